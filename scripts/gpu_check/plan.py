"""What is checked, as a list that costs nothing to make: a dry run counts it, a run begins what there is time for.

Nothing here touches a GPU. A check is run, reported, timed and left out as one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scripts.gpu_check.measure import Item

OPERATIONS = ("linear", "blocks", "attention", "choose", "elementwise", "layer", "verify", "acceptance", "training")
KINDS = ("correctness", "timings")
# The order of the kernels' checks: what serves an 8B model in bf16 first.
SERVED, BF16, FP16, FP32 = range(4)
RANKS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}

Lines = list[dict[str, Any]]


class LeftOut(Exception):
    """Raised by a check that cannot run here; its text is the reason."""


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Check:
    """One entry of the plan; `seconds` is what it takes on a GPU, at most, kernels compiled."""

    label: str
    place: tuple[str, ...]  # keys of the report under which its lines are listed
    seconds: float
    run: Callable[[], Lines]
    compile: Callable[[], None] = nothing  # launches the kernels that `run` compares or times, without its references


@dataclass(frozen=True)
class Group:
    """Checks that share something costly, which `close` releases."""

    checks: Sequence[Check]
    close: Callable[[], None] = field(default=nothing)

    @property
    def seconds(self) -> float:
        return sum(check.seconds for check in self.checks)


@dataclass(frozen=True)
class KernelCheck:
    """A check of one operation, as the operation's `checks(device)` states it; `rank` orders those of all operations.

    `items` launches a kernel before each comparison or timing that it yields.
    """

    kind: str  # of KINDS
    label: str
    seconds: float
    rank: int
    items: Callable[[], Iterator[Item]]

    def run(self) -> Lines:
        return [item.line() for item in self.items()]

    def compile(self) -> None:
        for item in self.items():
            item.launch()

    def check(self) -> Check:
        return Check(f"{self.label}: {self.kind}", ("kernels", self.kind), self.seconds, self.run, self.compile)


def kernels(device: torch.device) -> list[Group]:
    modules = (importlib.import_module(f"scripts.gpu_check.{name}") for name in OPERATIONS)
    checks: list[KernelCheck] = [check for module in modules for check in module.checks(device)]
    checks.sort(key=lambda check: (check.rank, KINDS.index(check.kind)))  # stable
    return [Group([check.check() for check in checks])]


def groups(part: str, device: torch.device, options: Any) -> list[Group]:
    """Return the plan of a part. `options` are those of the command line."""
    if part == "kernels":
        return kernels(device)
    if part == "exact":
        from scripts.gpu_check import exactness

        return exactness.groups(device)
    from scripts.gpu_check import speculation

    return speculation.groups(device, options.head, options.minutes)
