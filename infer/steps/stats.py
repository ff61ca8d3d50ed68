"""Statistics of an engine, for its caller and /metrics: counts, and what steps take with and without drafts."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace

from infer.request import SpeculationStats
from infer.speculation.control.planner import Forecast


@dataclass
class StepTimes:
    """Counts and seconds of steps without prefill: of those in which nothing was drafted, and of the others."""

    plain: int = 0
    plain_s: float = 0.0
    drafted: int = 0
    drafted_s: float = 0.0
    drafting_s: float = 0.0  # the part of `drafted_s` spent in the proposers, as far as it can be told from the rest
    drafted_rows: int = 0

    def __sub__(self, before: StepTimes) -> StepTimes:
        return StepTimes(*(value - earlier for value, earlier in zip(astuple(self), astuple(before), strict=True)))

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(*(value + more for value, more in zip(astuple(self), astuple(other), strict=True)))

    def summary(self) -> dict[str, float | None]:
        """Return the numbers of steps, and their mean milliseconds and rows; None where there were none."""
        count = self.drafted or None
        return {
            "plain": self.plain,
            "plain_ms": 1000 * self.plain_s / self.plain if self.plain else None,
            "drafted": self.drafted,
            "drafted_ms": count and 1000 * self.drafted_s / count,
            "drafting_ms": count and 1000 * self.drafting_s / count,
            "drafted_rows": count and self.drafted_rows / count,
        }


@dataclass
class EngineStats:
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of the pool's pages in use, 0..1
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, computed for an earlier request
    generation_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    proposer_failures: int = 0  # requests that stopped drafting after a proposer failed, since proposers were last set
    steps: StepTimes = field(default_factory=StepTimes)
    forecast: Forecast | None = None  # only with adaptive drafting

    def snapshot(self) -> EngineStats:
        """Return a copy that other threads may read while the engine continues, all but `steps`."""
        counts, lists = self.speculation, ("drafted_by_position", "accepted_by_position")
        return replace(self, speculation=replace(counts, **{name: [*getattr(counts, name)] for name in lists}))

    def restore(self, saved: EngineStats) -> None:
        """Reset all statistics to those in the copy `saved`."""
        vars(self).update(vars(saved))
