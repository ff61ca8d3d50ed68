"""Masks that together leave a row no token: an error, with drafts exactly where plain decoding meets it."""

from __future__ import annotations

import pytest

from infer.batch.grammar import Grammar
from infer.request import SamplingParams
from tests.lossless.plain import answer_all
from tests.pools import check_pool

A, B = 40, 41
ENGINES = {
    "plain": {"proposer": "none"},
    "ngram": {"proposer": "ngram"},
    "suffix": {"proposer": "suffix"},
    "head tree": {"proposer": "head", "shape": {"tree": "beam:4x4:14"}},
    "target itself": {"proposer": "draft_model", "draft_model": "same"},
}
RULES = {"greedy": {}, "seeded": {"temperature": 1.0, "seed": 3}}
LOSSY = {name: {"temperature": 1.0, "seed": 3, "acceptance": name} for name in ("block", "typical")}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (name, rule)
        for number, name in enumerate(ENGINES)
        for rule in ([*RULES, "block"], [*LOSSY, "greedy"])[number % 2]
    ],
)
def test_a_row_without_a_token_ends_its_request(make_engine, prompts, name, rule):
    """The tokens before that row are emitted, and another request beside it is not affected."""
    engine = make_engine(**ENGINES[name], max_batch=4)
    sampling = (RULES | LOSSY)[rule]
    dead_end = SamplingParams(allowed_token_ids=(A,), bad_words=((A,) * 9,), max_tokens=30, ignore_eos=True, **sampling)
    other = SamplingParams(max_tokens=12, ignore_eos=True)
    ended, finished = answer_all(engine, [([A + 9], dead_end), (prompts[0], other)])
    assert (ended.token_ids, ended.finish_reason) == ([A] * 8, "error")
    assert (len(finished.token_ids), finished.finish_reason) == (12, "length")
    check_pool(engine._pool, [])


def test_the_error_says_which_masks(make_engine):
    engine = make_engine(proposer="none")
    engine.add([A + 9], SamplingParams(allowed_token_ids=(A,), bad_words=((A, A),), max_tokens=9))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.token_ids for output in outputs] == [[A], []]
    assert outputs[-1].error == "no token can follow: allowed_token_ids, bad_words together allow none"
    assert not outputs[-1].internal


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"allowed_token_ids": (A,), "bad_words": ((A,),)}, "allowed_token_ids, bad_words"),
        ({"allowed_token_ids": (A, B), "bad_words": ((B,), (9, A))}, "allowed_token_ids, bad_words"),
        ({"allowed_token_ids": (0,), "min_tokens": 5}, "allowed_token_ids, min_tokens"),
        ({"allowed_token_ids": (A,), "stop_token_ids": (A,), "min_tokens": 1}, "allowed_token_ids, min_tokens"),
        ({"bad_words": tuple((token,) for token in range(384))}, "bad_words"),
        ({"allowed_token_ids": (A,), "grammar": Grammar("choice", '["zz"]')}, "allowed_token_ids, grammar"),
        ({"bad_words": ((90,), (89,)), "grammar": Grammar("regex", "[yz]")}, "bad_words, grammar"),
    ],
)
def test_what_can_be_told_beforehand_is_refused(make_engine, tiny_tokenizer, params, names):
    engine = make_engine(proposer="none", tokenizer=tiny_tokenizer)
    if "bad_words" in params and "grammar" in params:
        params = params | {"bad_words": tuple(tuple(tiny_tokenizer.encode(letter)) for letter in "yz")}
    with pytest.raises(ValueError, match=f"^{names.split(',')[0]}: no token can come first: {names} together"):
        engine.add([7, 9], SamplingParams(max_tokens=9, **params))
    assert not engine.has_work


def test_masks_that_leave_tokens_apply_together(make_engine, tiny_tokenizer):
    """A grammar too: it is followed with the tokens that the other masks leave."""
    engine = make_engine(proposer="ngram", tokenizer=tiny_tokenizer)
    a, b, c = (tiny_tokenizer.encode(letter)[0] for letter in "abc")
    grammar = Grammar("regex", "[abc]{6}")
    masks = {"allowed_token_ids": (a, b, c), "bad_words": ((c,), (a, a))}
    (completion,) = engine.generate([[5, 6]], SamplingParams(grammar=grammar, max_tokens=9, **masks))
    text = tiny_tokenizer.decode(completion.token_ids)
    assert completion.finish_reason == "stop"
    assert len(text) == 6
    assert set(text) <= set("ab")
    assert "aa" not in text
    dead_end = {"allowed_token_ids": (a,), "bad_words": ((a, a),)}
    (ended,) = engine.generate([[5, 6]], SamplingParams(grammar=grammar, max_tokens=9, **dead_end))
    assert (ended.token_ids, ended.finish_reason) == ([a], "error")
    assert ended.error == "no token can follow: allowed_token_ids, bad_words, grammar together allow none"
