"""How long steps take, by kind: what a step with drafts costs beside one without."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass
class StepTimes:
    """Of steps without prefill, those in which nothing was drafted and the others."""

    plain: int = 0
    plain_s: float = 0.0
    drafted: int = 0
    drafted_s: float = 0.0
    drafting_s: float = 0.0  # of `drafted_s`, in the proposers, as far as that can be told from the rest
    drafted_rows: int = 0

    def record(self, batch: int, rows: int, drafting: float | None, whole: float) -> None:
        if rows == batch:
            self.plain += 1
            self.plain_s += whole
        else:
            self.drafted += 1
            self.drafted_s += whole
            self.drafting_s += drafting or 0.0
            self.drafted_rows += rows

    def __sub__(self, before: StepTimes) -> StepTimes:
        return StepTimes(*(own - earlier for own, earlier in zip(astuple(self), astuple(before), strict=True)))

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(*(own + more for own, more in zip(astuple(self), astuple(other), strict=True)))

    def summary(self) -> dict[str, float | None]:
        """Numbers of steps, and of one in the mean its milliseconds and rows; None where there was none."""
        each = self.drafted or None
        return {
            "plain": self.plain,
            "plain_ms": 1000 * self.plain_s / self.plain if self.plain else None,
            "drafted": self.drafted,
            "drafted_ms": each and 1000 * self.drafted_s / each,
            "drafting_ms": each and 1000 * self.drafting_s / each,
            "drafted_rows": each and self.drafted_rows / each,
        }
