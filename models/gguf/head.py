"""An EAGLE-3 head as one GGUF file, which llama.cpp reads beside its target (`--spec-type draft-eagle3`).

The config is converted from and to the flat config.json of models/heads/eagle3/formats.py; tensors keep the
file's names, which the format spells there, and have our layout: queries and keys in halves, `d2t`
as offsets. In the file their rows are in pairs, as ggml's rotary embedding wants them, and `d2t` holds target ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf.quants import dequantize, quantize
from torch import Tensor

from models.config import RopeConfig
from models.gguf.config import (
    ARCHITECTURE,
    BETAS,
    FORWARD,
    IGNORED,
    LLAMA3,
    READ,
    ROPE_FREQS,
    SIZES,
    check_type,
    head_size,
    scaling,
    shown,
)
from models.gguf.file import GgufFile, open_gguf
from models.gguf.tensors import rotary_halves, rotary_pairs
from models.layers import rope_frequencies

EAGLE3 = "eagle3"
TOKENIZER, NO_TOKENIZER = "tokenizer.", {"tokenizer.ggml.model": "none"}
TRANSLATED = {**SIZES, **FORWARD, "vocab_size": "vocab_size", "target_hidden_size": "target_hidden_size"}
LAYERS, FLAGS = "target_layers", ("norm_before_residual", "norm_before_fc")
D2T, QUERIES, KEYS = "d2t", "blk.0.attn_q.weight", "blk.0.attn_k.weight"
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}  # others are read as float32
KINDS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def read_head(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors by the file's names. Raises ValueError naming file and key, or tensor."""
    file = open_gguf(path)
    config = head_config(file)
    tensors = {
        name: file.read(name, DTYPES.get(info.kind.name, torch.float32))
        for name, info in file.tensors.items()
        if name != ROPE_FREQS
    }
    for name, heads in rotary_heads(config).items():
        if name in tensors and len(tensors[name]) % (2 * heads) == 0:
            tensors[name] = rotary_halves(heads)(tensors[name])
    if D2T in tensors:
        tensors[D2T] = tensors[D2T] - torch.arange(len(tensors[D2T]))
    return config, tensors


def head_config(file: GgufFile) -> dict[str, Any]:
    """Return the keys of a config.json. Raises ValueError for one that is missing, unknown or of another type."""
    architecture, prefix = file.need(ARCHITECTURE), f"{EAGLE3}."
    if architecture != EAGLE3:
        raise ValueError(f"{file.path}: {ARCHITECTURE}={architecture!r}: of heads only {EAGLE3} is supported")
    values = {key.removeprefix(prefix): value for key, value in file.keys.items() if key.startswith(prefix)}
    for key, value in values.items():
        if key in (LAYERS, *FLAGS):  # checked by the reader of config.json
            continue
        if key not in (*TRANSLATED, *READ, *IGNORED):
            raise ValueError(f"{file.path}: {prefix}{key}={shown(value)}: is not supported, and may change the drafts")
        check_type(file, prefix + key, value)
    config: dict[str, Any] = {name: file.need(prefix + key) for key, name in TRANSLATED.items()}
    config["num_key_value_heads"] = values.get("attention.head_count_kv", config["num_attention_heads"])
    config["head_dim"] = head_size(file, EAGLE3, values, config)
    config["rope_theta"] = values.get("rope.freq_base", 10000.0)
    config["rope_scaling"] = scaling(file, EAGLE3, values, config)
    config["eagle_aux_hidden_state_layer_ids"] = file.need(prefix + LAYERS)
    config |= {flag: values.get(flag, False) for flag in FLAGS} | {"fc_norm": False, "norm_output": False}
    config["draft_vocab_size"] = file.tensors[D2T].shape[0] if D2T in file.tensors else config["vocab_size"]
    return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def head_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json as a file states them; numbers have the precision that it keeps.

    Raises ValueError for a rotary embedding that llama.cpp does not have.
    """
    size = config["head_dim"]
    keys = {key: config[name] for key, name in TRANSLATED.items()} | {flag: config[flag] for flag in FLAGS}
    keys |= {"attention.head_count_kv": config["num_key_value_heads"], "rope.dimension_count": size}
    keys |= {"attention.key_length": size, "attention.value_length": size, "rope.freq_base": config["rope_theta"]}
    keys |= {LAYERS: config["eagle_aux_hidden_state_layer_ids"]} | scaling_keys(config["rope_scaling"])
    return {f"{EAGLE3}.{key}": fp32(value) if isinstance(value, float) else value for key, value in keys.items()}


def scaling_keys(section: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys of a `rope_scaling` section; that of Llama 3 is the tensor of `rope_factors` instead."""
    numbers = dict(section or {"rope_type": "default"})
    kind, original = numbers.pop("rope_type"), "original_max_position_embeddings"
    if kind == "llama3":
        factor = numbers.pop("factor")
        if numbers != LLAMA3:
            raise ValueError(f"rope_scaling: {numbers}: a GGUF file has {LLAMA3} with factor={factor}")
        return {}
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": float(numbers.pop("factor", 1.0))}
    if kind == "yarn" and original in numbers:
        keys["rope.scaling.original_context_length"] = int(numbers.pop(original))
    if kind == "yarn":
        keys |= {key: float(numbers.pop(name)) for name, key in BETAS.items() if name in numbers}
    if numbers:
        raise ValueError(f"rope_scaling: {numbers}: has no place in a GGUF file of llama.cpp")
    return {} if kind == "default" else keys


