"""Token ids and loss masks of conversations: only what the target generated is learnt, whatever the template does."""

from __future__ import annotations

from typing import Any

import pytest

from models.tokenizer import Tokenizer
from tests.vocabularies import backend_of
from train.data.dialogue import Dialogue, Row, TooLong, first_prompt, provided_dialogue
from train.data.examples import Example

PLAIN = (
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}!{{ m.tool_calls[0].function.name }}"
    "{% endif %}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# drops the reasoning of earlier turns, as Qwen3's does
STRIPS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# opens a reasoning span that its history never shows, as DeepSeek-R1's and QwQ's do
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer(
        tokenizer.backend, eos_ids=tokenizer.eos_ids, chat_template=template, special_tokens=tokenizer.special_tokens
    )


def spans(tokenizer: Tokenizer, row: Row) -> list[str]:
    """Return the texts under the loss mask, with "." for the end of text."""
    groups, last = [], False
    for token, flag in zip(row.ids, row.loss_mask, strict=True):
        if flag:
            if not last:
                groups.append([])
            groups[-1].append(token)
        last = flag
    return ["".join("." if token == 0 else tokenizer.decode([token]) for token in span) for span in groups]


def converse(dialogue: Dialogue, tokenizer: Tokenizer, *responses: str) -> list[str]:
    """Play the target with `responses` and return the prompts that it received."""
    prompts, remaining = [], list(responses)
    while (prompt := dialogue.next_prompt()) is not None:
        prompts.append(tokenizer.backend.decode(prompt, skip_special_tokens=False))
        dialogue.take([*tokenizer.encode(remaining.pop(0)), 0])
    assert not remaining
    return prompts


def test_turn_by_turn_on_its_own_history_is_one_row(tiny_tokenizer: Tokenizer) -> None:
    tokenizer = with_template(tiny_tokenizer, PLAIN)
    example = Example(messages=(user("a?"), assistant("of the data"), user("b?"), assistant("of the data"), user("c?")))
    dialogue = Dialogue(example, tokenizer, longest_prompt=200)
    prompts = converse(dialogue, tokenizer, " one", " two", " three")
    assert prompts[2] == (
        "<user>a?<|endoftext|>\n<assistant> one<|endoftext|>\n<user>b?<|endoftext|>\n<assistant> two<|endoftext|>\n"
        "<user>c?<|endoftext|>\n<assistant>"
    )
    (row,) = dialogue.rows
    assert spans(tokenizer, row) == [" one.", " two.", " three."]
    assert tokenizer.backend.decode(row.ids, skip_special_tokens=False) == prompts[2] + " three<|endoftext|>"


def test_a_template_that_rewrites_history_gives_a_row_per_turn(tiny_tokenizer: Tokenizer) -> None:
    tokenizer = with_template(tiny_tokenizer, STRIPS)
    example = Example(messages=(user("a?"), user("b?"), assistant("x"), user("c?"), assistant("x")))
    dialogue = Dialogue(example, tokenizer, longest_prompt=200)
    prompts = converse(dialogue, tokenizer, "hm</think> one", " two")
    assert "hm" not in prompts[1]
    assert [spans(tokenizer, row) for row in dialogue.rows] == [["hm</think> one."], [" two."]]
    for row, prompt in zip(dialogue.rows, prompts, strict=True):
        assert tokenizer.backend.decode(row.ids, skip_special_tokens=False).startswith(prompt)


def test_ids_that_read_back_otherwise_are_never_rendered_again(tiny_tokenizer: Tokenizer) -> None:
    """The target may generate "an" as two tokens where the tokenizer makes one: the generated ids are learnt."""
    tokenizer = with_template(tiny_tokenizer, PLAIN)
    odd = [tokenizer.encode(letter)[0] for letter in "return"]
    assert tokenizer.encode("return") != odd
    dialogue = Dialogue(Example(messages=(user("a?"), user("b?"))), tokenizer, longest_prompt=200)
    first = dialogue.next_prompt()
    assert first is not None
    dialogue.take([*odd, 0])
    assert dialogue.next_prompt() is None  # two user messages in a row are one prompt
    assert dialogue.rows[0].ids == [*first, *odd, 0]

    dialogue = Dialogue(Example(messages=(user("a?"), assistant("x"), user("b?"))), tokenizer, longest_prompt=200)
    first = dialogue.next_prompt()
    assert first is not None
    dialogue.take([*odd, 0])
    second = dialogue.next_prompt()
    assert second is not None
    assert second[: len(first)] == first
    assert odd != second[len(first) : len(first) + len(odd)]
    dialogue.take([7, 0])
    assert [row.ids for row in dialogue.rows] == [[*first, *odd, 0], [*second, 7, 0]]
    assert [sum(row.loss_mask) for row in dialogue.rows] == [7, 2]


def test_calls_of_tools_stay_with_their_results(tiny_tokenizer: Tokenizer) -> None:
    tokenizer = with_template(tiny_tokenizer, PLAIN)
    call = assistant("", tool_calls=[{"type": "function", "function": {"name": "look"}}])
    messages = (user("a?"), call, {"role": "tool", "content": "blue"}, assistant("fine"))
    example = Example(messages=messages, tools=({"type": "function", "function": {"name": "look"}},))
    dialogue = Dialogue(example, tokenizer, longest_prompt=200)
    prompts = converse(dialogue, tokenizer, "so")
    assert prompts == [
        "[1 tools]<user>a?<|endoftext|>\n<assistant>!look<|endoftext|>\n<tool>blue<|endoftext|>\n<assistant>"
    ]
    assert spans(tokenizer, dialogue.rows[0]) == ["so."]
    (row,) = provided_dialogue(example, tokenizer, 200).rows
    assert spans(tokenizer, row) == ["!look.", "fine."]


