"""What it costs to change between drafted and plain steps, and when to look what a plain step costs.

Drafted steps compute, plain ones wait for memory, and a machine takes some hundredths of a second to get used to
either: with four requests the first plain step after drafted ones took half as long again as the tenth (LOG.md). So
steps right after a change say little of what others will cost, and who begins and ends in turns is slower than either.
"""

from __future__ import annotations

SETTLES_S = 0.025  # seconds of plain steps before one that is as others will be
LEARNS = 0.3  # share of the newest change in what a change is taken to cost
TEACHES_S = 0.01  # seconds of settled plain steps that a reminder lasts
MOST_PROMPTS = 16  # steps of a reminder that read prompts: where each does, none would ever show what it costs
DRAFTED_S, DRAFTED_STEPS = 2.0, 96  # between two of them
RARELY, MUCH = 5.0, 1.3  # times as long, where drafting is expected to be so many times as fast as plain decoding
EARLY_STEPS = 8  # before the first, where nothing is known of plain steps


class Settling:
    """Reminders: now and then nobody is to draft for a moment, so that those who always do hear what a plain step
    costs, in a machine that has settled. Steps with prompts are not told of.
    """

    def __init__(self, known: bool) -> None:
        """`known`: what a plain step costs, already."""
        self.reminds = False  # in this step nobody is to draft
        self.change_s = 0.0  # seconds that plain steps lose after drafted ones, until they have settled
        self._prompts = 0  # steps of this reminder that were not told of
        self._plain_s = SETTLES_S  # seconds of plain steps since the last drafted one, until they have settled,
        self._lost_s = 0.0  # and how many of these are more than expected
        self._settled_s = 0.0  # and of those after them
        self._drafted_s, self._drafted_steps = 0.0, 0  # since the last reminder
        if not known:
            self._drafted_s, self._drafted_steps = RARELY * DRAFTED_S, DRAFTED_STEPS - EARLY_STEPS

    def next_step(self, speedup: float) -> None:
        """`speedup`: that is expected of drafting."""
        wait = DRAFTED_S * (RARELY if speedup > MUCH else 1.0)
        if self.reminds:
            self.reminds = self._prompts < MOST_PROMPTS and self._settled_s < TEACHES_S
        elif self._drafted_s >= wait and self._drafted_steps >= DRAFTED_STEPS:
            self.reminds, self._prompts, self._drafted_s, self._drafted_steps = True, 0, 0.0, 0
        self._prompts += self.reminds

    def plain(self, seconds: float, expected: float) -> bool:
        """A step without drafts took so long. Whether it is as others will be."""
        self._prompts -= self.reminds
        if self._plain_s >= SETTLES_S:
            self._settled_s += seconds
            self._drafted_s, self._drafted_steps = 0.0, 0
            return True
        self._plain_s += seconds
        self._lost_s += seconds - expected
        if self._plain_s >= SETTLES_S:
            self.change_s += LEARNS * (max(0.0, self._lost_s) - self.change_s)
        return False

    def drafted(self, seconds: float) -> None:
        self._plain_s = self._lost_s = self._settled_s = 0.0
        self._drafted_s += seconds
        self._drafted_steps += 1
