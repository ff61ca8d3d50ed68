"""Writes GGUF files of tiny checkpoint folders with the gguf package's writer and its table of names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from models.checkpoint import open_tensors
from models.gguf.mamba2 import LAYERS
from models.targets.gpt_bigcode import RENAMED
from tests.gguf_hybrids import as_mamba2, known_name, parted, write_hybrid

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "GPTBigCodeForCausalLM": gguf.MODEL_ARCH.STARCODER,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "FalconH1ForCausalLM": gguf.MODEL_ARCH.FALCON_H1,
    "NemotronHForCausalLM": gguf.MODEL_ARCH.NEMOTRON_H,
}
QWEN = (gguf.MODEL_ARCH.QWEN3NEXT, gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE)
MIXED = (Kind.Q8_0, Kind.Q4_0, Kind.F16, Kind.Q4_1, Kind.BF16, Kind.Q5_0, Kind.F32, Kind.Q5_1)
RANDOM = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
# factors of a block's scale, and of what is added to its weights, for weights of a standard deviation of one
SCALES: dict[Kind, tuple[float, float | None]] = {
    Kind.Q4_0: (0.22, None),
    Kind.Q4_1: (0.22, -1.6),
    Kind.Q5_0: (0.11, None),
    Kind.Q5_1: (0.11, -1.7),
    Kind.Q8_0: (0.013, None),
    Kind.Q4_K: (0.005, 0.035),
    Kind.Q5_K: (0.0025, 0.035),
    Kind.Q6_K: (0.0007, None),
}
Change = Callable[[gguf.GGUFWriter], None]


def random_blocks(kind: Kind, rows: int, columns: int, deviation: float, seed: int = 0) -> np.ndarray:
    """Return random rows in blocks, uint8 `[rows, bytes]`, whose weights have about this standard deviation."""
    generator, (block, size) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[kind]
    raw = generator.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scale, offset = SCALES[kind]
    factors = np.abs(generator.normal(1, 0.2, (rows, columns // block))) * deviation

    def write(place: int, factor: float) -> None:
        raw[..., place : place + 2] = (factors * factor).astype(np.float16).view(np.uint8).reshape(*factors.shape, 2)

    write(raw.shape[-1] - 2 if kind is Kind.Q6_K else 0, scale)
    if offset is not None:
        write(2, offset)
    return raw.reshape(rows, -1)


def random_nvfp4(rows: int, columns: int, deviation: float, seed: int) -> np.ndarray:
    """Return random rows of NVFP4, which the package cannot quantize to: four scales in E4M3 before 64 numbers each."""
    generator = np.random.default_rng(seed)
    scales = np.abs(generator.normal(deviation / 3, deviation / 9, (rows, columns // 64, 4))).astype(np.float32)
    numbers = generator.integers(0, 256, (rows, columns // 64, 32), dtype=np.uint8)
    return np.concatenate([quants.NVFP4.fp32_to_ue4m3(scales * 2), numbers], axis=-1).reshape(rows, -1)


def write_gguf(
    folder: Path,
    file: Path,
    kinds: Sequence[Kind] = MIXED,
    *,
    change: Change | None = None,
    tokenizer: bool = False,
    older: bool = False,
    fused: bool = False,
    scaled: bool = False,
) -> dict[str, torch.Tensor]:
    """Write matrices in `kinds` by turns, gpt-oss's experts in MXFP4 and all else in fp32; `change` may add keys.

    `older`: DeepSeek's latent attention as files had it before llama.cpp multiplied queries with latents. `fused`: as
    llama.cpp's converter writes with its options of that name. `scaled`: with a scale beside every matrix of a layer,
    as beside NVFP4.

    Return the dequantized tensors of the file, with the names of `open_tensors` and in the layout of the folder. The
    package cannot quantize to kinds with K in their name: their weights are random.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {name: config[key] for key, name in RENAMED.items() if key in config}
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    architecture = ARCHITECTURES[config["architectures"][0]]
    if architecture is gguf.MODEL_ARCH.NEMOTRON_H and "moe" in config["layers_block_type"]:
        architecture = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _write_sizes(writer, config, older)
    if tokenizer:
        _write_tokenizer(writer, folder)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = {name: part for stored, tensor in open_tensors(folder).items() for name, part in parted(stored, tensor)}
    if config.get("tie_word_embeddings", "layer_norm_epsilon" in config):
        tensors.pop("lm_head.weight", None)
    expected: dict[str, torch.Tensor] = {}
    stored: dict[str, tuple[np.ndarray, Kind]] = {}
    stacks: dict[str, list[tuple[Kind, np.ndarray]]] = {}
    if architecture is gguf.MODEL_ARCH.QWEN3NEXT:
        tensors = _apart(tensors, config)
    for turn, (name, tensor) in enumerate(sorted(tensors.items())):
        value: np.ndarray = tensor.float().numpy()
        if architecture in QWEN:
            value = _as_in_qwens_files(architecture, name, tensor.float(), config).numpy()
        elif writer.arch in LAYERS:
            value = as_mamba2(name, value, config)
        elif "conv.weight" in name:
            value = value.squeeze(1)
        heads = _permuted_heads(architecture, name, config)
        if heads:
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if architecture is gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
            value = value + 1
        unquantized = ".experts." in name or tensor.ndim < 2 or "conv" in name.rpartition(".")[0].rpartition(".")[2]
        kind = Kind.F32 if unquantized else kinds[turn % len(kinds)]
        if architecture is gguf.MODEL_ARCH.GPT_OSS and ".experts." in name and value.ndim == 2:
            kind = Kind.MXFP4
        if name.endswith(".kv_b_proj.weight") and not older:
            expected[name] = _write_heads(writer, names, name, value, kind, config)
            continue
        if Kind.NVFP4 in kinds and value.ndim == 2:
            kind = Kind.NVFP4 if value.shape[1] % 64 == 0 else Kind.F32
        if kind is Kind.NVFP4:
            raw = random_nvfp4(*value.shape, float(value.std()), seed=turn)
        elif kind in RANDOM:
            raw = random_blocks(kind, *value.shape, float(value.std()), seed=turn)
        else:
            raw = quants.quantize(value, kind)
        restored = torch.from_numpy(np.array(quants.dequantize(raw, kind))).view(tensor.shape)
        if architecture in QWEN:
            restored = _as_in_qwens_files(architecture, name, restored, config, back=True)
        elif name.endswith(".A_log"):
            restored = torch.log(-restored)
        if heads:
            restored = restored.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        scale = 0.5 + turn / 7 if scaled and ".layers." in name and value.ndim == 2 else 1.0
        expected[name] = restored * torch.tensor(scale) if scale != 1 else restored
        if ".experts." in name:
            layer, _, rest = known_name(name, config).partition(".experts.")
            stacks.setdefault(f"{layer}.experts.{rest.split('.', 1)[1]}", []).append((kind, raw))
        else:
            stored[_name(names, known_name(name, config))] = raw, kind
        if scale != 1:
            stem = _name(names, re.sub(r"experts\.\d+", "experts", name)).removesuffix(".weight")
            stored.update(_scales(stored, stem, scale))
    for name, values in stacks.items():  # sorted by name, which is by number for fewer than ten experts
        stored[_name(names, name)] = np.stack([raw for _, raw in values]), values[0][0]
    if architecture is gguf.MODEL_ARCH.QWEN3NEXT:
        expected = _together(expected, config)
    for name, (raw, kind) in (fuse(stored) if fused else stored).items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _as_in_qwens_files(
    architecture: gguf.MODEL_ARCH, name: str, value: torch.Tensor, config: dict[str, Any], *, back: bool = False
) -> torch.Tensor:
    """Return a tensor as llama.cpp's converter writes it, or with `back` the inverse."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, size = 2 * groups * config["linear_key_head_dim"], config["linear_value_head_dim"]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return value - 1 if back else value + 1
    if "linear_attn." in name and architecture is not gguf.MODEL_ARCH.QWEN3NEXT:
        kind = name.partition("linear_attn.")[2].removesuffix(".weight")
        first = {"in_proj_qkv": keys, "conv1d": keys}.get(kind, 0)
        width = 1 if kind in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else size
        axis = 1 if kind == "out_proj" else 0
        if kind != "norm":
            shape = (heads // groups, groups) if back else (groups, heads // groups)
            plain, values = value.split([first, heads * width], dim=axis)
            moved = values.unflatten(axis, (*shape, width)).transpose(axis, axis + 1).flatten(axis, axis + 2)
            value = torch.cat([plain, moved], dim=axis)
    if name.endswith("A_log"):
        return (-value).log() if back else -value.exp()
    return value.squeeze(1) if "conv1d" in name and not back else value


def _apart(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return Qwen3-Next's tensors with q, k, v of all key heads in one, z in another."""
    apart = dict(tensors)
    for name in [name for name in tensors if "in_proj_qkvz" in name]:
        pieces = apart.pop(name).unflatten(0, (config["linear_num_key_heads"], -1)).split(_of_key_head(config), dim=1)
        q, k, v, z = (piece.flatten(0, 1) for piece in pieces)
        apart |= {name.replace("qkvz", "qkv"): torch.cat([q, k, v]), name.replace("qkvz", "z"): z.contiguous()}
    return apart


