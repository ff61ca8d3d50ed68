"""How rows of every form are parsed, and the errors for bad ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.tokenizer import Tokenizer
from train.config import FilesDataConfig
from train.data.examples import Example, parse_row

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def parse(row: Any, tokenizer: Tokenizer, **settings: Any) -> Example:
    return parse_row(row, FilesDataConfig(name="files", path="x.jsonl", **settings), tokenizer)[1]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER], "prompt": "of ultrachat, which counts less", "id": 3},
        {"messages": [ANSWER, USER, ANSWER]},  # a greeting before the first user message
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {**ANSWER, "tool_calls": None}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"conversations": [{"from": "user", "value": "hi"}, {"role": "assistant", "content": "yes"}], "tools": ""},
        {"prompt": "hi", "response": "yes", "text": None},
        {"prompt": "hi", "response": "yes", "messages": [], "conversations": ""},
    ],
)
def test_conversations_in_every_form(row: dict, tiny_tokenizer: Tokenizer) -> None:
    assert parse(row, tiny_tokenizer) == Example(messages=(USER, ANSWER))


def test_turns_are_what_a_user_says(tiny_tokenizer: Tokenizer) -> None:
    expected = Example(messages=(USER, {"role": "user", "content": "and?"}), questions=True)
    assert parse({"turns": ["hi", "and?"]}, tiny_tokenizer) == expected
    assert parse({"turns": [{"content": "hi"}, {"content": "and?"}]}, tiny_tokenizer) == expected
    assert parse({"prompt": ["hi", "and?"]}, tiny_tokenizer) == expected
    assert parse({"turns": [USER, ANSWER]}, tiny_tokenizer) == Example(messages=(USER, ANSWER))
    assert (
        parse({"turns": ["hi"]}, tiny_tokenizer) == parse({"prompt": "hi"}, tiny_tokenizer) == Example(messages=(USER,))
    )


def test_columns_of_another_name(tiny_tokenizer: Tokenizer) -> None:
    columns = {"prompt": "question", "response": "answer"}
    assert parse({"question": "hi", "answer": "yes"}, tiny_tokenizer, columns=columns) == Example(
        messages=(USER, ANSWER)
    )
    several = {"prompt": ["question", "instruction"], "response": ["answer", "output"]}
    for names in (("question", "answer"), ("instruction", "output")):
        row = dict(zip(names, ("hi", "yes"), strict=True))
        assert parse(row, tiny_tokenizer, columns=several) == Example(messages=(USER, ANSWER))


def test_tools_and_their_calls_are_kept(tiny_tokenizer: Tokenizer) -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "sky"}}'},
            {"from": "observation", "value": "blue"},
            {"from": "gpt", "value": "fine"},
        ],
        "system": "Be brief.",
        "tools": json.dumps([{"name": "look"}]),
    }
    example = parse(row, tiny_tokenizer)
    assert [message["role"] for message in example.messages] == ["system", "user", "assistant", "tool", "assistant"]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    assert example.messages[2]["tool_calls"] == [call]
    assert example.tools == ({"type": "function", "function": {"name": "look"}},)


def test_plain_texts(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("def f(x): return x")
    assert parse({"text": "def f(x): return x"}, tiny_tokenizer, prompt_tokens=4).ids == tuple(ids[:4])
    example = parse({"text": "def f(x): return x"}, tiny_tokenizer, responses="given")
    assert example == Example(ids=tuple(ids), loss_mask=(False, *[True] * (len(ids) - 1)), prompt_length=len(ids))
    pair = {"prompt": "def f", "response": "(x)"}
    assert parse(pair, tiny_tokenizer, chat_template=False).ids == tuple(tiny_tokenizer.encode("def f"))
    example = parse(pair, tiny_tokenizer, chat_template=False, responses="given")
    prompt, response = tiny_tokenizer.encode("def f"), tiny_tokenizer.encode("(x)")
    assert example.ids == (*prompt, *response, 0)
    assert example.loss_mask == (*[False] * len(prompt), *[True] * (len(response) + 1))
    assert example.prompt == tuple(prompt)


def test_rows_with_the_same_questions_have_one_key(tiny_tokenizer: Tokenizer) -> None:
    first_row, second_row = ({"messages": [USER, {**ANSWER, "content": text}]} for text in ("yes", "no"))
    examples = [parse(row, tiny_tokenizer) for row in (first_row, second_row)]
    assert examples[0].opening_key == examples[1].opening_key
    assert examples[0].prompt_key == examples[1].prompt_key
    assert examples[0].key != examples[1].key
    system, more = {"role": "system", "content": "be brief"}, {"role": "user", "content": "and then?"}
    first, longer, with_system = (
        parse({"messages": turns}, tiny_tokenizer) for turns in ([USER], [USER, ANSWER, more], [system, USER])
    )
    assert first.opening_key == longer.opening_key != with_system.opening_key
    assert first.prompt_key != longer.prompt_key
    armed = parse({"messages": [USER], "tools": [{"name": "look"}]}, tiny_tokenizer)
    assert armed.opening_key != first.opening_key
    masked = [parse({"input_ids": [5, 6, *end], "loss_mask": [0, 0, 1, 1]}, tiny_tokenizer) for end in ([7, 8], [9, 9])]
    assert masked[0].opening_key == masked[1].opening_key != parse({"text": "a"}, tiny_tokenizer).opening_key


def test_a_text_that_is_learnt_whole_is_known_by_its_beginning(tiny_tokenizer: Tokenizer) -> None:
    """The key covers the first `prompt_tokens` tokens, not the first one alone, which nearly every text shares."""
    texts = ["def f(x): return x", "def g(y): return y", "def f(x): pass"]
    for form in ("text", "input_ids"):
        keys = []
        for text in texts:
            ids = tiny_tokenizer.encode(text)
            row = {"text": text} if form == "text" else {"input_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1)}
            example = parse(row, tiny_tokenizer, responses="given", prompt_tokens=5)
            assert example.prompt == tuple(ids[:5])
            keys.append(example.opening_key)
        assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ([1], "must be an object with named fields"),
        ({"q": "a"}, "must hold one of input_ids, messages, conversations, turns, prompt, text; it holds q"),
        ({"prompt": 5}, "prompt must be a text"),
        ({"prompt": "a", "response": 5}, "response must be a text"),
        ({"messages": "hi"}, "messages must be a list of"),
        ({"messages": [{"content": "a"}]}, "messages must be a list of"),
        ({"messages": [ANSWER]}, "messages hold no turn to answer"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role 'robot'; must be one of system"),
        ({"messages": [{"role": None, "content": "a"}]}, "messages must be a list of"),
        ({"messages": [{"role": "user"}]}, "content must be a text (message 1)"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content has parts that are no text"),
        ({"conversations": ["hi"]}, "conversations must be a list of"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "function_call holds no JSON"),
        ({"turns": 5}, "turns must be a list of texts"),
        ({"turns": []}, "turns hold no turn to answer"),
        ({"turns": [1]}, "turns must be a text"),
        ({"prompt": "a", "tools": "{"}, "tools is a text and no JSON"),
        ({"prompt": "a", "system": ["Be brief."]}, "system must be a text"),
        ({"text": "a", "system": "Be brief."}, "the column system has no place beside a text without a chat template"),
        ({"input_ids": [1, 999999], "loss_mask": [0, 1]}, "input_ids must be a list of token ids below 384"),
        ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "input_ids must be a list of token ids below 384"),
        ({"input_ids": [1, 2, 3]}, "loss_mask must be a list of 0 and 1, as long as input_ids"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "loss_mask must be a list of 0 and 1, as long as input_ids"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, "loss_mask leaves nothing to learn"),
    ],
)  # fmt: skip
def test_bad_rows_say_what_is_wrong(row: Any, complaint: str, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # compared below
        parse(row, tiny_tokenizer)
    assert str(error.value).startswith(complaint)


FORMS: dict[str, Any] = {
    "messages": [USER, ANSWER],
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}],
    "turns": ["hi"],
    "prompt": "hi",
}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("column", ["system", "sp"])
def test_a_system_column_is_the_system_turn_once(form: str, column: str, tiny_tokenizer: Tokenizer) -> None:
    settings = {} if column == "system" else {"columns": {"system": "sp"}}
    row = {form: FORMS[form], "response": "yes", column: "Be brief."}
    turns = parse({form: FORMS[form], "response": "yes"}, tiny_tokenizer).messages
    assert parse(row, tiny_tokenizer, **settings).messages == (SYSTEM, *turns)
    for nothing in (None, "", " \n"):
        assert parse({**row, column: nothing}, tiny_tokenizer, **settings).messages == turns
    assert parse({**row, form: json.dumps(FORMS[form])}, tiny_tokenizer, **settings).messages[0] == SYSTEM


@pytest.mark.parametrize("role", ["system", "developer"])
def test_two_system_turns_are_one_text_or_an_error(role: str, tiny_tokenizer: Tokenizer) -> None:
    for turn in ({"role": role, "content": "Be brief."}, {"role": role, "content": [{"text": "Be brief.\n"}]}):
        row = {"messages": [turn, USER, ANSWER], "system": "Be brief."}
        assert [message["role"] for message in parse(row, tiny_tokenizer).messages] == [role, "user", "assistant"]
    row = {"conversations": [{"from": role, "value": "Be long."}, *FORMS["conversations"]], "system": "Be brief."}
    with pytest.raises(ValueError, match=r"the column system and the system turn in conversations are different texts"):
        parse(row, tiny_tokenizer)


def test_a_greeting_before_the_first_question_is_dropped(tiny_tokenizer: Tokenizer) -> None:
    """Wherever the system turn is given."""
    expected = Example(messages=(SYSTEM, USER, ANSWER))
    assert parse({"messages": [SYSTEM, ANSWER, USER, ANSWER]}, tiny_tokenizer) == expected
    assert parse({"messages": [ANSWER, USER, ANSWER], "system": "Be brief."}, tiny_tokenizer) == expected


IMAGE = {"role": "user", "content": [{"type": "text", "text": "this?"}, {"type": "image_url", "image_url": {}}]}


@pytest.mark.parametrize(
    ("form", "late", "why"),
    [
        ("messages", IMAGE, "content has parts that are no text"),
        ("messages", {"role": "user", "content": 5}, "content must be a text"),
        ("messages", {"role": "critic", "content": "hm"}, "role 'critic'; must be one of system"),
        ("messages", {"role": "assistant", "tool_calls": "{"}, "tool_calls is a text and no JSON"),
        ("messages", "so", 'messages must be a list of {"role": ..., "content": ...}'),
        ("conversations", {"from": "human", "value": None}, "content must be a text"),
        ("conversations", {"from": "function_call", "value": "x"}, "function_call holds no JSON"),
        ("turns", {"content": [{"type": "image"}]}, "turns must be a text"),
    ],
)
def test_the_turns_before_an_unusable_one_are_used(form: str, late: Any, why: str, tiny_tokenizer: Tokenizer) -> None:
    example = parse({form: [*FORMS[form], late, *FORMS[form]]}, tiny_tokenizer)
    assert example.messages == parse({form: FORMS[form]}, tiny_tokenizer).messages
    assert example.cut is not None
    assert example.cut.startswith(why)
    assert example.cut.endswith(f"(message {len(FORMS[form]) + 1})")
    with pytest.raises(ValueError) as error:  # noqa: PT011  # compared below
        parse({form: [late, *FORMS[form]]}, tiny_tokenizer)
    assert str(error.value).endswith("(message 1)")
