"""The bytes that each token of a vocabulary adds to a text, derived from the tokenizer's decoder.

A token need not consist of whole characters, so its text cannot identify it: log-probabilities report its bytes.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Return the bytes of every id, empty for an id without a token.

    These are the token's bytes inside a text: many decoders drop the space of a text's first word, and of no other.
    """
    decoder: Any = backend.decoder  # its type stubs lack the state
    kinds = set[str]() if decoder is None else kinds_of(json.loads(decoder.__getstate__()))
    added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
    count = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    tokens = [backend.id_to_token(index) for index in range(count)]
    table = [b"" if token is None else added.get(index, token).encode() for index, token in enumerate(tokens)]
    ordinary = {index: token for index, token in enumerate(tokens) if token is not None and index not in added}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        for index, token in ordinary.items():
            table[index] = b"".join(alphabet.get(character, character.encode()) for character in token)
        return table
    if "ByteFallback" in kinds:
        for index in list(ordinary):
            if match := BYTE_TOKEN.fullmatch(ordinary[index]):
                table[index] = bytes.fromhex(match[1])
                del ordinary[index]
    # Decode every other token after a word, and remove that word's text.
    word = next((index for index in ordinary if backend.decode([index]).strip().isalnum()), None)
    if word is not None:
        prefix = backend.decode([word])
        texts = backend.decode_batch([[word, index] for index in ordinary], skip_special_tokens=False)
        for index, text in zip(ordinary, texts, strict=True):
            if text.startswith(prefix):
                table[index] = text[len(prefix) :].encode()
    return table


def unfinished(tokens: Sequence[bytes]) -> int:
    """Return how many of a text's last tokens hold the beginning of a character that later tokens may complete.

    Bytes that no character can begin with count as finished: they become U+FFFD whatever follows.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(tokens))
    missing, count = len(decoder.getstate()[0]), 0
    while missing > 0:
        count += 1
        missing -= len(tokens[-count])
    return count


def is_continuation(token: bytes) -> bool:
    """Return whether the token begins inside a character."""
    return token[:1] >= b"\x80" and token[:1] < b"\xc0"


def kinds_of(decoder: dict[str, Any]) -> set[str]:
    return {decoder["type"]}.union(*(kinds_of(inner) for inner in decoder.get("decoders", ())))


def byte_alphabet() -> dict[str, bytes]:
    """Return GPT-2's map of characters to bytes: printable bytes map from themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + offset): bytes([byte]) for offset, byte in enumerate(others)
    }
