"""GPTQ (arXiv 2210.17323) as AutoGPTQ, GPTQModel and transformers store it, and AWQ (arXiv 2306.00978) as AutoAWQ.

`qweight` int32 `[K * bits / 32, N]`, packed along K; `qzeros` int32 `[G, N * bits / 32]`, packed along N; `scales`
`[G, N]`; `g_idx` `[K]`, each column's group, which need not be in order (`desc_act`). The original format (`gptq`)
stores zero points minus one; `checkpoint_format: gptq_v2` stores them unchanged. Some files state one and hold the
other, so with `sym`, where every zero point is the middle of the range, either form of it is read.

AutoRound's own format is one of these under another name (`packing_format`).

AWQ's version `gemm` packs `qweight` int32 `[K, N / 8]` along N too, both in AWQ's order, and has no `g_idx`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from kernels.weights.groups import GroupedRows
from models.fields import Fields
from models.quantized import scheme

# Keys on how the checkpoint was made, or that matter only to a kernel
HISTORY = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "exllama_config", "is_marlin_format", "max_input_length", "meta",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "mse", "quantizer", "static_groups", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama",
    # of AutoRound
    "amp", "autoround_version", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "minmax_lr", "nsamples", "provider", "scale_dtype",
    "seqlen", "to_quant_block_names",
)  # fmt: skip
AUTOROUND = {
    "auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2",
    "auto_round:auto_awq": "awq",
}  # fmt: skip
AWQ_BITS = 4
AWQ_HISTORY = (
    "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "modules_to_not_convert",
    "desc_act", "sym",  # the tensors hold every zero point, and have no order
)  # fmt: skip


def read_autoround(fields: Fields) -> scheme.Scheme:
    form = fields.need("packing_format", str)
    if form not in AUTOROUND:
        raise ValueError(f"{fields.name}: packing_format={form!r}: only {', '.join(AUTOROUND)} are supported")
    return read_awq(fields) if AUTOROUND[form] == "awq" else read_gptq(fields, AUTOROUND[form])


def read_gptq(fields: Fields, default: str = "gptq") -> scheme.Scheme:
    bits = fields.need("bits", int)
    if bits not in (4, 8):
        raise ValueError(f"{fields.name}: bits={bits}: only 4 and 8 are supported")
    size = fields.need("group_size", int)
    reordered, symmetric = fields.maybe("desc_act", bool), fields.take("sym", bool, False)
    version = fields.take("checkpoint_format", str, default)
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"{fields.name}: checkpoint_format={version!r}: only 'gptq' and 'gptq_v2' are supported")
    fields.only("method", "gptq")
    fields.only("format", version)
    _read_common(fields)
    parts = ("qweight", "qzeros", "scales", "g_idx")
    stored = {"minus_one": version == "gptq", "symmetric": symmetric, "reordered": reordered}
    layer = partial(_read_layer, bits=bits, group_size=size, **stored)
    return scheme.Scheme(f"{version}, {bits} bits in groups of {size}", parts, layer)


def read_awq(fields: Fields) -> scheme.Scheme:
    keys = ("bits", "w_bit"), ("group_size", "q_group_size")  # the second names are those of older files
    bits, size = (fields.maybe(new, int) or fields.need(old, int) for new, old in keys)
    if bits != AWQ_BITS:
        raise ValueError(f"{fields.name}: bits={bits}: only {AWQ_BITS} is supported")
    version = fields.take("version", str, "gemm")
    if version.lower() != "gemm":
        raise ValueError(f"{fields.name}: version={version!r}: only 'gemm' is supported")
    fields.only("zero_point", True, False)  # without, the tensors hold the middle of the range
    fields.only("method", "awq")
    for key in ("format", "checkpoint_format"):
        fields.only(key, "gemm")
    fields.ignore(*AWQ_HISTORY)
    _read_common(fields)
    layer = partial(_read_layer, bits=bits, group_size=size, awq=True)
    return scheme.Scheme(f"awq, {bits} bits in groups of {size}", ("qweight", "qzeros", "scales"), layer)


def _read_common(fields: Fields) -> None:
    fields.only("data_type", "int")
    fields.only("pack_dtype", "int32")
    fields.only("lm_head", False)
    fields.only("dynamic", {})
    fields.ignore(*HISTORY)


def _read_layer(
    layer: str,
    parts: Mapping[str, Tensor],
    *,
    bits: int,
    group_size: int,
    minus_one: bool = False,
    symmetric: bool = False,
    reordered: bool | None = None,
    awq: bool = False,
) -> GroupedRows:
    words = scheme.need(parts, "qweight")
    packed, order = scheme.WORD // bits, scheme.AWQ_ORDER if awq else None
    columns, rows = (words.shape[0], words.shape[1] * packed) if awq else (words.shape[0] * packed, words.shape[1])
    count = scheme.group_count(columns, group_size)
    zero_words = scheme.need(parts, "qzeros", count, rows // packed)
    if symmetric:
        _check_symmetric(scheme.unpack(zero_words, bits), 1 << (bits - 1))
    groups = scheme.column_groups(parts, "g_idx", columns, count)
    if groups is not None and reordered is False:
        raise ValueError("g_idx: reorders the columns, and desc_act=false says that nothing does")
    if reordered and "g_idx" not in parts and count > 1:
        raise ValueError("g_idx: missing, and desc_act=true says that the columns are reordered")

    def integers() -> tuple[Tensor, Tensor | None]:
        values = scheme.centered(
            scheme.unpack(words, bits, order=order).t() if awq else scheme.unpack(words.t(), bits), bits
        )
        if symmetric:
            return values, None
        zeros = scheme.unpack(zero_words, bits, order=order).t()  # [N, G]
        if minus_one:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return values, scheme.centered_zeros(zeros, bits)

    scales = scheme.need(parts, "scales", count, rows).t()
    return GroupedRows(scheme.INTEGERS[bits], columns, scales, groups, integers, layer)


def _check_symmetric(stored: Tensor, middle: int) -> None:
    """Raise ValueError for zero points that are not those of symmetric weights, in either of the two formats."""
    low, high = int(stored.min()), int(stored.max())
    if low != high or low not in (middle - 1, middle):
        raise ValueError(
            f"qzeros: hold {low} to {high}, and sym=true says {middle} (stored as {middle - 1} or {middle})"
        )
