"""The tokenizer of a GGUF file, as `tokenizers` runs it: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama").

A file holds the vocabulary, merges or scores, and the kinds of its tokens. How a text is split before merging is given
only as a name (`tokenizer.ggml.pre`); the patterns here are those of the published tokenizer.json files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from models.chat import DEFAULT
from models.end_tokens import CONTROL, gguf_ends
from models.gguf.file import GgufFile

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, USER_DEFINED, UNUSED = 1, 2, 4, 5  # kinds of tokens, with CONTROL; 6 is a byte
OF_TEXT = (NORMAL, USER_DEFINED, UNUSED)  # kinds that text may be merged into
SPACE = "▁"
KEEPS_RIGHT = ("<unk>", "<s>", "<|endoftext|>")  # special tokens of Phi-3 that keep the white space behind them
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "mask_token": "mask_token_id",
}
TEMPLATE = "tokenizer.chat_template"
log = logging.getLogger("headway.targets")
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKED = (  # marks belong to letters
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|\p{{N}}%s" + (
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED_LETTERS = (  # those that the tokenizer.json of DeepSeek-V2 lists
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-"
    "\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-"
    "ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1")
# By name, the patterns that split a text into words, one after another; none: GPT-2's, which is built into ByteLevel.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "smollm", "starcoder", "refact"), ()),  # the last is Granite's
    **dict.fromkeys((*LLAMA3, "dbrx"), (LETTERS + r"\p{N}{1,3}" + REST,)),
    "qwen2": (LETTERS + r"\p{N}" + REST,),
    "qwen35": (MARKED,),
    "tekken": (CASED % ("", "", ""),),
    "gpt-4o": (CASED % (CONTRACTION, CONTRACTION, "{1,3}"),),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{CASED_LETTERS}]+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        "[一-龥\u0800-一가-\ud7ff]+",
        r"\p{N}+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
SINGLE_DIGITS = ("smollm", "starcoder", "refact")
WHOLE_WORDS = (*LLAMA3, "tekken")  # a word that is a token is not merged from its parts
BEGIN = WHOLE_WORDS  # put a begin token before a text if `add_bos_token` is absent, as in their older files
COMPOSED = ("qwen2", "qwen35")  # text is first normalized to Unicode's NFC


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Build the file's tokenizer. Raises ValueError naming the key that is missing, or whose value is not supported."""
    kinds: dict[str, Callable[[GgufFile], Tokenizer]] = {"gpt2": byte_level, "llama": sentence_piece}
    kind = file.need(f"{PREFIX}model")
    if kind not in kinds:
        raise ValueError(f"{file.path}: {PREFIX}model={kind!r}: is not supported; one of {', '.join(kinds)}")
    tokens: list[str] = file.need(f"{PREFIX}tokens")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{file.path}: {PREFIX}tokens: some are there twice")
    types = token_types(file)
    named = special_tokens(file)
    check_special(file, named)
    backend = kinds[kind](file)
    special = {token for token, token_type in zip(tokens, types, strict=True) if token_type in (UNKNOWN, CONTROL)}
    special |= {named[name] for name in ("bos_token", "eos_token") if name in named}  # some files mark them as normal
    special |= set(gguf_ends(file))
    ordered = [token for token in tokens if token in special]  # by id
    ordered += [
        token
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == USER_DEFINED and token not in special
    ]
    strips = strips_right(file)
    backend.add_tokens(
        [
            AddedToken(token, special=token in special, normalized=False, rstrip=strips and token not in KEEPS_RIGHT)
            for token in ordered
        ]
    )
    adds_bos = kind == "llama" or file.keys.get(f"{PREFIX}pre") in BEGIN
    template = ["$A"]
    if file.keys.get(f"{PREFIX}add_bos_token", adds_bos):
        template.insert(0, needed(file, named, "bos_token"))
    if file.keys.get(f"{PREFIX}add_eos_token", False):
        template.append(needed(file, named, "eos_token"))
    if len(template) > 1:
        ids = [(token, tokens.index(token)) for token in dict.fromkeys(template) if token != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return backend


def strips_right(file: GgufFile) -> bool:
    """Return whether white space behind special tokens is dropped, as Phi-3's tokenizer.json says and no key does.

    llama.cpp goes by the name alone, which converters spell in several ways; Phi-4, with another vocabulary, does not.
    """
    named = any(name in str(file.keys.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    phi = named or file.keys.get("general.architecture") == "phi3"
    return phi and file.keys.get(f"{PREFIX}model") == "llama"


def needed(file: GgufFile, named: dict[str, str], name: str) -> str:
    """Return the text of a special token that is put around every text. Raises ValueError where the file has none."""
    file.need(PREFIX + SPECIAL[name])
    if name not in named:
        raise ValueError(outside(file, name))
    return named[name]


def outside(file: GgufFile, name: str) -> str:
    key, count = PREFIX + SPECIAL[name], len(file.need(f"{PREFIX}tokens"))
    return f"{file.path}: {key}={file.keys[key]}: is outside the vocabulary of {count}"


def check_special(file: GgufFile, named: dict[str, str]) -> None:
    """Warn of ids outside the vocabulary. Raises ValueError if one is the end token, or the chat template writes it."""
    written = "".join(chat_templates(file).values())
    for name, key in SPECIAL.items():
        if file.keys.get(PREFIX + key) is None or name in named:
            continue
        if name == "eos_token" or name in written:
            raise ValueError(outside(file, name))
        log.warning("%s; nothing uses it, and it is ignored", outside(file, name))


def token_types(file: GgufFile) -> list[int]:
    """Return the kind of every token. Raises ValueError for a list that is not as long as the vocabulary."""
    tokens: list[str] = file.need(f"{PREFIX}tokens")
    types: list[int] = file.keys.get(f"{PREFIX}token_type", [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"{file.path}: {PREFIX}token_type: has {len(types)} items for {len(tokens)} tokens")
    return types


def byte_level(file: GgufFile) -> Tokenizer:
    name = file.need(f"{PREFIX}pre")
    if name not in SPLITS:
        raise ValueError(f"{file.path}: {PREFIX}pre={name!r}: is not supported; one of {', '.join(SPLITS)}")
    vocabulary = {token: index for index, token in enumerate(file.need(f"{PREFIX}tokens"))}
    merges = list[tuple[str, str]]()
    for merge in file.need(f"{PREFIX}merges"):
        left, separator, right = merge.partition(" ")
        if not (left and separator and right):
            raise ValueError(f"{file.path}: {PREFIX}merges: {merge!r} is no pair of tokens")
        if not {left, right, left + right} <= vocabulary.keys():
            raise ValueError(f"{file.path}: {PREFIX}merges: {merge!r} is of tokens that {PREFIX}tokens lacks")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in WHOLE_WORDS))
    patterns = SPLITS[name]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if name in SINGLE_DIGITS else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if name in COMPOSED:
        backend.normalizer = normalizers.NFC()
    return backend


def sentence_piece(file: GgufFile) -> Tokenizer:
    """Build SentencePiece's BPE. Its merges are not stored: the pair whose union has the highest score merges first."""
    tokens: list[str] = file.need(f"{PREFIX}tokens")
    scores: list[float] = file.need(f"{PREFIX}scores")
    if len(scores) != len(tokens):
        raise ValueError(f"{file.path}: {PREFIX}scores: has {len(scores)} items for {len(tokens)} tokens")
    file.need(f"{PREFIX}token_type")
    types = token_types(file)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in OF_TEXT}
    merges = merges_of(pieces, vocabulary, scores)
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = file.keys.get(f"{PREFIX}add_space_prefix", True)
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *steps] if prefix else steps)
    decoder_steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*decoder_steps, decoders.Strip(" ", 1, 0)] if prefix else decoder_steps)
    return backend


def merges_of(pieces: set[str], vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every pair of pieces whose union is a piece, highest score first; for one union the lowest ids first.

    Control tokens and bytes are not among `pieces`: no text is merged into one.
    """
    ranked: list[tuple[float, int, int, int]] = []
    tokens = list(vocabulary)
    for token in pieces:
        index = vocabulary[token]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], index, vocabulary[left], vocabulary[right]))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Return name -> text of the special tokens in the vocabulary, by transformers' names."""
    tokens: list[str] = file.need(f"{PREFIX}tokens")
    named = {name: file.keys.get(PREFIX + key) for name, key in SPECIAL.items()}
    return {name: tokens[index] for name, index in named.items() if index is not None and 0 <= index < len(tokens)}


def chat_templates(file: GgufFile) -> dict[str, str]:
    """Return the chat templates by name; the one for conversations without tools is called DEFAULT."""
    templates = {
        key.removeprefix(f"{TEMPLATE}."): text for key, text in file.keys.items() if key.startswith(f"{TEMPLATE}.")
    }
    return ({DEFAULT: file.keys[TEMPLATE]} if TEMPLATE in file.keys else {}) | templates
