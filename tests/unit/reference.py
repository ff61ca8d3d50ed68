"""transformers as the reference for our reading of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.attention import CausalAttention
from models.targets import load_target

LAYERS = (0, 3, 1)  # hidden states that are compared, in an order of their own
TOLERANCE = 1e-5  # both compute in fp32, with other orders of summation


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    return ((actual - wanted).norm() / wanted.norm()).item()


@torch.no_grad()
def reference_outputs(folder: Path, ids: Tensor, **kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(ids, output_hidden_states=True, **kwargs)


@torch.no_grad()
def assert_equals_reference(folder: Path, ids: Tensor) -> None:
    """Logits, the hidden states of LAYERS, and the last one, normed by us or by transformers."""
    expected = reference_outputs(folder, ids)
    target = load_target(str(folder))
    out = target(ids, torch.arange(ids.shape[1]).expand_as(ids), CausalAttention(), aux_layers=LAYERS)
    assert relative_error(target.logits(out.hidden), expected.logits) < TOLERANCE
    for layer, feature in zip(LAYERS, out.aux, strict=True):
        assert relative_error(feature, expected.hidden_states[layer]) < TOLERANCE
    assert relative_error(out.hidden, expected.hidden_states[-1]) < TOLERANCE
    assert torch.equal(target.norm(out.last_hidden), out.hidden)


def randomise_biases_and_norms(folder: Path) -> None:
    """transformers starts biases at zero and norms at one, which would hide a mistake in either."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for value in tensors.values():
        if value.ndim == 1:
            value += 0.3 * torch.randn(value.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
