"""Reads from provenance.json what an exported head was trained for, and how well it drafts there.

Acceptance lengths are compared over the positions that all were measured at, and only for the same target.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from models.config import read_json
from models.heads.config import PROVENANCE


class Measurement(NamedTuple):
    """Greedy drafts on held-out prompts, in the engine."""

    target: str  # fingerprint
    steps: int
    emitted: int
    accepted: tuple[int, ...]  # by position

    def tau(self, depth: int) -> float:
        """Return the acceptance length with drafts of `depth` tokens, as far as longer ones tell."""
        return (self.emitted - sum(self.accepted[depth:])) / self.steps


def read_provenance(folder: Path) -> dict[str, Any]:
    """Return provenance.json; nothing for a head of others, or if the file cannot be read."""
    try:
        return read_json(folder / PROVENANCE)
    except (OSError, ValueError):
        return {}


def made_for(folder: Path) -> str | None:
    """Return the fingerprint of the target that the head in `folder` was trained for, None if unknown."""
    return read_provenance(folder).get("target_fingerprint")


def measurement(folder: Path) -> Measurement | None:
    """Return what training measured of the head in `folder`, None if nothing that can be compared."""
    record = read_provenance(folder)
    try:
        counts = record["counted"]["greedy"]
        accepted = tuple(map(int, counts["accepted_by_position"]))
        result = Measurement(record["target_fingerprint"], int(counts["steps"]), int(counts["emitted"]), accepted)
    except (KeyError, TypeError, ValueError):
        return None
    return result if result.target and result.steps > 0 and result.accepted else None


def best_measured(heads: Sequence[Path]) -> tuple[Path, str, Path | None]:
    """Return of `heads`, the newest first, the one with the best acceptance length on the newest one's target, or the
    newest if that was not measured; why, for people; and which other one might have been meant. The newest wins a tie.
    """
    newest, *others = heads
    measured = {head: result for head in heads if (result := measurement(head)) is not None}
    target = measured[newest].target if newest in measured else None
    alike = {head: each for head, each in measured.items() if each.target == target}
    if len(alike) < 2:
        return newest, "it is the newest, and no measured τ on one target compares them", next(iter(others), None)
    depth = min(len(each.accepted) for each in alike.values())
    taus = {head: each.tau(depth) for head, each in alike.items()}
    best, second = sorted(taus, key=taus.__getitem__, reverse=True)[:2]
    other = second if best == newest else newest
    age = "" if best == newest else ", which is newer"
    return best, f"τ {taus[best]:.2f} with drafts of {depth}, and {taus[other]:.2f} of the other{age}", other
