"""Published checkpoints whose linear layers are quantised, widened at load to the dtype that the target runs in.

Serving, feature extraction and head training then use the same weights; memory is that of the dtype (`engine.weights`
quantises again, to a format of our kernels). Nothing is guessed: an unknown method, format or key of
`quantization_config` is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from models.fields import Fields
from models.quantised import awq_layout, compressed_layout, gptq_layout
from models.quantised.scheme import SECTION, Scheme

METHODS: dict[str, Callable[[Fields], Scheme]] = {
    "compressed-tensors": compressed_layout.read,
    "gptq": gptq_layout.read,
    "awq": awq_layout.read,
}


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Read the scheme of a config.json; None if it is not quantised. Raises ValueError naming what is not supported."""
    section = Fields(config).section(SECTION)
    if section is None:
        return None
    method = section.need("quant_method", str)
    if method not in METHODS:
        raise ValueError(f"{section.name}: quant_method={method!r}: only {', '.join(METHODS)} are supported")
    scheme = METHODS[method](section)
    section.done()
    return scheme


def widen_layers(scheme: Scheme, tensors: dict[str, Tensor], dtype: torch.dtype) -> int:
    """Replace the stored tensors of quantised layers by weights in `dtype`; return the number of these layers.

    The product of scale and value is rounded once. Raises ValueError naming the layer that does not fit the scheme.
    """
    mark = f".{scheme.parts[0]}"
    layers = [name.removesuffix(mark) for name in tensors if name.endswith(mark)]
    if not layers:
        raise ValueError(f"{SECTION}: {scheme.name}: no tensor is called *{mark}; these weights are not of that format")
    for layer in layers:
        parts = {part: tensors.pop(f"{layer}.{part}") for part in scheme.parts if f"{layer}.{part}" in tensors}
        if f"{layer}.weight" in tensors:
            raise ValueError(f"{layer}.weight: is there beside {layer}{mark}")
        try:
            tensors[f"{layer}.weight"] = scheme.weight(layer, parts).to(dtype).contiguous()
        except ValueError as error:
            raise ValueError(f"{layer}: {scheme.name}: {error}") from error
    return len(layers)
