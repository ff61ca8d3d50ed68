"""Published checkpoints whose linear layers are quantized.

Serving reads their integers as they are (kernels/weights/groups.py). In feature extraction and training, with tensor
parallelism, and where no kernel reads them, they are widened at load to the dtype that the target runs in; memory is
that of the dtype. Nothing is guessed: an unknown method, format or key of `quantization_config` is an error that names
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from models.fields import Fields
from models.quantized import compressed_layout, fp8_layout, gptq_layout, mxfp4_layout
from models.quantized.scheme import SECTION, Scheme

METHODS: dict[str, Callable[[Fields], Scheme]] = {
    "compressed-tensors": compressed_layout.read,
    "gptq": gptq_layout.read_gptq,
    "auto-round": gptq_layout.read_autoround,
    "awq": gptq_layout.read_awq,
    "fp8": fp8_layout.read,
    "mxfp4": mxfp4_layout.read,
}


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Read the scheme of a config.json; None if it states none. Raises ValueError naming what is not supported."""
    section = Fields(config).section(SECTION)
    if section is None or not section.values:
        return None
    method = section.need("quant_method", str)
    if method not in METHODS:
        raise ValueError(f"{section.name}: quant_method={method!r}: only {', '.join(METHODS)} are supported")
    scheme = METHODS[method](section)
    section.done()
    return scheme
