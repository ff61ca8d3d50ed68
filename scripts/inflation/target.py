"""Enlargement of a target, directly on a device or as a checkpoint folder for `model.path=`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.chat import TEMPLATE_FOLDER
from models.checkpoint import open_tensors
from models.config import TargetConfig, read_json
from models.gguf import is_gguf
from models.heads.layer_config import layer_json
from models.quantised import SECTION
from models.targets import read_target_config, resolve_checkpoint
from models.targets.llama import LlamaTarget
from models.targets.tying import EMBEDDING, LM_HEAD, shared_weight
from models.weights import INDEX, load_into
from scripts.inflation.layers import LAYER, LIFT, LayerAxes, Noise, mark_of, norm, vocabulary
from scripts.inflation.shapes import Axis, Shape, enlarged, layer_places

SHARD_BYTES = 4 * 2**30
DTYPES = (torch.float32, torch.bfloat16)  # fp16 cannot represent the marker's weights


def inflate_target(
    source: str | Path, shape: Shape, *, dtype: torch.dtype, device: str | torch.device, seed: int = 0
) -> LlamaTarget:
    """Return the target in folder `source` enlarged to the sizes of `shape`, for inference.

    It has no fingerprint, because it is not stored in a folder, so heads are not checked against it. Raises ValueError
    for a target that cannot be enlarged to this shape.
    """
    folder = resolve_checkpoint(str(source))
    old = _read_config(folder)
    new = enlarged(old, shape)
    with torch.device("meta"):
        target = LlamaTarget(new)
    target = target.to(dtype).to_empty(device=device)
    layout = target.checkpoint_layout()
    if new.tie_word_embeddings:
        target.lm_head.weight = target.embed_tokens.weight
        layout.pop(LM_HEAD, None)
    tensors = dict(_tensors(folder, old, new, dtype, torch.device(device), seed))
    load_into(target, tensors, layout, source=f"{folder}, enlarged")
    target.path, target.folder = str(source), folder
    return target.eval().requires_grad_(False)


def write_target(
    source: str | Path, shape: Shape, out: Path, *, dtype: torch.dtype, seed: int = 0, marked: bool = True
) -> None:
    """Write the enlarged target as a folder: config, weights in shards, tokenizer. `out` must exist and be empty.

    Without `marked` new token ids have a logit of 0 (scripts/inflation/layers.py). Raises ValueError as
    `inflate_target` does.
    """
    folder = resolve_checkpoint(str(source))
    old = _read_config(folder)
    written = read_json(folder / "config.json")
    new = enlarged(old, shape)
    written |= layer_json(new)
    written |= {"tie_word_embeddings": new.tie_word_embeddings, "torch_dtype": str(dtype).removeprefix("torch.")}
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    for file in folder.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template", "generation_config")):
            shutil.copy(file, out / file.name)
    if (folder / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(folder / TEMPLATE_FOLDER, out / TEMPLATE_FOLDER)
    _write_shards(_tensors(folder, old, new, dtype, torch.device("cpu"), seed, marked=marked), out)


def _read_config(folder: Path) -> TargetConfig:
    if is_gguf(folder):
        raise ValueError(f"{folder}: a GGUF file can be served and trained for, not enlarged; give a checkpoint folder")
    if SECTION in read_json(folder / "config.json"):
        raise ValueError(
            f"{folder}: quantization_config: a quantised target can be served and trained for, not enlarged"
        )
    return read_target_config(folder)


def _write_shards(tensors: Iterator[tuple[str, Tensor]], out: Path) -> None:
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = held = number = 0

    def flush() -> None:
        nonlocal number, held
        number += 1
        name = f"model-{number:05d}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()
        held = 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > SHARD_BYTES:
            flush()
        shard[name] = tensor.contiguous()
        held, total = held + size, total + size
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensors(
    folder: Path,
    old: TargetConfig,
    new: TargetConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    *,
    marked: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by their checkpoint names, creating one large tensor at a time."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: must be float32 or bfloat16")
    source = open_tensors(folder)
    noise, axes = Noise(seed, device), LayerAxes.between(old, new, marked=marked)
    vocab = Axis.padded(old.vocab_size, new.vocab_size, "vocab_size")
    hidden, marker = axes.hidden, axes.marker
    embedding = source[shared_weight(folder) if old.tie_word_embeddings else EMBEDDING]
    lm_head = embedding if old.tie_word_embeddings else source[LM_HEAD]
    mark = mark_of(embedding)

    def build() -> Iterator[tuple[str, Tensor]]:
        name = EMBEDDING
        tied = new.tie_word_embeddings
        yield name, vocabulary(noise, name, embedding, vocab, hidden, marker, mark=mark, down=tied)
        if not tied:
            yield LM_HEAD, vocabulary(noise, "lm_head", lm_head, vocab, hidden, marker)
        yield "model.norm.weight", norm(noise, source["model.norm.weight"], hidden, marker=marker, lift=LIFT)
        places = layer_places(old.num_layers, new.num_layers)
        for index in range(new.num_layers):
            for module in LAYER:
                name = f"model.layers.{index}.{module}.weight"
                before = f"model.layers.{places.index(index)}.{module}.weight" if index in places else None
                yield name, axes.tensor(noise, name, None if before is None else source[before], hidden)

    for name, tensor in build():
        yield name, tensor.to(dtype)
