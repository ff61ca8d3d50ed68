"""Of answers in the data, the loss falls on exactly what the engine generates: every published chat template."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from models.tokenizer import Tokenizer
from tests.chats import TEMPLATES
from train.config import FilesDataConfig
from train.data.dialogue import Dialogue, Row, provided_dialogue
from train.data.examples import parse_row

EOS = "<|endoftext|>"
# template -> the tokens that end an answer, and what stands before and after the two answers
CHATML = (("<|im_end|>",), "", "<|im_end|>")
LLAMA3, GEMMA = (("<|eot_id|>",), "", "<|eot_id|>"), (("<end_of_turn>",), "", "<end_of_turn>")
THOUGHT = "<think>\n\n</think>\n\n"
ENDS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "deepseek": ((EOS,), "", EOS),
    "deepseek_v3": (("<｜end▁of▁sentence｜>",), "", "<｜end▁of▁sentence｜>"),
    "gemma": GEMMA,
    "gemma3": GEMMA,
    "glm4moe": (("<|user|>", "<|observation|>"), "\n<think></think>\n", "<|user|>"),
    "gpt_oss": (("<|return|>", "<|call|>"), "<|channel|>final<|message|>", "<|return|>"),
    "granite3_3": (("<|end_of_text|>",), "", "<|end_of_text|>"),
    "hermes": CHATML,
    "llama3": LLAMA3,
    "llama3_1": LLAMA3,
    "minimax": (("[e~[",), "", "[e~["),
    "mistral": ((EOS,), " ", EOS),
    "phi3": (("<|end|>", EOS), "", "<|end|>"),
    "phi4_mini": (("<|end|>", EOS), "", "<|end|>"),
    "qwen2_5": CHATML,
    "qwen3": (("<|im_end|>",), THOUGHT, "<|im_end|>"),
    "qwen3_5": (("<|im_end|>",), "\n</think>\n\n", "<|im_end|>"),
    "smollm2": CHATML,
    "vision": ((EOS,), " ", EOS),
}
OPENS = {"minimax", "deepseek_v3"}  # a reasoning span, which their history does not show
ANSWERS = "yes I do", "no way"
TALK = [text for pair in zip(("a?", "b?"), ANSWERS, strict=True) for text in pair]
MESSAGES = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(TALK)]


def tokenizer_of(base: Tokenizer, family: str) -> Tokenizer:
    """Return a tokenizer with the family's template and end tokens, each a special token."""
    backend = tokenizers.Tokenizer.from_str(base.backend.to_str())
    ends = ENDS[family][0]
    backend.add_special_tokens(list(ends))
    special = {"bos_token": EOS, "eos_token": EOS}
    ids = [token for token in map(backend.token_to_id, ends) if token is not None]
    return Tokenizer(backend, eos_ids=ids, chat_template=TEMPLATES[family], special_tokens=special, source=family)


def learnt(row: Row) -> list[tuple[int, int]]:
    """Return where the spans under the loss begin and end."""
    edges = [
        place
        for place, (a, b) in enumerate(zip([False, *row.loss_mask], [*row.loss_mask, False], strict=True))
        if a != b
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


def rows_of(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> list[Row]:
    _, example = parse_row(
        {"messages": messages}, FilesDataConfig(name="files", path="x", responses="given"), tokenizer
    )
    return provided_dialogue(example, tokenizer, 4000).rows


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_loss_falls_on_what_the_engine_generates(family: str, tiny_tokenizer: Tokenizer) -> None:
    tokenizer, (_, before, after) = tokenizer_of(tiny_tokenizer, family), ENDS[family]
    spans = [
        (row.ids[:first], row.ids[first:last]) for row in rows_of(MESSAGES, tokenizer) for first, last in learnt(row)
    ]
    texts = [f"{before}{answer}{after}" for answer in ANSWERS]
    if family == "glm4moe":  # whose end token begins the next turn
        texts[-1] = texts[-1].removesuffix(after)
    assert [tokenizer.decode(ids, with_special=True) for _, ids in spans] == texts
    for place, (prompt, ids) in enumerate(spans):
        served = tokenizer.apply_chat_template(MESSAGES[: 2 * place + 1])
        assert served[: len(prompt)] == prompt
        assert (len(served) > len(prompt)) == (family in OPENS)
        assert [token in tokenizer.eos_ids for token in ids[:-1]] == [False] * (len(ids) - 1)


@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (0, 0), (1, None), (0.0, 1.0)])
def test_an_answer_of_weight_0_is_only_history(weights: tuple[Any, Any], tiny_tokenizer: Tokenizer) -> None:
    """OpenAI's fine-tuning format. The target does not generate such an answer anew either."""
    tokenizer = tokenizer_of(tiny_tokenizer, "phi3")
    given = [weights[place // 2] if place % 2 else None for place in range(4)]
    messages = [m | ({} if w is None else {"weight": w}) for m, w in zip(MESSAGES, given, strict=True)]
    expected = [answer for answer, weight in zip(ANSWERS, weights, strict=True) if weight != 0]
    if not expected:
        with pytest.raises(ValueError, match="the row holds no answer"):
            rows_of(messages, tokenizer)
    else:
        (row,) = rows_of(messages, tokenizer)
        assert [tokenizer.decode(row.ids[a : b - 1]) for a, b in learnt(row)] == expected
        assert all(answer in tokenizer.decode(row.ids) for answer in ANSWERS[: 1 + (weights[1] != 0)])
    _, example = parse_row({"messages": messages}, FilesDataConfig(name="files", path="x"), tokenizer)
    dialogue, asked = Dialogue(example, tokenizer, longest_prompt=4000), []
    while (prompt := dialogue.next_prompt()) is not None:
        asked.append(tokenizer.decode(prompt))
        dialogue.take(tokenizer.encode("so"))
    assert len(asked) == len(expected)
    if weights == (0, 1):
        assert ANSWERS[0] in asked[0]


@pytest.mark.parametrize(
    ("weight", "role"), [(2, "assistant"), ("0", "assistant"), (True, "assistant"), (0.5, "assistant"), (1, "user")]
)
def test_any_other_weight_is_refused(weight: Any, role: str, tiny_tokenizer: Tokenizer) -> None:
    messages = [m | ({"weight": weight} if m["role"] == role else {}) for m in MESSAGES]
    with pytest.raises(ValueError, match=f"weight {weight!r} of a message of role {role}; must be 0, or 1"):
        rows_of(messages, tokenizer_of(tiny_tokenizer, "phi3"))


def test_phi_3_s_two_turns_are_one_row(tiny_tokenizer: Tokenizer) -> None:
    (row,) = rows_of(MESSAGES, tokenizer_of(tiny_tokenizer, "phi3"))
    assert len(learnt(row)) == 2
