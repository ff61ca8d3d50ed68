"""Decoded text continues its prompt, however the tokenizer treats a first word: at once, streamed, and as bytes."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import CONTEXT, Tokenizer
from tests.conftest import train_tiny_tokenizer
from tests.vocabularies import MAKERS, backend_of

KINDS = ("byte_level", *MAKERS)
BY_BYTES = ("byte_level", "llama", "mistral", "gemma")  # these can encode any character, as bytes if necessary
WORDS = ["Hello", " world", " the", "  ", " ", "\n", "here", ", ", "é", " é", "日本", "🎉", "\ufffd", " \ufffd", "<s>"]


@cache
def tokenizer_for(kind: str) -> Tokenizer:
    return Tokenizer(train_tiny_tokenizer() if kind == "byte_level" else backend_of(kind))


def only(kind: str, text: str) -> int:
    """Return the id of the token that stands for this text inside a longer one."""
    return tokenizer_for(kind).token_bytes.index(text.encode())


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[int], int]:
    """Draw a kind of tokenizer, the ids of a text, and a place in them, often inside a character."""
    kind = draw(st.sampled_from(KINDS))
    ids = tokenizer_for(kind).encode("".join(draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12))))
    return kind, ids, draw(st.integers(0, len(ids)))


@settings(max_examples=300, deadline=None)
@given(case=cut_texts())
def test_a_prompt_and_its_completion_are_the_text_of_both(case: tuple[str, list[int], int]) -> None:
    kind, ids, place = case
    tokenizer, prompt, output = tokenizer_for(kind), ids[:place], ids[place:]
    before = tokenizer.stream()
    shown = before.push(prompt)
    stream = tokenizer.stream(context=prompt)
    pieces = [stream.push([token]) for token in output]
    text = "".join(pieces) + stream.flush()
    assert text == tokenizer.decode(output, context=prompt) or not prompt
    assert shown + text == tokenizer.decode(ids) or not output
    halved = "\ufffd" in before.flush()
    # byte-fallback decoders garble the bytes before an incomplete character too
    assert tokenizer.decode(prompt).startswith(shown) or halved
    if kind != "unigram" and kind != "word_piece" and "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)  # no incomplete character is emitted


@settings(max_examples=200, deadline=None)
@given(case=cut_texts())
def test_the_bytes_of_tokens_are_the_text(case: tuple[str, list[int], int]) -> None:
    kind, ids, _ = case
    tokenizer = tokenizer_for(kind)
    table, context = tokenizer.token_bytes, [only(kind, "l")]  # some token before the text
    plain = [token for token in ids if token not in tokenizer.special_ids]
    assert b"".join(table[token] for token in plain).decode() == tokenizer.decode(plain, context=context)


@pytest.mark.parametrize("kind", KINDS)
def test_the_space_before_a_first_word(kind: str) -> None:
    tokenizer = tokenizer_for(kind)
    hello, world = (tokenizer.encode(text, add_special_tokens=False) for text in ("Hello", "Hello world"))
    assert tokenizer.decode(world[len(hello) :], context=tokenizer.encode("Hello")) == " world"
    assert tokenizer.decode(world) == "Hello world"


@pytest.mark.parametrize("kind", BY_BYTES)
def test_a_character_belongs_to_the_text_that_finishes_it(kind: str) -> None:
    tokenizer = tokenizer_for(kind)
    party = tokenizer.encode("Hello 🎉", add_special_tokens=False)
    assert tokenizer.decode(party[-2:], context=party[:-2]) == "🎉"
    stream = tokenizer.stream(context=party[:-2])
    assert [stream.push([token]) for token in party[-2:]] == ["", "🎉"]
    assert tokenizer.stream(context=party[:-2]).flush() == ""  # nothing was pushed
    assert tokenizer.decode([only(kind, "l")], context=party[:-2]) == "\ufffdl" or kind != "byte_level"


@pytest.mark.parametrize("kind", BY_BYTES)
@pytest.mark.parametrize("length", [1, 7, 400])
def test_only_the_end_of_a_prompt_is_read(kind: str, length: int) -> None:
    """However long the prompt is, and at whichever byte of a character it ends."""
    tokenizer = tokenizer_for(kind)
    party = tokenizer.encode("🎉", add_special_tokens=False)[-4:]
    for cut in range(len(party)):
        prompt = tokenizer.encode("Hello", add_special_tokens=False) + party * length + party[:cut]
        stream = tokenizer.stream(context=prompt)
        assert len(stream._shown) + len(stream._held) <= CONTEXT + 3
        assert stream.push(party[cut:]) == "🎉", cut
        assert stream.push([only(kind, "l")]) == "l"


@pytest.mark.parametrize("kind", BY_BYTES)
def test_bytes_that_never_make_a_character_are_not_kept(kind: str) -> None:
    tokenizer = tokenizer_for(kind)
    table = tokenizer.token_bytes
    for byte in (b"\xe2", b"\x82", b"\xf0"):
        stream, token = tokenizer.stream(context=tokenizer.encode("Hello")), table.index(byte)
        pieces = [stream.push([token]) for _ in range(50)]
        assert len(stream._held) <= 3
        assert "".join(pieces) + stream.flush() == "\ufffd" * 50


def test_special_tokens_at_the_end_of_a_prompt_are_no_text() -> None:
    tokenizer = tokenizer_for("llama")
    world = tokenizer.encode("Hello world", add_special_tokens=False)[-1:]
    assert tokenizer.decode(world) == "world"
    end = sorted(tokenizer.special_ids)[-1]
    prompt = tokenizer.encode("Hello") + [end] * 9
    assert tokenizer.decode([*world, end], context=prompt) == " world"
    assert tokenizer.decode([end, *world], context=prompt, with_special=True) == "</s> world"
    assert tokenizer.decode(world, context=[end]) == "world"  # no text before it: the text starts here


def test_ids_that_no_token_has_are_no_text() -> None:
    """A padded vocabulary has more ids than its tokenizer."""
    tokenizer = tokenizer_for("llama")
    world = tokenizer.encode("Hello world", add_special_tokens=False)[-1]
    assert tokenizer.decode([10**6, world, 10**6], context=[*tokenizer.encode("Hello"), 10**6]) == " world"


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(BY_BYTES), words=st.lists(st.sampled_from(WORDS), min_size=2, max_size=8), place=st.integers(1)
)
def test_a_text_that_goes_on_has_the_ids_of_the_whole(kind: str, words: list[str], place: int) -> None:
    tokenizer, place = tokenizer_for(kind), 1 + place % (len(words) - 1)
    before, text = "".join(words[:place]), "".join(words[place:])
    prompt, ids = tokenizer.encode(before), tokenizer.encode(before + text)
    if prompt and ids[: len(prompt)] == prompt:  # otherwise a token spans the boundary
        assert tokenizer.encode(text, context=prompt) == ids[len(prompt) :], (kind, before, text)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_piece"])
def test_a_text_that_goes_on_gets_no_further_space(kind: str) -> None:
    tokenizer = tokenizer_for(kind)
    prompt = tokenizer.encode("here [/INST]")
    assert tokenizer.decode(tokenizer.encode(" Hello world", context=prompt), context=prompt) == " Hello world"
    if kind != "unigram":  # it puts a space before every text
        assert tokenizer.decode(tokenizer.encode("Hello", context=prompt), context=prompt) == "Hello"
