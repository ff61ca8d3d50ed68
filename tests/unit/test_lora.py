"""Adapters on a target's layers: no effect at first, none when switched off, gone after a merge."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from models.attention import CausalAttention
from models.layers import pack
from models.lora import LoraLinear, adapt, merge, unadapted
from models.targets import load_target
from models.targets.llama import LlamaTarget

NAMES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
IDS = torch.arange(1, 13)[None]


@torch.no_grad()
def logits(target: LlamaTarget) -> Tensor:
    return target.logits(target(IDS, torch.arange(12)[None], CausalAttention()).hidden)


def randomise(target: LlamaTarget) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in target.named_parameters():
        if name.endswith("lora_b"):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture
def target(tiny_target_folder) -> LlamaTarget:
    return load_target(str(tiny_target_folder))


def test_adapters_change_nothing_at_first_and_nothing_when_off(target, tiny_target):
    adapt(target.layers, NAMES, rank=4, alpha=8.0)
    assert torch.equal(logits(target), logits(tiny_target))
    randomise(target)
    assert not torch.allclose(logits(target), logits(tiny_target), atol=1e-2)
    with unadapted(target):
        assert torch.equal(logits(target), logits(tiny_target))
    assert {name.rpartition(".")[2] for name, p in target.named_parameters() if p.requires_grad} == {"lora_a", "lora_b"}


def test_a_merged_target_is_plain_and_says_the_same(target):
    adapt(target.layers, NAMES, rank=4, alpha=8.0)
    randomise(target)
    merged = copy.deepcopy(target)
    merge(merged)
    torch.testing.assert_close(logits(merged), logits(target), rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, LoraLinear) for module in merged.modules())
    pack(merged)
    torch.testing.assert_close(logits(merged), logits(target), rtol=1e-4, atol=1e-4)


def test_only_the_named_layers_are_adapted(target):
    adapt(target.layers, ["o_proj"], rank=2, alpha=2.0)
    adapted = {name.rpartition(".")[2] for name, module in target.named_modules() if isinstance(module, LoraLinear)}
    assert adapted == {"o_proj"}
    with pytest.raises(ValueError, match=r"objective.lora_on: q_proj: this target's layers have .*qkv_proj"):
        adapt(target.layers, ["q_proj"], rank=2, alpha=2.0)
