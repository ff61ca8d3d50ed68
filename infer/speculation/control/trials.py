"""Step costs where no profile is available: a guess that trial drafts correct.

The engine starts without drafts. Its first plain steps show how long a step takes; then one request at a time is
drafted for, in a bounded share of the time, and after TRIALS such steps the controller plans by the corrected costs.
"""

from __future__ import annotations

from collections.abc import Mapping

from infer.speculation.budget import Budget
from infer.speculation.control.cost_model import CostModel, CostTable, Curve

# Guessed costs of a further row and of a level of drafts, in shares of a plain step. Corrections may go far from them,
# up or down.
ROW, LEVEL = 0.25, 0.3
MAX_ROWS = 64.0
GUESSED = (0.01, 30.0)  # bounds of these corrections
TRIALS = 8  # speculative steps that must have corrected the guess before anything is planned by it
TRIAL_STEPS = 4  # per trial of one request; the first may also make its drafter read what it has not read yet
TRIAL_SHARE = 0.05  # share of the time without drafts that may go into trials


def guessed_cost_model(drafters: Mapping[str, Budget]) -> CostModel:
    """Return the guess; a plain step is taken to last one second until one was seen."""
    verify = Curve((1.0, MAX_ROWS), (1.0, 1.0 + ROW * (MAX_ROWS - 1)))
    depths = {name: float(max(2, limit.depth)) for name, limit in drafters.items()}
    drafts = {name: (Curve((1.0, depth), (LEVEL, LEVEL * depth)),) for name, depth in depths.items()}
    return CostModel(CostTable((1,), (verify,), (0.0,), drafts), trials=TRIALS, extra=GUESSED)