def rope_factors(config: Mapping[str, Any]) -> Tensor | None:
    """Return by what Llama 3's scaling divides each frequency, `[head_dim / 2]`; None for another rotary embedding."""
    rope, size = RopeConfig.from_json(dict(config)), config["head_dim"]
    if rope.rope_type != "llama3":
        return None
    (plain, _), (scaled, _) = (rope_frequencies(each, size, 0) for each in (RopeConfig(rope.theta), rope))
    ratio, factor = plain / scaled, dict(rope.parameters)["factor"]
    return torch.where((ratio / factor - 1).abs() < 1e-6, factor, ratio)  # no rounding of the largest, which is read


def rotary_heads(config: Mapping[str, Any]) -> dict[str, int]:
    return {QUERIES: config["num_attention_heads"], KEYS: config["num_key_value_heads"]}


def kind_of(name: str, tensor: Tensor, dtype: str | None) -> str:
    """Return as which ggml type a tensor is stored: vectors in F32, matrices as `dtype` (q8_0, f16, ...; None: same).

    Raises ValueError for a matrix whose rows are no whole number of blocks.
    """
    if tensor.dtype is torch.int64 or (dtype is None and tensor.ndim > 1):
        return KINDS.get(tensor.dtype, "F32")
    kind = "F32" if dtype is None or tensor.ndim < 2 else dtype.upper()
    size, (block, _) = tensor.shape[-1], GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if size % block:
        raise ValueError(f"--dtype {dtype}: {name} has rows of {size}, no multiple of a block of {block}; use bf16")
    return kind


def encode(tensor: Tensor, kind: str) -> Any:
    if kind == "I64":
        return tensor.numpy()
    return quantize(tensor.float().contiguous().numpy(), GGMLQuantizationType[kind])


def as_stored(tensor: Tensor, kind: str) -> Tensor:
    """Return a tensor with the values and the dtype with which it is read when stored as `kind`."""
    if kind == "I64":
        return tensor
    values = dequantize(encode(tensor, kind), GGMLQuantizationType[kind])
    return torch.from_numpy(values).to(DTYPES.get(kind, torch.float32))


def tokenizer_keys(checkpoint: Path) -> dict[str, Any]:
    """Return the keys of a GGUF target's tokenizer, without empty lists, which the package cannot write."""
    keys = open_gguf(checkpoint).keys
    return {key: value for key, value in keys.items() if key.startswith(TOKENIZER) and value != []}


def write_head(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], kinds: Mapping[str, str]) -> None:
    """Write a head; the inverse of `read_head`. `kinds`: the ggml type of each tensor, by name.

    Keys of `config` that begin with `tokenizer.` are those of the target's tokenizer, and are copied.
    """
    writer = GGUFWriter(path, EAGLE3)
    main = kinds["fc.weight"]
    keys = {"general.type": "model", "general.quantization_version": 2}
    keys["general.file_type"] = int(LlamaFileType["ALL_F32" if main == "F32" else f"MOSTLY_{main}"])
    keys |= head_keys(config)
    keys |= {key: value for key, value in config.items() if key.startswith(TOKENIZER)} or NO_TOKENIZER
    for key, value in keys.items():
        unsigned = isinstance(value, int) and not isinstance(value, bool)
        writer.add_key_value(key, value, GGUFValueType.UINT32 if unsigned else GGUFValueType.get_type(value))
    heads, factors = rotary_heads(config), rope_factors(config)
    if factors is not None:
        writer.add_tensor(ROPE_FREQS, factors.numpy())
    for name, tensor in tensors.items():
        stored = rotary_pairs(heads[name])(tensor) if name in heads else tensor
        stored = stored + torch.arange(len(stored)) if name == D2T else stored
        writer.add_tensor(name, encode(stored, kinds[name]), raw_dtype=GGMLQuantizationType[kinds[name]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()
