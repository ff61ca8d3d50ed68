"""Trees change no token either: head trees, fixed trees and adversarial ones, moved KV and all."""

from __future__ import annotations

import pytest
import torch

from infer.proposers.base import Budget, WithoutLayers
from infer.request import SamplingParams
from infer.tree import DraftTree

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, top_k=60, top_p=0.95, seed=7)
SHAPES = {
    "wide": {"tree_width": 6},
    "few nodes": {"tree_width": 4, "tree_nodes": 5},
    "fixed": {"tree": [[0], [1], [2], [0, 0], [1, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0]]},
}


def ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def expected(make_engine, prompts):
    answers = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(dtype, "none", max_batch=1)
        for params in (GREEDY, SAMPLED):
            answers[dtype, params] = ids(engine.generate(prompts, params))
    return answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 8])
def test_head_trees(make_engine, prompts, expected, dtype, shape, batch):
    engine = make_engine(dtype, "head", drafts=5, shape=SHAPES[shape], max_batch=batch)
    for params in (GREEDY, SAMPLED):
        completions = engine.generate(prompts, params)
        assert ids(completions) == expected[dtype, params]
        stats = [completion.stats for completion in completions]
        assert 0 < sum(own.accepted for own in stats) < sum(own.drafted for own in stats)
    engine._pool.invariants([])


def test_trees_under_memory_pressure(make_engine, prompts, expected):
    engine = make_engine(shape=SHAPES["wide"], drafts=5, max_batch=8, max_tokens_in_cache=384, page_size=4)
    for params in (GREEDY, SAMPLED):
        assert ids(engine.generate(prompts, params)) == expected[torch.float32, params]
    assert engine.stats.preemptions > 0
    engine._pool.invariants([])


def test_trees_at_the_end_of_the_context(make_engine):
    """A tree has more places than the context has positions left."""
    plain, trees = make_engine(proposer="none"), make_engine(shape=SHAPES["wide"], drafts=5)
    for left in (1, 2, 3, 7):
        prompt = [[3] * (plain.context - left)]
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        (completion,) = trees.generate(prompt, params)
        assert len(completion.token_ids) == left
        assert completion.token_ids == plain.generate(prompt, params)[0].token_ids


class Thicket(WithoutLayers):
    """Random trees in which the right path lies among wrong nodes at random places, right to a random depth."""

    name = "thicket"

    def __init__(self, answers, seed):
        self.answers, self.generator = answers, torch.Generator().manual_seed(seed)

    def random(self, low, high):
        return int(torch.randint(low, high, (), generator=self.generator))

    def places(self, budget):
        return budget.nodes

    def propose(self, requests, budgets):
        return DraftTree.stack(
            [self.tree(r, b) for r, b in zip(requests, budgets, strict=True)], [[i] for i in range(len(requests))]
        )

    def tree(self, request, budget):
        answer = self.answers[tuple(request.prompt_ids)][len(request.output_ids) :]
        right = self.random(0, min(budget.depth, len(answer)) + 1)
        size = self.random(right, budget.nodes + 1)
        # Steps of the right path come at random times among wrong nodes; a wrong one hangs anywhere.
        turns = torch.randperm(size, generator=self.generator)[:right].sort().values.tolist() if right else []
        token, parent, depth, on_path = [request.tokens[-1]], [-1], [0], [0]
        for turn in range(size):
            if turn in turns:
                above, value = on_path[-1], answer[len(on_path) - 1]
            else:
                shallow = [node for node in range(len(token)) if depth[node] < budget.depth]
                if not shallow:
                    continue
                above, value = shallow[self.random(0, len(shallow))], self.random(0, 384)
            if any(p == above and t == value for p, t in zip(parent, token, strict=True)):
                continue
            if turn in turns:
                on_path.append(len(token))
            token.append(value)
            parent.append(above)
            depth.append(depth[above] + 1)
        return DraftTree.from_parents(torch.tensor([token]), torch.tensor([parent]), torch.tensor([len(token)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_valid_tree(make_engine, prompts, expected, dtype, params, seed):
    answers = {tuple(p): a for p, a in zip(prompts, expected[dtype, params], strict=True)}
    engine = make_engine(dtype, "ngram", drafts=12, max_batch=5)
    engine.add_proposer(Thicket(answers, seed), Budget(12, 12))
    completions = engine.generate(prompts, params)
    assert ids(completions) == expected[dtype, params]
    assert engine.stats.speculation.acceptance_length > 1.5
