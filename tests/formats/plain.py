"""What the plain forwards of several heads share: the target, norm, rotary embedding and MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.formats.sources import LLAMA


class Target:
    """What a head may use of the target: hidden states as HF numbers them, embedding and LM head."""

    def __init__(self, folder: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.lm_head = self.model.get_output_embeddings().weight.detach()

    @torch.no_grad()
    def hidden_states(self, ids: list[int]) -> tuple[Tensor, ...]:
        """Return the hidden states, `[T, H]` each; the last is after the final norm."""
        output = self.model(torch.tensor([ids]), output_hidden_states=True)
        return tuple(state[0] for state in output.hidden_states)

    @torch.no_grad()
    def before_norm(self, ids: list[int]) -> Tensor:
        """Return what the final norm reads, `[T, H]`."""
        states: list[Tensor] = []
        hook = self.model.model.norm.register_forward_hook(lambda module, inputs, output: states.append(inputs[0][0]))
        self.hidden_states(ids)
        hook.remove()
        return states[0]


def rms(x: Tensor, weight: Tensor, eps: float = LLAMA["rms_norm_eps"]) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float, first: int = 0) -> Tensor:
    """Apply RoPE to `[T, heads, D]`, row i at position `first` + i."""
    size = x.shape[-1]
    angle = torch.arange(first, first + len(x))[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    angle = torch.cat([angle, angle], dim=-1)[:, None]
    half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
    return x * angle.cos() + half * angle.sin()


def mlp(x: Tensor, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
