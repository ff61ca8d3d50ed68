"""Acceptance rules that give something up. None is a default; a response says which rule made it.

- `block` (block verification, arXiv 2403.10444): the text follows the target's law exactly, and runs are a little
  longer than with the exact rule, but a seed no longer fixes the text: it depends on what was drafted. Chains only; a
  step whose draft is a tree is verified by the exact rule.
- `typical` (Medusa, arXiv 2401.10774): accepts a drafted token that is likely enough where the target is uncertain.
  The text no longer follows the target's law.
- `synthetic`: accepts at given rates, whatever the target says. For measuring the engine; the text means nothing.

Where nothing is sampled (temperature 0) `block` and `typical` are the exact rule. Their arithmetic is in
kernels/acceptance.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.acceptance import coin

# Noise of drafts that must not be the target's: drawn anew in every step, so that its stream depends on where the
# step's root stands (kernels/acceptance.py): what a rejected draft has shown must not be used again. So are coins.
DRAFTS = 0x5BD1E995


@dataclass(frozen=True)
class Verdict:
    path: list[int]  # accepted nodes, the root first
    bonus: int  # the token after them


def synthetic(rates: Sequence[float], drafted: int, choice: Sequence[int], seed: int, root: int) -> Verdict:
    """Accepts the i-th drafted token of a chain with probability `rates[i]`, given those before it; 0 past the last."""
    accepted = 0
    while accepted < min(drafted, len(rates)) and coin(seed, root, accepted + 1) < rates[accepted]:
        accepted += 1
    return Verdict(list(range(accepted + 1)), choice[accepted])
