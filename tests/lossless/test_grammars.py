"""Structured output conforms to its grammar, and has the same bytes with any kind of drafts as without."""

from __future__ import annotations

import json
import re
import time

import jsonschema
import pytest
import torch

from infer.batch import constraint as constraint_module
from infer.batch.constraint import Constraints
from infer.batch.grammar import Grammar
from infer.request import SamplingParams
from infer.sampling.emission import without_forbidden
from kernels.shape import unpacked
from tests.drafts import checked_tree
from tests.lossless.plain import Answer, answer_all
from tests.pools import check_pool

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["adverb", "adjective", "noun"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
PATTERN = r"(ab|cd){2,6}-[0-9]{3}"
CHOICES = ["adverb", "adjective", "noun", 'quo"te\n']
LARK = 'start: item ("," item){0,3} ";"\nitem: "(" NUMBER ")"\nNUMBER: /[0-9]{1,2}/\n'
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "object": Grammar("json_object"),
    "regex": Grammar("regex", PATTERN),
    "choice": Grammar("choice", json.dumps(CHOICES)),
    "lark": Grammar("lark", LARK),
}
CHOOSING = {"greedy": {}, "seeded": {"temperature": 1.2, "seed": 5}, "without space": {"presence_penalty": 1.0}}
ENGINES = {
    "ngram": {"proposer": "ngram"},
    "suffix": {"proposer": "suffix", "drafts": 6},
    "head chain": {"proposer": "head"},
    "head tree": {"proposer": "head", "shape": {"tree": "beam:4x4:14"}},
    "target itself": {"proposer": "draft_model", "draft_model": "same"},
    "combined": {"proposer": "combined", "shape": {"sources": ["suffix", "head"]}},
}


def holds(grammar: Grammar, text: str) -> bool:
    if grammar.kind == "regex":
        return re.fullmatch(PATTERN, text) is not None
    if grammar.kind == "choice":
        return text in CHOICES
    if grammar.kind == "lark":
        return re.fullmatch(r"\(\d\d?\)(,\(\d\d?\)){0,3};", text) is not None
    jsonschema.validate(json.loads(text), SCHEMA if grammar.kind == "json_schema" else {"type": "object"})
    return True


@pytest.fixture(scope="module")
def cases(prompts, tiny_tokenizer) -> list[tuple[list[int], SamplingParams]]:
    """Every grammar in three ways. A random model emits too much JSON white space; "without space" reaches the end."""
    spaces = {token: -100.0 for token in range(384) if not tiny_tokenizer.decode([token]).strip()}
    return [
        (
            prompts[index % 6],
            SamplingParams(
                max_tokens=60,
                grammar=grammar,
                logprobs=1,
                logit_bias=spaces if name == "without space" else {},
                **choosing,
            ),
        )
        for index, grammar in enumerate(GRAMMARS.values())
        for name, choosing in CHOOSING.items()
    ]


@pytest.fixture(scope="module")
def expected(make_engine, tiny_tokenizer, cases) -> list[Answer]:
    engine = make_engine(proposer="none", max_batch=1, prefix_cache=False, tokenizer=tiny_tokenizer)
    answers = [answer_all(engine, [case])[0] for case in cases]
    complete: set[str] = set()
    for (_, params), answer in zip(cases, answers, strict=True):
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            complete.add(params.grammar.kind)
            assert holds(params.grammar, tiny_tokenizer.decode(answer.token_ids)), answer
    assert complete >= {"json_schema", "regex", "choice", "lark"}  # a random model may write an object for ever
    return answers


@pytest.mark.parametrize("name", ENGINES)
def test_drafts_change_no_byte(make_engine, tiny_tokenizer, cases, expected, name):
    engine = make_engine(**ENGINES[name], tokenizer=tiny_tokenizer, max_batch=16)
    answers = answer_all(engine, cases, arrivals=[0] * 8)
    for case, answer, wanted in zip(cases, answers, expected, strict=True):
        assert answer == wanted, case
    assert engine.stats.speculation.accepted > 0
    check_pool(engine._pool, [])


def test_after_a_pre_emption(make_engine, tiny_tokenizer, cases, expected):
    engine = make_engine(
        proposer="head", tokenizer=tiny_tokenizer, max_batch=8, max_tokens_in_cache=256, prefix_cache=False
    )
    assert answer_all(engine, cases) == expected
    assert engine.stats.preemptions > 0


