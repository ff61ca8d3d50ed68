"""Cost model of a step on this machine: verifying B requests of R rows in all, and drafting for them.

A table, measured once (infer/engine/startup/profiler.py), and corrections learnt from the steps since, as tables age.
Pure arithmetic.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from infer.batch.tree import Budget

# Weight of the newest step in a correction: steps vary by a tenth, a mean of ten by a thirtieth.
LEARNS = 0.1
# After a change between plain and speculative steps a correction counts like this many steps, since it may have aged.
# Without this a simulated target of 0.4 B never drafts for four requests again once their text suits its drafts.
AGED = 2
# A step that takes so many times what those before it took, and a table in which a smaller work takes so many times
# what a larger one does, show another process at work.
DISTURBED = 2.0
# Guessed cost of a further row, and of a level of drafts, as shares of a plain step: about those of SmolLM2 on two
# cores.
GUESSED_SHARE = 0.2
# Seconds until caches and clock have settled into another kind of work: of plain steps after drafted ones the first
# took 4.5 ms, the ninth 2.6 (docs/log/2026-11.md, "Why did `auto` lose where every drafted step gained?").
SETTLES_S = 0.025


@dataclass(frozen=True)
class Curve:
    """Seconds at ascending sizes: piecewise linear, extrapolated from the outer pieces, never below zero."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        if len(self.sizes) == 1:
            return self.seconds[0]
        place = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        (x, x_right), (y, y_right) = (values[place - 1 : place + 1] for values in (self.sizes, self.seconds))
        return max(y + (y_right - y) / (x_right - x) * (size - x), 0.0)


@dataclass(frozen=True)
class CostTable:
    """By batch size, ascending: seconds of a step without its drafting over its rows, and of drafting over its depth.

    `reads[name]`: seconds that a drafter takes to read one token of a prompt.
    """

    batches: tuple[int, ...]
    steps: tuple[Curve, ...]
    drafts: dict[str, tuple[Curve, ...]]
    reads: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CostTable:
        def curves(written: Sequence[dict[str, Sequence[float]]]) -> tuple[Curve, ...]:
            return tuple(Curve(tuple(curve["sizes"]), tuple(curve["seconds"])) for curve in written)

        drafts = {name: curves(written) for name, written in data["drafts"].items()}
        return cls(tuple(data["batches"]), curves(data["steps"]), drafts, data["reads"])

    def step(self, batch: int, rows: int) -> float:
        """Return the seconds of a step, without its drafting; further rows take no time at least."""
        return max(self._at(batch, self.steps, size) for size in (batch, rows))

    def draft(self, drafter: str, batch: int, depth: int) -> float:
        """Return the seconds of drafting `depth` levels for `batch` requests; 0 for a drafter that was not measured."""
        curves = self.drafts.get(drafter)
        return self._at(batch, curves, depth) if curves and batch and depth else 0.0

    def _at(self, batch: int, curves: Sequence[Curve], size: float) -> float:
        """Return the seconds at `size`, interpolated between the curves of the measured batch sizes around `batch`.

        Beyond the largest batch its curve applies, since noise in the others would grow with the distance.
        """
        return Curve(self.batches, tuple(curve(size) for curve in curves))(min(batch, self.batches[-1]))


def contradiction(table: CostTable) -> str:
    """Return why the table cannot come from an otherwise idle machine; empty if it can.

    More rows and deeper drafts should not take much less time.
    """
    steps = [(rows, seconds) for curve in table.steps for rows, seconds in zip(curve.sizes, curve.seconds, strict=True)]
    drafts = [curve for curves in table.drafts.values() for curve in curves]
    everything = [*(seconds for _, seconds in steps), *(value for curve in drafts for value in curve.seconds)]
    if not all(0 <= seconds < math.inf for seconds in (*everything, *table.reads.values())):
        return "a time is negative or not finite"
    for rows, seconds in steps:
        shortest_rows, shortest = min((s for s in steps if s[0] > rows), key=lambda s: s[1], default=(0.0, seconds))
        if seconds > DISTURBED * shortest:
            return f"{rows:g} rows took {1e3 * seconds:.3g} ms, {shortest_rows:g} rows {1e3 * shortest:.3g} ms"
    for curve in drafts:
        for depth, seconds, deeper in zip(curve.sizes, curve.seconds, curve.seconds[1:], strict=False):
            if seconds > DISTURBED * deeper:
                return f"drafts of depth {depth:g} took {1e3 * seconds:.3g} ms, deeper ones {1e3 * deeper:.3g} ms"
    return ""


@dataclass
class Correction:
    """Measured over tabulated seconds: the mean of the first steps, then a moving average."""

    factor: float
    guessed: bool  # the factor is a guess, which the first step replaces; else that may be one of cold caches
    seen: int = 0

    def learn(self, ratio: float) -> None:
        self.seen += 1
        if self.seen > 1 or not self.guessed:
            ratio = min(max(ratio, self.factor / DISTURBED), self.factor * DISTURBED)
        self.factor += max(LEARNS, 1 / self.seen) * (ratio - self.factor)


