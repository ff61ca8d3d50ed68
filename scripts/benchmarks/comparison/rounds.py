"""Paired rounds: every system runs on the same tasks, in an order that changes from round to round.

A machine's speed drifts by more than many of the differences to be measured, so speeds are compared within a round
only. Knows nothing of what a system is, of printing, or of where the tasks come from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from infer.console.compare import Comparison, Pair, Run, Spread
from infer.steps.stats import StepTimes
from scripts.benchmarks.comparison.systems import System, is_ours
from scripts.benchmarks.prompts import Task

OFF = "off"  # the system that the others are compared with


def order_of(names: Sequence[str], number: int, seed: str) -> list[str]:
    """Return the order of round `number`.

    It changes from round to round, because a system's position and its predecessor change its speed by more than some
    of the differences to be measured. Over as many rounds as there are systems, each runs once at every position.
    """
    turn, place = divmod(number, len(names))
    order = random.Random(f"{seed} {turn}").sample(names, len(names))
    return order[place:] + order[:place]


def run_round(
    systems: Mapping[str, System], tasks: list[Task], temperature: float, concurrency: int, number: int, bar: Any
) -> dict[str, Run]:
    """Run every system once on all tasks, `concurrency` of them in flight; return the runs by name.

    `bar` is a tqdm progress bar, advanced by one for each system.
    """
    runs = {}
    for name in order_of(list(systems), number, f"{temperature} {concurrency}"):
        bar.set_description(f"{name}, {concurrency} at once, temperature {temperature:g}")
        runs[name] = systems[name](tasks, temperature, concurrency)
        bar.update()
    return runs


def summary(name: str, pairs: list[Pair], ends: Sequence[int], *, greedy: bool) -> dict[str, Any]:
    """Return the cell of a result document: the rounds of the system `name` at one temperature and concurrency.

    `ends` are the target's end tokens. The `agreement` of another program's greedy responses: how many equal those of
    `off`, of how many.
    """
    total, ours = Comparison(pairs), is_ours(name)
    drafts = total.speculation.steps > 0 and name.partition(":")[0] != OFF
    steps = [pair.on.steps for pair in pairs if pair.on.steps is not None]
    agreement = None
    if greedy and not ours:
        equal = sum(count_matching(pair.off.token_ids, pair.on.token_ids, ends) for pair in pairs)
        agreement = equal, sum(len(pair.off.token_ids) for pair in pairs)
    return {
        "rounds": len(pairs),
        "tokens_per_s": asdict(Spread.of([pair.on.tokens_per_s for pair in pairs])),
        "ratio": asdict(total.ratio),
        "acceptance_length": total.speculation.acceptance_length if drafts else None,
        "identical": total.identical if ours else None,
        "steps": sum(steps, StepTimes()).summary() if steps else None,
        "agreement": agreement,
    }


def count_matching(reference: list[list[int]], outputs: list[list[int]], ends: Sequence[int]) -> int:
    """Return how many outputs equal their reference up to its first end token, after which programs may differ."""

    def text(ids: list[int]) -> list[int]:
        return ids[: next((index for index, token in enumerate(ids) if token in ends), len(ids))]

    return sum(
        text(expected) == actual[: len(text(expected))] for expected, actual in zip(reference, outputs, strict=True)
    )
