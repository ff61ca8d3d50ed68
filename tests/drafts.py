"""What becomes of drafts, made up."""

from __future__ import annotations

from infer.speculation.budget import Budget, Verified


def chain(depth: int, accepted: int) -> Verified:
    return Verified(Budget(depth, depth), depth, depth, range(1, accepted + 1))
