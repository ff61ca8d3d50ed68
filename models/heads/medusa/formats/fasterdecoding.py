"""FasterDecoding's Medusa: `medusa_lm_head` with {head}.{layer}.linear.* and {head}.{layers}.weight.

Its config.json states only the numbers of heads and layers; the sizes follow from the tensors. Every residual layer has
a bias, and every head a separate LM head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from models.fields import MAX_LAYERS, Fields
from models.formats.checkpoint import Checkpoint, ConversionOptions, Format, ParsedConfig, Shapes, Verifier
from models.heads.config import HeadShape
from models.heads.medusa.config import MedusaConfig

COUNTS = ("medusa_num_heads", "medusa_num_layers")
WRONG_COUNT = 2  # heads, by the config.json of each head that FasterDecoding published; the files hold five


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    vllm = config.get("model_type") == "medusa" or config.get("architectures") == ["MedusaModel"]
    return COUNTS[0] in config and not vllm


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
