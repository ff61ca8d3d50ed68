"""GPTQ (arXiv 2210.17323) as AutoGPTQ, GPTQModel and transformers store it.

`qweight` int32 `[K * bits / 32, N]`, packed along K; `qzeros` int32 `[G, N * bits / 32]`, packed along N; `scales`
`[G, N]`; `g_idx` `[K]`, each column's group, which need not be in order (`desc_act`). The original format (`gptq`)
stores zero points minus one; `checkpoint_format: gptq_v2` stores them unchanged. Some files state one and hold the
other, so with `sym`, where every zero point is the middle of the range, either form of it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from kernels.groups import GroupedRows
from models.fields import Fields
from models.quantized.scheme import (
    INTEGERS,
    WORD,
    Scheme,
    centered,
    centered_zeros,
    column_groups,
    group_count,
    need,
    unpack,
)

# Keys on how the checkpoint was made, or that matter only to a kernel
HISTORY = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "exllama_config", "is_marlin_format", "max_input_length", "meta",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "mse", "quantizer", "static_groups", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama",
)  # fmt: skip


def read(fields: Fields) -> Scheme:
    bits = fields.need("bits", int)
    if bits not in (4, 8):
        raise ValueError(f"{fields.name}: bits={bits}: only 4 and 8 are supported")
    size = fields.need("group_size", int)
    reordered, symmetric = fields.maybe("desc_act", bool), fields.take("sym", bool, False)
    version = fields.take("checkpoint_format", str, "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"{fields.name}: checkpoint_format={version!r}: only 'gptq' and 'gptq_v2' are supported")
    fields.only("format", version)
    fields.only("pack_dtype", "int32")
    fields.only("lm_head", False)
    fields.only("dynamic", {})
    fields.ignore(*HISTORY)
    parts = ("qweight", "qzeros", "scales", "g_idx")
    stored = {"minus_one": version == "gptq", "symmetric": symmetric, "reordered": reordered}
    layer = partial(_read_layer, bits=bits, group_size=size, **stored)
    return Scheme(f"{version}, {bits} bits in groups of {size}", parts, layer)


def _read_layer(
    layer: str,
    parts: Mapping[str, Tensor],
    *,
    bits: int,
    group_size: int,
    minus_one: bool,
    symmetric: bool,
    reordered: bool | None,
) -> GroupedRows:
    words = need(parts, "qweight")
    columns, rows = words.shape[0] * WORD // bits, words.shape[1]
    count = group_count(columns, group_size)
    zero_words = need(parts, "qzeros", count, rows * bits // WORD)
    if symmetric:
        _check_symmetric(unpack(zero_words, bits), 1 << (bits - 1))
    groups = column_groups(parts, "g_idx", columns, count)
    if groups is not None and reordered is False:
        raise ValueError("g_idx: reorders the columns, and desc_act=false says that nothing does")
    if reordered and "g_idx" not in parts and count > 1:
        raise ValueError("g_idx: missing, and desc_act=true says that the columns are reordered")

    def integers() -> tuple[Tensor, Tensor | None]:
        values = centered(unpack(words.t(), bits), bits)
        if symmetric:
            return values, None
        zeros = unpack(zero_words, bits).t()  # [N, G]
        if minus_one:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return values, centered_zeros(zeros, bits)

    scales = need(parts, "scales", count, rows).t()
    return GroupedRows(INTEGERS[bits], columns, scales, groups, integers, layer)


def _check_symmetric(stored: Tensor, middle: int) -> None:
    """Raise ValueError for zero points that are not those of symmetric weights, in either of the two formats."""
    low, high = int(stored.min()), int(stored.max())
    if low != high or low not in (middle - 1, middle):
        raise ValueError(
            f"qzeros: hold {low} to {high}, and sym=true says {middle} (stored as {middle - 1} or {middle})"
        )
