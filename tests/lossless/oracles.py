"""Proposers that know the target's output and mix it with wrong tokens, so that every kind of draft occurs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infer.batch.tree import DraftTree
from infer.request import Proposer, Request
from tests.drafts import checked_tree

AnswerOf = Callable[[Request], list[int]]  # the whole output of a request, by plain decoding


class WrongThenRight(Proposer):
    """Drafts the target's output up to some depth and wrong tokens after it, so that every accepted length occurs."""

    name = "oracle"

    def __init__(self, answer_of: AnswerOf) -> None:
        self.answer_of, self.turn = answer_of, 0

    def places(self, budget):
        return budget.depth

    def propose(self, requests, states, budgets):
        drafts = []
        for request, (budget, _) in zip(requests, budgets, strict=True):
            self.turn += 1
            right = self.answer_of(request)[len(request.output_ids) :][:budget]
            cut = self.turn % (budget + 1)
            drafts.append(right[:cut] + [(token + 1) % 50 for token in right[cut:]])
        return DraftTree.chains([request.tokens[-1] for request in requests], drafts)


class Thicket(Proposer):
    """Drafts random trees: the target's output down to a random depth, among wrong nodes at random places."""

    name = "thicket"

    def __init__(self, answer_of: AnswerOf, seed: int, vocab_size: int = 384) -> None:
        self.answer_of, self.vocab_size = answer_of, vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, low, high):
        return int(torch.randint(low, high, (), generator=self.generator))

    def places(self, budget):
        return budget.nodes

    def propose(self, requests, states, budgets):
        return DraftTree.stack(
            [self.tree(r, b) for r, b in zip(requests, budgets, strict=True)], [[i] for i in range(len(requests))]
        )

    def tree(self, request, budget):
        answer = self.answer_of(request)[len(request.output_ids) :]
        right = self.random(0, min(budget.depth, len(answer)) + 1)
        size = self.random(right, budget.nodes + 1)
        # Nodes of the right path are added at random turns, between wrong nodes with random parents.
        turns = torch.randperm(size, generator=self.generator)[:right].sort().values.tolist() if right else []
        token, parent, depth, on_path = [request.tokens[-1]], [-1], [0], [0]
        for turn in range(size):
            if turn in turns:
                above, value = on_path[-1], answer[len(on_path) - 1]
            else:
                shallow = [node for node in range(len(token)) if depth[node] < budget.depth]
                if not shallow:
                    continue
                above, value = shallow[self.random(0, len(shallow))], self.random(0, self.vocab_size)
            if any(p == above and t == value for p, t in zip(parent, token, strict=True)):
                continue
            if turn in turns:
                on_path.append(len(token))
            token.append(value)
            parent.append(above)
            depth.append(depth[above] + 1)
        return checked_tree(torch.tensor([token]), torch.tensor([parent]), torch.tensor([len(token)]))


class Scripted(Proposer):
    """Drafts turn by turn a chain or a tree of `depth` levels, the first `right` of them the target's output.

    A level of a tree has two nodes, the right one, if any, last. Turns (kind, right, depth); none is no draft.
    """

    name = "scripted"

    def __init__(self, answer_of: AnswerOf, turns: Sequence[tuple[str, int, int] | None]) -> None:
        self.answer_of, self.turns, self.turn = answer_of, turns, 0

    def places(self, budget):
        return budget.nodes

    def propose(self, requests, states, budgets):
        (request,), turn = requests, self.turns[self.turn % len(self.turns)]
        kind, right, depth = turn or ("chain", 0, 0)
        self.turn += 1
        token, parent, above = [request.tokens[-1]], [-1], 0
        answer = self.answer_of(request)[len(request.output_ids) :]
        for level, correct in enumerate(answer[:depth]):
            wrong = [(correct + 1 + sibling) % 384 for sibling in range(2)]
            level = [wrong[0], correct if level < right else wrong[1]]
            level = level[-1:] if kind == "chain" else level
            token += level
            parent += [above] * len(level)
            above = len(token) - 1
        return checked_tree(torch.tensor([token]), torch.tensor([parent]), torch.tensor([len(token)]))
