"""What a conversion needs of the target: its name and sizes and, rarely, its token embedding and LM head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from models.checkpoint import open_tensors, read_config
from models.config import read_json
from models.fields import Fields
from models.formats.checkpoint import Verifier
from models.gguf import is_gguf
from models.heads import config as head_config
from models.targets.tying import EMBEDDING, LM_HEAD, keeps_two, shared_weight


def find_verifier(path_or_hub_id: str) -> tuple[Verifier, Path | None]:
    """Return the verifier of a folder or GGUF file, with the path, or of a hub id. Raises ValueError if no config."""
    folder = Path(path_or_hub_id).expanduser()
    if is_gguf(folder):
        file, config = folder, read_config(folder)
    elif folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise ValueError(f"--verifier {path_or_hub_id}: no config.json in this folder")
        config = read_json(file)
    else:
        folder, file = None, _from_hub(path_or_hub_id)
        config = read_json(file)
    fields = Fields(config.get("text_config") or config, str(file))  # of a multimodal model: its language part
    architectures = config.get("architectures") or []
    if not architectures:
        raise ValueError(f"{file}: architectures is missing")
    sizes = (fields.need(key, int) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
    return Verifier(path_or_hub_id, str(architectures[0]), *sizes), folder


def _from_hub(hub_id: str) -> Path:
    if hub_id.count("/") != 1 or hub_id.startswith((".", "/", "~")):
        raise ValueError(f"--verifier {hub_id}: no such folder (a hub id would be written owner/name)")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"--verifier {hub_id}: neither a folder nor reachable on the model hub ({type(error).__name__}); "
            "give a folder with its config.json"
        ) from error


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
