"""IBM's MLP speculator (`mlp_speculator`), with or without the prefix `speculator.` on every name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from models.fields import MAX_LAYERS, Fields
from models.formats.checkpoint import (
    Checkpoint,
    ConversionOptions,
    Format,
    ParsedConfig,
    Shapes,
    Verifier,
    write_with_base_model,
)
from models.heads.config import HeadShape
from models.heads.mlp.config import MlpConfig

TOP_K = (5, 4, 3)
# `architectures` of Arctic's files, and their older name
ARCTIC = (["ArcticLSTMSpeculatorPreTrainedModel"], ["MLPVariantSpeculatorPreTrainedModel"])


def is_arctic(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json of this model_type is of Arctic's layout."""
    return config.get("architectures") in ARCTIC or "input_hidden_dim" in config


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return config.get("model_type") == "mlp_speculator" and not is_arctic(config)


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    fields.only("model_type", "mlp_speculator")
    fields.only("architectures", ["MLPSpeculatorPreTrainedModel"], "MLPSpeculatorPreTrainedModel")
    name = fields.maybe("base_model_name_or_path", str)
    alias = fields.maybe("hidden_size", int)
    emb_dim = fields.size("emb_dim", alias)
    if alias not in (None, emb_dim):
        raise ValueError(f"config.json: emb_dim={emb_dim} and its alias hidden_size={alias} disagree")
    n_predict = fields.size("n_predict", limit=MAX_LAYERS)
    top_k = fields.numbers("top_k_tokens_per_head")
    if top_k is None:
        top_k = [*TOP_K, *[1] * n_predict][:n_predict]
        notes.append(f"top_k_tokens_per_head is not stated: {top_k}")
    if len(top_k) != n_predict:
        raise ValueError(f"config.json: top_k_tokens_per_head={top_k}: must be as many as n_predict={n_predict}")
    config = MlpConfig(
        vocab_size=fields.size("vocab_size"),
        target_hidden_size=emb_dim,
        inner_dim=emb_dim if fields.maybe("inner_dim", int) == 0 else fields.size("inner_dim", emb_dim),
        n_predict=n_predict,
        tie_weights=fields.take("tie_weights", bool, False),
        scale_input=fields.take("scale_input", bool, False),
        top_k_tokens_per_head=tuple(top_k),
        n_candidates=fields.take("n_candidates", int, 5),
    )
    tokens = fields.maybe("num_lookahead_tokens", int)
    return ParsedConfig(config, Verifier(name) if name else None, tokens, notes)


def incoming(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, str]:
    """Drop the copies of tied tensors that some files hold for every depth. Raises ValueError for one that differs."""
    config = cast(MlpConfig, config)
    if not config.tie_weights:
        return {}
    copies = {
        f"{part}.{depth}.{kind}": f"{part}.{first}.{kind}"
        for part, first in (("emb", 0), ("ln", 0), ("head", 0), ("proj", 1))
        for depth in range(first + 1, config.n_predict)
        for kind in ("weight", "bias")
    }
    return drop_copies(tensors, copies, "tie_weights")


def drop_copies(tensors: dict[str, Tensor], copies: Mapping[str, str], key: str) -> dict[str, str]:
    """Drop tensors that `key` ties to others, both by name, and return a remark on each.

    Raises ValueError for one that differs.
    """
    remarks = {}
    for name, first in copies.items():
        if name in tensors and first in tensors:
            if not torch.equal(tensors[name], tensors[first]):
                raise ValueError(f"{name} differs from {first}, but config.json states {key}=True")
            del tensors[name]
            remarks[name] = f"a copy of {first}, to which it is tied"
    return remarks


def losses(checkpoint: Checkpoint) -> list[str]:
    return ["vLLM 0.32 reads this config.json but serves no MLP speculator"]


FORMAT = Format(
    name="ibm-mlp",
    heads=("mlp",),
    matches=matches,
    read=read,
    write=write_with_base_model,
    prefixes=("speculator.",),
    written_prefix="speculator.",
    blame=(
        (r"^emb", ("vocab_size", "inner_dim", "n_predict", "tie_weights")),
        (r"^head", ("vocab_size", "inner_dim", "n_predict", "tie_weights")),
        (r"^proj\.0", ("emb_dim", "inner_dim")),
        (r"^(proj|ln)", ("inner_dim", "n_predict", "tie_weights")),
    ),
    incoming=incoming,
    losses=losses,
)
FORMATS, LAYOUT = (FORMAT,), FORMAT
