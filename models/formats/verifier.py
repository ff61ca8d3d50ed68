"""What a conversion needs of the target: its name and sizes and, rarely, its token embedding and LM head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from models.checkpoint import open_tensors, read_config
from models.checks import home_path
from models.fields import Fields
from models.formats.checkpoint import Verifier
from models.gguf import is_gguf
from models.heads import config as head_config
from models.targets import resolve_checkpoint
from models.targets.tying import EMBEDDING, LM_HEAD, keeps_two, shared_weight


def find_verifier(path_or_hub_id: str) -> tuple[Verifier, Path | None]:
    """Return the verifier of a folder or GGUF file, with the path, or of a hub id. Raises ValueError if no config."""
    checkpoint = resolve_checkpoint(path_or_hub_id, weights=False, option="--verifier ")
    config, source = read_config(checkpoint), str(checkpoint if is_gguf(checkpoint) else checkpoint / "config.json")
    architectures = config.get("architectures") or []
    if not architectures:
        raise ValueError(f"{source}: architectures is missing")
    fields = Fields(config.get("text_config") or config, source)  # of a multimodal model: its language part
    sizes = (fields.need(key, int) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
    is_local = is_gguf(checkpoint) or home_path(path_or_hub_id).is_dir()
    return Verifier(path_or_hub_id, str(architectures[0]), *sizes), checkpoint if is_local else None


def weights_of(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Return functions, by a head's names, that read embedding and LM head, `[V, H]` each, of the target in `folder`.

    They raise ValueError if the target has none.
    """

    def read(name: str) -> Tensor:
        tied = bool(read_config(folder).get("tie_word_embeddings")) and not keeps_two(folder)
        tensors, name = open_tensors(folder), shared_weight(folder) if tied else name
        if name not in tensors:
            raise ValueError(f"{folder}: holds no {name}")
        return tensors[name]

    return {head_config.EMBEDDING: lambda: read(EMBEDDING), head_config.LM_HEAD: lambda: read(LM_HEAD)}
