"""The values of `proposer.tree`: which nodes a head proposes per step."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeAlias

MAX_TREE_NODES = 64  # the bits of DraftTree.ancestors, the root included
MOST = MAX_TREE_NODES - 1  # drafted nodes
CHAIN = "none"
FORM = re.compile(r"beam:(\d+)x(\d+)(?::(\d+))?|measured(?::(\d+))?", re.ASCII)


class Beam(NamedTuple):
    """A beam search (EAGLE-2) of that width and depth, whose best nodes are proposed."""

    width: int
    depth: int
    nodes: int = MOST  # at most; the default is as many as fit

    def __str__(self) -> str:
        return f"beam:{self.width}x{self.depth}" + (f":{self.nodes}" if self.nodes < MOST else "")


class Measured(NamedTuple):
    """The best fixed tree (Medusa) for the exported head, of that many nodes."""

    nodes: int = 16


Paths: TypeAlias = list[list[int]]  # a fixed tree: every node as the path of ranks that leads to it


def parse_tree(tree: Any) -> Beam | Measured | Paths | None:
    """Return what a value of `proposer.tree` stands for, None for a chain. Raises ValueError for any other value."""
    if tree == CHAIN:
        return None
    if isinstance(tree, list):
        return _check_paths(tree)
    match = FORM.fullmatch(tree) if isinstance(tree, str) else None
    if match is None:
        raise ValueError(
            f"proposer.tree={tree}: must be none, beam:<width>x<depth>, beam:<width>x<depth>:<nodes>, measured, "
            "measured:<nodes>, or a list of paths, each a list of ranks: [[0], [1], [0, 0]]"
        )
    numbers = [int(digits) for digits in match.groups() if digits is not None]
    if not all(1 <= number <= MOST for number in numbers) or match[1] == "1":
        raise ValueError(f"proposer.tree={tree}: its numbers must be 1 to {MOST}, and a beam's width at least 2")
    if match[1] is None:
        return Measured(*numbers)
    beam = Beam(*numbers)
    if beam.width * (beam.depth - 1) > MAX_TREE_NODES:
        raise ValueError(
            f"proposer.tree={tree}: the head would grow more than {MAX_TREE_NODES} nodes; make it narrower or shallower"
        )
    return beam


def _check_paths(tree: list[Any]) -> Paths:
    if any(not isinstance(path, list) or any(type(rank) is not int for rank in path) for path in tree):
        raise ValueError(f"proposer.tree={tree}: must be a list of paths, each a list of ranks: [[0], [1], [0, 0]]")
    if not tree:
        raise ValueError("proposer.tree=[]: a tree needs a node; none drafts a chain")
    if len(tree) > MOST:
        raise ValueError(f"proposer.tree: {len(tree)} nodes; at most {MOST}")
    for index, path in enumerate(tree):
        if not path or min(path) < 0:
            raise ValueError(f"proposer.tree: {path}: a path is a list of ranks from 0")
        if path in tree[:index]:
            raise ValueError("proposer.tree: a path occurs twice")
        if len(path) > 1 and path[:-1] not in tree:
            raise ValueError(f"proposer.tree: {path}: its parent {path[:-1]} is missing")
    return tree
