"""JSON written by models is read strictly, even if truncated, and what is sent to clients is JSON to every parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.json_text import (
    LARGEST,
    MAX_DEPTH,
    MAX_DIGITS,
    JsonScanner,
    depth,
    elements,
    members,
    read,
    value_end,
    without_lone_surrogates,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
INDENTS = st.sampled_from([None, 1])


@settings(max_examples=80, deadline=None)
@given(value=VALUES, indent=INDENTS, after=st.sampled_from(["", ", x", "}", "]"]))
def test_a_value_ends_where_it_ends(value: Any, indent: int | None, after: str) -> None:
    text = json.dumps(value, indent=indent)
    assert read(text) == value
    if isinstance(value, dict | list | str):
        assert value_end(text + after, 0) == len(text)
        assert all(value_end(text[:cut], 0) is None for cut in range(len(text)))
    if isinstance(value, dict | list):
        assert JsonScanner().end(text + after, 0) == len(text)


@settings(max_examples=80, deadline=None)
@given(value=st.dictionaries(st.text(max_size=4), VALUES, max_size=3), indent=INDENTS, data=st.data())
def test_members_of_an_object_that_breaks_off(value: dict[str, Any], indent: int | None, data: Any) -> None:
    text = json.dumps(value, indent=indent)
    assert [(name, json.loads(inner), complete) for name, inner, complete in members(text)] == [
        (name, inner, True) for name, inner in value.items()
    ]
    listed = list(value.values())
    assert [json.loads(inner) for inner, _ in elements(json.dumps(listed, indent=indent))] == listed
    parsed = list(members(text[: data.draw(st.integers(1, len(text)))]))
    assert [name for name, _, _ in parsed] == list(value)[: len(parsed)]
    assert all(complete for _, _, complete in parsed[:-1])
    for name, inner, complete in parsed:
        if complete:
            assert json.loads(inner) == value[name]
        else:
            assert indent or json.dumps(value[name]).startswith(inner)


@pytest.mark.parametrize("text", ['{"a" 1}', '{"a": 1 "b": 2}', "{a: 1}", '{"a": 1]', '{"\\q": 1}'])
def test_what_is_no_object_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="no colon|no name|neither|escape"):
        list(members(text))


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', "{'a': 1}", '{"a": "\n"}', "01", "[1,]", ""])
def test_what_is_not_strictly_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="JSON|Expect|Illegal|Invalid|Extra"):
        read(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e999", LARGEST),
        ("-1e999", -LARGEST),
        ("1" * (MAX_DIGITS + 1), LARGEST),
        ("1" * MAX_DIGITS, int("1" * MAX_DIGITS)),
        ("-0.5", -0.5),
    ],
    ids=["large", "small", "long", "as long as may be", "plain"],
)
def test_every_number_is_one_to_every_parser(text: str, value: float) -> None:
    assert read(text) == value
    assert json.loads(json.dumps(read(text), allow_nan=False)) == value


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded_and_nothing_recurses(opening: str, closing: str) -> None:
    def nested(levels: int) -> str:
        return opening * levels + "1" + closing * levels

    assert depth(read(nested(MAX_DEPTH))) == MAX_DEPTH
    for levels in (MAX_DEPTH + 1, 5000, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            read(nested(levels))
        assert JsonScanner().end(nested(levels), 0) == len(nested(levels))


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        (r'"\ud83d"', r'"\ufffd"'),
        (r'"\uDE00\uD83D"', r'"\ufffd\ufffd"'),
        (r'"\ud83d\ude00"', "="),
        (r'"\ud83d\ud83d\ude00"', r'"\ufffd\ud83d\ude00"'),
        (r'"\\ud83d \\\ud83d \u00e9 \"\n"', r'"\\ud83d \\\ufffd \u00e9 \"\n"'),
        (r'"\ud8', "="),
        (r'"\ud83d\u', r'"\ufffd\u'),
        ("plain \U0001f600 \ue000", "="),
        ("half \ud83d é \ude00", "half \ufffd é \ufffd"),
    ],
)
def test_half_pairs_are_replaced(text: str, mended: str) -> None:
    assert without_lone_surrogates(text) == (text if mended == "=" else mended)


@settings(max_examples=200, deadline=None)
@given(units=st.lists(st.sampled_from(["\\ud83d", "\\ude00", "\\\\", "\\n", "u", "\\u0041", "d83d", "é"]), max_size=12))
def test_what_is_mended_is_utf_8_and_means_the_same(units: list[str]) -> None:
    text = json.dumps("")[0] + "".join(units) + '"'
    mended = without_lone_surrogates(text)
    value = json.loads(mended)
    value.encode()
    assert value == json.loads(text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert without_lone_surrogates(mended) == mended
