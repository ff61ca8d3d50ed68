"""Enlargement of an EAGLE-3 head: its logits over the old draft vocabulary equal those of the original head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from models.heads.eagle3.config import Eagle3Config
from models.heads.eagle3.head import Eagle3Head
from models.heads.weights import checkpoint_layout, checkpoint_tensors
from models.weights import load_into
from scripts.inflation.layers import LAYER, LIFT, LayerAxes, Noise, norm, put, vocabulary
from scripts.inflation.shapes import Axis, Shape, layer_places


def inflate_head(
    head: Eagle3Head,
    shape: Shape,
    *,
    target_layers: int,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int = 0,
    marked: bool = True,
) -> Eagle3Head:
    """Return the unpacked `head` enlarged to the sizes of `shape`, for inference.

    `target_layers` is the number of layers of the target that the head was trained for. The draft vocabulary grows to
    the shape's; its new ids map to new ids of the target and get very low logits, or 0 without `marked`, as the target
    was enlarged. Raises ValueError for a head that cannot be enlarged.
    """
    old, new = head.config, _enlarged(head.config, shape, target_layers)
    with torch.device("meta"):
        wide = Eagle3Head(new)
    wide = wide.to(dtype).to_empty(device=device)
    noise = Noise(seed, torch.device(device))
    source = checkpoint_tensors(head)
    tensors = {name: tensor.to(dtype) for name, tensor in _tensors(source, old, new, noise, marked=marked)}
    layout = {name: parts for name, parts in checkpoint_layout(wide).items() if name not in ("d2t", "t2d")}
    load_into(wide, tensors, layout, source="the enlarged head")
    added = old.vocab_size + torch.arange(new.draft_vocab_size - old.draft_vocab_size)
    ids = torch.cat([head.target_ids.cpu(), added])
    with torch.no_grad():
        wide.d2t.copy_(ids - torch.arange(len(ids)))
        wide.t2d.copy_(torch.zeros(new.vocab_size, dtype=torch.bool).index_fill_(0, ids, True))
    return wide.eval().requires_grad_(False)


def _enlarged(old: Eagle3Config, shape: Shape, target_layers: int) -> Eagle3Config:
    if old.hidden_size != old.target_hidden_size:
        raise ValueError(f"head.hidden_size={old.hidden_size}: can only be enlarged at its target's width")
    for flag in ("norm_before_residual", "norm_output"):
        if getattr(old, flag) and shape.vocab_size > old.vocab_size:
            raise ValueError(f"head.{flag}=true: its state cannot carry what keeps new draft ids down")
    places = layer_places(target_layers, shape.num_layers)
    max_draft_vocab_size = old.draft_vocab_size + shape.vocab_size - old.vocab_size
    layer = replace(
        old.layer,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=old.layer.rms_norm_eps * old.hidden_size / shape.hidden_size,
        **shape.layer_sizes,
    )
    return replace(
        old,
        layer=layer,
        draft_vocab_size=max(old.draft_vocab_size, min(shape.draft_vocab_size, max_draft_vocab_size)),
        aux_layers=tuple(places[layer_id] for layer_id in old.aux_layers),
        target_hidden_size=shape.hidden_size,
    )


def _tensors(
    source: dict[str, Tensor], old: Eagle3Config, new: Eagle3Config, noise: Noise, *, marked: bool
) -> Iterator[tuple[str, Tensor]]:
    axes = LayerAxes.between(old.layer, new.layer, marked=marked)
    hidden, marker = axes.hidden, axes.marker
    vocab = Axis.padded(old.vocab_size, new.vocab_size, "vocab_size")
    drafts = Axis.padded(old.draft_vocab_size, new.draft_vocab_size, "draft_vocab_size")
    fused = hidden
    for _ in old.aux_layers[1:]:
        fused = fused.then(hidden)

    embedding = noise.normal("embed_tokens", vocab.size, hidden.size)
    embedding[vocab.places.to(noise.device)] = 0.0
    yield "embed_tokens.weight", put(embedding, source["embed_tokens.weight"], vocab, hidden)
    if old.norm_before_fc:
        yield "input_norm.weight", norm(noise, source["input_norm.weight"], fused, marker=None)
    if old.fc_norm:
        for index in range(len(old.aux_layers)):
            name = f"fc_norm.{index}.weight"
            yield name, norm(noise, source[name], hidden, marker=marker, lift=1.0)
    yield "fc.weight", _fusion(source["fc.weight"], noise, hidden, fused, marker)
    for index in range(old.layer.num_layers):
        modules, reads = (LAYER, hidden) if index else ((*LAYER, "hidden_norm"), hidden.then(hidden))
        for name in (f"layers.{index}.{module}.weight" for module in modules):
            yield name, axes.tensor(noise, name, source[name], reads)
    yield "norm.weight", norm(noise, source["norm.weight"], hidden, marker=marker, lift=LIFT)
    yield "lm_head.weight", vocabulary(noise, "lm_head", source["lm_head.weight"], drafts, hidden, marker)


def _fusion(old: Tensor, noise: Noise, hidden: Axis, fused: Axis, marker: int | None) -> Tensor:
    """Return the enlarged fc weight.

    The features' new dimensions are zero, except the marker, which the state copies from the last feature.
    """
    new = noise.zeros(hidden.size, fused.size)
    rows = hidden.places.to(noise.device)
    new[rows] = noise.normal("fc", len(rows), fused.size)
    put(new, old, hidden, fused)
    if marker is not None:
        new[:, marker :: hidden.size] = 0.0
        new[marker, fused.size - hidden.size + marker] = 1.0
    return new
