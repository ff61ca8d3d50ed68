"""AWQ (arXiv 2306.00978) as AutoAWQ's `gemm` version stores it.

`qweight` int32 `[K, N / 8]` and `qzeros` int32 `[G, N / 8]` are packed along N, in AWQ's order; `scales` `[G, N]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from kernels.groups import GroupedRows
from models.fields import Fields
from models.quantized.scheme import AWQ_ORDER, INTEGERS, Scheme, centered, centered_zeros, group_count, need, unpack

BITS = 4
HISTORY = ("backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "modules_to_not_convert")


def read(fields: Fields) -> Scheme:
    keys = ("bits", "w_bit"), ("group_size", "q_group_size")  # the second names are those of older files
    bits, size = (fields.maybe(new, int) or fields.need(old, int) for new, old in keys)
    if bits != BITS:
        raise ValueError(f"{fields.name}: bits={bits}: only {BITS} is supported")
    version = fields.take("version", str, "gemm")
    if version.lower() != "gemm":
        raise ValueError(f"{fields.name}: version={version!r}: only 'gemm' is supported")
    fields.only("zero_point", True)
    fields.ignore(*HISTORY)
    return Scheme(
        f"awq, {bits} bits in groups of {size}", ("qweight", "qzeros", "scales"), partial(_read_layer, group_size=size)
    )


def _read_layer(layer: str, parts: Mapping[str, Tensor], *, group_size: int) -> GroupedRows:
    words = need(parts, "qweight")
    columns, rows = words.shape[0], words.shape[1] * 8
    count = group_count(columns, group_size)
    zero_words = need(parts, "qzeros", count, rows // 8)

    def integers() -> tuple[Tensor, Tensor | None]:
        values, zeros = (unpack(each, BITS, order=AWQ_ORDER).t() for each in (words, zero_words))  # [N, K], [N, G]
        return centered(values, BITS), centered_zeros(zeros, BITS)

    return GroupedRows(INTEGERS[BITS], columns, need(parts, "scales", count, rows).t(), None, integers, layer)
