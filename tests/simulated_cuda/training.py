"""An optimiser step of every objective on a simulated device: where the host waits in it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from models.heads.borrowing import borrow
from models.targets import load_target
from tests.heads import make_head, make_objective
from tests.simulated_cuda.machine import Machine, Wait
from tests.simulated_cuda.matrix import EAGLE3
from train.config import OptimConfig
from train.data.sequences import Sequences
from train.distributed.strategies import make_optimizers
from train.features.online import compute_features

# by objective: which head of tests/heads.py
OBJECTIVES = {
    "ttt": EAGLE3,
    "eagle": "eagle",
    "mtp": "mtp",
    "medusa": "medusa",
    "mlp": "mlp",
    "p-eagle": "p-eagle, one layer",
    "dflash": "dflash, one layer",
    "dspark": "dspark, gated",
    "dflash2": "dflash2, truncated",
}
ROWS = [
    ([5, 6, 7, 8, *range(20, 44)], [False] * 4 + [True] * 24),
    ([9, 8, *range(30, 50)], [False] * 2 + [True] * 20),
]


def step_waits(folder: Path, machine: Machine, name: str, device: str = "cuda:0") -> dict[str, Counter[Wait]]:
    """Take two optimiser steps; return the waits of the second by part."""
    target = load_target(str(folder), device=device)
    head = make_head(load_target(str(folder)), OBJECTIVES[name])
    borrow(head, target)
    objective = make_objective(head.to(device), name)
    optimizers = make_optimizers(objective, OptimConfig(), 1e-3, fused=True)
    batch = Sequences.of(ROWS).batch(range(len(ROWS))).to(torch.device(device))
    parts: dict[str, Counter[Wait]] = {}
    for _ in range(2):
        with machine.counting() as parts["features"]:
            features = compute_features(target, batch, head.config.aux_layers)
            teacher = objective.teach(target, features.hidden, batch)
        generator = torch.Generator(device).manual_seed(1)
        with machine.counting() as parts["forward"]:
            loss, _ = objective(batch, features, teacher, objective.denominators(batch), True, generator)
        with machine.counting() as parts["backward"]:
            loss.backward()
        trained = [p for group in objective.parameter_groups() for p in group["params"]]
        assert any(p.grad is not None for p in trained)
        with machine.counting() as parts["optimizer"]:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return parts
