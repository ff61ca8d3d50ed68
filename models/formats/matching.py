"""Checks the tensors of a file against those that its config.json describes: all of them, each once, and no other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.formats.checkpoint import Blame, Format, ParsedConfig
from models.heads.config import HeadShape
from models.heads.weights import checkpoint_tensors, module_of

SHOWN = 8
KINDS = {  # of dtypes, each of which stands for the others
    "floating point": (torch.float64, torch.float32, torch.float16, torch.bfloat16),
    "whole numbers": (torch.int64, torch.int32),
}


def expected_tensors(config: HeadShape) -> dict[str, Tensor]:
    """Return name -> tensor without storage, for every tensor of our export of such a head."""
    with torch.device("meta"):
        return checkpoint_tensors(module_of(config.name).kind(config))


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
        for alias, replacement in aliases:
            short = replacement + short.removeprefix(alias) if short.startswith(alias) else short
        if short in bare:
            raise ValueError(f"{name} and {names[short]}: one tensor, doubled")
        bare[short], names[short] = tensor, name
    return bare, names


def match(
    form: Format, stated: ParsedConfig, tensors: Mapping[str, Tensor], written: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors under our names, and the format's name of each.

    Raises ValueError listing every tensor that is missing, unexpected, not finite, or of another shape or kind of
    dtype, with the keys of `written` (config.json) that it should follow from.
    """
    config, blame = stated.config, stated.blame or form.blame
    expected = {form.spell(our_name, config): (our_name, meta) for our_name, meta in expected_tensors(config).items()}
    problems, matched, names = [], {}, {}
    for source, (our_name, meta) in expected.items():
        tensor, keys = tensors.get(source), because(blame, source, written)
        kind, dtypes = next((each for each in KINDS.items() if meta.dtype in each[1]), (meta.dtype, (meta.dtype,)))
        if tensor is None:
            if our_name not in form.optional(config):
                problems.append(f"{source}: missing, though config.json states {keys}")
        elif tensor.shape != meta.shape:
            problems.append(f"{source} {list(tensor.shape)}: expected {list(meta.shape)}, as config.json states {keys}")
        elif tensor.dtype not in dtypes:
            problems.append(f"{source} is {tensor.dtype}: expected {kind}")
        elif tensor.is_floating_point() and not tensor.isfinite().all():
            problems.append(f"{source} holds NaN or infinity")
        else:
            matched[our_name], names[our_name] = tensor.to(meta.dtype) if meta.dtype == torch.int64 else tensor, source
    for name in sorted(set(tensors) - set(expected)):
        keys = because(blame, name, written)
        problems.append(f"{name}: not part of this head, of which config.json states {keys}")
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError("config.json and weights disagree:\n  " + "\n  ".join(problems[:SHOWN]) + more)
    return matched, names


def because(blame: Blame, name: str, written: Mapping[str, Any]) -> str:
    """Return the keys of config.json that a tensor follows from, as "vocab_size=384, hidden_size=64"."""
    flat = dict(written)
    for section in ("transformer_layer_config", "dflash_config"):
        flat |= written.get(section) or {}
    keys = next((keys for pattern, keys in blame if re.search(pattern, name)), ())
    settings = [f"{key}={flat[key]}" for key in keys if flat.get(key) is not None]
    if keys and flat.get(keys[0]) is None:  # the deciding flag is the first key
        settings.insert(0, f"no {keys[0]}")
    return ", ".join(settings) or "nothing of the kind"
