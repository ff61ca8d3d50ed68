"""What a conversion needs of the target: its name and sizes and, rarely, its token embedding and LM head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from models.checkpoint import open_tensors, read_config
from models.checks import home_path
from models.fields import Fields
from models.formats.checkpoint import Verifier
from models.gguf import is_gguf
from models.heads import config as head_config
from models.targets import resolve_checkpoint
from models.targets.gpt_bigcode import RENAMED
from models.targets.tying import LM_HEAD, embedding_of, keeps_two, shared_weight


def find_verifier(path_or_hub_id: str) -> tuple[Verifier, Path | None]:
    """Return the verifier of a folder or GGUF file, with the path, or of a hub id. Raises ValueError if no config."""
    checkpoint = resolve_checkpoint(path_or_hub_id, weights=False, option="--verifier ")
    config, source = read_config(checkpoint), str(checkpoint if is_gguf(checkpoint) else checkpoint / "config.json")
    architectures = config.get("architectures") or []
    if not architectures:
        raise ValueError(f"{source}: architectures is missing")
    config = config.get("text_config") or config  # of a multimodal model: its language part
    fields = Fields({RENAMED.get(key, key): value for key, value in config.items()}, source)
    sizes = (fields.need(key, int) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
    is_local = is_gguf(checkpoint) or home_path(path_or_hub_id).is_dir()
    return Verifier(path_or_hub_id, str(architectures[0]), *sizes), checkpoint if is_local else None


def weights_of(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Return functions, by a head's names, that read embedding and LM head, `[V, H]` each, of the target in `folder`.

    They raise ValueError if the target has none.
    """

    def read(*, lm_head: bool) -> Tensor:
        tensors = open_tensors(folder)
        tied = bool(read_config(folder).get("tie_word_embeddings", LM_HEAD not in tensors)) and not keeps_two(folder)
        name = shared_weight(folder) if tied else LM_HEAD if lm_head else embedding_of(tensors)
        if name not in tensors:
            raise ValueError(f"{folder}: holds no {name}")
        return tensors[name]

    return {head_config.EMBEDDING: partial(read, lm_head=False), head_config.LM_HEAD: partial(read, lm_head=True)}
