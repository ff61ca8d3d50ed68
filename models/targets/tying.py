"""Whether a target's LM head is its token embedding: what config.json states, held against the weights.

Files contradict their config in both directions. Fine-tuning with an LM head of its own leaves
`tie_word_embeddings: true` behind, and a writer that drops doubled tensors may keep the pair under the LM head's name
alone. The weights decide, as in transformers: two tensors of different values are two, one is the other as well.
"""

from __future__ import annotations

import logging
from pathlib import Path

from models.checkpoint import open_tensors
from models.gguf.file import is_gguf
from models.weights import LazyTensors, equal_values

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
log = logging.getLogger("headway.targets")


def keeps_two(folder: Path) -> bool:
    """Whether a checkpoint whose config ties the two holds an LM head of other values than the embedding.

    A GGUF file says that it is tied by holding none. Raises ValueError for a broken checkpoint. Weights are read only
    where both are there.
    """
    if is_gguf(folder):
        return False
    names = set(LazyTensors(folder))
    heads = {name for name in names if name.startswith("lm_head.")}
    if not heads or EMBEDDING not in names:
        return False
    # An LM head that is quantised is stored as other tensors, and was rounded apart from the embedding.
    if heads == {LM_HEAD} and equal_values(folder, EMBEDDING, LM_HEAD):
        return False
    log.warning(
        "%s: config.json states tie_word_embeddings=true, but %s differs from %s; both are kept. With "
        "tie_word_embeddings=false in config.json this is not said again",
        folder,
        ", ".join(sorted(heads)),
        EMBEDDING,
    )
    return True


def shared_weight(folder: Path) -> str:
    """The tensor of a tied checkpoint that is embedding and LM head. Raises ValueError for a broken checkpoint."""
    names = open_tensors(folder)
    return LM_HEAD if LM_HEAD in names and EMBEDDING not in names else EMBEDDING
