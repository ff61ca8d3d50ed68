"""Replays of captured decode steps, for the profiler of step costs (infer/engine/startup/profiler.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from infer.batch.tree import NOTHING, Budget
from infer.graphs.step_graph import StepGraphs
from infer.request import Request
from infer.speculation.control.cost_model import Curve
from infer.steps.step import StepsAhead


class Replays:
    """The graphs of plain steps and of steps that draft, replayed for requests that stay where they are."""

    def __init__(self, plain: StepGraphs, drafting: StepGraphs) -> None:
        self._plain, self._drafting = plain, drafting
        self.largest = min(max(graphs.batches, default=0) for graphs in (plain, drafting))  # batch size

    def curves(
        self, requests: Sequence[Request], budget: Budget, time: Callable[[Callable[[], object]], float]
    ) -> tuple[Curve, Curve]:
        """Return the seconds of a step without its drafting, over its rows, and of drafting, over its depth.

        A graph takes as long whatever it drafts. Its verify is counted as a plain step and the rest as drafting, since
        only the sum of both can be seen. `time` returns the seconds of a work.
        """
        plain = time(replay(self._plain, requests, NOTHING))
        whole = time(replay(self._drafting, requests, budget))
        return Curve((float(len(requests)),), (plain,)), Curve((1.0,), (max(0.0, whole - plain),))


def replays_of(overlap: StepsAhead | None, drafters: Mapping[str, Budget], positions: int) -> Replays | None:
    """Return the replays of an engine's only drafter for requests of so many positions at most.

    None if there are several drafters, or if a kind of step is not captured.
    """
    if overlap is None or len(drafters) > 1:
        return None
    plain, drafting = overlap.graphs_of("none"), overlap.graphs_of(*drafters)
    if plain is None or drafting is None or positions + drafting.reach > drafting.longest:
        return None
    replays = Replays(plain, drafting)
    return replays if replays.largest else None


def replay(graphs: StepGraphs, requests: Sequence[Request], budget: Budget) -> Callable[[], None]:
    """Load the requests and return a function that launches their graph and reads the replay before.

    So do overlapped steps; but no root advances, and each replay computes the same.
    """
    with torch.inference_mode():
        states = [request.drafter.kept if budget.nodes else None for request in requests]
        graphs.load(requests, states, [len(request.tokens) - 1 for request in requests], [budget] * len(requests))
        in_flight = graphs.launch()

    @torch.inference_mode()
    def run() -> None:
        nonlocal in_flight
        before, in_flight = in_flight, graphs.launch()
        before.read()

    return run
