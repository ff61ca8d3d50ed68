"""Every head and every other proposer in the situations that their own tests leave out, all at once.

Requests arrive while others decode, share pages, have grammars, penalties and several outputs, and are drafted for as a
planner pleases, in the buffers of CUDA graphs. docs/coverage.md shows what met what.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infer.batch.grammar import Grammar
from infer.request import SamplingParams
from tests.heads import ONE_OF_EACH
from tests.lossless.plain import answer_all
from tests.lossless.test_controller import AtRandom
from tests.pairwise import parametrize_each
from tests.pools import check_pool

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1)
SAMPLED = replace(GREEDY, temperature=0.9, seed=3, top_k=40)
PREFIX = [5, 6, 7] * 5
REQUESTS = [
    (PREFIX, GREEDY),
    ([*PREFIX, 9], SAMPLED),
    (PREFIX[:12], replace(GREEDY, ignore_eos=False, grammar=Grammar("regex", "[A-M]{18}"))),
    ([8], replace(SAMPLED, presence_penalty=0.6, repetition_penalty=1.2, logit_bias={7: 2.0})),
    ([*PREFIX, 9, 9], replace(SAMPLED, ignore_eos=False, grammar=Grammar("regex", "([a-f]{3} ?){2,6}"))),
]
TREE = {"tree": "beam:3x3:8"}
PROPOSERS: dict[str, dict[str, Any]] = {
    **{head: {"proposer": "head", "head": head} for head in ONE_OF_EACH},
    "n-gram": {"proposer": "ngram"},
    "suffix": {"proposer": "suffix"},
    "combined": {"proposer": "combined"},
    "draft model": {"proposer": "draft_model", "draft_model": "other"},
}


@parametrize_each({"name": list(PROPOSERS), "shape": [{}, TREE]})
def test_all_at_once(make_small_engine, make_plain, name, shape):
    oracle = make_plain(small=True)
    engine = make_small_engine(shape=shape, threads=1, max_batch=3, page_size=4, graphs="on", **PROPOSERS[name])
    steady, engine.speculator.planner = engine.speculator.planner, AtRandom(seed=2)
    answers = answer_all(engine, REQUESTS, arrivals=(0, 3, 6, 9, 12))
    for request, answer in zip(REQUESTS, answers, strict=True):
        assert answer == oracle(*request)
    engine.speculator.planner = steady
    outputs = engine.generate([PREFIX], replace(SAMPLED, n=2))
    wanted = [oracle(PREFIX, replace(SAMPLED, seed=SAMPLED.seed + index)) for index in range(2)]
    assert [output.token_ids for output in outputs] == [answer.token_ids for answer in wanted]
    assert engine.stats.speculation.drafted > 0
    assert engine.stats.cached_tokens > 0
    assert engine.stats.proposer_failures == 0
    check_pool(engine._pool, [])
