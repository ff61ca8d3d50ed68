"""Made-up results of verifying drafts."""

from __future__ import annotations

from infer.speculation.budget import Budget, VerifiedDraft


def chain(depth: int, accepted: int) -> VerifiedDraft:
    return VerifiedDraft(Budget(depth, depth), depth, depth, range(1, accepted + 1))
