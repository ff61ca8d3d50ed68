"""Translation of JSON schemas and regular expressions for llguidance, against Python's `re` and `jsonschema`."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from infer.batch.grammar import Grammar
from infer.json_schema.formats import FORMATS
from infer.json_schema.keywords import ANNOTATIONS, ENFORCED, IGNORED
from infer.json_schema.regexes import translate as translate_regex
from infer.json_schema.translation import translate

BYTES = LLTokenizer("byte")
ALPHABET = "aZ_9 -]^.\t\n\u00a0é٣１\x1c"  # characters that classes disagree about


def takes(source: str, text: str) -> bool:
    """Return whether a text is a complete output of a grammar in llguidance's format."""
    matcher = LLMatcher(BYTES, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def accepts(schema: Any, value: Any, **options: Any) -> bool:
    grammar = Grammar("json_schema", json.dumps(schema), **options)
    return takes(grammar.source.text, json.dumps(value, ensure_ascii=False))


CLASSES = st.sampled_from([r"\d", r"\w", r"\s", r"\D", r"\W", r"\S"])
LITERALS = st.sampled_from(["a", "Z", "9", "_", r"\.", r"\-", r"\]", r"\^", r"\t", "é", "&", "~"])
RANGES = st.sampled_from(["a-z", "0-9", "!-~", r"\t-\r", "é-ü"])
MEMBERS = st.lists(CLASSES | LITERALS | RANGES | st.sampled_from(["[", "&&", "--", "~~"]), min_size=1, max_size=4)


def bracketed(members: list[str], negated: bool, minus: str) -> str:
    begin, end = {"first": ("-", ""), "last": ("", "-"), "none": ("", "")}[minus]
    return f"[{'^' if negated else ''}{begin}{''.join(members)}{end}]"


BRACKETS = st.builds(bracketed, MEMBERS, st.booleans(), st.sampled_from(["first", "last", "none"]))
REGEXES = st.recursive(
    CLASSES | LITERALS | BRACKETS | st.just("."),
    lambda inner: st.one_of(
        st.builds("".join, st.lists(inner, min_size=1, max_size=3)),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?P<n{}>{})".format, st.integers(0, 10**6), inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+?", "?", "{2}", "{,2}", "{1,2}"])),
    ),
    max_leaves=5,
)


@pytest.mark.filterwarnings("ignore:Possible (nested set|set)")
@settings(max_examples=300, deadline=None)
@given(REGEXES, st.text(ALPHABET, max_size=4))
def test_a_regular_expression_means_what_python_s_ascii_does(regex: str, text: str) -> None:
    try:
        expected = re.compile(regex, re.ASCII)
    except re.error:  # a bad range, two groups of one name
        return
    (translated,), exact = translate_regex(regex)
    assert exact
    assert takes(LLMatcher.grammar_from_regex(translated), text) == bool(expected.fullmatch(text))


@settings(max_examples=200, deadline=None)
@given(st.text("ab^$()[]{}?*+|\\-=!<>:P#1dwb,&~ué", max_size=20))
def test_no_regular_expression_breaks_the_translation(regex: str) -> None:
    regexes, exact = translate_regex(regex)
    assert regexes or not exact


@pytest.mark.parametrize(
    ("regex", "fitting", "unfit"),
    [
        (r"^(?=.*\d)(?=.*[A-Z])[A-Za-z\d]{3,}$", ["aB1", "1Bab"], ["abc", "B1", "a1b"]),
        (r"^(?!^[-+.]*$)[+-]?\d*\.?\d*$", ["1", "-1.5", ".5"], ["", "-", "+.", "a"]),
        (r"^a|b$", ["ax", "xb"], ["xa"]),
        (r"^[^[\]]+$", ["ab", "^"], ["a[", "]"]),
        (r"^[a&&b]$", ["&", "a"], ["c"]),
        (r"^\cI\0\ud83d\ude00\u{1F600}\x41$", ["\t\0😀😀A"], ["A"]),
        (r"^\<(?<tag>a)(?>b)(?#c)\>$", ["<ab>"], ["ab"]),
        (r"^{x}a{$", ["{x}a{"], ["x"]),
        (r"\Aab\Z", ["ab"], ["abc", "xab"]),
        (r"^[\w-.]+$", ["a-.b"], ["é"]),
        (r"^(?:\p{L}|\p{N})+$", ["é1"], ["-"]),
    ],
)
def test_forms_that_libraries_write(regex: str, fitting: list[str], unfit: list[str]) -> None:
    schema = {"type": "string", "pattern": regex}
    assert translate(schema).remarks == ()
    assert [text for text in fitting if not accepts(schema, text)] == []
    assert [text for text in unfit if accepts(schema, text)] == []


@pytest.mark.parametrize(
    ("regex", "fitting"),
    [
        (r"^(?!00)\d{2}$", ["12"]),
        (r"^(?=a)b|c$", ["c", "xc"]),
        (r"\bword\b", ["a word"]),
        (r"(?<=a)b", ["ab"]),
        (r"^(a|b)\1$", ["aa"]),
    ],
)
def test_what_a_pattern_cannot_enforce_is_said_and_admitted(regex: str, fitting: list[str]) -> None:
    schema = {"type": "string", "pattern": regex}
    (remark,) = translate(schema).remarks
    assert "is not enforced" in remark
    assert [text for text in fitting if not accepts(schema, text)] == []


@pytest.mark.parametrize("length", [10, 10_000])
def test_a_hostile_pattern_takes_linear_time(length: int) -> None:
    for part in ("[", "(?<", "(?=", "(?#", "{1", r"\u{", "[a]", "[\\", "^(?=a)"):
        translate_regex(part * length)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 9999), st.integers(0, 13), st.integers(0, 32))
