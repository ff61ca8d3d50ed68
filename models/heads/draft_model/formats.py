"""A draft model's files are those of a target, with the keys of a head in config.json; no other software adds such."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from models.fields import Fields
from models.formats import llama
from models.formats.checkpoint import ConversionOptions, Format, ParsedConfig, Shapes
from models.heads.draft_model.config import MODEL_TYPES, DraftModelConfig
from models.targets import ARCHITECTURES


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return config.get("architectures") in [[name] for name in MODEL_TYPES]


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    (architecture,) = fields.need("architectures", list)
    fields.only("model_type", MODEL_TYPES[architecture])
    fields.only("sliding_window")
    notes = list[str]()
    llama.read_sizes(fields, notes)
    model = ARCHITECTURES[architecture].read_config(dict(fields.values))
    if model.attention_bias and not model.output_bias:
        fields.only("qkv_bias", True)
    trains = fields.take("embed_requires_grad", bool, False)
    config = DraftModelConfig(model, model.vocab_size, model.hidden_size, embed_requires_grad=trains)
    return ParsedConfig(config, notes=notes)


LAYOUT = Format(name="draft-model", heads=("draft-model",), matches=matches, read=read, blame=llama.BLAME)
FORMATS = ()
