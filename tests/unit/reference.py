"""transformers as the reference for how we read a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.attention import CausalAttention
from models.targets import load_target

LAYERS = (0, 3, 1)  # layers whose hidden states are compared, not in ascending order
TOLERANCE = 1e-5  # both compute in fp32, but sum in different orders


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    return ((actual - wanted).norm() / wanted.norm()).item()


@torch.no_grad()
def reference_outputs(folder: Path, ids: Tensor, **kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(ids, output_hidden_states=True, **kwargs)


@torch.no_grad()
def assert_equals_reference(folder: Path, ids: Tensor) -> None:
    """Assert equal logits, hidden states of LAYERS and last hidden state, which is compared after the final norm."""
    expected = reference_outputs(folder, ids)
    target = load_target(str(folder))
    out = target(ids, torch.arange(ids.shape[1]).expand_as(ids), CausalAttention(), aux_layers=LAYERS)
    assert relative_error(target.logits(out.hidden), expected.logits) < TOLERANCE
    for layer, feature in zip(LAYERS, out.aux, strict=True):
        assert relative_error(feature, expected.hidden_states[layer]) < TOLERANCE
    last = out.hidden if (project := getattr(target, "project_out", None)) is None else project(out.hidden)
    assert relative_error(last, expected.hidden_states[-1]) < TOLERANCE


def randomise_biases_and_norms(folder: Path) -> None:
    """Add noise to biases and norms: transformers starts them at zero and one, which would hide a mistake in either."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, value in tensors.items():
        if value.ndim == 1 or name.endswith("_bias"):  # of experts in one tensor
            value += 0.3 * torch.randn(value.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
