"""Writers of quantized checkpoints of the tiny target, following the formats' documentation word by word.

They share nothing with models/quantized/: numbers are packed one at a time and dequantized with numpy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LAYER = "_proj"  # the quantized weights: every projection of every layer
Array = np.ndarray
Stored = dict[str, torch.Tensor]
Quantizer = Callable[[Array, np.random.Generator], tuple[Stored, Array]]  # W [N, K] -> stored parts, dequantized W


def word(values: list[int], bits: int) -> int:
    """Pack the values into a signed 32-bit number, the first one in the lowest bits."""
    unsigned = sum(value << (bits * place) for place, value in enumerate(values))
    return unsigned - (1 << 32 if unsigned >= 1 << 31 else 0)


def pack_rows(values: Array, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack along the last dimension, padded with zeros. `order[p]`: the column at place p of a word."""
    per_word = 32 // bits
    places = order or tuple(range(per_word))
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word)))
    words = [[word([int(row[i + p]) for p in places], bits) for i in range(0, len(row), per_word)] for row in padded]
    return torch.tensor(words, dtype=torch.int32)


def affine(weight: Array, bits: int, size: int, symmetric: bool) -> tuple[Array, Array, Array]:
    """Return values from 0 `[N, K]`, zeros `[N, G]` and fp16 scales `[N, G]` for groups of `size` columns in order."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // size, size)
    max_value = (1 << bits) - 1
    if symmetric:
        scale = np.abs(grouped).max(2) / (max_value // 2)
        zero = np.full(scale.shape, (max_value + 1) // 2)
    else:
        low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
        scale = (high - low) / max_value
        zero = np.rint(-low / scale).astype(int)
    scale = scale.astype(np.float16)
    values = np.clip(np.rint(grouped / scale[..., None].astype(np.float64)) + zero[..., None], 0, max_value).astype(int)
    return values.reshape(rows, columns), zero, scale


def widened(values: Array, zero: Array, scale: Array, group: Array) -> Array:
    return (scale.astype(np.float32)[:, group] * (values - zero[:, group]).astype(np.float32)).astype(np.float32)


def gptq(bits: int, size: int, *, symmetric: bool = True, shuffled: bool = False, zero_offset: int = 1) -> Quantizer:
    def quantize(weight: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        columns = weight.shape[1]
        order = rng.permutation(columns) if shuffled else np.arange(columns)  # order[i]: the column at place i
        values, zero, scale = affine(weight[:, order], bits, size, symmetric)
        group = np.empty(columns, int)
        group[order] = np.arange(columns) // size
        unshuffled = np.empty_like(values)
        unshuffled[:, order] = values
        parts = {
            "qweight": pack_rows(unshuffled, bits).t().contiguous(),
            "qzeros": pack_rows(((zero - zero_offset) % (1 << bits)).T, bits),
            "scales": torch.from_numpy(scale.T.copy()),
            "g_idx": torch.from_numpy(group.astype(np.int32)),
        }
        return parts, widened(unshuffled, zero, scale, group)

    return quantize


def awq(size: int, *, symmetric: bool = False) -> Quantizer:
    def quantize(weight: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        values, zero, scale = affine(weight, 4, size, symmetric)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            "qweight": pack_rows(values.T, 4, order),
            "qzeros": pack_rows(zero.T, 4, order),
            "scales": torch.from_numpy(scale.T.copy()),
        }
        return parts, widened(values, zero, scale, np.arange(weight.shape[1]) // size)

    return quantize


def packed(bits: int, size: int | None, *, symmetric: bool = True) -> Quantizer:
    """Quantize to compressed-tensors' pack-quantized: signed numbers, stored with half the range added."""

    def quantize(weight: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        group_size = size or weight.shape[1]
        values, zero, scale = affine(weight, bits, group_size, symmetric)
        parts = {
            "weight_packed": pack_rows(values, bits),
            "weight_scale": torch.from_numpy(scale),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack_rows(zero.T, bits).t().contiguous()
        return parts, widened(values, zero, scale, np.arange(weight.shape[1]) // group_size)

    return quantize


def plain8(kind: str, *, per_tensor: bool = False) -> Quantizer:
    """Quantize to compressed-tensors' int-quantized or float-quantized: unpacked, one scale per row or per tensor."""

    def quantize(weight: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        amax = np.abs(weight).max(keepdims=True) if per_tensor else np.abs(weight).max(1, keepdims=True)
        scale = torch.from_numpy(amax / (127 if kind == "int" else 448)).to(torch.bfloat16)
        scaled = torch.from_numpy(weight) / scale.float()
        stored = scaled.round().to(torch.int8) if kind == "int" else scaled.to(torch.float8_e4m3fn)
        dequantized = stored.float().numpy() * scale.float().numpy()
        return {"weight": stored, "weight_scale": scale.reshape(-1) if per_tensor else scale}, dequantized

    return quantize


def fp8_blocks(rows: int, columns: int) -> Quantizer:
    """Quantize as DeepSeek does: a scale in fp32 for each block, those at the edges smaller."""

    def quantize(weight: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        count, inputs = weight.shape
        scales = np.empty((-(-count // rows), -(-inputs // columns)), np.float32)
        stored, dequantized = torch.empty(count, inputs, dtype=torch.float8_e4m3fn), np.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scales[i, j] = np.abs(weight[block]).max() / 448
                stored[block] = torch.from_numpy(weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
                dequantized[block] = stored[block].float().numpy() * scales[i, j]
        return {"weight": stored, "weight_scale_inv": torch.from_numpy(scales)}, dequantized

    return quantize


def unordered(quantize: Quantizer, part: str) -> Quantizer:
    """Store -1 as the group of each column, as compressed-tensors does where it has not reordered any."""

    def quantize_and_mark(weight: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        parts, dequantized = quantize(weight, rng)
        return parts | {part: torch.full((weight.shape[1],), -1, dtype=torch.int32)}, dequantized

    return quantize_and_mark


def gptq_config(size: int, **changes: Any) -> dict[str, Any]:
    """Return `quantization_config` as GPTQModel writes it for 4 bits."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": False, "sym": True, "lm_head": False}
    more = {"damp_percent": 0.01, "true_sequential": True, "checkpoint_format": "gptq", "pack_dtype": "int32"}
    return config | more | changes


def compressed(form: str, *, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    """Return `quantization_config` as llm-compressor writes it, including null keys."""
    base = {
        "num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "strategy": "channel", "dynamic": False,
        "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": base | weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
    }


def write(
    source: Path,
    section: dict[str, Any],
    quantize: Quantizer,
    out: Path,
    plain: Path,
    dense: tuple[str, ...] = (),
    otherwise: dict[str, Quantizer] | None = None,
) -> None:
    """Write the target in `source` quantized to `out`, and the dequantized weights as an fp32 checkpoint to `plain`.

    Layers of a name with one of `dense` in it are not quantized, those with one of `otherwise` as it says.
    """
    rng = np.random.default_rng(0)
    stored, ordinary = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        if LAYER in name and not any(part in name for part in dense):
            others = [other for part, other in (otherwise or {}).items() if part in name]
            parts, weight = (others or [quantize])[0](tensor.numpy(), rng)
            stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
            ordinary[name] = torch.from_numpy(np.ascontiguousarray(weight))
        else:
            stored[name] = ordinary[name] = tensor
    config = json.loads((source / "config.json").read_text())
    for folder, tensors, extra_config in ((out, stored, {"quantization_config": section}), (plain, ordinary, {})):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | extra_config))
        for file in source.glob("token*"):
            (folder / file.name).write_bytes(file.read_bytes())


GPTQ = gptq_config(32)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AWQ |= {"modules_to_not_convert": None}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 16]}
# of AutoRound 0.16.1's own exports, with iters=2 and lr=1
AUTOROUND_GPTQ = {
    "autoround_version": "0.16.1", "bits": 4, "damp_percent": 0.01, "data_type": "int", "desc_act": False,
    "group_size": 32, "iters": 2, "lm_head": False, "lr": 1, "minmax_lr": 1, "provider": "auto-round",
    "quant_method": "gptq", "sym": True, "true_sequential": False,
}  # fmt: skip
AUTOROUND_AWQ = {
    "autoround_version": "0.16.1", "bits": 4, "data_type": "int", "group_size": 32, "iters": 1,
    "modules_to_not_convert": ["lm_head"], "provider": "auto-round", "quant_method": "awq", "sym": True,
    "to_quant_block_names": "model.layers", "version": "gemm", "zero_point": False,
}  # fmt: skip
AUTOROUND = {
    "autoround_version": "0.16.1", "bits": 4, "block_name_to_quantize": "model.layers", "data_type": "int",
    "group_size": 32, "iters": 1, "quant_method": "auto-round", "sym": True,
}  # fmt: skip
# of GPTQModel 7.7.0, and what transformers 5.19 makes of AWQ's when it saves a model again
GPTQMODEL = GPTQ | {"method": "gptq", "format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"], "mse": 0.0}}
TRANSFORMERS_AWQ = AWQ | {
    "sym": True, "desc_act": False, "act_group_aware": True, "format": "gemm", "damp_percent": 0.1, "meta": None,
    "true_sequential": True, "batch_size": 1, "cache_block_outputs": True, "pad_token_id": None, "backend": "auto",
}  # fmt: skip
GROUP = {"strategy": "group", "group_size": 32}
KINDS: dict[str, tuple[dict[str, Any], Quantizer]] = {
    "gptq": (GPTQ, gptq(4, 32)),
    "gptq with columns in an order of activations": (GPTQ | {"desc_act": True}, gptq(4, 32, shuffled=True)),
    "gptq, symmetric zeros as in v2": (GPTQ, gptq(4, 32, zero_offset=0)),
    "gptq_v2, symmetric zeros as in v1": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 32)),
    "gptq, symmetric zeros as in v2, in 8 bits": (GPTQ | {"bits": 8}, gptq(8, 32, zero_offset=0)),
    "gptq without an order": (GPTQ | {"desc_act": True}, unordered(gptq(4, 32), "g_idx")),
    "gptq with zeros, in 8 bits": (GPTQ | {"bits": 8, "sym": False}, gptq(8, 32, symmetric=False)),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, gptq(4, 32, symmetric=False, zero_offset=0)),
    "gptq of AutoRound": (AUTOROUND_GPTQ, gptq(4, 32)),
    "gptq of AutoRound, zeros": (
        AUTOROUND_GPTQ | {"sym": False, "nsamples": 512, "seqlen": 512, "scale_dtype": "torch.float32"},
        gptq(4, 32, symmetric=False),
    ),
    "AutoRound's own, as gptq": (
        AUTOROUND | {"packing_format": "auto_round:auto_gptq", "sym": False},
        gptq(4, 32, symmetric=False),
    ),
    "AutoRound's own, as gptq_v2": (
        AUTOROUND | {"packing_format": "auto_round:gptqmodel", "sym": False},
        gptq(4, 32, symmetric=False, zero_offset=0),
    ),
    "AutoRound's own, as awq": (AUTOROUND | {"packing_format": "auto_round:auto_awq"}, awq(32, symmetric=True)),
    "gptq of GPTQModel": (GPTQMODEL, gptq(4, 32)),
    "awq": (AWQ, awq(32)),
    "awq of AutoRound": (AUTOROUND_AWQ, awq(32, symmetric=True)),
    "awq of transformers": (TRANSFORMERS_AWQ, awq(32)),
    "awq with the older names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"},
        awq(16),
    ),
    "int4 in groups": (compressed("pack-quantized", num_bits=4, **GROUP), packed(4, 32)),
    "int4 in groups without an order": (
        compressed("pack-quantized", num_bits=4, actorder="group", **GROUP),
        unordered(packed(4, 32), "weight_g_idx"),
    ),
    "int4 with zeros": (
        compressed("pack-quantized", num_bits=4, symmetric=False, **GROUP),
        packed(4, 32, symmetric=False),
    ),
    "int8 by rows, packed": (compressed("pack-quantized"), packed(8, None)),
    "int8 by rows": (compressed("int-quantized"), plain8("int")),
    "fp8 by rows": (compressed("float-quantized", type="float"), plain8("float")),
    "fp8 in blocks": (FP8, fp8_blocks(48, 16)),
    "fp8 in blocks that divide no row": (FP8 | {"weight_block_size": [24, 40]}, fp8_blocks(24, 40)),
    "fp8, one scale": (
        compressed("naive-quantized", type="float", strategy="tensor"),
        plain8("float", per_tensor=True),
    ),
}