def test_dates_are_of_the_calendar(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        exists = bool(datetime.date.fromisoformat(text))
    except ValueError:
        exists = False
    pattern = FORMATS["date"]
    assert pattern is not None
    assert bool(re.fullmatch(pattern, text)) == exists


@pytest.mark.parametrize(
    ("format_", "fitting", "unfit"),
    [
        ("date-time", ["2024-02-29T23:59:59Z", "2024-01-01t00:00:00.123456789-23:59"], ["2024-01-01T00:00:00"]),
        ("time", ["00:00:00.1Z", "23:59:59+01:00"], ["24:00:00Z", "00:00:00.1234567890Z", "12:00"]),
        ("duration", ["P1Y2M3D", "PT1H", "P2W", "P1DT999999S"], ["P", "PT", "P1Y2D", "P1234567D", "1D"]),
        ("email", ["a.b@example.org", "a@[127.0.0.1]"], ["a", "@a", f"{'a' * 65}@b", f"a@{'b' * 64}"]),
        ("hostname", ["example.org"], ["-a", ".".join(["a" * 60] * 5)]),
        ("uuid", ["00000000-0000-0000-0000-000000000000"], ["0"]),
        ("json-pointer", ["", "/a/b~1c~0"], ["a", "/~2"]),
        ("relative-json-pointer", ["0", "1/a", "2#"], ["/a", "01"]),
        ("unknown", ["anything"], []),
    ],
)
def test_formats(format_: str, fitting: list[str], unfit: list[str]) -> None:
    schema = {"type": ["string", "null"], "format": format_}
    assert [text for text in [*fitting, None] if not accepts(schema, text)] == []
    assert [text for text in unfit if accepts(schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "fitting", "unfit"),
    [
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]),
        ({"propertyNames": {"type": "string"}, "minProperties": 1}, [{"a": 1}], [{}]),
        ({"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": "a"}}}, [{"a": 1}], [{"b": 1}]),
        (
            {"properties": {"a": {"const": 1}, "b": True}, "propertyNames": {"enum": ["a", "c"]}},
            [{"a": 1, "c": 2}],
            [{"a": 2}, {"b": 1}],
        ),
        ({"maxItems": 2**31 - 1, "maxLength": 1e18, "minItems": 1.0}, [[1]], [[]]),
        (
            {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "unevaluatedProperties": False},
            [{"a": 1}, {"b": 1}],
            [{"c": 1}],
        ),
        ({"allOf": [{"additionalProperties": {}}], "unevaluatedProperties": False}, [{"c": 1}], []),
        ({"prefixItems": [{"const": 1}], "unevaluatedItems": False}, [[1], []], [[1, 2]]),
        ({"properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 1}, [{"b": 1}], [{}]),
        ({"patternProperties": {r"^\d$": {"const": 1}}}, [{"1": 1, "a": 2}], [{"1": 2}]),
        ({"minimum": 1, "exclusiveMinimum": True, "type": "integer"}, [2], [1]),
    ],
)
def test_keywords_that_are_rewritten(schema: Any, fitting: list[Any], unfit: list[Any]) -> None:
    assert translate(schema).remarks == ()
    draft = jsonschema.Draft4Validator if schema.get("exclusiveMinimum") is True else jsonschema.Draft202012Validator
    for value in fitting + unfit:
        assert draft(schema).is_valid(value) == (value in fitting)
        assert accepts(schema, value) == (value in fitting)


WORDS = st.sampled_from([*ENFORCED, *IGNORED, *ANNOTATIONS, "a"])
SMALL = st.sampled_from([None, True, False, 0, -1, 2.5, 2**70, "", "a", "#", "#/a", "#a", "string", "object", "("])
NODES = st.recursive(
    SMALL, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5), max_leaves=12
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(WORDS, NODES, min_size=1, max_size=5))
@example({"unevaluatedProperties": False, "$ref": "#/a", "a": {"allOf": 3}})
@example({"unevaluatedProperties": False, "$ref": "#/a", "a": {"$ref": 5}})
@example({"unevaluatedProperties": False, "$ref": "#/a", "a": {"properties": [{}]}})
@example({"propertyNames": {"$ref": "#/a"}, "a": {"$ref": "#/a"}})
def test_what_is_malformed_is_an_error_in_words(schema: Any) -> None:
    message = ""
    try:
        json.dumps(translate(schema).schema)
    except ValueError as error:
        message = str(error)
    assert not message or any(word in message for word in ("must be", "is not in this schema", "beyond 2^53"))


def test_closed_objects_have_the_declared_properties() -> None:
    inner = {"properties": {"b": {}}}
    schema = {"properties": {"a": inner}, "required": ["a"], "$defs": {"x": inner}}
    assert accepts(schema, {"a": {"c": 1}, "d": 1})
    assert accepts(schema, {"a": {"b": 1}}, closed=True)
    assert not accepts(schema, {"a": {"c": 1}}, closed=True)
    assert not accepts(schema, {"a": {}, "d": 1}, closed=True)
    assert accepts(schema | {"additionalProperties": True}, {"a": {}, "d": 1}, closed=True)


def test_remarks_hold_no_text_of_a_client_s() -> None:
    secret = "line\nbreak of a client's " * 9
    schema = {
        "format": secret,
        "pattern": f"(?!{secret})",
        "not": {"const": secret},
        "propertyNames": {"format": "uri"},
    }
    remarks = translate(schema).remarks
    assert len(remarks) == 3
    assert not any("client" in remark for remark in remarks)