def _together(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    together, (key, _, value, _) = dict(tensors), _of_key_head(config)
    groups = config["linear_num_key_heads"]
    for name in [name for name in tensors if "in_proj_qkv." in name]:
        pieces = together.pop(name).split([key * groups, key * groups, value * groups])
        pieces = [piece.unflatten(0, (groups, -1)) for piece in (*pieces, together.pop(name.replace("qkv", "z")))]
        together[name.replace("qkv", "qkvz")] = torch.cat(pieces, dim=1).flatten(0, 1)
    return together


def _of_key_head(config: dict[str, Any]) -> list[int]:
    """Return how many rows q, k, v and z of a key head have."""
    value = config["linear_num_value_heads"] // config["linear_num_key_heads"] * config["linear_value_head_dim"]
    return [config["linear_key_head_dim"]] * 2 + [value] * 2


Stored = dict[str, tuple[np.ndarray, Kind]]
FUSIONS = {  # as ModelBase.modify_tensors in llama.cpp's conversion/base.py: tensors, the axis, the result
    "attn_qkv": (("attn_q", "attn_k", "attn_v"), 0),
    "ffn_gate_up_exps": (("ffn_gate_exps", "ffn_up_exps"), 1),
}


def fuse(stored: Stored) -> Stored:
    """Return the tensors with those of FUSIONS fused, where all parts have one kind."""
    result = dict(stored)
    for name in stored:
        for fused, (parts, axis) in FUSIONS.items():
            if f".{parts[0]}." not in name:
                continue
            found = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            assert len({stored[part][1] for part in found}) == 1
            result[name.replace(f".{parts[0]}.", f".{fused}.")] = (
                np.concatenate([result.pop(part)[0] for part in found], axis=axis),
                stored[name][1],
            )
    return result


def _scales(stored: Stored, stem: str, scale: float) -> Stored:
    """Return the tensor of scales of a matrix or, one more, of a stack of experts, and a scale of activations."""
    earlier, _ = stored.get(f"{stem}.scale", (np.zeros(0, np.float32), None))
    scales = np.concatenate([earlier, np.array([scale], np.float32)])
    return {f"{stem}.scale": (scales, Kind.F32), f"{stem}.input_scale": (scales * 3, Kind.F32)}


def _write_heads(
    writer: gguf.GGUFWriter,
    names: gguf.TensorNameMap,
    name: str,
    value: np.ndarray,
    kind: Kind,
    config: dict[str, Any],
) -> torch.Tensor:
    """Write each head's matrices to keys, transposed, and to values, as two tensors. Return them dequantized."""
    heads = value.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    restored = []
    for part, array in (("k_b_proj", keys.swapaxes(1, 2)), ("v_b_proj", values)):
        raw = quants.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(_name(names, name.replace("kv_b_proj", part)), raw, raw_dtype=kind)
        restored.append(np.array(quants.dequantize(raw, kind)).reshape(array.shape))
    return torch.from_numpy(np.concatenate([restored[0].swapaxes(1, 2), restored[1]], axis=1).reshape(value.shape))


def _name(names: gguf.TensorNameMap, name: str) -> str:
    if name.endswith(("A_log", ".D")):  # without a suffix
        return str(names.get_name(name))
    name = f"{name}.weight" if name.endswith(".sinks") else name.replace("correction_bias", "correction.bias")
    name = name.removeprefix("model.") if ".feed_forward.experts." in name else name
    name = name.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
    gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert gguf_name is not None, name
    return gguf_name


def _permuted_heads(architecture: gguf.MODEL_ARCH, name: str, config: dict[str, Any]) -> int:
    """Return the number of heads if converters permute the tensor's rows for ggml's rotary embedding, otherwise 0."""
    if architecture not in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.GRANITE, gguf.MODEL_ARCH.GRANITE_HYBRID):
        return 0
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else 0


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], older: bool) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("tiny")
    writer.add_quantization_version(2)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    if writer.arch in LAYERS:
        write_hybrid(writer, config)
        return
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    one = "layer_norm_epsilon" in config or ("kv_lora_rank" in config and not older)
    layers = config.get("layer_types") or []
    if "conv" in layers:
        writer.add_head_count_kv([config["num_key_value_heads"] * (kind != "conv") for kind in layers])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        writer.add_head_count_kv(1 if one else config["num_key_value_heads"])
    if "linear_key_head_dim" in config:
        _write_delta_net(writer, config, head_dim)
    if "layer_norm_epsilon" in config:  # StarCoder
        writer.add_layer_norm_eps(config["rms_norm_eps"])
        return
    if "kv_lora_rank" in config:
        _write_latent(writer, config, older)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.get("norm_eps") or config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:  # Gemma 3, whose files hold the RoPE base of full attention only
        rope = rope["full_attention"]
        writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "granite":
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
    if config["model_type"] == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        if rope["rope_type"] == "longrope":
            stretch = config["max_position_embeddings"] / config["original_max_position_embeddings"]
            logarithm = math.log(stretch) / math.log(config["original_max_position_embeddings"])
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + logarithm))
            for name in ("long", "short"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
        writer.add_sliding_window(config["sliding_window"] or 0)


def _write_delta_net(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    heads, part = config["linear_num_value_heads"], config["rope_parameters"]["partial_rotary_factor"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    kinds = [kind == "linear_attention" for kind in config["layer_types"]]
    if kinds[0] and kinds.index(False) == 1:
        writer.add_full_attention_interval(2)
    else:
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", kinds)
    writer.add_rope_dimension_count(int(head_dim * part))
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([2, 1, 1, 0])


def _write_latent(writer: gguf.GGUFWriter, config: dict[str, Any], older: bool) -> None:
    """Write what DeepSeek's files state beside the sizes of others; older ones had no groups of experts either."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    sizes = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    writer.add_key_length(sizes[0] if older else rank + rotated)
    writer.add_value_length(sizes[1] if older else rank)
    if not older:
        writer.add_key_length_mla(sizes[0])
        writer.add_value_length_mla(sizes[1])
        writer.add_expert_group_count(config["n_group"] or 1)
        writer.add_expert_group_used_count(config["topk_group"] or 1)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["rope_parameters"]["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_parameters"]["mscale_all_dim"])


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return the divisor of each RoPE frequency."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / scaled).numpy()


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Write a byte-level BPE with GPT-2's pre-tokenizer."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([3 if token in special else 1 for token in sorted(vocabulary, key=vocabulary.__getitem__)])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))
