"""Which token of a target's vocabulary each token of a draft model's is: two tokenizers compared token by token.

Tokens are the same if they add the same bytes to a text, whatever their ids. A draft model may draft what both have
(TLI, token-level intersection, arXiv 2502.05202). In the text that it reads, a token that it lacks is replaced by one
of its own, the longest that ends the token's bytes, so that every position holds exactly one token of either. That
changes drafts, never the text: only the target verifies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.token_bytes import BYTE_TOKEN
from models.tokenizer import Tokenizer

NAMED = ("eos_token", "bos_token")  # special tokens that are the same by their role, whatever their text


class TokenMap(NamedTuple):
    """The maps between a target's V ids and a draft model's Vd."""

    read: Tensor  # int64 [V]: the draft id that stands for each target id in the text
    target_ids: Tensor  # int64 [Vd]: the target id of each draft id; 0 for those that are not drafted
    undrafted: Tensor | None  # bool [Vd]: the draft ids without a target id; None if there are none


def same_ids(vocab_size: int, draft_size: int) -> TokenMap:
    """Return the maps of one vocabulary that two models pad to different sizes; ids of the longer one are not shared.

    In the text, an id beyond the draft model's last row is read as 0.
    """
    target, draft = torch.arange(vocab_size), torch.arange(draft_size)
    undrafted = None if draft_size <= vocab_size else draft >= vocab_size
    drafted = draft if undrafted is None else draft.masked_fill(undrafted, 0)
    return TokenMap(target.masked_fill(target >= draft_size, 0), drafted, undrafted)


def map_tokens(target: Tokenizer, draft: Tokenizer, vocab_size: int, draft_size: int) -> TokenMap:
    """Return the maps between two tokenizers, whose models have `vocab_size` and `draft_size` rows."""
    if target.backend.get_vocab() == draft.backend.get_vocab():
        return same_ids(vocab_size, draft_size)
    by_bytes = ids_by_bytes(draft, draft_size)
    longest = max(map(len, by_bytes), default=0)
    read = torch.zeros(vocab_size, dtype=torch.int64)
    readings = [last_token(text, by_bytes, longest) for text in target.token_bytes[:vocab_size]]
    read[: len(readings)] = torch.tensor(readings, dtype=torch.int64)
    pairs = {by_bytes[text]: index for text, index in ids_by_bytes(target, vocab_size).items() if text in by_bytes}
    taken = set(pairs.values())
    for name in NAMED:
        index, draft_index = special_id(target, name, vocab_size), special_id(draft, name, draft_size)
        if index is not None and draft_index is not None and index not in taken and draft_index not in pairs:
            read[index], pairs[draft_index] = draft_index, index
    target_ids, undrafted = torch.zeros(draft_size, dtype=torch.int64), torch.ones(draft_size, dtype=torch.bool)
    draft_ids = torch.tensor(list(pairs), dtype=torch.int64)
    target_ids[draft_ids], undrafted[draft_ids] = torch.tensor(list(pairs.values()), dtype=torch.int64), False
    return TokenMap(read, target_ids, undrafted)


def ids_by_bytes(tokenizer: Tokenizer, size: int) -> dict[bytes, int]:
    """Return the ids below `size` by their bytes. Of several with the same bytes, byte fallback comes last."""
    ids: dict[bytes, int] = {}
    fallback: dict[bytes, int] = {}
    for index, text in enumerate(tokenizer.token_bytes[:size]):
        token = tokenizer.backend.id_to_token(index) if len(text) == 1 else None
        (fallback if token and BYTE_TOKEN.fullmatch(token) else ids).setdefault(text, index)
    ids = fallback | ids
    ids.pop(b"", None)
    return ids


def last_token(text: bytes, by_bytes: dict[bytes, int], longest: int) -> int:
    """Return the id of the longest token that ends `text`, 0 if there is none."""
    starts = range(max(0, len(text) - longest), len(text))
    return next((index for start in starts if (index := by_bytes.get(text[start:])) is not None), 0)


def special_id(tokenizer: Tokenizer, name: str, size: int) -> int | None:
    """Return the id of a special token by its name in tokenizer_config.json; None if it has no row below `size`."""
    index = tokenizer.backend.token_to_id(tokenizer.special_tokens.get(name, ""))
    return index if index is not None and index < size else None
