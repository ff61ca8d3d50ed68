"""Acceptance rules that give up a guarantee of the exact rule. None is a default; a response names the rule it used.

- `block` (block verification, arXiv 2403.10444): the text follows the target's distribution exactly, and acceptance
  lengths are a little greater than with the exact rule, but a seed no longer determines the text, which also depends on
  what was drafted. Chains only; a step whose draft is a tree is verified by the exact rule.
- `typical` (Medusa, arXiv 2401.10774): accepts a drafted token if its probability under the target exceeds a threshold
  that falls with the target's entropy. The text no longer follows the target's distribution.
- `synthetic`: accepts at given rates, whatever the target chooses. For benchmarks of the engine; the text is
  meaningless.

At temperature 0 `block` and `typical` are the exact rule. Their arithmetic is in kernels/acceptance.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.acceptance import coin

# Stream of the drafts' noise where it must be independent of the target's. Like the stream of the acceptance coins it
# depends on the position of the step's root (kernels/acceptance.py), so that every step draws new noise: noise that a
# rejected draft has revealed must not be used again.
DRAFTS = 0x5BD1E995


def synthetic(rates: Sequence[float], drafted: int, seed: int, root: int) -> int:
    """Return how many tokens of a chain are accepted: the i-th with probability `rates[i]`, if all before it were.

    Past the last rate nothing is accepted.
    """
    accepted = 0
    while accepted < min(drafted, len(rates)) and coin(seed, root, accepted + 1) < rates[accepted]:
        accepted += 1
    return accepted
