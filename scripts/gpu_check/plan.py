"""What is checked, as a list that costs nothing to make: a dry run counts it, a run begins what there is time for.

Nothing here touches a GPU. A check is run, reported, timed and left out as one.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from scripts.gpu_check.measure import Item
from scripts.gpu_check.ptxas import Ptxas, other_ptxas

OPERATIONS = (
    "linear", "blocks", "attention", "choose", "elementwise", "layer", "verify", "drafting", "acceptance", "training"
)  # fmt: skip
KINDS = ("correctness", "timings")  # in the parts `kernels` and `timings`
# The order of the kernels' checks: what serves an 8B model in bf16 first.
SERVED, BF16, FP16, FP32 = range(4)
RANKS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}

PROCESSES = 4  # that share the comparisons of kernels

Lines = list[dict[str, Any]]


class LeftOut(Exception):
    """Raised by a check that cannot run here; its text is the reason."""


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Check:
    """One entry of the plan; `seconds` is what it takes on a GPU, at most, kernels compiled.

    It is left out if the check that `needs` names has failed.
    """

    label: str
    place: tuple[str, ...]  # keys of the report under which its lines are listed
    seconds: float
    run: Callable[[], Lines]
    compile: Callable[[], None] = nothing  # launches the kernels that `run` compares or times, without its references
    needs: str | None = None


@dataclass(frozen=True)
class Group:
    """Checks of a part that run in one process and share something costly, which `close` releases.

    The kernels of the checks `compiled` are compiled before, in processes of their own. `environment` is added to that
    of all its processes. `warms_up`: its engines compile every kernel when they start, as they do when they serve;
    others do it when they need them.
    """

    name: str
    part: str
    checks: Sequence[Check]
    close: Callable[[], None] = nothing
    compiled: Sequence[Check] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    warms_up: bool = False

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

    def check(self, assembler: str = "") -> Check:
        """`assembler`: other than Triton's own, under whose name the results are listed."""
        label = f"{self.label}: {self.kind}"
        if assembler:
            return Check(f"{assembler}: {label}", ("kernels", assembler), self.seconds, self.run, self.compile)
        return Check(label, ("kernels", self.kind), self.seconds, self.run, self.compile)


def kernel_checks(device: torch.device, kind: str) -> list[KernelCheck]:
    modules = (importlib.import_module(f"scripts.gpu_check.{name}") for name in OPERATIONS)
    checks = [check for module in modules for check in module.checks(device) if check.kind == kind]
    return sorted(checks, key=lambda check: check.rank)  # stable


def kernels(device: torch.device, parts: Sequence[str], assemblers: Sequence[Ptxas]) -> list[Group]:
    """Return the comparisons of all kernels, in processes that share them, and again for each other ptxas.

    What the part `timings` will launch is compiled here, while nothing is timed.
    """
    checks, processes = kernel_checks(device, "correctness"), PROCESSES if device.type == "cuda" else 1
    groups = list[Group]()
    for index in range(processes):
        share = [check.check() for check in checks[index::processes]]
        groups.append(Group("kernels" + (f" {index + 1}" if index else ""), "kernels", share, compiled=share))
    if device.type == "cuda" and "timings" in parts:
        compiled = [check.check() for check in kernel_checks(device, "timings")]
        groups.append(Group("compiling for timings", "kernels", (), compiled=compiled))
    for ptxas in assemblers:
        again = [check.check(ptxas.name) for check in checks if check.rank <= BF16]
        cache = f"{tempfile.gettempdir()}/headway-{ptxas.name.replace(' ', '-')}"
        environment = {"TRITON_PTXAS_PATH": ptxas.path, "TRITON_CACHE_DIR": cache}
        groups.append(Group(f"kernels, {ptxas.name}", "kernels", again, compiled=again, environment=environment))
    return groups


def groups(parts: Sequence[str], device: torch.device, options: Any) -> list[Group]:
    """Return the plan of these parts, stage by stage. `options` are those of the command line."""
    from scripts.gpu_check import exactness, speculation, tiles, training_run

    assemblers = [] if device.type != "cuda" or options.bundled_ptxas else other_ptxas()
    make: dict[str, Callable[[], list[Group]]] = {
        "kernels": partial(kernels, device, options.only, assemblers),
        "exact": partial(exactness.groups, device, options.head),
        "train": partial(training_run.groups, device, options),
        "bench": partial(speculation.groups, device, options),
        "timings": lambda: [Group("timings", "timings", [c.check() for c in kernel_checks(device, "timings")])],
        "tiles": partial(tiles.groups, device),
    }
    return [group for part in parts for group in make[part]()]
