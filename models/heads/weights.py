"""What is done with a head's weights outside of a forward: they are initialized, packed for serving, exported.

The functions here do it for any head. What a head does in its own way, it says in `HEAD` of its head.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.weights.quantize import WeightFormat
from models import layers
from models.heads import HEADS
from models.heads.base import Head
from models.heads.borrowing import borrow, borrowed_by
from models.targets.llama import LlamaTarget
from models.vocab import target_ids
from models.weights import merged_parts, split_merged

log = logging.getLogger("headway.heads")

Layout = dict[str, tuple[str, ...]]  # parameter or buffer -> the checkpoint's tensors that are concatenated to make it


def pack_layers(head: Head, *, exact: bool, weight_format: WeightFormat) -> None:
    """Pack the linear layers like models.layers.pack. Borrowed modules are the target's and stay as they are.

    With weights that are integers rows are quantized too: that changes drafts alone, and hardly those. A format with
    fewer bits than the target's packs a copy of its LM head, if the head uses it.
    """
    layers.pack(head, exact=exact, weight_format=weight_format, quantize_rows=True)
    for borrowed in borrowed_by(head):
        if head.readout(0).lm_head is borrowed.lm_head:
            borrowed.pack(exact=exact, weight_format=weight_format)


def layout_of_names(head: Head) -> Layout:
    """Return our names, those of merged layers taken apart; maps of the vocabulary only if it is a part."""
    layout = {name: merged_parts(name) for name, _ in head.named_parameters()}
    if head.config.draft_vocab_size < head.config.vocab_size:
        layout |= {name: (name,) for name, _ in head.named_buffers(recurse=False)}
    return layout


class HeadModule(NamedTuple):
    """A head's module, made from its shape, and the functions that make weights of it and of these weights files."""

    kind: type[Head]
    initialize: Callable[..., None]  # (head, target, *, from_target, seed)
    pack: Callable[..., None] = pack_layers
    layout: Callable[..., Layout] = layout_of_names


def module_of(name: str) -> HeadModule:
    """Return the module of the head of this name."""
    return HEADS[name].part("head").HEAD


def dtype_of(head: Head) -> torch.dtype:
    return next(head.parameters()).dtype


@torch.no_grad()
def set_vocabulary(head: Head, d2t: Tensor, t2d: Tensor) -> None:
    """Store the maps of models/vocab.py; a head over the whole vocabulary may store nothing."""
    assert d2t.numel() == head.config.draft_vocab_size
    maps = {"d2t": d2t, "t2d": t2d, "token_map": target_ids(d2t)}
    for name, buffer in head.named_buffers(recurse=False):
        if name in maps:
            buffer.copy_(maps[name])


@torch.no_grad()
def initialize(head: Head, target: LlamaTarget, *, from_target: bool, seed: int = 0) -> None:
    """Initialize a new head, after `set_vocabulary`. It borrows of `target`, which must not be packed."""
    borrow(head, target)
    for borrowed in borrowed_by(head):
        borrowed.to(next(head.parameters()))
    module_of(head.config.name).initialize(head, target, from_target=from_target, seed=seed)


def start_at_random() -> None:
    """Say that a head takes nothing of its target's layers."""
    log.warning("the head starts at random: its layers are not of the sizes and kind of the target's last ones")


def draw_matrices(head: Head, seed: int, *, but: str | None = None) -> None:
    """Draw every matrix from N(0, 0.02), but one parameter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2 and name != but:
            parameter.normal_(0.0, 0.02, generator=generator)


def pack(head: Head, *, exact: bool, weight_format: WeightFormat) -> None:
    """Pack a head for serving, after `borrow`, in place; it can no longer be trained."""
    module_of(head.config.name).pack(head, exact=exact, weight_format=weight_format)


def checkpoint_layout(head: Head) -> Layout:
    """Return which tensors of a checkpoint make each parameter or buffer that is exported."""
    return module_of(head.config.name).layout(head)


def checkpoint_tensors(head: Head) -> dict[str, Tensor]:
    """Return the tensors of the head's checkpoint, by name."""
    return split_merged(head, checkpoint_layout(head), head.config.projected_heads)
