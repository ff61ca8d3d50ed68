"""Acceptance: checks over random trees that the GPU accepts the same node as the CPU, and times it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infer.speculation.tree import DraftTree
from kernels.verify import accept
from scripts.gpu_check.measure import same, timed


def random_trees(batch: int, nodes: int, seed: int) -> tuple[DraftTree, Tensor]:
    """Return random trees in which every node has at most two children, and choices that often match a child."""
    generator = torch.Generator().manual_seed(seed)
    parent = torch.full((batch, nodes), -1)
    token = torch.zeros(batch, nodes, dtype=torch.int64)
    for node in range(1, nodes):
        parent[:, node] = (node - 1) // 2
        token[:, node] = node % 2
    tree = DraftTree.assemble(token, parent, torch.randint(1, nodes + 1, (batch,), generator=generator))
    return tree, torch.randint(0, 2, (batch, nodes), generator=generator)


def tensors(tree: DraftTree, choice: Tensor, device: torch.device) -> list[Tensor]:
    fields = (tree.token, tree.parent, tree.depth, tree.ancestors, tree.length, choice)
    return [field.to(device) for field in fields]


def expected(tree: DraftTree, choice: Tensor) -> Tensor:
    """Return the last accepted node of every tree, by walking down from the root."""
    ends = []
    for token, parent, length, chosen in zip(tree.token, tree.parent, tree.length.tolist(), choice, strict=True):
        node = 0
        while True:
            below = [i for i in range(1, length) if parent[i] == node and token[i] == chosen[node]]
            if not below:
                break
            (node,) = below
        ends.append(node)
    return torch.tensor(ends)


def correctness(device: torch.device) -> list[dict[str, Any]]:
    results = []
    for batch, nodes in ((64, 64), (256, 17), (3, 1)) if device.type == "cuda" else ((3, 16), (2, 64)):
        tree, choice = random_trees(batch, nodes, seed=nodes)
        last = accept(*tensors(tree, choice, device))
        results.append(same("accept", f"{batch} trees of up to {nodes}", last, expected(tree, choice)))
    return results


def timings(device: torch.device) -> list[dict[str, Any]]:
    results = []
    for batch, nodes in ((1, 16), (64, 64)) if device.type == "cuda" else ((2, 16),):
        inputs = tensors(*random_trees(batch, nodes, seed=0), device)
        moved = sum(x.numel() * x.element_size() for x in inputs)
        results.append(timed("accept", f"{batch} trees of {nodes}", device, moved, accept, *inputs))
    return results
