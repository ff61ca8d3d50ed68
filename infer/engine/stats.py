"""Statistics of an engine, for its caller and /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from infer.request import SpeculationStats
from infer.speculation.control.planner import Forecast
from infer.speculation.control.step_times import StepTimes


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
        counts = self.speculation
        by_position = {
            "drafted_by_position": [*counts.drafted_by_position],
            "accepted_by_position": [*counts.accepted_by_position],
        }
        return replace(self, speculation=replace(counts, **by_position))

    def restore(self, saved: EngineStats) -> None:
        """Reset all statistics to those in the copy `saved`."""
        vars(self).update(vars(saved))
