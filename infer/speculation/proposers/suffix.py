"""Suffix decoding (arXiv 2411.04975): drafts what most often followed earlier occurrences of the text's suffix.

The longest suffix that occurred before is looked up in the request's own prompt and output, and in earlier responses of
the same tenant. Tries hold the counts of all runs of up to `max_depth` tokens; a draft follows the most frequent
continuation as long as it is likely enough, and the longer the match, the longer the draft may be.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from infer.request import Request
from infer.speculation.budget import Budget
from infer.speculation.proposers.base import Proposer
from infer.speculation.tree import DraftTree


class Node:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}
        self.count = 0


class CountedTrie:
    """Counts all runs of up to `max_depth` tokens in the sequences added. `size` is its number of nodes."""

    def __init__(self, max_depth: int) -> None:
        self.root, self.size, self._max_depth = Node(), 0, max_depth

    def extend(self, ends: list[Node], token: int) -> list[Node]:
        """Append a token to the runs that end at `ends`; return the end nodes of the new runs, the longest first."""
        grown = []
        for node in [*ends, self.root][-self._max_depth :]:
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = Node()
                self.size += 1
            child.count += 1
            grown.append(child)
        return grown

    def remove(self, tokens: Sequence[int]) -> None:
        """Remove a whole sequence that was added."""
        for start in range(len(tokens)):
            node = self.root
            for token in tokens[start : start + self._max_depth]:
                child = node.children[token]
                child.count -= 1
                if child.count == 0:
                    self.size -= count_nodes(child)
                    del node.children[token]
                    break  # its descendants are removed with it
                node = child

    def find(self, suffix: Sequence[int]) -> tuple[Node, int] | None:
        """Return the node and the length of the longest end of `suffix` with a continuation; None if there is none."""
        for length in range(min(len(suffix), self._max_depth - 1), 0, -1):
            node: Node | None = self.root
            for token in suffix[len(suffix) - length :]:
                node = node.children.get(token)
                if node is None:
                    break
            if node is not None and node.children:
                return node, length
        return None


def count_nodes(node: Node) -> int:
    return 1 + sum(count_nodes(child) for child in node.children.values())


def follow(node: Node, max_length: int, min_probability: float) -> tuple[list[int], float]:
    """Return the most frequent run after `node` of at least `min_probability`, and its expected accepted length."""
    tokens: list[int] = []
    probability, expected = 1.0, 0.0
    while node.children and len(tokens) < max_length:
        token, child = min(node.children.items(), key=lambda pair: (-pair[1].count, pair[0]))
        probability *= child.count / sum(other.count for other in node.children.values())
        if probability < min_probability:
            break
        tokens.append(token)
        expected += probability
        node = child
    return tokens, expected


class Text:
    """The trie of one request's tokens, extended as they come."""

    def __init__(self, max_depth: int) -> None:
        self.trie = CountedTrie(max_depth)
        self._ends: list[Node] = []
        self._read = 0

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens[self._read :]:
            self._ends = self.trie.extend(self._ends, token)
        self._read = len(tokens)

    def match(self) -> tuple[Node, int] | None:
        """Return what `CountedTrie.find` would for this text, without a walk: `_ends` are the nodes of its suffixes."""
        for node, length in zip(self._ends, range(len(self._ends), 0, -1), strict=True):
            if node.children:
                return node, length
        return None


class Earlier:
    """Responses of one tenant, the oldest of which are evicted when the trie or the text exceeds `max_nodes`.

    The text is bounded separately: responses that repeat one another add to it and not to the trie.
    """

    def __init__(self, max_depth: int, max_nodes: int) -> None:
        self.trie, self._max_nodes = CountedTrie(max_depth), max_nodes
        self._responses: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._added = self._tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        ends: list[Node] = []
        for token in tokens:
            ends = self.trie.extend(ends, token)
        self._responses[self._added] = tuple(tokens)
        self._added += 1
        self._tokens += len(tokens)
        while max(self.trie.size, self._tokens) > self._max_nodes:
            _, oldest = self._responses.popitem(last=False)
            self._tokens -= len(oldest)
            self.trie.remove(oldest)


class SuffixProposer(Proposer):
    """Drafts chains; reads no features and keeps no KV.

    `max_depth`: tokens of the longest run that is counted, match plus draft. `factor`: maximum of drafted tokens per
    matched token. `max_nodes`: size of the memory of earlier responses, for each of `max_tenants` tenants.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        max_depth: int = 24,
        factor: float = 2.0,
        min_probability: float = 0.1,
        max_nodes: int = 200_000,
        max_tenants: int = 64,
    ) -> None:
        self._max_depth, self._factor, self._min_probability = max_depth, factor, min_probability
        self._max_nodes, self._max_tenants = max_nodes, max_tenants
        self._texts: dict[str, Text] = {}
        self._tenants: OrderedDict[str, Earlier] = OrderedDict()  # the most recently used is last

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        drafts = [self._draft(request, budget) for request, budget in zip(requests, budgets, strict=True)]
        return DraftTree.chains([request.tokens[-1] for request in requests], drafts)

    def release(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)
        # Responses are kept only for tenants that were drafted for, since adding one costs milliseconds.
        if request.finish_reason in ("stop", "length") and request.params.cache_salt in self._tenants:
            self._earlier(request).add(request.output_ids)

    def _draft(self, request: Request, budget: Budget) -> list[int]:
        text = self._texts.setdefault(request.request_id, Text(self._max_depth))
        text.read(request.tokens)
        earlier = self._earlier(request).trie.find(request.tokens[-self._max_depth :])
        best: tuple[float, list[int]] = (0.0, [])
        for match in (text.match(), earlier):
            if match is not None:
                node, length = match
                tokens, expected = follow(node, min(budget.depth, int(self._factor * length)), self._min_probability)
                best = max(best, (expected, tokens), key=lambda pair: pair[0])
        return best[1]

    def _earlier(self, request: Request) -> Earlier:
        earlier = self._tenants.pop(request.params.cache_salt, None) or Earlier(self._max_depth, self._max_nodes)
        self._tenants[request.params.cache_salt] = earlier
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)
        return earlier
