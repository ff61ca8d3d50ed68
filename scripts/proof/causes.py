"""Why drafts do not pay: one sentence to act on, computed from figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NO_USE = 0.2  # a position at which fewer drafts are accepted is not worth its row


class Figures(NamedTuple):
    """Of drafts that are made always, at one number of requests."""

    requests: int
    ratio: float  # speed, of plain decoding's
    tau: float  # tokens per verify
    by_position: Sequence[float]  # acceptance rate by depth
    plain_ms: float  # a step without drafts
    drafted_ms: float  # a step with drafts, drafting included
    drafting_ms: float
    rows: float  # of a step with drafts
    missed: float = 0.0  # share of the verifies that ended at a token outside the draft vocabulary
    suffix_ratio: float | None = None  # speed of suffix decoding in the same rounds
    head: bool = True  # whether a head drafts


def why_slower(figures: Figures) -> str | None:
    """Return what to do about drafts that are slower than plain decoding; None if they are not.

    Names the one cause without which they would pay, the cheapest to remove first: another proposer, the time of
    drafting, the time of further rows in a verify, tokens that the head cannot draft. What is left is τ itself.
    """
    f = figures
    if f.ratio >= 1:
        return None
    slower = f"{f.requests} request{'s' if f.requests > 1 else ''}: {f.ratio:.2f} times plain decoding's speed; "
    if f.suffix_ratio is not None and f.suffix_ratio > 1:
        return f"{slower}this text repeats itself, and copies have {f.suffix_ratio:.2f}: use proposer=suffix"
    verify_ms, needed = f.drafted_ms - f.drafting_ms, f.drafted_ms / f.plain_ms
    if f.tau * f.plain_ms > verify_ms and f.drafting_ms >= verify_ms - f.plain_ms:
        return (
            f"{slower}drafting costs more than it brings, {f.drafting_ms:.1f} of the {f.drafted_ms:.1f} ms of a step: "
            "draft fewer tokens (proposer.max_draft_tokens)"
            + (", or with a smaller head, or engine.head_weights=int8" if f.head else "")
        )
    if f.tau * f.plain_ms > f.plain_ms + f.drafting_ms:
        return (
            f"{slower}verify rows cost too much here at this batch, {verify_ms:.1f} ms for {f.rows:.0f} where plain "
            f"decoding takes {f.plain_ms:.1f}: leave proposer.adaptive=true, which drafts less with more requests"
        )
    if f.missed and f.tau / max(1 - f.missed, f.tau / (1 + len(f.by_position))) > needed:
        return (
            f"{slower}{100 * f.missed:.0f} % of the verifies end at a token that the draft vocabulary misses: train "
            "the head with a larger head.draft_vocab_size, or on data like these prompts"
        )
    low = next((depth for depth, rate in enumerate(f.by_position, 1) if rate < NO_USE), 0)
    cut = f", and from position {low} on fewer than {100 * NO_USE:.0f} % are accepted" if low else ""
    fewer = f"use proposer.max_draft_tokens={low - 1}, or " if low > 1 else ""
    better = "train a head on data like them" if f.head else "train a head (train/run.py)"
    return f"{slower}τ is too low on these prompts, {f.tau:.2f} where {needed:.2f} would pay{cut}: {fewer}{better}"