class CostModel:
    """The cost table with corrections learnt from the steps since.

    There is one for plain steps, one for verifies and one for each drafter, by batch size up to the next power of two.
    Whatever slows plain steps slows the others: where none was learnt yet, theirs applies, and while they go on, what
    changes theirs changes all. `guess`: nothing was `measured`, so nothing should be planned before corrections are
    the mean of enough speculative steps. Steps that have not `settled` only show what is cheaper than expected.
    """

    def __init__(self, table: CostTable, *, guess: bool = False) -> None:
        self.table, self.measured = table, None if guess else table
        self._step, self._draft = cache(table.step), cache(table.draft)  # a plan looks up some hundred
        self._guess, self._trials_left = guess, round(1 / LEARNS) if guess else 0
        self._corrections: dict[tuple[str, int], dict[int, Correction]] = {}  # by number of rows
        self._machine = 1.0  # the correction of plain steps learnt last
        self.settled = True  # the step that is learnt from; the first of a kind, for SETTLES_S, may be slow
        self._before: bool | None = None  # whether the settled step before was speculative

    @property
    def guessed(self) -> bool:
        """Whether the table is a guess that too few speculative steps have corrected yet."""
        return self._trials_left > 0

    def knows_plain(self, batch: int) -> bool:
        """Return whether plain steps of about this batch size were seen."""
        return ("plain", bucket(batch)) in self._corrections

    def plain(self, batch: int) -> float:
        """Return the seconds of a step without drafts."""
        return self._factor("plain", batch) * self._step(batch, batch)

    def verify(self, batch: int, rows: int) -> float:
        """Return the seconds of a step of `batch` requests and `rows` rows in all, without its drafting."""
        plain = self.plain(batch)
        return max(plain, self._factor("verify", batch, rows) * self._step(batch, rows)) if rows > batch else plain

    def draft(self, drafter: str, batch: int, depth: int) -> float:
        """Return the seconds of drafting `depth` levels for `batch` requests; 0 for a drafter that was not measured."""
        return self._factor(drafter, batch) * self._draft(drafter, batch, depth)

    def read(self, drafter: str, tokens: int) -> float:
        """Return the seconds that a drafter takes to read this many tokens of a prompt."""
        return self._machine * self.table.reads.get(drafter, 0.0) * tokens

    def learn_plain(self, batch: int, seconds: float) -> None:
        """Learn from a step without prefill and drafts."""
        self._learn("plain", batch, seconds, self._step(batch, batch))
        self._machine = self._factor("plain", batch)
        self._before = False if self.settled else self._before

    def learn_drafted(
        self, batch: int, rows: int, drafter: str, counts: Sequence[int], seconds: float, drafting: float | None
    ) -> None:
        """Learn from a speculative step of `seconds`, of which `drafting` in the drafter, None if that is unknown.

        `counts[l]` requests took part in level l + 1 of the draft.
        """
        predicted = 0.0
        for level, count in enumerate(counts, start=1):
            predicted += self._draft(drafter, count, level) - self._draft(drafter, count, level - 1)
        if drafting is None:  # it is assumed to take the predicted share
            drafts = self._factor(drafter, counts[0]) * predicted
            drafting = seconds * drafts / (drafts + self.verify(batch, rows))
        self._learn("verify", batch, seconds - drafting, self._step(batch, rows), rows)
        if predicted > 0:
            self._learn(drafter, counts[0], drafting, predicted)
        self._before = True if self.settled else self._before
        self._trials_left -= self.guessed

    def _learn(self, kind: str, batch: int, seconds: float, tabulated: float, rows: int = 1) -> None:
        factor = self._factor(kind, batch, rows)
        if seconds <= 0 or tabulated <= 0 or not (self.settled or self.guessed or seconds < factor * tabulated):
            return
        corrections = self._corrections.setdefault((kind, bucket(batch)), {})
        correction = corrections.setdefault(bucket(rows), Correction(factor, self._guess))
        if self._before != (kind != "plain"):
            correction.seen = min(correction.seen, AGED)
        before = correction.factor
        correction.learn(seconds / tabulated)
        if kind == "plain" and correction.seen > 1 / LEARNS:
            for other in (each for by_rows in self._corrections.values() for each in by_rows.values()):
                if other is not correction:
                    other.factor *= correction.factor / before

    def _factor(self, kind: str, batch: int, rows: int = 1) -> float:
        for name in (kind, "plain"):
            if by_rows := self._corrections.get((name, bucket(batch))):
                return by_rows[min(by_rows, key=lambda each: abs(each - bucket(rows)))].factor
        return self._machine


def bucket(batch: int) -> int:
    return (batch - 1).bit_length()


def guessed_cost_model(drafters: dict[str, Budget]) -> CostModel:
    """Return a model without a profile; a plain step is taken to last one second until one was seen."""
    step, draft = Curve((1.0, 2.0), (1.0, 1.0 + GUESSED_SHARE)), Curve((0.0, 1.0), (0.0, GUESSED_SHARE))
    return CostModel(CostTable((1,), (step,), {name: (draft,) for name in drafters}), guess=True)
