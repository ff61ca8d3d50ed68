"""What drafts are copied from: the request's text, the place where a copy in it was interrupted, earlier responses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from infer.speculation.proposers.suffix_decoding.automaton import ROOT, Match, SuffixAutomaton
from infer.speculation.proposers.suffix_decoding.drafts import (
    NO_DRAFT,
    PRIORS,
    REQUEST_DECAY,
    CopyRates,
    Draft,
    copied,
    follow,
    likeliest,
    place_of,
)

MOST_MATCHES = 3  # of the suffixes that occurred before whose drafts are compared, the longest
LONG = 6  # tokens of a match that is taken to be a copy, whose place is remembered where it ends
WINDOW = 12  # tokens after that place in which an interrupted copy is looked for
MISSES = 12  # tokens not found there after which it is given up
# By tokens found since the interruption, the shares of right tokens before any evidence.
PRIORS_RESUMED = (0.05, 0.4, 0.72, 0.84, 0.87, 0.93)


class CopySource:
    """A text to copy from, and how copies from it went: in this request, and usually (`usual`)."""

    def __init__(self, automaton: SuffixAutomaton, usual: CopyRates) -> None:
        self.automaton, self._usual, self._rates = automaton, usual, CopyRates(REQUEST_DECAY)

    def matched(self) -> tuple[int, int]:
        """Return the state and length of the longest suffix of the request's text that occurred before."""
        raise NotImplementedError

    def extend(self, token: int) -> None:
        """Append a token to the request's text."""
        raise NotImplementedError

    def record(self, token: int) -> None:
        """Record whether the text's next token is what most often followed its longest match."""
        state, length = self.matched()
        state = next(self.automaton.suffixes(state), ROOT)
        if state != ROOT:
            likely, _, share = likeliest(self.automaton.edges[state])
            place = place_of(min(length, self.automaton.length[state]))
            for rates in (self._usual, self._rates):
                rates.record(place, share, likely == token)

    def rate(self, length: int) -> float:
        """Return how often a token after a match of this length is right, relative to its share."""
        place = place_of(length)
        return self._rates.rate(place, self._usual.rate(place, PRIORS[place]))

    def draft(self, most: int, least: float, factor: float | None) -> Draft:
        """Return the draft with the most expected tokens among those of the longest matches."""
        best, firsts = NO_DRAFT, set[int]()
        state, longest = self.matched()
        for suffix in islice(self.automaton.suffixes(state), MOST_MATCHES):
            first, _, _ = likeliest(self.automaton.edges[suffix])
            if first in firsts:
                continue  # a longer match drafts the same
            firsts.add(first)
            length = min(longest, self.automaton.length[suffix])
            room = most if factor is None else min(most, int(factor * length))
            best = max(best, follow(self.automaton, suffix, length, self.rate, room, least), key=lambda d: d.expected)
        return best


class Text(CopySource):
    """The request's own text."""

    def __init__(self, usual: CopyRates) -> None:
        super().__init__(SuffixAutomaton(), usual)

    def matched(self) -> tuple[int, int]:
        state = self.automaton.link[self.automaton.end]
        return (ROOT, 0) if state == -1 else (state, self.automaton.length[state])

    def extend(self, token: int) -> None:
        self.automaton.append(token)

    def copied_from(self) -> int | None:
        """Return the place in the text of the token that follows the latest occurrence of a long match."""
        state, length = self.matched()
        if length < LONG or not self.automaton.edges[state]:
            return None
        return likeliest(self.automaton.edges[state])[1].place - 1


class Earlier(CopySource):
    """A generation of earlier responses."""

    def __init__(self, automaton: SuffixAutomaton, usual: CopyRates) -> None:
        super().__init__(automaton, usual)
        self._match = Match()

    def matched(self) -> tuple[int, int]:
        self._match.settle(self.automaton)
        return self._match.state, self._match.length

    def extend(self, token: int) -> None:
        self._match.extend(self.automaton, token)


class Interrupted:
    """A copy that an edit has interrupted, expected to go on after the place in the text where it left off.

    Where the last token occurs a few tokens on, the copy goes on after it; else one token was replaced, if it is the
    first.
    """

    def __init__(self, usual: CopyRates) -> None:
        self._usual, self._rates = usual, CopyRates(REQUEST_DECAY)
        self._place: int | None = None  # of the next token of the copy in the text; None: nothing was copied lately
        self._resumed = self._missed = 0  # tokens since the interruption
        self._going_on = False

    def _rate(self, resumed: int) -> float:
        place = min(resumed, len(PRIORS_RESUMED) - 1)
        return self._rates.rate(place, self._usual.rate(place, PRIORS_RESUMED[place]))

    def record(self, tokens: Sequence[int], place: int) -> None:
        """Record whether the token at `place` is the copy's."""
        if self._going_on:
            return
        if self._place is not None:
            for rates in (self._usual, self._rates):
                rates.record(min(self._resumed, len(PRIORS_RESUMED) - 1), 1.0, tokens[self._place] == tokens[place])

    def extend(self, tokens: Sequence[int], place: int, copied_from: int | None) -> None:
        """Take note of the token at `place`. `copied_from`: where the copy that it belongs to is, if it does."""
        self._going_on = copied_from is not None
        if copied_from is not None:
            self._place, self._resumed, self._missed = copied_from, 0, 0
        elif self._place is not None:
            window = tokens[self._place : min(self._place + WINDOW, place)]
            if tokens[place] in window:
                skipped = window.index(tokens[place])
                self._resumed = 1 if skipped else self._resumed + 1
                self._place += skipped + 1
            else:
                self._resumed, self._missed = 0, self._missed + 1
            if self._missed > MISSES:
                self._place = None

    def draft(self, tokens: Sequence[int], most: int, least: float) -> Draft:
        if self._place is None or self._going_on:
            return NO_DRAFT
        return copied(tokens[self._place : self._place + most], self._resumed, self._rate, least)
