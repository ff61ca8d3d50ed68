"""The tokenizer of a GGUF file against the one it was written from; errors name the missing key."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from models.end_tokens import read_end_tokens
from models.fetching import place_of
from models.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PREFIX = "tokenizer.ggml."
CONTROLS = ("<|end|>", "<|begin|>", "<|turn|>")
# As published in the tokenizer.json of the model of that name.
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3 = LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
STEPS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
MARKS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_OSS = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{MARKS[0]}*{MARKS[1]}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{MARKS[0]}+{MARKS[1]}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
STEPS["gpt-4o"] = [
    pre_tokenizers.Split(Regex(GPT_OSS), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
]
DEEPSEEK = {
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ],
    "deepseek-llm": [  # which lists the letters
        "[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    ],
}
for name, patterns in DEEPSEEK.items():
    STEPS[name] = [
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
LIKE_LLAMA3 = ("llama-bpe", "lfm2", "falcon3", "falcon-h1")  # as in llama.cpp (llama-vocab.cpp)
STEPS |= {"refact": STEPS["smollm"]} | dict.fromkeys(("dbrx", *LIKE_LLAMA3), STEPS["llama-bpe"])  # Granite 3, Phi-4
CORPUS = [
    "def read(path):\n    return 2024 + 12345 * x\n",
    "I'm here, it's 1984; WE'LL see. aren't THEY'RE",
    "ação naïve 你好 世界 🙂🙂 e\u0301",
    "a    b\t\tc\n\n\nd \r\n e",
]
TEXTS = [
    "",
    " ",
    "   two  spaces",
    *CORPUS,
    "x<|turn|>user\n1<|end|>",
    "½ ² Ⅷ ٣٤",
    "（全角）！ ひらがな カタカナ 한국어 ΑΛΦΑ жизнь\u3000。 ok.go",
    "\u200d👩\u200d👩\u200d👧",
    "DON'T don't",
    "<0x0A>",
]


def write(
    path: Path, model: str, tokens: list[str], types: list[int], architecture: str = "llama", **keys: Any
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in keys.items():
        key = name if name.startswith(("tokenizer.", "general.")) else PREFIX + name
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(folder: Path, pre: str, **keys: Any) -> tuple[Path, tokenizers.Tokenizer]:
    """Write a GGUF file; return it and the tokenizer it was written from."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in LIKE_LLAMA3))
    backend.pre_tokenizer = pre_tokenizers.Sequence(STEPS[pre])
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True) for token in CONTROLS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 5, trainer)
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["merges"]]
    types = [CONTROL if token in CONTROLS else NORMAL for token in tokens]
    all_keys = {
        "tokenizer.ggml.pre": pre,
        "merges": merges,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "add_bos_token": False,
    } | keys
    present_keys = {name: value for name, value in all_keys.items() if value is not None}
    return write(folder / f"{pre}.gguf", "gpt2", tokens, types, **present_keys), backend


@pytest.mark.parametrize("pre", STEPS)
def test_ids_and_texts_of_byte_level_bpe(tmp_path: Path, pre: str) -> None:
    file, reference = byte_level(tmp_path, pre)
    tokenizer = Tokenizer.load(file)
    draw = random.Random(0)
    letters = "".join(TEXTS)
    texts = TEXTS + ["".join(draw.choices(letters, k=draw.randrange(40))) for _ in range(300)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text).ids, text
        assert tokenizer.decode(ids) == reference.decode(ids)


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_a_text_comes_back(small: Tokenizer, text: str) -> None:
    if all(token not in text for token in CONTROLS):
        assert small.decode(small.encode(text)) == text


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_level(tmp_path_factory.mktemp("small"), "smollm")[0])


@pytest.mark.parametrize("pre", LIKE_LLAMA3)
def test_special_tokens_templates_and_end_tokens(tmp_path: Path, pre: str) -> None:
    templates = {"tokenizer.chat_template": "A{{ bos_token }}", "tokenizer.chat_template.tool_use": "B"}
    file, _ = byte_level(tmp_path, pre, eot_token_id=2, padding_token_id=0, add_bos_token=None, **templates)
    tokenizer = Tokenizer.load(file)
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    assert tokenizer.eos_ids == read_end_tokens(file) == (0, 2)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat.text_for(tools=False) == "A{{ bos_token }}"
    assert tokenizer.chat.text_for(tools=True) == "B"
    assert tokenizer.encode("a")[0] == 1, "files of Llama 3 and its like without add_bos_token put one before a text"
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1


