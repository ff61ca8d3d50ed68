"""The forward of block drafters, in torch, from the formulas of their formats' documentation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.heads.config import CANDIDATES
from tests.formats.plain import Target, mlp, rms, rotate


def block(tensors: dict[str, Tensor], config: dict[str, Any], target: Target, ids: list[int], count: int) -> list[int]:
    """Run a block [anchor, MASK, ...] over the features before the anchor, then take a token of slot after slot."""
    layer = config.get("transformer_layer_config", config)
    theta = layer.get("rope_theta") or layer["rope_parameters"]["rope_theta"]
    option = {**config, **config.get("dflash_config", {})}
    # speculators' ids are indices of hidden_states; the others are outputs of layers, and that of layer 0 has index 1
    features = option.get("aux_hidden_state_layer_ids") or [index + 1 for index in option["target_layer_ids"]]
    anchor, rows = len(ids) - 1, option["block_size"]
    hidden = target.hidden_states(ids)
    context = F.linear(torch.cat([hidden[index][:anchor] for index in features], dim=-1), tensors["fc.weight"])
    context = rms(context, tensors["hidden_norm.weight"])
    x = target.embedding[[ids[-1], *[option["mask_token_id"]] * (rows - 1)]]
    for index in range(layer["num_hidden_layers"]):
        visible, neox = mask(config, layer, index, anchor, rows), config.get("rope_is_neox_style", True)
        x = decoder_layer(tensors, f"layers.{index}.", x, context, theta, visible, neox)
    x = rms(x, tensors["norm.weight"])
    from_anchor = option.get("sample_from_anchor", "DSpark" in config["architectures"][0])
    states = x[0 if from_anchor else 1 :][:count]
    reduced = option.get("draft_vocab_size", layer["vocab_size"]) < layer["vocab_size"]
    return walk(tensors, option, states, tensors["lm_head.weight"] if reduced else target.lm_head, ids[-1])


def mask(config: dict[str, Any], layer: dict[str, Any], index: int, anchor: int, rows: int) -> Tensor:
    """Return what the rows of a block see, `[rows, anchor + rows]`: of the context, then of the block.

    A window counts from the row in block-causal layers, and from the anchor in the others.
    """
    sliding = layer["layer_types"][index] == "sliding_attention"
    if "speculators_model_type" in config:
        causal = sliding and not config["sliding_window_non_causal"]
    else:
        causal = config.get("is_causal", config.get("dflash_config", {}).get("causal_head", sliding))
    key, row = torch.arange(anchor + rows), anchor + torch.arange(rows)[:, None]
    visible = key <= row if causal else torch.ones(rows, anchor + rows, dtype=torch.bool)
    if sliding:
        visible = visible & (key > row - layer["sliding_window"] if causal else key >= anchor - layer["sliding_window"])
    return visible


def decoder_layer(
    tensors: dict[str, Tensor], prefix: str, x: Tensor, context: Tensor, theta: float, visible: Tensor, neox: bool
) -> Tensor:
    def attend(y: Tensor) -> Tensor:
        return attention(y, context, tensors, f"{prefix}self_attn.", theta, visible, neox)

    def feed_forward(y: Tensor) -> Tensor:
        return mlp(y, tensors, prefix)

    normed = rms(x, tensors[f"{prefix}input_layernorm.weight"])
    x = x + convolved(tensors, f"{prefix}attention_conv.", normed, attend)
    normed = rms(x, tensors[f"{prefix}post_attention_layernorm.weight"])
    return x + convolved(tensors, f"{prefix}mlp_conv.", normed, feed_forward)


def attention(
    x: Tensor, context: Tensor, tensors: dict[str, Tensor], prefix: str, theta: float, visible: Tensor, neox: bool
) -> Tensor:
    """8 heads and 2 KV heads of dimension 16; keys and values are of the context, then of the block itself."""
    everything = torch.cat([context, x])
    q, k, v = (
        F.linear(y, tensors[f"{prefix}{name}_proj.weight"]).unflatten(-1, (-1, 16))
        for name, y in (("q", x), ("k", everything), ("v", everything))
    )
    turn = rotate if neox else rotate_neighbours
    q = turn(rms(q, tensors[f"{prefix}q_norm.weight"]), theta, first=len(context))
    k = turn(rms(k, tensors[f"{prefix}k_norm.weight"]), theta)
    k, v = k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(16)
    mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v).flatten(1)
    return F.linear(mixed, tensors[f"{prefix}o_proj.weight"])


def rotate_neighbours(x: Tensor, theta: float, first: int = 0) -> Tensor:
    """Rotate the numbers 2 i and 2 i + 1 of each head as one complex number."""
    angles = torch.outer(torch.arange(first, first + len(x)).float(), theta ** (-torch.arange(0, 16, 2).float() / 16))
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def convolved(tensors: dict[str, Tensor], name: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """DFlash2: y_t = sum over two taps of (base + delta_t) z_{t - tap}, before and after a sublayer."""
    if f"{name}base_kernel" not in tensors:
        return sublayer(x)
    delta = F.linear(x, tensors[f"{name}kernel_projection.weight"]).view(len(x), 2, 2, -1)  # [row, side, tap, group]
    kernel = tensors[f"{name}base_kernel"] + delta.repeat_interleave(16, dim=-1)

    def convolve(z: Tensor, side: int) -> Tensor:
        earlier = torch.cat([torch.zeros_like(z[:1]), z[:-1]])
        return kernel[:, side, 0] * z + kernel[:, side, 1] * earlier

    return convolve(sublayer(convolve(x, 0)), 1)


def walk(tensors: dict[str, Tensor], option: dict[str, Any], states: Tensor, lm_head: Tensor, anchor: int) -> list[int]:
    """Take the best token of each slot, after the corrector of DSpark or DFlash2 has read the token before.

    DSpark's chooses among the engine's number of candidates.
    """
    token, drafted, carried = anchor, [], torch.zeros(option.get("markov_rank") or 0)
    for h in states:
        logits = lm_head @ h
        draft_id = int(logits.argmax())
        if option.get("markov_rank"):
            best = logits.topk(min(CANDIDATES, len(logits))).indices
            message, carried = markov_message(tensors, option["markov_head_type"], h, token, carried)
            corrected = logits + tensors["markov_head.markov_w2.weight"] @ message
            draft_id = int(best[corrected[best].argmax()])
        if "selector_top_k" in option:
            best = logits.topk(option["selector_top_k"])
            projected = tensors["candidate_selector.hidden_projection.weight"] @ h
            query = tensors["candidate_selector.predecessor_codebook"][token] * projected
            scores = best.values + tensors["candidate_selector.successor_codebook"][best.indices] @ query
            draft_id = int(best.indices[scores.argmax()])
        token = draft_id + int(tensors["d2t"][draft_id]) if "d2t" in tensors else draft_id
        drafted.append(token)
    return drafted


def markov_message(
    tensors: dict[str, Tensor], kind: str, h: Tensor, token: int, carried: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what W2 is applied to, and the recurrent state."""
    embedded = tensors["markov_head.markov_w1.weight"][token]
    if kind == "gated":
        gate = tensors["markov_head.gate_proj.weight"] @ torch.cat([h, embedded])
        return (gate + tensors["markov_head.gate_proj.bias"]).sigmoid() * embedded, carried
    if kind == "rnn":
        joint = tensors["markov_head.joint_proj.weight"] @ torch.cat([carried, embedded, h])
        g, c, o = (joint + tensors["markov_head.joint_proj.bias"]).chunk(3)
        return o.tanh(), g.sigmoid() * carried + (1 - g.sigmoid()) * c.tanh()
    return embedded, carried
