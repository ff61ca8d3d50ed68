"""DeepSpec's DSpark: a flat Qwen3Config with DSpark's keys at the top. With markov_rank 0 it is a DFlash head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from models.fields import Fields
from models.formats import dflash, speculators
from models.formats.checkpoint import Checkpoint, ConversionOptions, Format, ParsedConfig, Shapes
from models.heads.dflash.config import DFlashConfig, qwen3_json
from models.heads.dspark.config import KEYS, DSparkConfig

ARCHITECTURE = "Qwen3DSparkModel"


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return ARCHITECTURE in (config.get("architectures") or ())


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    """The anchor's row yields the first token, and every row sees its whole block."""
    notes: list[str] = []
    fields.only("architectures", [ARCHITECTURE])
    fields.only("model_type", "qwen3")
    fields.ignore("num_target_layers", "num_anchors")
    layer = dflash.read_layers(fields, notes)
    shape = {
        "layer": layer,
        "draft_vocab_size": layer.vocab_size,
        "aux_layers": dflash.read_outputs(fields),
        "block_size": fields.size("block_size"),
        "mask_token_id": fields.need("mask_token_id", int),
        "causal_layers": (False,) * layer.num_layers,
        "sample_from_anchor": fields.take("sample_from_anchor", bool, True),
    }
    markov = dict(zip(KEYS, (fields.need("markov_rank", int), *read_markov(fields)), strict=True))
    if markov["markov_rank"] > 0:
        return ParsedConfig(DSparkConfig(**shape, **markov), notes=notes)
    if markov["enable_confidence_head"]:
        raise ValueError("config.json: markov_rank=0, enable_confidence_head=True: no head has only the latter")
    notes.append("markov_rank is 0: a DFlash head whose anchor's row predicts")
    return ParsedConfig(DFlashConfig(**shape), notes=notes)


def read_markov(fields: Fields) -> tuple[str, bool, bool]:
    return (
        fields.take("markov_head_type", str, "vanilla"),
        fields.need("enable_confidence_head", bool),
        fields.take("confidence_head_with_markov", bool, False),
    )


def write(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(DSparkConfig, checkpoint.config)
    dflash.check_whole_vocabulary(config, "deepspec")
    if any(config.causal_layers) or not config.sample_from_anchor:
        raise ValueError("deepspec: holds heads whose rows see the whole block and whose anchor's row predicts")
    return qwen3_json(config.layer) | {
        "architectures": [ARCHITECTURE],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [index - 1 for index in config.aux_layers],
        **{key: getattr(config, key) for key in KEYS},
    }


FORMAT = Format(
    name="deepspec",
    heads=("dspark",),
    weights=("model.safetensors",),
    matches=matches,
    read=read,
    write=write,
    prefixes=("model.",),
    aliases=(*dflash.ALIASES, ("logit_head.", "")),
    blame=dflash.BLAME,
    incoming=dflash.incoming,
    states_tokens=False,
)
FORMATS, LAYOUT = (speculators.FORMAT, FORMAT), speculators.FORMAT
