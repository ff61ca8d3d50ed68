"""Heads by name, and how an exported one is read and written (the speculators format, checkpoint-strict)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from models.config import read_json
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.targets.llama import LlamaTarget
from models.weights import load_into, read_tensors, split_merged

__all__ = ["HEADS", "Eagle3Config", "Eagle3Head", "load_head", "save_head"]

HEADS = {"eagle3": Eagle3Head}
PROVENANCE = "provenance.json"


def save_head(
    head: Eagle3Head,
    folder: Path,
    *,
    verifier: str,
    verifier_architecture: str,
    speculative_tokens: int,
    provenance: dict[str, Any],
    dtype: torch.dtype | None = None,
) -> None:
    """Writes config.json, model.safetensors and provenance.json into an existing folder, weights in `dtype` if given.

    `provenance` must hold `target_fingerprint`; `load_head` compares it with the target it is loaded for.
    """
    assert "target_fingerprint" in provenance
    tensors = split_merged(head, head.checkpoint_layout(), head.merged_sizes())
    if dtype is not None:
        tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = head.config.to_json(
        verifier=verifier, verifier_architecture=verifier_architecture, speculative_tokens=speculative_tokens
    )
    config["torch_dtype"] = str(next(t.dtype for t in tensors.values() if t.is_floating_point())).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")


def load_head(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    target: LlamaTarget | None = None,
    allow_mismatch: bool = False,
) -> Eagle3Head:
    """Reads an exported head for inference.

    Raises ValueError when a tensor is missing, left over or misshapen, when sizes do not fit `target`, or when the
    head was trained for another target than `target` (unless `allow_mismatch`).
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder}: no exported head (no config.json); train one with `python train/run.py`, or give head.path="
        )
    config = Eagle3Config.from_json(read_json(folder / "config.json"))
    if target is not None:
        _check_target(folder, config, target, allow_mismatch=allow_mismatch)
    head = Eagle3Head(config)
    load_into(head, dict(read_tensors(folder)), head.checkpoint_layout(), source=str(folder))
    return head.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _check_target(folder: Path, config: Eagle3Config, target: LlamaTarget, *, allow_mismatch: bool) -> None:
    sizes = {
        "target_hidden_size": (config.target_hidden_size, target.config.hidden_size),
        "vocab_size": (config.layer.vocab_size, target.config.vocab_size),
    }
    for key, (mine, theirs) in sizes.items():
        if mine != theirs:
            raise ValueError(f"{folder}: the head's {key} is {mine}, the target's is {theirs}; it is another target's")
    if max(config.aux_layers) >= target.config.num_layers:
        raise ValueError(f"{folder}: reads layer {max(config.aux_layers)}, the target has {target.config.num_layers}")
    path = folder / PROVENANCE
    if allow_mismatch or not path.is_file():
        return
    trained_for = read_json(path).get("target_fingerprint")
    if target.fingerprint and trained_for != target.fingerprint:
        raise ValueError(
            f"{folder}: this head was trained for another target (fingerprint {trained_for}, this one has "
            f"{target.fingerprint}); train it again, or accept a lower acceptance with head.allow_mismatch=true"
        )
