"""What a step costs on this machine: verifying B requests of R rows in all, and drafting for them.

A table measured once at start-up, for short contexts and what longer ones add, and a correction learnt from the steps
themselves, since others may use the machine. Pure arithmetic over the table; infer/measuring.py fills it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Sizes = TypeVar("Sizes", float, NDArray[np.float64])

LEARNS = 0.05  # share of the newest step in a correction
TRUSTED = (0.2, 5.0)  # a step this far off its prediction says nothing: someone else used the machine
EXTRA = (0.1, 3.0)  # so far the correction of further rows may go
FORGETS = 0.97  # of what plain steps have shown, with every step of more rows
MOST_SEEN = 0.99  # or a few rows of hardly any cost would be blamed for all noise


@dataclass(frozen=True)
class Curve:
    """Seconds at ascending sizes, linear in between; past the ends as the outer pieces go on, never below zero."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: Sizes) -> Sizes:
        if len(self.sizes) == 1:
            return size * 0.0 + self.seconds[0]
        if isinstance(size, float):  # some twenty times a step, where an array's overhead would show
            place = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
            (x, x_right), (y, y_right) = (own[place - 1 : place + 1] for own in (self.sizes, self.seconds))
            return max(y + (y_right - y) / (x_right - x) * (size - x), 0.0)
        xs, ys, slopes = self._pieces
        left = np.clip(np.searchsorted(xs, size), 1, len(xs) - 1) - 1
        found: Any = np.maximum(ys[left] + slopes[left] * (size - xs[left]), 0.0)
        return found

    @cached_property
    def _pieces(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        xs, ys = np.array(self.sizes), np.array(self.seconds)
        return xs, ys, np.diff(ys) / np.diff(xs)


@dataclass(frozen=True)
class ContextCost:
    """Seconds that a token of context adds to the first row of a request, to each further one, and to each level that a
    drafter drafts for a request: attention reads that token once more.
    """

    first: float = 0.0
    further: float = 0.0
    levels: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class CostTable:
    """By batch size, ascending: seconds of a verify over its rows, of all else in a plain step, and of drafting.

    `drafts[name]` are curves over the depth of what a drafter proposes. All of requests of `context` tokens; `beyond`
    is what each further token adds.
    """

    batches: tuple[int, ...]
    verify: tuple[Curve, ...]
    around: tuple[float, ...]
    drafts: dict[str, tuple[Curve, ...]]
    context: int = 0
    beyond: ContextCost = ContextCost()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> CostTable:
        def curves(written: Sequence[dict[str, Any]]) -> tuple[Curve, ...]:
            return tuple(Curve(tuple(own["sizes"]), tuple(own["seconds"])) for own in written)

        drafts = {name: curves(own) for name, own in found["drafts"].items()}
        batches, around, beyond = tuple(found["batches"]), tuple(found["around"]), ContextCost(**found["beyond"])
        return cls(batches, curves(found["verify"]), around, drafts, found["context"], beyond)

    def at(self, batch: int, curves: Sequence[Curve], size: Sizes) -> Sizes:
        """Between the two measured batch sizes beside `batch`."""
        right = min(bisect_left(self.batches, batch), len(self.batches) - 1)
        if self.batches[right] == batch or right == 0:
            return curves[right](size)
        low, high = self.batches[right - 1], self.batches[right]
        share = (batch - low) / (high - low)  # above 1 beyond the largest
        return curves[right - 1](size) * (1 - share) + curves[right](size) * share


class Costs:
    """The table with what the steps since then have taught, for requests of a certain length."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._further = 0.0  # tokens of context, in the mean of a batch, above those that the table is of
        self._around = Curve(tuple(map(float, table.batches)), table.around)
        self._steps: dict[int, float] = {}  # plain ones of short requests by the table alone; every step asks for one
        # Corrections: of all seconds, since whoever shares the machine slows all of them, and then of what further rows
        # add to a plain step.
        self._all = self._extra = 1.0
        self._seen = 0.0  # how well plain steps are known, from 0 to 1
        self._draft: dict[str, float] = {}  # and of a drafter's

    def set_context(self, tokens: Sequence[int]) -> None:
        """From now on costs are those of requests as long as these."""
        self._further = max(0.0, sum(tokens) / len(tokens) - self.table.context)

    def verify(self, batch: int, rows: Sizes) -> Sizes:
        """Seconds of a step of `batch` requests and so many rows, all but its drafting."""
        extra = self.table.at(batch, self.table.verify, rows) - self.table.at(batch, self.table.verify, float(batch))
        extra = extra + self.table.beyond.further * self._further * (rows - batch)
        return self.plain(batch) + self._all * self._extra * extra

    def row(self) -> float:
        """Seconds that a further row adds to a verify of one short request."""
        curve = self.table.verify[0]
        first, last = curve.sizes[0], curve.sizes[-1]
        return self._all * max(0.0, curve.seconds[-1] - curve.seconds[0]) / max(last - first, 1.0)

    def plain(self, batch: int) -> float:
        """The same of a step without drafts."""
        size, known = float(batch), self._steps.get(batch)
        if known is None:
            known = self._steps[batch] = self.table.at(batch, self.table.verify, size) + self._around(size)
        return self._all * (known + self.table.beyond.first * self._further * batch)

    def draft(self, drafter: str, batch: int, depth: int) -> float:
        """Seconds of drafting `depth` deep for `batch` requests; 0 for a drafter that was not measured."""
        curves = self.table.drafts.get(drafter)
        if curves is None or depth == 0 or batch == 0:
            return 0.0
        seconds = float(self.table.at(batch, curves, float(depth)))
        seconds += self.table.beyond.levels.get(drafter, 0.0) * self._further * batch * depth
        return self._all * self._draft.get(drafter, 1.0) * seconds

    def learn(self, *, batch: int, rows: int, seconds: float) -> None:
        """A step without prefill took so long, its drafting set aside.

        What one with further rows took longer than expected is their doing as far as plain steps have been seen lately;
        else the whole machine's (normalised least mean squares).
        """
        plain = self.plain(batch)
        expected = plain if rows == batch else float(self.verify(batch, float(rows)))
        extra, known = expected - plain, 0.0 if rows == batch else min(self._seen, MOST_SEEN)
        if not trusted(seconds, expected):
            return
        share = LEARNS * (seconds - expected) / ((1 - known) * expected**2 + extra**2)
        self._all *= 1 + (1 - known) * share * expected
        self._extra = min(max(self._extra * (1 + share * extra), EXTRA[0]), EXTRA[1])
        self._seen = self._seen + LEARNS * (1 - self._seen) if rows == batch else FORGETS * self._seen

    def learn_draft(self, drafter: str, counts: Sequence[int], seconds: float) -> None:
        """A draft took so long, in which `counts[l]` requests went on to level l + 1."""
        predicted = 0.0
        for level, count in enumerate(counts, start=1):
            predicted += self.draft(drafter, count, level) - self.draft(drafter, count, level - 1)
        if trusted(seconds, predicted):
            self._draft[drafter] = self._draft.get(drafter, 1.0) * (1 + LEARNS * (seconds / predicted - 1))


def trusted(seconds: float, predicted: float) -> bool:
    return predicted > 0 and TRUSTED[0] < seconds / predicted < TRUSTED[1]
