"""GGUF files of hybrids with Mamba-2: their keys under the names of Hugging Face's config.json, and their tensors.

llama.cpp's converter stores -exp(A_log), the mixer's norm by groups, and all factors of Falcon-H1 within its weights. A
layer without KV heads is recurrent; in Nemotron-H one with an MLP's size is an MLP or a mixture of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.gguf.file import GgufFile
from models.mixers.mamba2 import GRANITE, NEMOTRON

SSM = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")
MODULES = "nextn_predict_layers"  # for multi-token prediction, which block_count includes, and which are not read
KV_HEADS, FORWARD = "attention.head_count_kv", "feed_forward_length"
PER_LAYER = {  # keys that may be lists, with a value for each layer
    "granitehybrid": (KV_HEADS,),
    "nemotron_h": (KV_HEADS, FORWARD),
    "nemotron_h_moe": (KV_HEADS, FORWARD),
}
EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "moe_latent_size": "moe_latent_size",
}
OF_SSM = (*SSM, "attention.layer_norm_epsilon")
KEYS = {  # that are of these architectures alone
    "granitehybrid": (*SSM, "expert_count", "expert_shared_feed_forward_length"),
    "falcon-h1": SSM,
    "nemotron_h": OF_SSM,
    "nemotron_h_moe": (*OF_SSM, *EXPERTS, MODULES),
}
# tensors of a layer -> our names, without its `mixer` or `mamba`
MIXER = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv",
    "ssm_dt.bias": "dt_bias",
    "ssm_a.weight": "A_log",
    "ssm_d.weight": "D",
    "ssm_norm": "norm",
    "ssm_out": "o_proj",
}
SHARED = {f"ffn_{kind}_shexp": f"mlp.shared_experts.{kind}_proj" for kind in ("gate", "up", "down")}
NEMOTRON_LAYER = {
    **{name: f"mamba.{ours}" for name, ours in MIXER.items()},
    **SHARED,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
}
LAYERS = {  # by architecture
    "granitehybrid": {**{name: f"mixer.{ours}" for name, ours in MIXER.items()}, **SHARED},
    "falcon-h1": {name: f"mixer.{ours}" for name, ours in MIXER.items()},
    "nemotron_h": NEMOTRON_LAYER,
    "nemotron_h_moe": NEMOTRON_LAYER,
}


def shape_of(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a checkpoint folder has for a tensor: `[C, 1, K]` of the convolution, else one axis."""
    if kind == "ssm_conv1d" and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (torch.Size(shape).numel(),) if kind in ("ssm_a", "ssm_d", "ssm_norm") else shape


def logarithm(source: str, value: Tensor) -> Tensor:
    """Return A_log for -exp(A_log). Raises ValueError naming `source` for a number that is none."""
    if not bool((value < 0).all()):
        raise ValueError(f"{source}: damaged: {float(value.max())} is no negative rate of decay")
    return torch.log(-value)


def per_layer(file: GgufFile, architecture: str, values: dict[str, Any]) -> dict[str, list[int]]:
    """Return the keys of PER_LAYER as lists, and replace them in `values` by their largest number."""
    layers, lists = file.need(f"{architecture}.block_count") - values.get(MODULES, 0), dict[str, list[int]]()
    for key in PER_LAYER.get(architecture, ()):
        stated = file.need(f"{architecture}.{key}")
        numbers = stated if isinstance(stated, list) else [stated] * layers
        if len(numbers) == layers + values.get(MODULES, 0):  # the last ones are of modules that are not read
            numbers = numbers[:layers]
        if len(numbers) != layers or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{file.path}: {architecture}.{key}={numbers!r}: must be {layers} whole numbers")
        if not any(numbers):
            raise ValueError(f"{file.path}: {architecture}.{key}={numbers!r}: a layer with such must be there")
        lists[key] = numbers
        values[key] = max(numbers)
    return lists


def config_keys(
    file: GgufFile, architecture: str, values: dict[str, Any], lists: dict[str, list[int]], config: dict[str, Any]
) -> dict[str, Any]:
    """Return the keys of a config.json that Llama's files have not. Raises ValueError naming a key."""

    def any_layer(kind: str) -> bool:
        return any(f"blk.{layer}.{kind}" in file.tensors for layer in range(config["num_hidden_layers"]))

    nemotron = architecture.startswith("nemotron")
    keys = NEMOTRON if nemotron else GRANITE
    taps, inner, state, heads, groups = (file.need(f"{architecture}.{key}") for key in SSM)
    if inner % heads:
        raise ValueError(f"{file.path}: {architecture}.ssm.time_step_rank={heads}: must divide ssm.inner_size={inner}")
    found: dict[str, Any] = {
        keys.heads: heads,
        keys.head_size: inner // heads,
        keys.groups: groups,
        keys.state: state,
        keys.taps: taps,
        keys.convolution_bias: any_layer("ssm_conv1d.bias"),
        "attention_bias": any_layer("attn_q.bias") or any_layer("attn_qkv.bias"),
        "mlp_bias": any_layer("ffn_up.bias"),
    }
    if nemotron:
        return found | nemotron_keys(values, lists)
    if architecture == "falcon-h1":
        found |= {"mamba_d_ssm": inner, "mamba_rms_norm": any_layer("ssm_norm.weight")}
        return found | {"mamba_norm_before_gate": False}
    experts, shared = values.get("expert_count", 0), values.get("expert_shared_feed_forward_length")
    return found | {
        "mamba_expand": inner // config["hidden_size"],
        "layer_types": ["attention" if count else "mamba" for count in lists[KV_HEADS]],
        "shared_intermediate_size": shared or config["intermediate_size"],
        "num_local_experts": experts,
        "num_experts_per_tok": values.get("expert_used_count", 0),
        "position_embedding_type": "rope" if values.get("rope.scaling.finetuned", True) else "nope",
    }


def nemotron_keys(values: dict[str, Any], lists: dict[str, list[int]]) -> dict[str, Any]:
    stated = {name: values[key] for key, name in EXPERTS.items() if key in values}
    other = "moe" if "n_routed_experts" in stated else "mlp"
    pairs = zip(lists[KV_HEADS], lists[FORWARD], strict=True)
    types = [other if size else "attention" if count else "mamba" for count, size in pairs]
    eps = values.get("attention.layer_norm_rms_epsilon", values.get("attention.layer_norm_epsilon"))
    return stated | {
        "num_hidden_layers": len(types),
        "layers_block_type": types,
        "layer_norm_epsilon": eps,
        "mlp_hidden_act": "relu2",
    }
