"""The cost of switching between speculative and plain steps, and baseline probes of the latency of plain steps.

Speculative steps are bound by compute, plain ones by memory, and a machine takes some hundredths of a second to settle
into either: with four requests the first plain step after speculative ones took half as long again as the tenth
(LOG.md). So steps right after a switch say little about later ones, and alternating is slower than either.
"""

from __future__ import annotations

SETTLES_S = 0.025  # warm-up: seconds of plain steps before one is representative
LEARNS = 0.3  # weight of the newest switch in the estimated cost of switching
TEACHES_S = 0.01  # seconds of settled plain steps that a baseline probe lasts
MAX_PROMPTS = 16  # steps with prefill after which a probe ends: if every step has one, none shows the baseline
DRAFTED_S, DRAFTED_STEPS = 2.0, 96  # seconds and number of speculative steps between two probes
RARELY, MUCH = 5.0, 1.3  # probes are RARELY times as far apart if the expected speedup of drafting is above MUCH
EARLY_STEPS = 8  # speculative steps before the first probe, if the cost of plain steps is unknown


class BaselineProbe:
    """Baseline probing: periodically force non-speculative steps to refresh the baseline latency.

    Only steps after the machine has settled count. Steps with prefill are not reported to this class.
    """

    def __init__(self, known: bool) -> None:
        """`known`: whether the cost of a plain step is known already."""
        self.probing = False  # whether this step belongs to a probe, so that nothing is drafted in it
        self.switch_s = 0.0  # seconds that plain steps lose after speculative ones, until the machine has settled
        self._prompts = 0  # steps of this probe that were not reported
        self._plain_s = SETTLES_S  # seconds of plain steps since the last speculative one, up to SETTLES_S,
        self._lost_s = 0.0  # by how much these exceed the expected seconds,
        self._settled_s = 0.0  # and seconds of the plain steps after them
        self._drafted_s, self._drafted_steps = 0.0, 0  # since the last probe
        if not known:
            self._drafted_s, self._drafted_steps = RARELY * DRAFTED_S, DRAFTED_STEPS - EARLY_STEPS

    def next_step(self, speedup: float) -> None:
        """Decide whether the next step belongs to a probe. `speedup`: the expected one of drafting."""
        wait = DRAFTED_S * (RARELY if speedup > MUCH else 1.0)
        if self.probing:
            self.probing = self._prompts < MAX_PROMPTS and self._settled_s < TEACHES_S
        elif self._drafted_s >= wait and self._drafted_steps >= DRAFTED_STEPS:
            self.probing, self._prompts, self._drafted_s, self._drafted_steps = True, 0, 0.0, 0
        self._prompts += self.probing

    def plain(self, seconds: float, expected: float) -> bool:
        """Record a step without drafts; return whether the machine had settled, so that it is representative."""
        self._prompts -= self.probing
        if self._plain_s >= SETTLES_S:
            self._settled_s += seconds
            self._drafted_s, self._drafted_steps = 0.0, 0
            return True
        self._plain_s += seconds
        self._lost_s += seconds - expected
        if self._plain_s >= SETTLES_S:
            self.switch_s += LEARNS * (max(0.0, self._lost_s) - self.switch_s)
        return False

    def drafted(self, seconds: float) -> None:
        self._plain_s = self._lost_s = self._settled_s = 0.0
        self._drafted_s += seconds
        self._drafted_steps += 1
