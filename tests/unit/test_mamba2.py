"""The Mamba-2 mixer against its formulas, token by token in float64, where decays vanish and time steps are large."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.config import RECURRENT, TargetConfig
from models.mixers.mamba2 import GroupNorm, Mamba2, read_mamba2
from models.recurrence import CausalRecurrence
from tests.unit.reference import TOLERANCE, relative_error

HIDDEN, HEADS, SIZE, STATE, TAPS, LENGTH = 16, 6, 4, 10, 4, 21
SIZES = {"mamba_n_heads": HEADS, "mamba_d_head": SIZE, "mamba_d_state": STATE, "mamba_d_conv": TAPS}
LLAMA = {
    **{"vocab_size": 8, "hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 1},
    **{"num_attention_heads": 1, "rms_norm_eps": 1e-2},
}


def make_mixer(groups: int, **options) -> Mamba2:
    own = replace(read_mamba2({**SIZES, "mamba_n_groups": groups, "mamba_proj_bias": True}), **options)
    config = replace(TargetConfig.from_json(LLAMA), recurrent=own, mixers=(RECURRENT,))
    mixer, generator = Mamba2(config, 0), torch.Generator().manual_seed(groups)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        mixer.A_log.copy_(torch.linspace(-3, 7, HEADS))  # rates of decay up to 1,100
        mixer.dt_bias.copy_(torch.tensor([-5.0, 0.0, 1.0, 25.0, 40.0, 2.0]))  # softplus is linear above 20
    return mixer.requires_grad_(False)


def formulas(mixer: Mamba2, x: Tensor) -> Tensor:
    """Return the output `[T, H]` for x `[T, H]`."""
    own, weights = mixer.config, {name: value.double() for name, value in mixer.named_parameters()}
    inner, group_rows = HEADS * SIZE, own.groups * STATE
    projected = x @ weights["in_proj.weight"].T + weights["in_proj.bias"]
    scales = torch.tensor(own.scales).double()
    projected *= scales.repeat_interleave(torch.tensor([inner, inner, group_rows, group_rows, HEADS]))
    z, columns, steps = projected.split([inner, own.channels, HEADS], dim=1)
    padded = torch.cat([torch.zeros(TAPS - 1, own.channels).double(), columns])
    taps = weights["conv.weight"][:, 0]
    state, outputs = torch.zeros(HEADS, SIZE, STATE).double(), []
    for t in range(len(x)):
        convolved = (taps * padded[t : t + TAPS].T).sum(1) + weights["conv.bias"]
        convolved = convolved * torch.sigmoid(convolved)
        values, b, c = convolved.split([inner, group_rows, group_rows])
        y = torch.empty(HEADS, SIZE).double()
        for head in range(HEADS):
            group, value = head // (HEADS // own.groups), values.view(HEADS, SIZE)[head]
            dt = torch.log1p(torch.exp(steps[t, head] + weights["dt_bias"][head]))
            decay = torch.exp(-dt * torch.exp(weights["A_log"][head]))
            state[head] = decay * state[head] + dt * torch.outer(value, b.view(own.groups, STATE)[group])
            y[head] = state[head] @ c.view(own.groups, STATE)[group] + weights["D"][head] * value
        outputs.append(y.flatten())
    y, gate = torch.stack(outputs), z * torch.sigmoid(z)

    def norm(rows: Tensor) -> Tensor:
        parts = rows.view(len(rows), own.groups, -1)
        return (parts / (parts.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt()).flatten(1) * weights["norm.weight"]

    y = norm(y * gate) if own.norm == "after the gate" else norm(y) * gate if own.norm != "none" else y * gate
    return y @ weights["o_proj.weight"].T + weights["o_proj.bias"]


@pytest.mark.parametrize("norm", ["after the gate", "before the gate", "none"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_mixer_is_its_formulas(groups, norm):
    mixer = make_mixer(groups, norm=norm, scales=(0.5, 1.3, 0.7, 0.4, 1.1))
    x = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(3))
    out = mixer(x, CausalRecurrence(), residual=torch.ones_like(x)) - 1
    for row, wanted in zip(out, (formulas(mixer, row.double()) for row in x), strict=True):
        assert relative_error(row.double(), wanted) < TOLERANCE


def test_a_document_begins_with_an_empty_state():
    mixer = make_mixer(2)
    x = torch.randn(1, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(3))
    starts = torch.tensor([[0] * 8 + [8] * 2 + [10] * (LENGTH - 10)])
    out = mixer(x, CausalRecurrence(starts))
    apart = [mixer(part, CausalRecurrence()) for part in x.split([8, 2, LENGTH - 10], dim=1)]
    assert relative_error(out, torch.cat(apart, dim=1)) < TOLERANCE


def test_decays_are_kept_in_fp32():
    mixer = make_mixer(1).to(torch.bfloat16)
    wide = {name for name, parameter in mixer.named_parameters() if parameter.dtype is torch.float32}
    assert wide == {"A_log", "D", "dt_bias"}
    assert isinstance(mixer.norm, GroupNorm)
    assert mixer(torch.randn(1, 3, HIDDEN).bfloat16(), CausalRecurrence()).dtype is torch.bfloat16