@pytest.mark.parametrize(("template", "rows"), [(PLAIN, [["one.", "two."]]), (STRIPS, [["hm</think>one."], ["two."]])])
def test_given_answers(template: str, rows: list[list[str]], tiny_tokenizer: Tokenizer) -> None:
    tokenizer = with_template(tiny_tokenizer, template)
    thought = "hm</think>" if template is STRIPS else ""
    messages = (user("a?"), assistant(f"{thought}one"), user("b?"), assistant("two"), user("c?"))
    actual = provided_dialogue(Example(messages=messages), tokenizer, 200).rows
    assert [spans(tokenizer, row) for row in actual] == rows


def test_given_answers_behind_a_reasoning_span(tiny_tokenizer: Tokenizer) -> None:
    """A reasoning span in the data is learnt after the prompt of serving; without one, none of its tokens is added."""
    tokenizer = with_template(tiny_tokenizer, THINKS)

    def texts(*responses: str) -> list[tuple[str, list[str]]]:
        turns = [turn for number, text in enumerate(responses) for turn in (user(f"{number}?"), assistant(text))]
        rows = provided_dialogue(Example(messages=tuple(turns)), tokenizer, 200).rows
        return [(tokenizer.backend.decode(row.ids, skip_special_tokens=False), spans(tokenizer, row)) for row in rows]

    end = "<|endoftext|>"
    first = f"<user>0?{end}\n<assistant>"
    assert texts("<think>hm</think>one", "<think>so</think>two") == [
        (f"{first}<think>hm</think>one{end}", ["hm</think>one."]),
        (f"{first}one{end}\n<user>1?{end}\n<assistant><think>so</think>two{end}", ["so</think>two."]),
    ]
    # "<the" begins like the span that the prompt opens, but belongs to the response
    assert texts("<the one>", "two") == [
        (f"{first}<the one>{end}\n<user>1?{end}\n<assistant>two{end}", ["<the one>.", "two."])
    ]
    assert texts("one", "<think>so</think>two") == [
        (f"{first}one{end}\n<user>1?{end}\n<assistant><think>so</think>two{end}", ["one.", "so</think>two."])
    ]


def test_turns_before_one_that_cannot_be_told_apart_are_kept(tiny_tokenizer: Tokenizer) -> None:
    """The template replaces the third message by "(hurry)" once an answer follows it."""
    rewrites = PLAIN.replace("{{ m.content }}", "{{ '(hurry)' if loop.index == 3 and not loop.last else m.content }}")
    tokenizer = with_template(tiny_tokenizer, rewrites)
    messages = (user("a?"), assistant("one"), user("b?"), assistant("two"))
    (row,) = provided_dialogue(Example(messages=messages), tokenizer, 200).rows
    assert spans(tokenizer, row) == ["one."]


def test_what_cannot_be_learnt_is_said(tiny_tokenizer: Tokenizer) -> None:
    tokenizer = with_template(tiny_tokenizer, PLAIN)
    with pytest.raises(TooLong, match=r"the prompt has \d+ tokens; 1 to 5 are possible"):
        first_prompt(Example(messages=(user("a long question"),)), tokenizer, 5)
    with pytest.raises(ValueError, match="the row holds no answer of two tokens"):
        provided_dialogue(Example(messages=(user("a?"),)), tokenizer, 200)
    broken = with_template(tiny_tokenizer, "{% if add_generation_prompt %}x{% endif %}{{ messages[0].content }}")
    with pytest.raises(ValueError, match="does not continue its own prompt"):
        provided_dialogue(Example(messages=(user("a?"), assistant("b"))), broken, 200)


def test_a_conversation_that_grows_too_long_ends_there(tiny_tokenizer: Tokenizer) -> None:
    tokenizer = with_template(tiny_tokenizer, PLAIN)
    example = Example(messages=(user("a?"), assistant("x"), user("b " * 50)))
    dialogue = Dialogue(example, tokenizer, longest_prompt=60)
    assert len(converse(dialogue, tokenizer, "one")) == 1
    assert dialogue.cut
    assert [spans(tokenizer, row) for row in dialogue.rows] == [["one."]]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma"])
def test_a_given_answer_has_the_ids_that_serving_would_see(kind: str) -> None:
    """Holds for tokenizers that put a space before a text's first word too: a response is not a text by itself."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
        "{% endif %}{% endfor %}"
    )
    backend = backend_of(kind)
    tokenizer = Tokenizer(backend, eos_ids=[2], chat_template=template, special_tokens={"eos_token": "</s>"})
    talk = (user("Hello"), assistant("the world"), user("here"), assistant("Hello world"))
    (row,) = provided_dialogue(Example(messages=talk), tokenizer, 200).rows
    text = tokenizer.render_chat(list(talk), generation_prompt=False)
    assert row.ids == tokenizer.encode(text, add_special_tokens=False)
    learnt = [token for token, flag in zip(row.ids, row.loss_mask, strict=True) if flag]
    responses = backend.decode(learnt, skip_special_tokens=False).split("</s>")
    assert [response.strip() for response in responses] == ["the world", "Hello world", ""]
