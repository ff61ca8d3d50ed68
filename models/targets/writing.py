"""Writes a target as a checkpoint folder in Hugging Face's layout, with its config and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.chat import DEFAULT, TEMPLATE_FOLDER
from models.config import read_config_json
from models.gguf import is_gguf
from models.mtp_names import COUNTS
from models.quantized.scheme import SECTION
from models.targets.llama import LlamaTarget
from models.targets.tying import LM_HEAD
from models.weights import shard_files, split_merged

# files of a checkpoint folder other than weights and their index
BESIDE = ("*.json", "*.jinja", f"{TEMPLATE_FOLDER}/*.jinja", "tokenizer.model")


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


def write_beside(checkpoint: Path, folder: Path, end_tokens: tuple[int, ...]) -> None:
    """Write config.json, generation_config.json and the tokenizer's files. Raises ValueError if not supported."""
    from models.gguf.config import config_json
    from models.gguf.file import open_gguf
    from models.gguf.tokenizer import build_tokenizer, chat_templates, special_tokens

    file = open_gguf(checkpoint)
    templates = chat_templates(file)
    tokenizer: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens(file)}
    tokenizer |= {"clean_up_tokenization_spaces": False}
    if list(templates) == [DEFAULT]:
        tokenizer["chat_template"] = templates[DEFAULT]
    elif templates:
        tokenizer["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    contents = {
        "config.json": config_json(file) | {"dtype": "float32"},
        "generation_config.json": {"eos_token_id": list(end_tokens)},
        "tokenizer_config.json": tokenizer,
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    build_tokenizer(file).save(str(folder / "tokenizer.json"))


def save_target(target: LlamaTarget, folder: Path) -> None:
    """Write a target into the empty `folder`: its current weights, and all else as at `target.folder` or its GGUF file.

    Large targets are written in shards, with an index; a tied LM head once, as the embedding.
    """
    layout = dict(target.checkpoint_layout())
    if target.config.tie_word_embeddings:
        layout.pop(LM_HEAD, None)
    copy_beside(target, folder)
    config = read_config_json(folder / "config.json")
    dtype = str(target.norm.weight.dtype).removeprefix("torch.")
    config.pop(SECTION, None)  # the weights are written widened
    for key in COUNTS:  # of modules that were not loaded
        config.pop(key, None)
    if config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = target.config.tie_word_embeddings  # as decided by the loaded weights
    config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = target.as_stored(split_merged(target, layout, target.config.projected_heads))
    # Parts of a merged tensor share its memory, which the writer would take for tied weights.
    save_torch_state_dict({name: value.clone() for name, value in tensors.items()}, folder, metadata={"format": "pt"})


def write_with(source: Path, folder: Path, replaced: Mapping[str, Tensor]) -> None:
    """Write a copy of the checkpoint folder `source` into the empty `folder`, with other values of some tensors.

    These have the dtypes and shapes of the old ones, so that an index of shards stays true. Shards without any of them
    are hard links where the file system allows it.
    """
    shards = shard_files(source)
    others = (path for path in source.rglob("*") if path.is_file() and path not in shards)
    for path in others:
        destination = folder / path.relative_to(source)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination)
    for path in shards:
        with safe_open(path, "pt") as shard:
            names, metadata = shard.keys(), shard.metadata()
            if not replaced.keys().isdisjoint(names):
                values = {name: replaced[name] if name in replaced else shard.get_tensor(name) for name in names}
                save_file(values, folder / path.name, metadata=metadata)
                continue
        with suppress(OSError):
            (folder / path.name).hardlink_to(path.resolve())
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
