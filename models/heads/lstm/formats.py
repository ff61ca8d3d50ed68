"""Arctic's LSTM speculator (ArcticTraining writes it, ArcticInference reads it), its names with or without a prefix.

Widths are numbers, lists or texts with dots between. Their modules run embeddings and projections of several layers
only where all have the width of the sum, because each is normed with the weights of the next one's width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from torch import Tensor

from models.fields import MAX_LAYERS, MOST, Fields
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
from models.heads.lstm.config import LSTM, METHODS, RNN, LstmConfig, dotted
from models.heads.mlp.formats import ARCTIC, drop_copies, is_arctic
from models.heads.mlp.head import GATES

MOST_WIDTHS = 8
TIED = {f"{gate}_emb.0.weight": f"{GATES[0]}_emb.0.weight" for gate in GATES[1:]}


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return config.get("model_type") == "mlp_speculator" and is_arctic(config)


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    fields.only("model_type", "mlp_speculator")
    fields.only("architectures", *ARCTIC)
    fields.only("method", *METHODS)
    # how an engine grows its candidates, and which targets it serves the head for
    fields.ignore("top_k_tokens_per_head", "n_candidates", "base_model_archs")
    name = fields.maybe("base_model_name_or_path", str)
    has_gates = fields.take("method", str, RNN) == LSTM
    inner, emb, proj = (widths(fields, key) for key in ("inner_dim", "emb_dim", "proj_dim"))
    wrong = {*emb, *proj, *(inner if has_gates else ())} - {inner[0]}
    if wrong:
        keys = f"inner_dim={dotted(inner)}, emb_dim={dotted(emb)}, proj_dim={dotted(proj)}"
        raise ValueError(f"config.json: {keys}: must all be {inner[0]}; Arctic's own modules run no others")
    if has_gates:
        inner = emb = proj = inner[:1]  # of several only the first is built
    tie_weights = fields.take("tie_weights", bool, has_gates)
    if has_gates and not tie_weights:
        raise ValueError(f"config.json: tie_weights=False: the depths of {LSTM} share their weights")
    tied = fields.maybe("tie_lstm_embs", bool)
    if has_gates and tied is None:  # Arctic's training did not always write it
        tied = not TIED.keys() & shapes.keys()
        notes.append(f"tie_lstm_embs is not stated: {tied}, by the embeddings that the file holds")
    config = LstmConfig(
        vocab_size=fields.size("vocab_size"),
        target_hidden_size=fields.size("input_hidden_dim"),
        method=LSTM if has_gates else RNN,
        inner_dim=inner,
        emb_layers=len(emb),
        proj_layers=len(proj),
        n_predict=fields.size("n_predict", limit=MAX_LAYERS),
        tie_weights=tie_weights,
        tie_lstm_embs=bool(tied) and has_gates,
        scale_input=fields.take("scale_input", bool, False),
    )
    tokens = fields.maybe("num_lookahead_tokens", int)
    return ParsedConfig(config, Verifier(name) if name else None, tokens, notes)


def widths(fields: Fields, key: str) -> tuple[int, ...]:
    """Return the widths that a key states. Raises ValueError unless they are widths."""
    fields.ignore(key)
    value = fields.values.get(key)
    if value is None:
        raise ValueError(f"config.json: {key} is missing")
    items = value.split(".") if isinstance(value, str) else value if isinstance(value, list) else [value]
    sizes: tuple[Any, ...] = tuple(int(item) if isinstance(item, str) and item.isdecimal() else item for item in items)
    if not 1 <= len(sizes) <= MOST_WIDTHS or any(type(size) is not int or not 1 <= size <= MOST for size in sizes):
        wanted = f"a width from 1 to {MOST}, or up to {MOST_WIDTHS} as '4096.4096'"
        raise ValueError(f"config.json: {key}={value!r}: expected {wanted}")
    return sizes


def incoming(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, str]:
    """Drop the copies that Arctic's training saves of tied tensors. Raises ValueError for one that differs."""
    config, remarks = cast(LstmConfig, config), {}
    if config.tie_weights:
        heads = {f"head.{depth}.weight": "head.0.weight" for depth in range(1, config.n_predict)}
        remarks |= drop_copies(tensors, heads, "tie_weights")
    return remarks | (drop_copies(tensors, TIED, "tie_lstm_embs") if config.tie_lstm_embs else {})


def losses(checkpoint: Checkpoint) -> list[str]:
    config, notes = cast(LstmConfig, checkpoint.config), []
    if config.has_gates and not config.tie_lstm_embs:
        notes.append("ArcticInference serves no head with tie_lstm_embs=false")
    if not checkpoint.facts(needs_verifier=False).architecture:
        notes.append("base_model_archs is empty, which ArcticInference refuses; --verifier says what the target is")
    return notes


FORMAT = Format(
    name="arctic-lstm",
    heads=("lstm",),
    matches=matches,
    read=read,
    write=write_with_base_model,
    prefixes=("speculator.",),
    blame=(
        (r"^(input|output|cell)_emb", ("tie_lstm_embs", "method", "vocab_size", "emb_dim")),
        (r"^(forget_)?emb", ("vocab_size", "emb_dim", "method", "n_predict", "tie_weights")),
        (r"^head", ("vocab_size", "inner_dim", "n_predict", "tie_weights")),
        (r"proj\.0", ("input_hidden_dim", "proj_dim", "method")),
        (r"proj|ln", ("inner_dim", "proj_dim", "method", "n_predict", "tie_weights")),
    ),
    incoming=incoming,
    losses=losses,
)
FORMATS, LAYOUT = (FORMAT,), FORMAT