def test_what_is_put_around_a_text(tmp_path: Path) -> None:
    file, reference = byte_level(tmp_path, "smollm", add_bos_token=True, add_eos_token=True)
    assert Tokenizer.load(file).encode("ab 12") == [1, *reference.encode("ab 12").ids, 0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer.ggml.pre": "viking"}, r"tokenizer\.ggml\.pre='viking': is not supported; one of .*smollm"),
        ({"tokenizer.ggml.pre": None}, r"the key tokenizer\.ggml\.pre is missing"),
        ({"merges": None}, r"the key tokenizer\.ggml\.merges is missing"),
        ({"merges": ["a never"]}, r"tokenizer\.ggml\.merges: 'a never' is of tokens"),
        ({"merges": ["a"]}, r"tokenizer\.ggml\.merges: 'a' is no pair"),
        ({"bos_token_id": None, "add_bos_token": True}, r"the key tokenizer\.ggml\.bos_token_id is missing"),
        ({"bos_token_id": 999, "add_bos_token": True}, r"tokenizer\.ggml\.bos_token_id=999: is outside the vocabulary"),
        ({"eos_token_id": 999}, r"tokenizer\.ggml\.eos_token_id=999: is outside the vocabulary of 333"),
        (
            {"padding_token_id": 999, "tokenizer.chat_template": "{{ pad_token }}"},
            r"tokenizer\.ggml\.padding_token_id=999: is outside the vocabulary",
        ),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(byte_level(tmp_path, "smollm", **keys)[0])


@pytest.mark.parametrize("name", ["padding", "seperator", "mask", "unknown", "bos"])
def test_an_id_outside_the_vocabulary_that_nothing_uses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    file, reference = byte_level(tmp_path, "smollm", **{f"{name}_token_id": 999})
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer.load(file)
    assert f"tokenizer.ggml.{name}_token_id=999: is outside the vocabulary of 333; nothing uses it" in caplog.text
    assert tokenizer.encode("ab 12") == reference.encode("ab 12").ids


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv"])
def test_another_kind_of_tokenizer_is_refused(tmp_path: Path, model: str) -> None:
    file = write(tmp_path / "x.gguf", model, ["a"], [NORMAL])
    with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.model='{model}': is not supported; one of gpt2, llama"):
        Tokenizer.load(file)


def sentence_piece(folder: Path, **keys: Any) -> Path:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["he", "ll", "hell", "hello", "▁hello", "▁w", "▁wo", "▁▁", "<", "s>", "0x0A>"]
    letters = list("▁helowrd!0123")
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(place) for place in range(len(pieces) + len(letters))]
    all_keys = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | keys
    return write(folder / "spm.gguf", "llama", tokens, types, **{k: v for k, v in all_keys.items() if v is not None})


def test_sentence_piece(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentence_piece(tmp_path))
    id_to_token = tokenizer.backend.id_to_token

    def pieces(text: str) -> list[str | None]:
        return [id_to_token(token) for token in tokenizer.encode(text)]

    assert pieces("hello world") == ["<s>", "▁hello", "▁wo", "r", "l", "d"]
    assert pieces("é\n") == ["<s>", "▁", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert "<0x0A>" not in pieces("<0x0A>"), "a text that looks like a byte's name is none"
    assert pieces("hello</s>") == ["<s>", "▁hello", "</s>"]
    for text in ("hello  world", "  hello", "é🙂\n<0x0A>", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_ids == (2,)


def test_sentence_piece_without_the_space_before_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentence_piece(tmp_path, add_space_prefix=False, add_bos_token=False))
    assert [tokenizer.backend.id_to_token(token) for token in tokenizer.encode("hello")] == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@pytest.mark.parametrize(
    ("architecture", "name", "strips"),
    [("phi3", "Phi 3.5 Mini Instruct", True), ("llama", "Phi3", True), ("llama", "TinyLlama", False)],
)
def test_white_space_behind_phi_3_s_special_tokens(architecture: str, name: str, strips: bool, tmp_path: Path) -> None:
    """As its tokenizer.json has it: not behind <|endoftext|>, <s> and <unk>."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "H", "i", "▁", "▁H", "▁Hi", "Hi"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6]
    added = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]
    named = {"bos_token_id": 1, "eos_token_id": 265, "unknown_token_id": 0, "add_bos_token": False}
    scores = [0.0] * 259 + [-5.0, -6.0, -4.0, -2.0, -1.0, -3.0] + [0.0] * 4
    types = [*types, CONTROL, CONTROL, CONTROL, USER_DEFINED]
    keys = {"scores": scores, "general.name": name, **named}
    tokenizer = Tokenizer.load(write(tmp_path / "phi.gguf", "llama", [*tokens, *added], types, architecture, **keys))

    def pieces(text: str) -> list[str | None]:
        return [tokenizer.backend.id_to_token(token) for token in tokenizer.encode(text)]

    newline = [] if strips else ["▁", "<0x0A>"]
    first = ["▁Hi"] if strips else ["▁", "<0x0A>", "Hi"]
    expected = ["<|user|>", *first, "<|end|>", *newline, "<|assistant|>", *newline]
    assert pieces("<|user|>\nHi<|end|>\n<|assistant|>\n") == expected
    assert pieces("<|endoftext|>\nHi") == ["<|endoftext|>", "▁", "<0x0A>", "Hi"]


@pytest.mark.parametrize("scores", [None, [0.0]])
def test_sentence_piece_needs_its_scores(tmp_path: Path, scores: list[float] | None) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores"):
        Tokenizer.load(sentence_piece(tmp_path, scores=scores))


@pytest.mark.skipif(not place_of("smollm2-135m").is_file(), reason="python scripts/fetch_model.py smollm2-135m")
def test_smollm2() -> None:
    tokenizer = Tokenizer.load(place_of("smollm2-135m"))
    assert (tokenizer.eos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (2, (2, 0), 49152)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    text = tokenizer.decode(chat, with_special=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), with_special=True) == text
