"""The bytes that each token of a vocabulary stands for, read from the tokenizer's own decoder.

A token need not be whole characters, so its text alone cannot name it: log-probabilities name it by its bytes.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "▁"  # what SentencePiece writes for a space


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """One entry per id, empty for an id that no token has."""
    kinds = decoder_kinds(json.loads(backend.to_str()).get("decoder"))
    added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
    alphabet = byte_alphabet()
    count = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    table = []
    for index in range(count):
        token = backend.id_to_token(index)
        if token is None:
            table.append(b"")
        elif index in added:
            table.append(added[index].encode())
        elif "ByteLevel" in kinds:
            table.append(b"".join(alphabet.get(character, character.encode()) for character in token))
        elif "ByteFallback" in kinds and (match := BYTE_TOKEN.fullmatch(token)):
            table.append(bytes.fromhex(match[1]))
        else:
            table.append(token.replace(SPACE, " ").encode())
    return table


def decoder_kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    return {decoder["type"]}.union(*(decoder_kinds(inner) for inner in decoder.get("decoders", ())))


def byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-ins: a byte that is printable stands for itself, the others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + place): bytes([byte]) for place, byte in enumerate(others)
    }
