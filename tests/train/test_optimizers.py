"""Muon: which parameters it updates, and how; a killed run goes on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.heads.weights import checkpoint_layout, checkpoint_tensors
from models.targets.llama import LlamaTarget
from tests.forking import Run
from tests.heads import OBJECTIVE_OF, VARIANTS, make_head, make_objective
from tests.train.running import assert_equal, run
from tests.train.test_killed import killed_after
from train.config import MuonConfig, OptimConfig
from train.distributed.strategies import hidden_matrices, make_optimizers


@pytest.mark.parametrize("variant", VARIANTS)
def test_muon_gets_the_matrices_between_hidden_states(variant: str, tiny_target: LlamaTarget) -> None:
    """And AdamW all else that is trained, what a vocabulary is a side of too: every parameter has one optimiser."""
    head = make_head(tiny_target, variant)
    names = {parameter: name for name, parameter in head.named_parameters()}
    vocabularies = {head.config.vocab_size, head.config.draft_vocab_size, 1}
    trained = {name: parameter.shape for parameter, name in names.items() if parameter.requires_grad}
    expected = {name for name, shape in trained.items() if len(shape) == 2 and not {*shape} & vocabularies}
    assert expected
    assert {names[parameter] for parameter in hidden_matrices(head)} == expected
    optimizers = make_optimizers(objective_of(head), MuonConfig("muon"), 0.1, fused=True)
    updated = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(updated) == len(set(updated))
    assert set(updated) == {p for p in head.parameters() if p.requires_grad}
    for group in optimizers[0].param_groups:
        assert {names[p] for p in group["params"]} == expected


def objective_of(head: Any) -> Any:
    return make_objective(head, OBJECTIVE_OF[head.config.name], steps=None if head.config.max_depth else 3)


def test_merged_matrices_are_updated_one_by_one(tiny_target: LlamaTarget) -> None:
    """As torch's Muon does with the checkpoint's separate tensors, and the others as torch's AdamW does."""
    merged, separate = (make_head(tiny_target, "dspark, gated") for _ in range(2))
    parts = {name: tensor.clone().requires_grad_() for name, tensor in checkpoint_tensors(separate).items()}
    layout = checkpoint_layout(merged)
    matrices = {
        names for p, names in ((p, layout[n]) for n, p in merged.named_parameters()) if p in hidden_matrices(merged)
    }
    inner = [parts[name] for names in matrices for name in names]
    outer = [tensor for name, tensor in parts.items() if not any(name in names for names in matrices)]
    config = MuonConfig("muon", weight_decay=0.1)
    optimizers = make_optimizers(objective_of(merged), config, 0.05, fused=False)
    references = [
        torch.optim.Muon(inner, lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=0.05, weight_decay=0.1, betas=(0.9, 0.95)),
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, parameter in merged.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            pieces = parameter.grad.split([len(parts[part]) for part in layout[name]])
            for part, piece in zip(layout[name], pieces, strict=True):
                parts[part].grad = piece.clone()
        for optimizer in (*optimizers, *references):
            optimizer.step()
    assert_equal(checkpoint_tensors(merged), {name: tensor.detach() for name, tensor in parts.items()})


@pytest.mark.parametrize("variant", ["eagle3", "dflash2"])
def test_updates_are_as_large_as_adamws(variant: str, tiny_target: LlamaTarget) -> None:
    """The root mean square of AdamW's is 0.2 to 0.4 of the rate (arXiv 2502.16982): its rate serves for both."""
    head = make_head(tiny_target, variant)
    before = {p: p.detach().clone() for p in hidden_matrices(head)}
    for parameter in head.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    for optimizer in make_optimizers(objective_of(head), MuonConfig("muon"), 0.01, fused=True):
        optimizer.step()
    for parameter, value in before.items():
        assert 0.1 < (parameter - value).square().mean().sqrt() / 0.01 < 0.4


def test_adamw_gets_everything_by_default(tiny_target: LlamaTarget) -> None:
    (optimizer,) = make_optimizers(objective_of(make_head(tiny_target, "dflash2")), OptimConfig("adamw"), 1, fused=True)
    assert type(optimizer) is torch.optim.AdamW


def test_killed_after_a_checkpoint_it_is_the_same_head(settings: list[str], tmp_path: Path, forked: Run) -> None:
    muon = [
        *settings, "head=dspark", "head.num_layers=1", "head.markov_rank=8", "optim=muon", "steps=5",
        "checkpoint_every=2", "eval_prompts=1", "eval_max_tokens=4",
    ]  # fmt: skip
    run([*muon, "run=steady", f"head.path={tmp_path / 'steady-head'}"])
    torn = [*muon, "run=torn", f"head.path={tmp_path / 'torn-head'}"]
    killed_after(1, "train.checkpoint:save_checkpoint", torn, forked)
    assert (tmp_path / "torn" / "checkpoints" / "latest").read_text() == "step-000002\n"
    run(torn)
    steady, result = (load_file(tmp_path / f"{name}-head" / "model.safetensors") for name in ("steady", "torn"))
    assert_equal(steady, result)
    saved = load_file(tmp_path / "torn" / "checkpoints" / "step-000005" / "optimizer.safetensors")
    assert {"fc.weight|momentum_buffer", "norm.weight|exp_avg"} <= saved.keys()
