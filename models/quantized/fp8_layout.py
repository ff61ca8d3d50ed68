"""fp8 in blocks, as DeepSeek-V3 is published (arXiv 2412.19437, section 3.3): a scale for each block of a weight.

`weight` float8_e4m3fn `[N, K]`, `weight_scale_inv` `[ceil(N / n), ceil(K / k)]` for blocks of n rows and k columns: a
weight is the product of both. Other programs round a layer's input to fp8 too, with a scale per block; here it is not
rounded, as in DeepSeek's own conversion to bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from kernels.weights.groups import GroupedRows
from models.fields import Fields
from models.quantized.scheme import Scheme, need

PARTS = ("weight_scale_inv", "weight")


def read(fields: Fields) -> Scheme:
    fields.only("activation_scheme", "dynamic")
    fields.only("fmt", "e4m3")
    fields.only("scale_fmt", "float")
    fields.ignore(
        "modules_to_not_convert", "ignored_layers", "dequantize"
    )  # the tensors say which layers are quantized
    sizes = fields.numbers("weight_block_size") or []
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"{fields.name}: weight_block_size={sizes}: must be the rows and the columns of a block")
    rows, columns = sizes
    return Scheme(f"fp8 in blocks of {rows}x{columns}", PARTS, partial(_read_layer, rows=rows, columns=columns))


def _read_layer(layer: str, parts: Mapping[str, Tensor], *, rows: int, columns: int) -> GroupedRows:
    weight = need(parts, "weight")
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise ValueError(f"weight: {weight.dtype} {list(weight.shape)}, expected a matrix of {torch.float8_e4m3fn}")
    count, inputs = weight.shape
    scales = need(parts, "weight_scale_inv", -(-count // rows), -(-inputs // columns))
    scales = scales.repeat_interleave(rows, dim=0)[:count]
    groups = torch.arange(inputs) // columns if inputs % columns else None
    return GroupedRows("fp8", inputs, scales, groups, lambda: (need(parts, "weight"), None), layer)
