"""Acceptance: checks over random trees that the GPU accepts the same node as the CPU, and times it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from infer.speculation.tree import DraftTree
from kernels.verify import accept
from scripts.gpu_check.measure import Item, same, timed
from scripts.gpu_check.plan import SERVED, KernelCheck


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


def checks(device: torch.device) -> Iterator[KernelCheck]:
    on_gpu = device.type == "cuda"
    for batch, nodes in ((64, 64), (256, 17), (3, 1)) if on_gpu else ((3, 16), (2, 64)):
        items = partial(compare, batch, nodes, device)
        yield KernelCheck("correctness", f"accept, {batch} trees of up to {nodes}", 2, SERVED, items)
    for batch, nodes in ((1, 16), (64, 64)) if on_gpu else ((2, 16),):
        items = partial(time, batch, nodes, device)
        yield KernelCheck("timings", f"accept, {batch} trees of {nodes}", 1, SERVED, items)


def compare(batch: int, nodes: int, device: torch.device) -> Iterator[Item]:
    tree, choice = random_trees(batch, nodes, seed=nodes)
    last = accept(*tensors(tree, choice, device))
    yield same("accept", f"{batch} trees of up to {nodes}", last, partial(expected, tree, choice))


def time(batch: int, nodes: int, device: torch.device) -> Iterator[Item]:
    inputs = tensors(*random_trees(batch, nodes, seed=0), device)
    moved = sum(x.numel() * x.element_size() for x in inputs)
    yield timed("accept", f"{batch} trees of {nodes}", device, moved, accept, *inputs)
