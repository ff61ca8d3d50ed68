"""Limits the length of numbers in JSON that a model writes under a grammar, so that it cannot write one for ever.

Schemas rarely bound a number's digits, and a double is exact with 17. After MAX_NUMBER characters a number ends as soon
as the grammar lets it end: tokens that would continue it are forbidden, unless no other token may follow. Where strings
may stand without quotes, only digits count, and they count everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.shape import packed

MAX_NUMBER = 40  # characters; the last token may exceed it
DIGITS = frozenset(b"0123456789")
NUMBER, QUOTE, BACKSLASH = frozenset(b"0123456789.eE+-"), ord('"'), ord("\\")


class Place(NamedTuple):
    """Where in a JSON text an output stands."""

    in_string: bool = False
    escaped: bool = False
    digits: int = 0  # characters of the number that it is in
    after: bytes = b""  # the JSON begins behind this mark
    seen: bytes = b""  # the last characters before the mark


class NumberLimit:
    """The rule for one tokenizer. Stateless: the caller keeps the `Place` of each output."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, *, quoted: bool = True) -> None:
        """`quoted`: every string of the output stands in quotes."""
        self._token_bytes, self._quoted, self._number = token_bytes, quoted, NUMBER if quoted else DIGITS
        continues = torch.zeros(vocab_size, dtype=torch.bool)
        ids = [token for token, text in enumerate(token_bytes[:vocab_size]) if text[:1] and text[0] in self._number]
        continues[ids] = True
        self._ending = ~packed(continues)

    def after(self, place: Place, token: int) -> Place:
        """Return the place after a token of the output."""
        text = self._token_bytes[token] if token < len(self._token_bytes) else b""
        if place.after:
            seen = place.seen + text
            _, mark, text = seen.partition(place.after)
            if not mark:
                return place._replace(seen=seen[-len(place.after) :])
            place = Place()
        in_string, escaped, digits, *_ = place
        for byte in text:
            digits = digits + 1 if byte in self._number and not in_string else 0
            if escaped:
                escaped = False
            elif byte == QUOTE and self._quoted:
                in_string = not in_string
            else:
                escaped = in_string and byte == BACKSLASH
        return Place(in_string, escaped, digits)

    def apply(self, place: Place, mask: Tensor) -> Tensor:
        """Return the mask `[ceil(V / 32)]` of tokens that may follow at `place`, of those that the grammar allows."""
        if place.digits < MAX_NUMBER:
            return mask
        ending = mask & self._ending
        return ending if bool(ending.any()) else mask
