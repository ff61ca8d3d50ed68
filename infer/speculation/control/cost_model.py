"""Cost model of a step on this machine: verifying B requests of R rows in all, and drafting for them.

It consists of a table measured once at start-up (costs at short contexts, and what longer ones add) and of corrections
learnt from the steps themselves, since other processes may use the machine. Pure arithmetic over the table; profiler.py
fills it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Sizes = TypeVar("Sizes", float, NDArray[np.float64])

LEARNS = 0.05  # weight of the newest step in a correction
RELEARNS = 0.3  # the same for a speculative step, if no others were seen recently
TRUSTED = (0.2, 5.0)  # measured over predicted time; a step outside is ignored: another process used the machine
# Lower bound of a further row's cost, as a share of its cost in the largest verify: while memory is slow a few more
# rows take no time, but memory may become faster again, and a price of zero cannot be corrected.
MIN_ROW_SHARE = 0.3
# Unit, as a share of a plain step, and upper bound, in units, of a speculative step's fixed overhead beside its rows: a
# tree is laid out, and the drafter's weights have evicted the target's from the caches. Learnt from steps only.
OVERHEAD, MAX_OVERHEAD = 0.1, 5.0
MAX_DOUBTED = 16  # after this many steps in a row outside TRUSTED the prediction itself must be wrong
CORRECTIONS = (0.1, 3.0)  # bounds of the corrections of further rows and of drafts
# Share of the corrections learnt from speculative steps that is left after a second of decay. Rows at twice their usual
# cost were seen for a second now and then (LOG.md), and drafting must not stay off for much longer than that. But
# trying again too soon costs something: the machine settles into plain steps, and would have to do so anew.
DECAY = 0.75
FORGETS = 0.998  # decay of how well plain steps are known, per step with further rows
WELL_SEEN = 0.25  # from here on the excess time of a step with further rows is attributed to these rows,
MAX_SEEN = 0.99  # but not quite all of it, or all noise would be attributed to a few rows of hardly any cost
# How many times as long as a larger work a smaller one may take in a table: STRICTLY up to FEW_ROWS rows, else LOOSELY.
FEW_ROWS, STRICTLY, LOOSELY = 2, 1.5, 5.0
UNSEEN_S = 2e-4  # difference between drafts that is tolerated whatever their ratio


@dataclass(frozen=True)
class Curve:
    """Seconds at ascending sizes: piecewise linear, extrapolated from the outer pieces, never below zero."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: Sizes) -> Sizes:
        if len(self.sizes) == 1:
            return size * 0.0 + self.seconds[0]
        if isinstance(size, float):  # called some twenty times per step, where an array's overhead would show
            place = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
            (x, x_right), (y, y_right) = (values[place - 1 : place + 1] for values in (self.sizes, self.seconds))
            return max(y + (y_right - y) / (x_right - x) * (size - x), 0.0)
        xs, ys, slopes = self._pieces
        left = np.clip(np.searchsorted(xs, size), 1, len(xs) - 1) - 1
        seconds: Any = np.maximum(ys[left] + slopes[left] * (size - xs[left]), 0.0)
        return seconds

    @property
    def slope(self) -> float:
        """Mean slope from the first size to the last."""
        width = self.sizes[-1] - self.sizes[0]
        return (self.seconds[-1] - self.seconds[0]) / width if width else 0.0

    @cached_property
    def _pieces(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        xs, ys = np.array(self.sizes), np.array(self.seconds)
        return xs, ys, np.diff(ys) / np.diff(xs)


@dataclass(frozen=True)
class ContextCost:
    """Seconds that a token of context adds, since attention reads that token once more.

    They are added to a request's first row, to each further row, and to each level that a drafter drafts for it.
    """

    first: float = 0.0
    further: float = 0.0
    levels: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class CostTable:
    """By batch size, ascending: seconds of a verify over its rows, of all else in a plain step, and of drafting.

    `drafts[name]` are curves over the draft's depth. All are of requests with `context` tokens; `beyond` is what each
    further token adds, `reads[name]` the seconds that a drafter takes to read one token of a prompt.
    """

    batches: tuple[int, ...]
    verify: tuple[Curve, ...]
    around: tuple[float, ...]
    drafts: dict[str, tuple[Curve, ...]]
    context: int = 0
    beyond: ContextCost = ContextCost()
    reads: dict[str, float] = field(default_factory=dict[str, float])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CostTable:
        def curves(written: Sequence[dict[str, Any]]) -> tuple[Curve, ...]:
            return tuple(Curve(tuple(item["sizes"]), tuple(item["seconds"])) for item in written)

        drafts = {name: curves(item) for name, item in data["drafts"].items()}
        batches, around, beyond = tuple(data["batches"]), tuple(data["around"]), ContextCost(**data["beyond"])
        return cls(batches, curves(data["verify"]), around, drafts, data["context"], beyond, data["reads"])

    def size(self, batch: int) -> int:
        """Return the smallest measured batch size that is not below `batch`, or the largest one."""
        return self.batches[self._place(batch)]

    def _place(self, batch: int) -> int:
        return min(bisect_left(self.batches, batch), len(self.batches) - 1)

    def at(self, batch: int, curves: Sequence[Curve], size: Sizes) -> Sizes:
        """Return the seconds at `size`, interpolated between the curves of the measured batch sizes around `batch`."""
        right = self._place(batch)
        if self.batches[right] == batch or right == 0:
            return curves[right](size)
        low, high = self.batches[right - 1], self.batches[right]
        share = (batch - low) / (high - low)  # above 1 beyond the largest
        return curves[right - 1](size) * (1 - share) + curves[right](size) * share


def contradiction(table: CostTable) -> str:
    """Return why the table cannot come from an otherwise idle machine; empty if it can.

    More rows and deeper drafts should not take less time. Some rows do: beyond a number of rows a step uses more
    threads. So only steps of one or two rows, which would use them too if that were faster, are checked strictly.
    """
    steps = [
        (rows, seconds) for curve in table.verify for rows, seconds in zip(curve.sizes, curve.seconds, strict=True)
    ]
    drafts = [curve for curves in table.drafts.values() for curve in curves]
    everything = [seconds for _, seconds in steps] + [value for curve in drafts for value in curve.seconds]
    if not all(0 <= seconds < math.inf for seconds in (*everything, *table.around, *table.reads.values())):
        return "a time is negative or not finite"
    for rows, seconds in steps:
        shortest_rows, shortest = min((s for s in steps if s[0] > rows), key=lambda s: s[1], default=(0.0, seconds))
        if seconds > (STRICTLY if rows <= FEW_ROWS else LOOSELY) * shortest:
            return f"{rows:g} rows took {1e3 * seconds:.3g} ms, {shortest_rows:g} rows {1e3 * shortest:.3g} ms"
    for curve in drafts:
        for depth, seconds, deeper in zip(curve.sizes, curve.seconds, curve.seconds[1:], strict=False):
            if seconds > STRICTLY * deeper + UNSEEN_S:
                return f"drafts of depth {depth:g} took {1e3 * seconds:.3g} ms, deeper ones {1e3 * deeper:.3g} ms"
    return ""


class CostModel:
    """The cost table with corrections learnt from the steps since, for requests of a certain length."""

    def __init__(self, table: CostTable, *, trials: int = 0, extra: tuple[float, float] = CORRECTIONS) -> None:
        """`trials`: speculative steps that must have corrected a guessed table before anything is planned by it.

        `extra`: bounds of the corrections of rows and drafts.
        """
        self.table = table
        self._trials, self._tried = trials, 0
        self._bounds = extra
        widest = table.verify[-1]
        self._min_row_s = MIN_ROW_SHARE * max(0.0, widest.slope)
        self._extra_context = 0.0  # the batch's mean context in tokens, above that of the table
        self._around = Curve(tuple(map(float, table.batches)), table.around)
        # Cached, since every step needs them: uncorrected plain steps, further rows and drafts of short requests.
        self._steps: dict[int, float] = {}
        self._rows: dict[tuple[int, float], float] = {}
        self._drafts: dict[tuple[str, int, int], float] = {}
        # Corrections: of all seconds, since whatever shares the machine slows all of them; then of what further rows
        # add to a plain step, and the fixed overhead that comes with them. The last two are kept by batch size of the
        # table: what they are in small batches says little about larger ones.
        self._overall = 1.0
        self._extra = dict.fromkeys(table.batches, 1.0)
        self._overhead = dict.fromkeys(table.batches, 0.0)  # in units of OVERHEAD
        self._seen = 0.0  # how well plain steps are known, from 0 to 1
        self._rows_seen = dict.fromkeys(table.batches, 0.0)  # the same for steps with further rows
        self._draft: dict[str, tuple[float, float]] = {}  # by drafter, for its first level and further ones
        self._doubted = 0  # steps in a row that were too far off their prediction

    @property
    def knows_plain(self) -> bool:
        """Whether plain steps were seen recently."""
        return self._seen > WELL_SEEN

    @property
    def guessed(self) -> bool:
        """Whether the table is a guess that too few speculative steps have corrected yet."""
        return self._tried < self._trials

    def tried(self) -> None:
        """Count a speculative step that has corrected a guessed table."""
        self._tried += 1

    @property
    def _guess_step_size(self) -> float:
        """Weight of the newest speculative step in a guess, such that it becomes their mean; 0 if this is no guess."""
        return 1 / (1 + self._tried) if self.guessed else 0.0

    def set_context(self, tokens: Sequence[int]) -> None:
        """Set the lengths of the requests that all costs from now on refer to."""
        self._extra_context = max(0.0, sum(tokens) / len(tokens) - self.table.context)

    def verify(self, batch: int, rows: Sizes) -> Sizes:
        """Return the seconds of a step of `batch` requests and `rows` rows in all, without its drafting."""
        if isinstance(rows, float):
            extra = self._rows.get((batch, rows))
            if extra is None:
                extra = self._rows[batch, rows] = self._further_rows(batch, rows)
        else:
            extra = self._further_rows(batch, rows)
        extra = extra + self.table.beyond.further * self._extra_context * (rows - batch)
        size, plain = self.table.size(batch), self.plain(batch)
        return (
            plain + OVERHEAD * self._overhead[size] * plain * (rows > batch) + self._overall * self._extra[size] * extra
        )

    def _further_rows(self, batch: int, rows: Sizes) -> Sizes:
        """Return the seconds of the rows beyond one per request, by the table alone."""
        curves, lower_bound = self.table.verify, self._min_row_s * (rows - batch)
        extra = self.table.at(batch, curves, rows) - self.table.at(batch, curves, float(batch))
        seconds: Any = max(extra, lower_bound) if isinstance(rows, float) else np.maximum(extra, lower_bound)
        return seconds

    def plain(self, batch: int) -> float:
        """Return the seconds of a step without drafts."""
        size, seconds = float(batch), self._steps.get(batch)
        if seconds is None:
            seconds = self._steps[batch] = self.table.at(batch, self.table.verify, size) + self._around(size)
        return self._overall * (seconds + self.table.beyond.first * self._extra_context * batch)

    def draft(self, drafter: str, batch: int, depth: int) -> float:
        """Return the seconds of drafting `depth` levels for `batch` requests; 0 for a drafter that was not measured."""
        if not depth:
            return 0.0
        first_s, (first, further) = self._drafting(drafter, batch, 1), self._draft.get(drafter, (1.0, 1.0))
        return first * first_s + further * (self._drafting(drafter, batch, depth) - first_s)

    def _drafting(self, drafter: str, batch: int, depth: int) -> float:
        """Return the same as `draft`, without the corrections learnt from drafts."""
        key = drafter, batch, depth
        seconds = self._drafts.get(key)
        if seconds is None:
            curves = self.table.drafts.get(drafter)
            seconds = 0.0
            if curves is not None and depth and batch:
                seconds = float(self.table.at(batch, curves, float(depth)))
            self._drafts[key] = seconds
        seconds += self.table.beyond.levels.get(drafter, 0.0) * self._extra_context * batch * depth
        return self._overall * seconds

    def read(self, drafter: str, tokens: int) -> float:
        """Return the seconds that a drafter takes to read this many tokens of a prompt."""
        return self._overall * self.table.reads.get(drafter, 0.0) * tokens

    def learn(self, *, batch: int, rows: int, seconds: float) -> float:
        """Learn from a step without prefill that took `seconds`, without its drafting; return measured over predicted.

        Excess time of a step with further rows is attributed to these and to their fixed overhead, as far as plain
        steps have been seen recently; otherwise to the whole machine (normalised least mean squares).
        """
        plain = self.plain(batch)
        expected = plain if rows == batch else float(self.verify(batch, float(rows)))
        extra, certainty = expected - plain, MAX_SEEN if rows > batch and self.knows_plain else 0.0
        if not trusted(seconds, expected) and not self._convinced(seconds):
            return 1.0
        self._doubted = 0
        # The table may stem from a slower hour, and so may what was learnt of plain steps before many speculative ones.
        size = self.table.size(batch)
        if rows == batch:
            step_size = max(LEARNS, 1 - self._seen)
        else:
            step_size = self._guess_step_size or max(LEARNS, RELEARNS * (1 - self._rows_seen[size]))
        unit = OVERHEAD * plain * (rows > batch)
        extra -= unit * self._overhead[size]
        share = step_size * (seconds - expected) / ((1 - certainty) * expected**2 + unit**2 + extra**2)
        self._overall *= 1 + (1 - certainty) * share * expected
        self._overhead[size] = min(max(self._overhead[size] + share * unit, 0.0), MAX_OVERHEAD)
        self._extra[size] = self._bounded(self._extra[size] * (1 + share * extra))
        if rows == batch:
            self._seen = (1 + self._seen) / 2
        else:
            self._seen, self._rows_seen[size] = FORGETS * self._seen, (3 * self._rows_seen[size] + 1) / 4
        return seconds / expected

    def _convinced(self, seconds: float) -> bool:
        """Return whether to learn from a step that is far off its prediction.

        True at once where nothing but a guess is known, otherwise if all steps were far off for some time. Then the
        table is wrong, or the machine has changed, and plain steps are learnt anew.
        """
        self._doubted += 1
        if seconds <= 0 or (self._doubted < MAX_DOUBTED and not (self.guessed and not self._seen)):
            return False
        self._seen = 0.0
        return True

    def decay(self, seconds: float) -> None:
        """Decay the corrections learnt from speculative steps, as is due after this many seconds."""
        left: float = DECAY**seconds
        self._rows_seen = {size: left * seen for size, seen in self._rows_seen.items()}
        self._extra = {size: 1 + left * (extra - 1) for size, extra in self._extra.items()}
        self._overhead = {size: left * overhead for size, overhead in self._overhead.items()}
        self._draft = {
            name: (1 + left * (first - 1), 1 + left * (further - 1)) for name, (first, further) in self._draft.items()
        }

    def learn_draft(self, drafter: str, counts: Sequence[int], seconds: float) -> None:
        """Learn from a draft that took `seconds`, in which `counts[l]` requests took part in level l + 1."""
        first_s, further_s = self._drafting(drafter, counts[0], 1) if counts else 0.0, 0.0
        for level, count in enumerate(counts[1:], start=2):
            further_s += self._drafting(drafter, count, level) - self._drafting(drafter, count, level - 1)
        first, further = self._draft.get(drafter, (1.0, 1.0))
        predicted = first * first_s + further * further_s
        step_size = self._guess_step_size or LEARNS
        if trusted(seconds, predicted) or (self.guessed and predicted > 0):  # here too normalised least mean squares
            share = step_size * (seconds - predicted) / (first_s**2 + further_s**2)
            self._draft[drafter] = self._bounded(first + share * first_s), self._bounded(further + share * further_s)

    def _bounded(self, correction: float) -> float:
        lower, upper = self._bounds
        return min(max(correction, lower), upper)


def trusted(seconds: float, predicted: float) -> bool:
    return predicted > 0 and TRUSTED[0] < seconds / predicted < TRUSTED[1]
