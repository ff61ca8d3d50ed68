"""FasterDecoding's Medusa, and Medusa as vLLM reads it, in which Headway exports it.

FasterDecoding's file, `medusa_lm_head`, holds {head}.{layer}.linear.* and {head}.{layers}.weight. Its config.json
states only the numbers of heads and layers; the sizes follow from the tensors. Every residual layer has a bias, and
every head a separate LM head.

vLLM's holds blocks.{head}.layers.{layer}.* and lm_heads.{head}.weight. vLLM ignores names that it does not expect, so
it silently loses a bias without medusa_fc_bias; here the two must agree.
"""

from __future__ import annotations

import re
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
from models.heads.medusa.config import MedusaConfig

COUNTS = ("medusa_num_heads", "medusa_num_layers")
WRONG_COUNT = 2  # heads, by the config.json of each head that FasterDecoding published; the files hold five


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return COUNTS[0] in config and not matches_vllm(config, files)


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    heads, layers = (fields.size(key, limit=MAX_LAYERS) for key in COUNTS)
    present = len({name.partition(".")[0] for name in shapes if name[:1].isdigit()})
    if heads == WRONG_COUNT < present <= MAX_LAYERS:
        notes.append(
            f"medusa_num_heads={heads}, and the file holds {present}: all are used, as in FasterDecoding's code"
        )
        heads = present
    name = fields.maybe("base_model_name_or_path", str)
    fields.only("version", "2")
    fields.ignore("architectures", "model_type")
    last = f"0.{layers}.weight"
    if len(shapes.get(last, ())) != 2:
        raise ValueError(
            f"{last}: missing, the LM head of the first head after medusa_num_layers={layers} residual layers "
            "(heads that share the target's LM head, of the first Medusa release, are not supported)"
        )
    vocab_size, hidden_size = shapes[last]
    fields.only("vocab_size", vocab_size)
    fields.only("hidden_size", hidden_size)
    config = MedusaConfig(vocab_size, hidden_size, heads, layers, vocab_size, shared=False, bias=True)
    return ParsedConfig(config, Verifier(name) if name else None, notes=notes)


def spell(name: str, config: HeadShape) -> str:
    if match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    match = re.fullmatch(r"lm_heads\.(\d+)\.weight", name)
    assert match, name
    return f"{match[1]}.{cast(MedusaConfig, config).num_layers}.weight"


def write(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(MedusaConfig, checkpoint.config)
    for unsupported, message in (
        (config.shared, "original_lm_head=true: this format has an LM head for every head"),
        (not config.bias, "medusa_fc_bias=false: this format has a bias on every residual layer"),
        (
            config.draft_vocab_size < config.vocab_size,
            f"truncated_vocab_size={config.draft_vocab_size}: this format has no smaller vocabulary",
        ),
    ):
        if unsupported:
            raise ValueError(message)
    if checkpoint.verifier is None:
        raise ValueError("base_model_name_or_path: not known, and its readers take vicuna-7b for it; give --verifier")
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": checkpoint.verifier.name,
        "hidden_size": config.target_hidden_size,
        "vocab_size": config.vocab_size,
    }


def losses(checkpoint: Checkpoint) -> list[str]:
    return ["FasterDecoding's own loader opens medusa_lm_head.pt alone; this is medusa_lm_head.safetensors, no pickle"]


FORMAT = Format(
    name="medusa",
    heads=("medusa",),
    weights=("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"),
    matches=matches,
    read=read,
    write=write,
    spell=spell,
    prefixes=("medusa_head.",),
    blame=((r"linear", ("medusa_num_heads", "medusa_num_layers", "hidden_size")), (r"", (*COUNTS, "vocab_size"))),
    losses=losses,
    states_tokens=False,
)

SHARED, FIRST = "lm_head.weight", "lm_heads.0.weight"


def matches_vllm(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return config.get("model_type") == "medusa" or config.get("architectures") == ["MedusaModel"]


def read_vllm(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    fields.only("model_type", "medusa")
    fields.only("architectures", ["MedusaModel"])
    fields.ignore("max_paths", "topk", "max_seq_len")
    name = fields.maybe("base_model_name_or_path", str)
    fields.only("logit_scale", 1.0, 1)
    vocab_size = fields.size("vocab_size")
    flags = {key: fields.maybe(key, bool) for key in ("original_lm_head", "medusa_fc_bias")}
    missing = [key for key, value in flags.items() if value is None]
    if missing:
        notes.append(f"not stated, so false: {', '.join(missing)}")
    config = MedusaConfig(
        vocab_size=vocab_size,
        target_hidden_size=fields.size("hidden_size"),
        num_heads=count(fields, "heads", "num_heads"),
        num_layers=count(fields, "layers", "num_hidden_layers"),
        draft_vocab_size=fields.size("truncated_vocab_size", vocab_size),
        shared=bool(flags["original_lm_head"]),
        bias=bool(flags["medusa_fc_bias"]),
    )
    tokens = fields.maybe("num_lookahead_tokens", int)
    return ParsedConfig(config, Verifier(name) if name else None, tokens, notes)


def count(fields: Fields, counted: str, key: str) -> int:
    """Read `key`, for which vLLM takes any key containing "num" and `counted`. Raises ValueError when there are two."""
    names = [name for name in fields.values if "num" in name and counted in name] or [key]
    if len(names) > 1:
        raise ValueError(f"config.json: {' and '.join(names)} are both taken for {key}; keep one")
    return fields.size(names[0], limit=MAX_LAYERS)


def incoming(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, str]:
    token_map = tensors.get("token_map")
    if token_map is not None and token_map.dtype in (torch.int64, torch.int32) and token_map.numel():
        inside = int(token_map.min()) >= 0 and int(token_map.max()) < config.vocab_size
        if not inside or token_map.unique().numel() != token_map.numel():
            raise ValueError(f"token_map: must hold distinct tokens of the target's {config.vocab_size}")
    if not cast(MedusaConfig, config).shared or FIRST not in tensors:
        return {}
    if SHARED in tensors:
        raise ValueError(f"{SHARED} and {FIRST}: one LM head, doubled")
    tensors[SHARED] = tensors.pop(FIRST)
    return {SHARED: f"{FIRST} in the source"}


VLLM_FORMAT = Format(
    name="vllm-medusa",
    heads=("medusa",),
    matches=matches_vllm,
    read=read_vllm,
    write=write_with_base_model,
    prefixes=("medusa_heads.",),
    blame=(
        (r"^blocks.*\.bias", ("medusa_fc_bias",)),
        (r"^blocks", ("num_heads", "num_hidden_layers", "hidden_size")),
        (r"^lm_head", ("original_lm_head", "num_heads", "truncated_vocab_size", "vocab_size", "hidden_size")),
        (r"^token_map", ("truncated_vocab_size", "vocab_size")),
    ),
    incoming=incoming,
)
FORMATS, LAYOUT = (FORMAT, VLLM_FORMAT), VLLM_FORMAT
