"""Writes what GGUF files of hybrids with Mamba-2 hold otherwise than others, as llama.cpp's converter does."""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np
import torch

ATTENTION = ("attention", "full_attention", "hybrid")


def parted(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the parts of Granite's merged tensors, as its converter stores them; any other tensor as it is."""
    layer, _, kind = name.removesuffix(".weight").rpartition(".")
    if kind not in ("input_linear", "output_linear"):
        return [(name, tensor)]
    names = ("gate_proj", "up_proj") if kind == "input_linear" else ("down_proj",)
    if tensor.ndim == 2:
        parts = zip(names, tensor.chunk(len(names)), strict=True)
        return [(f"{layer}.{part}.weight" if len(names) > 1 else name, rows) for part, rows in parts]
    return [
        (f"{layer}.experts.{expert}.{part}.weight", rows.contiguous())
        for expert, matrix in enumerate(tensor)
        for part, rows in zip(names, matrix.chunk(len(names)), strict=True)
    ]


def known_name(name: str, config: dict[str, Any]) -> str:
    """Return a name that the gguf package knows, for one that a converter makes or splits."""
    shared = "mlp.shared_expert" if config.get("num_local_experts") else "mlp"
    for pattern, known in (
        (r"\.shared_mlp\.output_linear\.", f".{shared}.down_proj."),
        (r"\.shared_mlp\.", f".{shared}."),
        (r"^backbone\.(.*)\.mixer\.experts\.", r"model.\1.mlp.experts."),
        (r"\.block_sparse_moe\.experts\.(\d+)\.(gate|up|down)_proj", r".mlp.experts.\1.\2_proj"),
    ):
        name = re.sub(pattern, known, name)
    return name


def as_mamba2(name: str, value: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a tensor of a Mamba-2 layer as llama.cpp's converter stores it."""
    if name.endswith(".conv1d.weight"):
        return value.squeeze(1)
    if name.endswith((".A_log", ".D")) and value.ndim == 1:
        return (-np.exp(value) if name.endswith(".A_log") else value)[:, None]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return value.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    return value


def write_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the sizes of all layers."""
    nemotron, layers = "mamba_num_heads" in config, config["num_hidden_layers"]
    heads = config["mamba_num_heads" if nemotron else "mamba_n_heads"]
    size = config["mamba_head_dim" if nemotron else "mamba_d_head"]
    writer.add_ssm_conv_kernel(config["conv_kernel" if nemotron else "mamba_d_conv"])
    writer.add_ssm_inner_size(heads * size)
    writer.add_ssm_state_size(config["ssm_state_size" if nemotron else "mamba_d_state"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(config["n_groups" if nemotron else "mamba_n_groups"])
    kinds = config.get("layers_block_type") or config.get("layer_types") or ["hybrid"] * layers
    attention = [config["num_key_value_heads"] if kind in ATTENTION else 0 for kind in kinds]
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(attention[0] if "hybrid" in kinds else attention)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if nemotron:
        _write_nemotron(writer, config, kinds)
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_rope_freq_base((config.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    if config["model_type"] == "granitemoehybrid":
        writer.add_rope_dimension_count(head_dim)
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def _write_nemotron(writer: gguf.GGUFWriter, config: dict[str, Any], kinds: list[str]) -> None:
    inner = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    writer.add_feed_forward_length([inner.get(kind, 0) for kind in kinds])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    if "moe" not in kinds:
        return
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    if config["moe_latent_size"] is not None:
        writer.add_moe_latent_size(config["moe_latent_size"])
