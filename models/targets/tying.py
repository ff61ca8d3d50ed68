"""Whether a target's LM head is its token embedding: the statement of config.json, checked against the weights.

Files contradict their config in both directions. Fine-tuning with a separate LM head leaves
`tie_word_embeddings: true` behind, and a writer that drops duplicate tensors may keep the pair under the LM head's name
only. The weights decide, as in transformers: two tensors of different values are not tied, a single tensor is both.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path

from models.checkpoint import open_tensors
from models.gguf import is_gguf
from models.weights import LazyTensors, equal_values, shard_files

EMBEDDINGS = (
    *("model.embed_tokens.weight", "model.decoder.embed_tokens.weight", "transformer.wte.weight"),
    "model.language_model.embed_tokens.weight",
)
LM_HEAD = "lm_head.weight"
log = logging.getLogger("headway.targets")


def embedding_of(names: Container[str]) -> str:
    """Return the name of a checkpoint's embedding, which its family decides."""
    return next((name for name in EMBEDDINGS if name in names), EMBEDDINGS[0])


def keeps_two(folder: Path) -> bool:
    """Return whether a checkpoint whose config ties the two holds an LM head of other values than the embedding.

    A GGUF file is tied exactly if it has no LM head. Raises ValueError for a broken checkpoint. Weights are read only
    if both are present.
    """
    if is_gguf(folder):
        return False
    tensors = LazyTensors(shard_files(folder))
    heads, embedding = {name for name in tensors if name.startswith("lm_head.")}, embedding_of(tensors)
    if not heads or embedding not in tensors:
        return False
    # A quantized LM head is stored as other tensors, and was rounded separately from the embedding.
    if heads == {LM_HEAD} and equal_values(tensors, embedding, LM_HEAD):
        return False
    log.warning(
        "%s: config.json states tie_word_embeddings=true, but %s differs from %s; both are kept. Set "
        "tie_word_embeddings=false in config.json to silence this warning",
        folder,
        ", ".join(sorted(heads)),
        embedding,
    )
    return True


def shared_weight(folder: Path) -> str:
    """Return the name of a tied checkpoint's shared embedding tensor. Raises ValueError for a broken checkpoint."""
    names = open_tensors(folder)
    embedding = embedding_of(names)
    return LM_HEAD if LM_HEAD in names and embedding not in names else embedding