def test_the_rows_of_a_tree_see_their_own_path(make_engine, tiny_tokenizer):
    """Each row's mask is that of a fresh constraint after its path; forbidden nodes are removed with their subtrees."""
    engine = make_engine(proposer="none", tokenizer=tiny_tokenizer)
    a, b, c, d, zero, dash = (tiny_tokenizer.encode(text)[0] for text in ("a", "b", "c", "d", "0", "-"))
    state = engine.compile(GRAMMARS["regex"])
    paths = [[], [a], [c], [a, b], [c, d], [a, b, a], [c, d, c], [a, b, a, b], [a, b, a, b, dash], [c, zero]]
    masks = unpacked(state.words(paths), 384)
    for path, mask in zip(paths[:-1], masks, strict=False):
        fresh = engine.compile(GRAMMARS["regex"])
        assert not any(fresh.push(token) for token in path)
        assert torch.equal(unpacked(fresh.words([[]]), 384)[0], mask)
    assert masks[0].nonzero().flatten().tolist() == sorted(
        token for token in range(384) if tiny_tokenizer.decode([token]) in ("a", "c", "ab", "cd")
    )
    assert masks[-1].all()  # a forbidden path, which is never reached
    token = torch.tensor([[9, a, c, b, zero, a, b]])
    parent = torch.tensor([[-1, 0, 0, 1, 2, 4, 3]], dtype=torch.int32)

    class Constrained:
        constraint = engine.compile(GRAMMARS["regex"])

    tree = without_forbidden(checked_tree(token, parent, torch.tensor([7])), [Constrained()])
    assert tree.token[0].tolist() == [9, a, c, b]
    assert tree.parent[0].tolist() == [-1, 0, 0, 1]
    assert tree.depth[0].tolist() == [0, 1, 1, 2]
    assert tree.ancestors[0].tolist() == [1, 3, 5, 11]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("json_schema", '{"type": "wibble"}'), "json_schema: type: must be one or a list of null, boolean"),
        (Grammar("regex", "(?=a)b"), "regex: .*look-around"),
        (Grammar("regex", "("), "regex: "),
        (Grammar("lark", "start: nowhere"), "lark: "),
    ],
)
def test_a_bad_grammar_is_its_request_s_own_failure(make_engine, tiny_tokenizer, grammar, message):
    engine = make_engine(proposer="none", tokenizer=tiny_tokenizer)
    with pytest.raises(ValueError, match=message):
        engine.add([1, 2], SamplingParams(grammar=grammar))
    assert not engine.has_work


def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(make_engine, tiny_tokenizer):
    """The first mask of this grammar exceeds the limits on computing it."""
    engine = make_engine(proposer="ngram", tokenizer=tiny_tokenizer)
    hostile = SamplingParams(grammar=Grammar("regex", "(a{1000}){1000}"), max_tokens=8)
    other = SamplingParams(max_tokens=8, ignore_eos=True)
    bad, good = answer_all(engine, [([1, 2], hostile), ([3, 4], other)])
    assert bad.finish_reason == "error"
    assert (good.finish_reason, len(good.token_ids)) == ("length", 8)
    check_pool(engine._pool, [])


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "json_schema: not valid JSON"),
        ("json_schema", "[1]", "must be a JSON object"),
        ("choice", "[]", "list of strings"),
        ("choice", '["a", 1]', "list of strings"),
        ("regex", "", "regex: is empty"),
        ("yaml", "x", "grammar=yaml: must be one of"),
    ],
)
def test_what_is_no_grammar(kind, text, message):
    with pytest.raises(ValueError, match=message):
        Grammar(kind, text)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_what_has_no_effect_beside_a_grammar(other):
    assert SamplingParams(grammar=GRAMMARS["object"], **other) == SamplingParams(grammar=GRAMMARS["object"])


def test_without_a_tokenizer(make_engine):
    with pytest.raises(ValueError, match="no tokenizer"):
        make_engine(proposer="none").add([1], SamplingParams(grammar=GRAMMARS["object"]))


def test_a_step_of_a_grammar_is_limited_in_cpu_time_only(tiny_tokenizer, monkeypatch):
    """Beside busy processes any grammar may take long."""
    monkeypatch.setattr(constraint_module, "STEP_LIMIT_S", 0.1)
    constraint = Constraints(tiny_tokenizer, 384, [0]).compile(Grammar("regex", "a+"))
    mask = constraint._mask

    def waiting(path):
        time.sleep(0.2)
        return mask(path)

    def computing(path):
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return mask(path)

    constraint._mask = waiting
    constraint.words([[]])
    assert constraint.error is None
    constraint._mask = computing
    constraint.words([[]])
    assert constraint.error == "the grammar cannot be followed further: takes more than 0.1 s of CPU time per step"


def test_only_what_stands_behind_the_thought_is_bound(tiny_tokenizer):
    """Any text precedes the mark, numbers of any length and quotes too; behind it they are those of JSON."""
    grammar = Grammar("json_schema", '{"type": "integer"}', after="</think>")
    constraint = Constraints(tiny_tokenizer, 384, [0]).compile(grammar)
    one = tiny_tokenizer.encode("1")[0]
    for token in tiny_tokenizer.encode('a "b {' + "1" * 60 + " </thin </think>\n\n" + "1" * 20):
        assert not constraint.push(token), constraint.error
    count = 20
    while int(constraint.words([[]])[0][one // 32]) >> (one % 32) & 1:
        constraint.push(one)
        count += 1
    assert 38 <= count <= 42
    assert constraint.copy().error is None


def test_text_in_tags_has_quotes_and_dashes_of_its_own(tiny_tokenizer):
    """Only digits are limited there, whatever quotes the text before them has."""
    constraint = Constraints(tiny_tokenizer, 384, [0]).compile(Grammar("tagged_calls", 'start: /[^<]*/ "<"'))
    dash, one = (tiny_tokenizer.encode(text)[0] for text in "-1")
    for token in tiny_tokenizer.encode('5" ' + "-" * 60) + [dash] + [one] * 39:
        assert not constraint.push(token), constraint.error
    for last, expected in ((one, 1), (one, 0)):
        (row,) = constraint.words([[]])
        assert int(row[one // 32]) >> (one % 32) & 1 == expected
        constraint.push(last)
