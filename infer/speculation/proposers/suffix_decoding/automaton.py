"""A suffix automaton (Blumer et al. 1985) of token sequences that grow: every run of tokens that occurred, counted.

Its states are classes of runs that end at the same places; the longest run of a state has `length[state]` tokens, and
`link[state]` is the class of the longest of its suffixes that also occurred elsewhere. A sequence of n tokens has at
most 2 n states and 3 n edges, of any length of runs.
"""

from __future__ import annotations

from collections.abc import Iterator

ROOT = 0
MOST_COUNTED = 32  # suffixes per token that are counted, the longest: `aaaa...` has as many as tokens


class Edge:
    """What followed a state: `count` times its token, last at `place`, which leads to state `target`."""

    __slots__ = ("count", "place", "target")

    def __init__(self, target: int, count: int, place: int) -> None:
        self.target, self.count, self.place = target, count, place


class SuffixAutomaton:
    """`end` is the state of the whole last sequence."""

    def __init__(self) -> None:
        self.length, self.link = [0], [-1]
        self.edges: list[dict[int, Edge]] = [{}]
        self.end = ROOT
        self.tokens = 0

    def begin(self) -> None:
        """Begin another sequence."""
        self.end = ROOT

    def append(self, token: int) -> None:
        self.tokens += 1
        end, place = self._reached(token), self.tokens
        state, counted = self.end, 0
        while state != -1 and counted < MOST_COUNTED:
            edge = self.edges[state][token]
            edge.count, edge.place = edge.count + 1, place
            state, counted = self.link[state], counted + 1
        self.end = end

    def _reached(self, token: int) -> int:
        """Return the state of the text with `token` appended; new edges have no counts yet."""
        if token in self.edges[self.end]:  # the beginning of a sequence that occurred before
            return self._narrowed(self.end, token)
        end, state = self._add(self.length[self.end] + 1, {}), self.end
        while state != -1 and token not in self.edges[state]:
            self.edges[state][token] = Edge(end, 0, 0)
            state = self.link[state]
        self.link[end] = ROOT if state == -1 else self._narrowed(state, token)
        return end

    def _narrowed(self, state: int, token: int) -> int:
        """Return the state of the longest run of `state` with `token` appended, split from longer ones if need be."""
        target = self.edges[state][token].target
        if self.length[target] == self.length[state] + 1:
            return target
        copies = {key: Edge(edge.target, edge.count, edge.place) for key, edge in self.edges[target].items()}
        split = self._add(self.length[state] + 1, copies)
        self.link[split], self.link[target] = self.link[target], split
        while state != -1 and (edge := self.edges[state].get(token)) is not None and edge.target == target:
            edge.target = split
            state = self.link[state]
        return split

    def _add(self, length: int, edges: dict[int, Edge]) -> int:
        self.length.append(length)
        self.link.append(ROOT)
        self.edges.append(edges)
        return len(self.length) - 1

    def suffixes(self, state: int) -> Iterator[int]:
        """Yield the states of the suffixes of a run of `state` that something followed, the longest first."""
        while state > ROOT:
            if self.edges[state]:
                yield state
            state = self.link[state]


class Match:
    """The longest suffix of another growing text that an automaton knows: `length` tokens, in `state`."""

    def __init__(self) -> None:
        self.state, self.length = ROOT, 0

    def extend(self, automaton: SuffixAutomaton, token: int) -> None:
        self.settle(automaton)
        while self.state != ROOT and token not in automaton.edges[self.state]:
            self.state = automaton.link[self.state]
            self.length = automaton.length[self.state]
        edge = automaton.edges[self.state].get(token)
        self.state, self.length = (ROOT, 0) if edge is None else (edge.target, self.length + 1)

    def settle(self, automaton: SuffixAutomaton) -> None:
        """Follow the states that were split since: the match is in the one that is not too short for it."""
        while self.state != ROOT and automaton.length[automaton.link[self.state]] >= self.length:
            self.state = automaton.link[self.state]
