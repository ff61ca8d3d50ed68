"""Writes a target as a checkpoint folder in Hugging Face's layout, with its config and tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from huggingface_hub import save_torch_state_dict

from models.chat import TEMPLATE_FOLDER
from models.config import read_json
from models.gguf import is_gguf
from models.gguf.folder import write_beside
from models.quantized.scheme import SECTION
from models.stacked_experts import stack
from models.targets.llama import LlamaTarget
from models.targets.tying import LM_HEAD
from models.weights import split_merged

BESIDE = (
    "*.json",
    "*.jinja",
    f"{TEMPLATE_FOLDER}/*.jinja",
    "tokenizer.model",
)  # files of a checkpoint folder other than weights and their index


def copy_beside(target: LlamaTarget, folder: Path) -> None:
    """Write all that a target's folder, or its GGUF file, holds beside its weights into `folder`."""
    source = target.folder
    if is_gguf(source):
        write_beside(source, folder, target.end_tokens)
        return
    for pattern in BESIDE:
        for path in sorted(source.glob(pattern)):
            if not path.name.endswith(".index.json"):
                destination = folder / path.relative_to(source)
                destination.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, destination)


def save_target(target: LlamaTarget, folder: Path) -> None:
    """Write a target into the empty `folder`: its current weights, and all else as at `target.folder` or its GGUF file.

    Large targets are written in shards, with an index; a tied LM head once, as the embedding.
    """
    layout = dict(target.checkpoint_layout())
    if target.config.tie_word_embeddings:
        layout.pop(LM_HEAD, None)
    copy_beside(target, folder)
    config = read_json(folder / "config.json")
    dtype = str(target.norm.weight.dtype).removeprefix("torch.")
    config.pop(SECTION, None)  # the weights are written widened
    if config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = target.config.tie_word_embeddings  # as decided by the loaded weights
    config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = split_merged(target, layout, target.heads[:2])
    tensors = stack(tensors) if target.config.sinks else tensors
    # Parts of a merged tensor share its memory, which the writer would take for tied weights.
    save_torch_state_dict({name: value.clone() for name, value in tensors.items()}, folder, metadata={"format": "pt"})
