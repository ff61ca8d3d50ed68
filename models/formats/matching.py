"""Checks the tensors of a file against those that its config.json describes: all of them, each once, and no other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.formats.checkpoint import Blame, Format, Stated
from models.heads import HEADS, Head
from models.heads.base import HeadShape
from models.weights import split_merged

SHOWN = 8
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32)


def head_kind(config: HeadShape) -> type[Head]:
    return next(kind for kind in HEADS.values() if kind.config_class is type(config))


def expected_tensors(config: HeadShape) -> dict[str, Tensor]:
    """Return name -> tensor without storage, for every tensor of our export of such a head."""
    with torch.device("meta"):
        head = head_kind(config)(config)
    return split_merged(head, head.checkpoint_layout(), head.merged_sizes())


def bare_names(
    tensors: Mapping[str, Tensor], prefixes: tuple[str, ...], aliases: tuple[tuple[str, str], ...]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors without prefixes and aliases, and the name of each in the file.

    Raises ValueError for two that get the same name.
    """
    bare: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        short = name.removeprefix(prefix)
        for other, own in aliases:
            short = own + short.removeprefix(other) if short.startswith(other) else short
        if short in bare:
            raise ValueError(f"{name} and {names[short]}: one tensor, doubled")
        bare[short], names[short] = tensor, name
    return bare, names


def match(
    form: Format, stated: Stated, tensors: Mapping[str, Tensor], written: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors under our names, and the format's name of each.

    Raises ValueError listing every tensor that is missing, unexpected, not finite, or of another shape or kind of
    dtype, with the keys of `written` (config.json) that it should follow from.
    """
    config, blame = stated.config, stated.blame or form.blame
    wanted = {form.spell(ours, config): (ours, like) for ours, like in expected_tensors(config).items()}
    problems, matched, names = [], {}, {}
    for theirs, (ours, like) in wanted.items():
        tensor, says = tensors.get(theirs), because(blame, theirs, written)
        if tensor is None:
            if ours not in form.optional(config):
                problems.append(f"{theirs}: missing, though config.json states {says}")
        elif tensor.shape != like.shape:
            problems.append(f"{theirs} {list(tensor.shape)}: expected {list(like.shape)}, as config.json states {says}")
        elif not _same_kind(tensor, like):
            problems.append(f"{theirs} is {tensor.dtype}: expected {_kind(like)}")
        elif tensor.is_floating_point() and not tensor.isfinite().all():
            problems.append(f"{theirs} holds NaN or infinity")
        else:
            matched[ours], names[ours] = tensor.to(like.dtype) if like.dtype == torch.int64 else tensor, theirs
    for name in sorted(set(tensors) - set(wanted)):
        says = because(blame, name, written)
        problems.append(f"{name}: not part of this head, of which config.json states {says}")
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError("config.json and weights disagree:\n  " + "\n  ".join(problems[:SHOWN]) + more)
    return matched, names


def because(blame: Blame, name: str, written: Mapping[str, Any]) -> str:
    """Return the keys of config.json that a tensor follows from, as "vocab_size=384, hidden_size=64"."""
    flat = {**written, **(written.get("transformer_layer_config") or {})}
    keys = next((keys for pattern, keys in blame if re.search(pattern, name)), ())
    says = [f"{key}={flat[key]}" for key in keys if flat.get(key) is not None]
    if keys and flat.get(keys[0]) is None:  # the deciding flag is the first key
        says.insert(0, f"no {keys[0]}")
    return ", ".join(says) or "nothing of the kind"


def _same_kind(tensor: Tensor, like: Tensor) -> bool:
    kinds = FLOATS if like.dtype in FLOATS else WHOLE if like.dtype in WHOLE else (like.dtype,)
    return tensor.dtype in kinds


def _kind(like: Tensor) -> str:
    return "floating point" if like.dtype in FLOATS else "whole numbers" if like.dtype in WHOLE else str(like.dtype)
