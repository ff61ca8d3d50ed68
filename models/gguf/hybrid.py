"""What GGUF files say of hybrid targets: kinds and sizes of layers, and where tensors differ from the checkpoint's.

llama.cpp's architectures lfm2, lfm2moe, qwen3next, qwen35 and qwen35moe. Its converter stores A as -exp(A_log) and the
norms of Qwen, but that of a gated delta net, as 1 + weight. In qwen35 and qwen35moe value heads are tiled: the first of
every key head, then the second ones; a checkpoint has those of a key head one after another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.gguf.file import GgufFile
from models.gguf.mamba2 import MODULES, logarithm

LFM, QWEN, TILED = ("lfm2", "lfm2moe"), ("qwen3next", "qwen35", "qwen35moe"), ("qwen35", "qwen35moe")
DELTA_NET = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
LISTS = ("attention.head_count_kv", "attention.recurrent_layers", "rope.dimension_sections")  # may be one per layer
SHARED = "expert_shared_feed_forward_length"
KEYS = {
    **dict.fromkeys(LFM, ("shortconv.l_cache", "expert_gating_func")),
    **dict.fromkeys(QWEN, (*DELTA_NET, "ssm.inner_size", "full_attention_interval", SHARED, MODULES)),
}
LAYER = re.compile(r"blk\.(\d+)\.")
SIGMOID = 2  # of expert_gating_func

GLOBAL = {"token_embd_norm": "model.norm"}
SHORT_CONVOLUTION = {
    "shortconv.in_proj": "mixer.in_proj",
    "shortconv.conv": "mixer.conv",
    "shortconv.out_proj": "mixer.o_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
GATED_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a.weight": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
NAMES = {**dict.fromkeys(LFM, SHORT_CONVOLUTION), **dict.fromkeys(QWEN, GATED_DELTA_NET)}
# a tensor of both kinds of Qwen's layers, and one of recurrent ones alone
OF_RECURRENT = ("attn_qkv", "ssm_out.weight")


class Change(NamedTuple):
    """What is done to a tensor as it is read: to its rows, and the order of its columns, in runs of `run`."""

    rows: Callable[[Tensor], Tensor] | None = None
    columns: Tensor | None = None
    run: int = 1


def take_lists(file: GgufFile, architecture: str, values: dict[str, Any]) -> list[bool]:
    """Return which layers are recurrent, and remove from `values` what is stated per layer."""
    layers = range(file.need(f"{architecture}.block_count") - values.get(MODULES, 0))
    heads, recurrent, _ = (values.pop(key, None) for key in LISTS)
    if architecture in LFM:
        kv_heads = heads if isinstance(heads, list) else [heads] * len(layers)
        counts = {count for count in kv_heads if count}
        if len(kv_heads) != len(layers) or len(counts) != 1:
            raise ValueError(f"{file.path}: {architecture}.{LISTS[0]}={heads}: must be 0 or one number for each layer")
        values[LISTS[0]] = counts.pop()
        return [not count for count in kv_heads]
    values |= {} if heads is None else {LISTS[0]: heads}
    if isinstance(recurrent, list) and len(recurrent) >= len(layers):
        return [bool(recurrent[layer]) for layer in layers]
    interval = values.get("full_attention_interval", 4)
    return [bool((layer + 1) % interval) for layer in layers]


def hybrid_json(
    file: GgufFile, architecture: str, values: Mapping[str, Any], config: Mapping[str, Any], recurrent: list[bool]
) -> dict[str, Any]:
    """Return the additional keys of a hybrid's config.json. Raises ValueError naming a key."""
    other = "conv" if architecture in LFM else "linear_attention"
    kinds = {
        "num_hidden_layers": len(recurrent),
        "layer_types": [("full_attention", other)[kind] for kind in recurrent],
    }
    if architecture in LFM:
        if architecture == "lfm2moe" and file.need("lfm2moe.expert_gating_func") != SIGMOID:
            raise ValueError(f"{file.path}: lfm2moe.expert_gating_func: only {SIGMOID}, a sigmoid, is supported")
        taps = file.need(f"{architecture}.shortconv.l_cache")
        return kinds | {"conv_L_cache": taps, "norm_eps": config["rms_norm_eps"], "block_auto_adjust_ff_dim": False}
    sizes = {name: file.need(f"{architecture}.{key}") for key, name in DELTA_NET.items()}
    width, heads = file.need(f"{architecture}.ssm.inner_size"), sizes["linear_num_value_heads"]
    if width % heads:
        raise ValueError(f"{file.path}: {architecture}.ssm.inner_size={width}: is no multiple of {heads} value heads")
    more = {"linear_value_head_dim": width // heads, "mtp_num_hidden_layers": 0}
    more |= {"intermediate_size": values["feed_forward_length"]} if "feed_forward_length" in values else {}
    return kinds | sizes | more | ({"shared_expert_intermediate_size": values[SHARED]} if SHARED in values else {})


def layer_of(name: str) -> int:
    """Return the layer of a tensor, -1 for one of none."""
    match = LAYER.match(name)
    return -1 if match is None else int(match[1])


def shape_of(piece: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the checkpoint's shape of a tensor: convolutions have a dimension more, as may a gate of one output."""
    if piece in ("shortconv.conv", "ssm_conv1d"):
        return shape[0], 1, shape[-1]
    return (1, shape[-1]) if piece == "ffn_gate_inp_shexp" else shape


def change_of(architecture: str, piece: str, config: Mapping[str, Any], source: str) -> Change:
    """Return what makes the checkpoint's tensor of one of Qwen's files, which messages call `source`."""
    groups, heads, key, value = (
        int(config[f"linear_{name}"]) for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    if piece.endswith("_norm") and piece != "ssm_norm":
        return Change(lambda weight: weight - 1)
    tiled = architecture in TILED and heads > groups
    if piece == "ssm_out":
        order = grouped(0, groups, heads, value)
        return Change(columns=order, run=value) if tiled else Change()
    starts = {  # the first row of value heads, and the rows of each
        "attn_qkv": (2 * groups * key, value),
        "ssm_conv1d": (2 * groups * key, value),
        "attn_gate": (0, value),
        **dict.fromkeys(("ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a"), (0, 1)),
    }
    order = grouped(starts[piece][0], groups, heads, starts[piece][1]) if tiled and piece in starts else None
    if piece == "ssm_a":
        return Change(lambda a: logarithm(source, a if order is None else a[order]))
    return Change() if order is None else Change(lambda rows: rows[order])


def grouped(first: int, groups: int, heads: int, size: int) -> Tensor:
    """Return the stored places of numbers that belong to value heads, `size` each from `first` on, in our order."""
    places = torch.arange(heads * size).view(heads // groups, groups, size).transpose(0, 1)
    return torch.cat([torch.arange(first), first + places.flatten()])
