"""Reads and writes exported heads: strictly checked, in formats that other software reads."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.formats.checkpoint import Checkpoint, ConversionOptions, Verifier
from models.formats.conversion import FORMATS, detect, read_checkpoint, write_checkpoint
from models.formats.files import PICKLES
from models.formats.verifier import weights_of
from models.gguf import is_gguf
from models.heads.base import Head
from models.heads.borrowing import borrow
from models.heads.config import EMBEDDING, LM_HEAD
from models.heads.layer_config import reaching
from models.heads.weights import checkpoint_layout, checkpoint_tensors, module_of
from models.hub import fetch_snapshot
from models.targets.llama import LlamaTarget
from models.weights import load_into


def save_head(
    head: Head,
    folder: Path,
    *,
    verifier: str,
    verifier_architecture: str,
    speculative_tokens: int,
    provenance: dict[str, Any],
    dtype: torch.dtype | None = None,
) -> None:
    """Write config.json, model.safetensors and provenance.json into an existing folder, weights in `dtype` if given.

    `provenance` must hold `target_fingerprint`; `load_head` compares it with the target that the head is loaded for.
    """
    assert "target_fingerprint" in provenance
    tensors = {
        name: value.to("cpu", dtype if value.is_floating_point() else None)
        for name, value in checkpoint_tensors(head).items()
    }
    if not getattr(head.config, "own_embedding", True):
        tensors.pop(EMBEDDING, None)
    checkpoint = Checkpoint(
        head=head.config.name,
        config=head.config,
        tensors=tensors,
        verifier=Verifier(verifier, verifier_architecture),
        speculative_tokens=min(speculative_tokens, head.config.max_depth or speculative_tokens),
        provenance=provenance,
    )
    write_checkpoint(FORMATS["headway"], checkpoint, folder)


def check_exported(folder: Path) -> None:
    """Raise ValueError if `folder`, or GGUF file, holds no head; called before a large target is loaded in vain."""
    if not (folder if is_gguf(folder) else folder / "config.json").is_file():
        raise ValueError(
            f"{folder}: no exported head ({'no such file' if is_gguf(folder) else 'no config.json'}); train one with "
            "`python train/run.py`, or give head.path="
        )


def fetch_head(hub_id: str, revision: str | None = None, *, weights: bool = True, option: str) -> Path:
    """Return the folder of a head from the model hub: config and safetensors, or pickles where there are none.

    Without `weights` the config alone. Raises ValueError as `fetch_snapshot` does.
    """
    if not weights:
        return fetch_snapshot(hub_id, revision, ("*.json",), option)
    folder = fetch_snapshot(hub_id, revision, ("*.json", "*.safetensors"), option)
    if any(folder.glob("*.safetensors")):
        return folder
    names = {Path(name) for form in FORMATS.values() for name in form.weights if name.endswith(PICKLES)}
    pickles = {pattern for name in names for pattern in (name.name, f"{name.stem}-*{name.suffix}")}  # and shards
    return fetch_snapshot(hub_id, revision, ("*.json", *sorted(pickles)), option)


def load_head(
    folder: str | Path,
    *,
    name: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    target: LlamaTarget | None = None,
    allow_mismatch: bool = False,
) -> Head:
    """Load a head for inference from our export, or any other format of models/formats that leaves nothing ambiguous.

    An embedding that is the target's is the same module, if dtype and device are the target's too. Raises ValueError
    for what `read_head` refuses, and when the maps of the draft vocabulary are invalid.
    """
    folder = Path(folder)
    checkpoint = read_head(folder, name=name, target=target, allow_mismatch=allow_mismatch)
    parts = checkpoint.config, checkpoint.tensors
    head = head_of(*parts, dtype=dtype, device=device, target=target, source=str(folder))
    head.notes = tuple(checkpoint.notes)
    return head


def head_of(
    config: Any,
    tensors: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    target: LlamaTarget | None,
    source: str,
) -> Head:
    """Return a head of this shape for inference, with the tensors of its checkpoint; `source` names them in errors."""
    head = module_of(config.name).kind(config).to(dtype)
    layout = checkpoint_layout(head)
    for shared, read_target in ((EMBEDDING, attrgetter("embedding_weight")), (LM_HEAD, _full_lm_head)):
        if shared in dict(head.named_parameters()) and shared not in tensors:
            if target is None:
                raise ValueError(
                    f"{source}: {shared} is not there, the head shares its target's; load it with a target"
                )
            weight, plain = target.norm.weight, target.config.embedding_size is None  # else its table is another
            place = torch.empty(0, device=device).device
            if shared == EMBEDDING and plain and (weight.dtype, weight.device) == (dtype, place):
                head.embed_tokens = target.embed_tokens
                del layout[shared]
            else:
                tensors = tensors | {shared: read_target(target)}
    load_into(head, tensors, layout, source=source)
    _check_vocabulary(source, head)
    head = head.to(device).eval().requires_grad_(False)
    if target is not None:
        borrow(head, target)
    return head


def _full_lm_head(target: LlamaTarget) -> Tensor:
    """Return the LM head `[V, H]`, with the scale of the logits; from the checkpoint if this process has but a part."""
    weight, scaling = target.lend()[0].unpacked_weight(), target.config.logits_scaling
    if weight is None or len(weight) != target.config.vocab_size:
        weight = weights_of(target.folder)[LM_HEAD]()
    return weight if scaling == 1 else weight / scaling


def read_head(
    folder: Path, *, name: str | None = None, target: LlamaTarget | None = None, allow_mismatch: bool = False
) -> Checkpoint:
    """Read and check the files of a head. Of `target` only sizes and fingerprint are used, so it may lack weights.

    Raises ValueError when the head is of another kind than `name`, when a tensor is missing, unexpected or misshapen,
    when sizes do not fit `target`, or when the head was trained for another target (unless `allow_mismatch`).
    """
    check_exported(folder)
    verifier = None
    if target is not None:
        sizes = target.config.vocab_size, target.config.hidden_size, target.config.num_layers
        verifier = Verifier(target.path, target.config.architecture, *sizes)
    checkpoint = read_checkpoint(detect(folder), folder, ConversionOptions(verifier))
    if name is not None and checkpoint.head != name:
        raise ValueError(f"head={name}: {folder} holds a head of another kind; say head={checkpoint.head}")
    if target is None:
        return checkpoint
    trained_for = (checkpoint.provenance or {}).get("target_fingerprint")
    if trained_for and target.fingerprint and trained_for != target.fingerprint and not allow_mismatch:
        raise ValueError(
            f"{folder}: this head was trained for another target (fingerprint {trained_for}, this one has "
            f"{target.fingerprint}); train it again, or accept a lower acceptance with head.allow_mismatch=true"
        )
    return replace(checkpoint, config=reaching(checkpoint.config, target.config.max_position_embeddings))


def _check_vocabulary(source: str, head: Head) -> None:
    """Raise ValueError for invalid maps: an offset read as an id, or the reverse, would silently draft nonsense."""
    ids, size = head.target_ids, head.config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= size or ids.unique().numel() < ids.numel():
        raise ValueError(
            f"{source}: the draft vocabulary does not map to as many of the target's {size} tokens; d2t holds offsets "
            "(target id = draft id + d2t), token_map holds target ids"
        )
    t2d = getattr(head, "t2d", None)
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], ids.sort().values):
        raise ValueError(f"{source}: d2t and t2d name different tokens; one of them is of another vocabulary")
