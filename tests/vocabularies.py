"""Tokenizers of the kinds that published checkpoints have, trained on little text: each encodes spaces differently."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
SIZE = 512  # maximum size of each vocabulary
REPLACE, JOIN = decoders.Replace("▁", " "), [decoders.ByteFallback(), decoders.Fuse()]


def corpus() -> list[str]:
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    return ["Hello world, hello there, words of the world are here."] * 40 + source.splitlines()[:120]


def with_bytes(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer with byte fallback: its byte tokens encode characters outside its alphabet."""
    written = json.loads(backend.to_str())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] in SPECIAL]
    written["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    return tokenizers.Tokenizer.from_str(json.dumps(written))


def bpe(*, normalizer: Any, pre_tokenizer: Any, decoder: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # only for training
    special = [*SPECIAL, *BYTES]
    backend.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=SIZE, special_tokens=special, show_progress=False)
    )
    written = json.loads(backend.to_str())
    written["pre_tokenizer"] = None
    backend = tokenizers.Tokenizer.from_str(json.dumps(written))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    backend = with_bytes(backend)
    begin = [("<s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    return backend


def llama() -> tokenizers.Tokenizer:
    """Llama 2, Mistral 0.1: encoding prepends a space, and decoding strips the first one."""
    return bpe(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        pre_tokenizer=None,
        decoder=decoders.Sequence([REPLACE, *JOIN, decoders.Strip(" ", 1, 0)]),
    )


def mistral() -> tokenizers.Tokenizer:
    """Llama 2 as it is exported today: Metaspace prepends a space to the first word only."""
    return bpe(
        normalizer=None,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        decoder=decoders.Sequence([REPLACE, *JOIN, decoders.Strip(" ", 1, 0)]),
    )


def gemma() -> tokenizers.Tokenizer:
    """Gemma: no space is prepended or stripped."""
    return bpe(
        normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=None, decoder=decoders.Sequence([REPLACE, *JOIN])
    )


def unigram() -> tokenizers.Tokenizer:
    """Unigram: the decoder is Metaspace, which drops the first space."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIAL], unk_token="<unk>", show_progress=False, max_piece_length=8
    )
    backend.train_from_iterator(corpus(), trainer)
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """WordPiece: the decoder inserts the spaces."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=[*SPECIAL], show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    return backend


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "llama": llama, "mistral": mistral, "gemma": gemma, "unigram": unigram, "word_piece": word_piece,
}  # fmt: skip


@cache
def tokenizer_json(kind: str) -> str:
    return MAKERS[kind]().to_str()


def backend_of(kind: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_json(kind))


def write_end_tokens(source: Path, folder: Path, config: Any, generation: Any) -> Path:
    """Write a copy of `source` whose files name these end tokens; `generation` None: no generation_config.json."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"eos_token_id": config}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}), encoding="utf-8")
    return folder


def write_tokenizer(kind: str, folder: Path, *, source: Path, **settings: Any) -> Path:
    """Write a copy of `source`, whose vocabulary must have at least SIZE ids, with this tokenizer and `settings` in its
    tokenizer_config.json."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")
    file = folder / "tokenizer_config.json"
    changed = json.loads(file.read_text(encoding="utf-8")) | {"bos_token": "<s>", "eos_token": "</s>"} | settings
    file.write_text(json.dumps(changed), encoding="utf-8")
    return folder


CHAT_ML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURN_START, TURN_END = 382, 383  # of `write_chat_ml`


def write_chat_ml(source: Path, folder: Path, *, special: bool = True, end: str = "<|im_end|>") -> Path:
    """Write a copy of `source`, a byte-level BPE of 384 tokens, with ChatML's template and its marks in place of the
    last two tokens, which no merge reads. Its files name another end token than the end of a turn, which is `special`.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    written = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = written["model"]["vocab"]
    for index, mark in ((TURN_START, "<|im_start|>"), (TURN_END, end)):
        (token,) = (token for token, place in vocabulary.items() if place == index)
        written["model"]["merges"] = [pair for pair in written["model"]["merges"] if "".join(pair) != token]
        del vocabulary[token]
        vocabulary[mark] = index
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        written["added_tokens"].append({"id": index, "content": mark, "special": special or mark != end, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_ML.replace("<|im_end|>", end), encoding="utf-8")
    return folder


# The added tokens of published tokenizers that concern chats and tool calls, with their `special` flags: the first ends
# a turn. Then the style of calls in their chat templates.
CHATML = (("<|im_end|>", True), ("<|im_start|>", True), ("<tool_call>", False), ("</tool_call>", False))
THINKING = (("<think>", False), ("</think>", False))
FAMILIES: dict[str, tuple[tuple[tuple[str, bool], ...], str]] = {
    "qwen2.5": ((*CHATML, ("<|fim_prefix|>", False), ("<|file_sep|>", False)), "hermes"),
    "qwen3": ((*CHATML, *THINKING, ("<tool_response>", False), ("</tool_response>", False)), "hermes"),
    "hermes": ((*CHATML, ("<tools>", False), ("</tools>", False), ("<tool_response>", False)), "hermes"),
    "llama3": (
        tuple((f"<|{name}|>", True) for name in ("eot_id", "begin_of_text", "eom_id", "python_tag", "end_header_id")),
        "llama3",
    ),
    "mistral": (
        tuple((text, True) for text in ("[/INST]", "[INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[ARGS]")),
        "mistral",
    ),
    "glm": (
        (
            *(("<|user|>", True), ("<|observation|>", True), ("[gMASK]", True), ("<sop>", True)),
            *(("<tool_call>", False), ("</tool_call>", False), ("<arg_key>", False), ("</arg_key>", False)),
            *THINKING,
        ),
        "glm45",
    ),
}
MOST_ADDED = 16
FAMILIES["qwen3_coder"] = ((*CHATML, *THINKING), "qwen3_coder")
DEEPSEEK = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
FAMILIES["deepseek_v31"] = (
    (("<｜end▁of▁sentence｜>", True), *((f"<｜tool▁{name}｜>", False) for name in DEEPSEEK)),
    "deepseek_v31",
)


def write_family(family: str, folder: Path, *, source: Path) -> Path:
    """Write a copy of `source` with a family's added tokens too; its model must have MOST_ADDED more rows for them."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    added, _ = FAMILIES[family]
    for text, special in added:
        backend.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    ids = [backend.token_to_id(text) for text in (added[0][0], "<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    return folder
