"""Text goes on after its prompt, whatever the tokenizer does to a first word: in one piece, in pieces, and in bytes."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import CONTEXT, Tokenizer
from tests.conftest import train_tiny_tokenizer
from tests.vocabularies import MAKERS, backend_of

KINDS = ("byte_level", *MAKERS)
BY_BYTES = ("byte_level", "llama", "mistral", "gemma")  # any character is written, as bytes if need be
WORDS = ["Hello", " world", " the", "  ", " ", "\n", "here", ", ", "é", " é", "日本", "🎉", "\ufffd", " \ufffd", "<s>"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(train_tiny_tokenizer() if kind == "byte_level" else backend_of(kind))


def only(kind: str, text: str) -> int:
    """The id that is this text inside of a longer one."""
    return tokenizer(kind).token_bytes.index(text.encode())


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[int], int]:
    """A tokenizer, the ids of a text and a place in them, often inside a character."""
    kind = draw(st.sampled_from(KINDS))
    ids = tokenizer(kind).encode("".join(draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12))))
    return kind, ids, draw(st.integers(0, len(ids)))


@settings(max_examples=300, deadline=None)
@given(case=cut_texts())
def test_a_prompt_and_its_completion_are_the_text_of_both(case: tuple[str, list[int], int]) -> None:
    kind, ids, place = case
    own, prompt, output = tokenizer(kind), ids[:place], ids[place:]
    before = own.stream()
    shown = before.push(prompt)
    stream = own.stream(context=prompt)
    pieces = [stream.push([token]) for token in output]
    text = "".join(pieces) + stream.flush()
    assert text == own.decode(output, context=prompt) or not prompt
    assert shown + text == own.decode(ids) or not output
    halved = "\ufffd" in before.flush()
    assert own.decode(prompt).startswith(shown) or halved  # byte-fallback decoders spoil what is before a half, too
    if kind != "unigram" and kind != "word_piece" and "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)  # no character is shown by halves


@settings(max_examples=200, deadline=None)
@given(case=cut_texts())
def test_the_bytes_of_tokens_are_the_text(case: tuple[str, list[int], int]) -> None:
    kind, ids, _ = case
    own = tokenizer(kind)
    table, context = own.token_bytes, [only(kind, "l")]  # any word before
    plain = [token for token in ids if token not in own.special_ids]
    assert b"".join(table[token] for token in plain).decode() == own.decode(plain, context=context)


@pytest.mark.parametrize("kind", KINDS)
def test_the_space_before_a_first_word(kind: str) -> None:
    own = tokenizer(kind)
    hello, world = (own.encode(text, add_special_tokens=False) for text in ("Hello", "Hello world"))
    assert own.decode(world[len(hello) :], context=own.encode("Hello")) == " world"
    assert own.decode(world) == "Hello world"


@pytest.mark.parametrize("kind", BY_BYTES)
def test_a_character_belongs_to_the_text_that_finishes_it(kind: str) -> None:
    own = tokenizer(kind)
    party = own.encode("Hello 🎉", add_special_tokens=False)
    assert own.decode(party[-2:], context=party[:-2]) == "🎉"
    stream = own.stream(context=party[:-2])
    assert [stream.push([token]) for token in party[-2:]] == ["", "🎉"]
    assert own.stream(context=party[:-2]).flush() == ""  # nothing was added
    assert own.decode([only(kind, "l")], context=party[:-2]) == "\ufffdl" or kind != "byte_level"


@pytest.mark.parametrize("kind", BY_BYTES)
@pytest.mark.parametrize("length", [1, 7, 400])
def test_only_the_end_of_a_prompt_is_read(kind: str, length: int) -> None:
    """However long it is, and wherever its bytes are cut."""
    own = tokenizer(kind)
    party = own.encode("🎉", add_special_tokens=False)[-4:]
    for cut in range(len(party)):
        prompt = own.encode("Hello", add_special_tokens=False) + party * length + party[:cut]
        stream = own.stream(context=prompt)
        assert len(stream._shown) + len(stream._held) <= CONTEXT + 3
        assert stream.push(party[cut:]) == "🎉", cut
        assert stream.push([only(kind, "l")]) == "l"


@pytest.mark.parametrize("kind", BY_BYTES)
def test_bytes_that_never_make_a_character_are_not_kept(kind: str) -> None:
    own = tokenizer(kind)
    table = own.token_bytes
    for byte in (b"\xe2", b"\x82", b"\xf0"):
        stream, token = own.stream(context=own.encode("Hello")), table.index(byte)
        pieces = [stream.push([token]) for _ in range(50)]
        assert len(stream._held) <= 3
        assert "".join(pieces) + stream.flush() == "\ufffd" * 50


def test_special_tokens_at_the_end_of_a_prompt_are_no_text() -> None:
    own = tokenizer("llama")
    world = own.encode("Hello world", add_special_tokens=False)[-1:]
    assert own.decode(world) == "world"
    end = sorted(own.special_ids)[-1]
    prompt = own.encode("Hello") + [end] * 9
    assert own.decode([*world, end], context=prompt) == " world"
    assert own.decode([end, *world], context=prompt, with_special=True) == "</s> world"
    assert own.decode(world, context=[end]) == "world"  # no text before: the text begins here


def test_ids_that_no_token_has_are_no_text() -> None:
    """A padded vocabulary has more ids than its tokenizer."""
    own = tokenizer("llama")
    world = own.encode("Hello world", add_special_tokens=False)[-1]
    assert own.decode([10**6, world, 10**6], context=[*own.encode("Hello"), 10**6]) == " world"


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(BY_BYTES), words=st.lists(st.sampled_from(WORDS), min_size=2, max_size=8), place=st.integers(1)
)
def test_a_text_that_goes_on_has_the_ids_of_the_whole(kind: str, words: list[str], place: int) -> None:
    own, place = tokenizer(kind), 1 + place % (len(words) - 1)
    before, text = "".join(words[:place]), "".join(words[place:])
    prompt, whole = own.encode(before), own.encode(before + text)
    if prompt and whole[: len(prompt)] == prompt:  # or a token reaches from the one into the other
        assert own.encode(text, context=prompt) == whole[len(prompt) :], (kind, before, text)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_piece"])
def test_a_text_that_goes_on_gets_no_further_space(kind: str) -> None:
    own = tokenizer(kind)
    prompt = own.encode("here [/INST]")
    assert own.decode(own.encode(" Hello world", context=prompt), context=prompt) == " Hello world"
    if kind != "unigram":  # which puts one before every text
        assert own.decode(own.encode("Hello", context=prompt), context=prompt) == "Hello"
