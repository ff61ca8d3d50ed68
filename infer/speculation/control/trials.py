"""What steps cost where no profile is to be had: a guess, until drafts on trial have taught the rest.

The engine begins without drafts. Its first plain steps say how long a step is; then one request at a time is drafted
for, in a bounded share of the time, and after TRIALS such steps the controller plans by what they have taught.
"""

from __future__ import annotations

from collections.abc import Mapping

from infer.speculation.budget import Budget
from infer.speculation.control.cost_model import Costs, CostTable, Curve

# In shares of a plain step: a further row, and a level of drafts. From there on corrections go far to either side.
ROW, LEVEL = 0.25, 0.3
MOST_ROWS = 64.0
GUESSED = (0.01, 30.0)  # how far
TRIALS = 8  # drafted steps that must have taught before anything is planned by them
TRIAL_STEPS = 4  # of one request, the first of which may read what was not read yet
TRIAL_SHARE = 0.05  # of the time without drafts


def guessed_costs(drafters: Mapping[str, Budget]) -> Costs:
    """Of a step that takes a second, until one was seen."""
    verify = Curve((1.0, MOST_ROWS), (1.0, 1.0 + ROW * (MOST_ROWS - 1)))
    depths = {name: float(max(2, limit.depth)) for name, limit in drafters.items()}
    drafts = {name: (Curve((1.0, depth), (LEVEL, LEVEL * depth)),) for name, depth in depths.items()}
    return Costs(CostTable((1,), (verify,), (0.0,), drafts), trials=TRIALS, extra=GUESSED)
