"""Other weights of the head while requests run: no token changes, and the drafts are the new weights'."""

from __future__ import annotations

import copy

import pytest
import torch

from models.heads.files import load_head
from models.heads.weights import initialize
from models.targets import load_target
from tests.heads import make_head
from tests.lossless.plain import LONG_GREEDY as GREEDY
from tests.lossless.plain import LONG_SAMPLED as SAMPLED
from tests.lossless.plain import answer_all, ids
from tests.pairwise import parametrize_each
from tests.pools import check_pool

DRAFTS = {
    "eagle3 chain": ("eagle3", None),
    "eagle3 tree": ("eagle3", {"tree": "beam:3x4:10"}),
    "mtp tree": ("mtp", {"tree": "beam:2x4"}),
    "lstm chain": ("lstm", None),
    "medusa tree": ("medusa", {"tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]}),
    "p-eagle chain": ("p-eagle, one layer", None),
    "dspark tree": ("dspark", {"tree": "beam:3x4:10"}),
}


@parametrize_each({"drafts": list(DRAFTS), "dtype": [torch.float32, torch.bfloat16]})
def test_an_update_within_requests_changes_no_token(make_small_engine, dtype, drafts):
    """Requests decode, wait, share cached pages and are pre-empted while the weights change every third step."""
    head, shape = DRAFTS[drafts]
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(1, 96, (20,), generator=generator).tolist()
    prompts = [shared[: 4 + 8 * (n % 3)] + torch.randint(1, 96, (n,), generator=generator).tolist() for n in range(9)]
    requests = [(prompt, (GREEDY, SAMPLED)[n % 2]) for n, prompt in enumerate(prompts)]
    plain = make_small_engine(dtype, "none", None, threads=1)
    expected = [ids(plain.generate([prompt], params))[0] for prompt, params in requests]
    engine = make_small_engine(
        dtype, "head", shape, head=head, threads=1, max_batch=4, page_size=8, max_tokens_in_cache=160
    )
    heads = [make_head(load_target(str(engine.target.path)), head, seed=seed) for seed in (5, 6)]
    step, steps = engine.step, 0

    def step_and_update():
        nonlocal steps
        steps += 1
        if steps % 3 == 0:
            engine.update_head(heads[steps // 3 % 2])
        return step()

    engine.step = step_and_update
    responses = answer_all(engine, requests, arrivals=[0, 0, 0, 2, 5, 9, 14, 20, 30])
    assert [response.token_ids for response in responses] == expected
    assert steps > 30
    assert engine.stats.preemptions > 0
    assert engine.stats.speculation.drafted > 0
    assert engine.stats.proposer_failures == 0
    check_pool(engine._pool, [])


def test_drafts_are_those_of_the_new_weights(make_engine, trained_head_folder, tiny_target, prompts):
    """A head that has memorised the responses takes over from a random one in the middle of a request, and back."""
    engine = make_engine(torch.float32, "head", head="eagle3", threads=1, max_batch=1)
    trained = load_head(trained_head_folder("eagle3"), target=tiny_target)
    random = copy.deepcopy(trained)
    initialize(random, tiny_target, from_target=False, seed=8)
    engine.update_head(random)

    def accepted(*updates):
        engine.add(prompts[0], GREEDY)
        for head, count in updates:
            if head is not None:
                engine.update_head(head)
            before = engine.stats.speculation.accepted
            for _ in range(count):
                if engine.has_work:
                    engine.step()
        while engine.has_work:
            engine.step()
        return engine.stats.speculation.accepted - before

    packed = engine.head
    assert accepted((None, 3), (trained, 30)) > 4 + accepted((random, 3), (random, 30))
    assert engine.head is packed


def test_another_head_is_refused(make_engine, tiny_target):
    engine = make_engine(torch.float32, "head", threads=1)
    other = make_head(tiny_target, "medusa", seed=1)
    with pytest.raises(ValueError, match="update_head: this engine drafts with no head of that kind, shape and draft"):
        engine.update_head(other)
    engine.add([1, 2, 3], GREEDY)
    with pytest.raises(ValueError, match="update_head"):
        engine.update_head(other)
    while engine.has_work:
        engine.step()
    with pytest.raises(ValueError, match="update_head"):
        make_engine(torch.float32, "none", head="mlp").update_head(other)
