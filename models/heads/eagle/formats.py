"""SafeAILab's EAGLE-1: a flat LlamaConfig of one layer, with a bias on fc unless stated otherwise."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from models.fields import Fields
from models.formats import llama
from models.formats.checkpoint import Checkpoint, ConversionOptions, Format, ParsedConfig, Shapes
from models.heads.config import EMBEDDING
from models.heads.eagle.config import ARCHITECTURE, EagleConfig
from models.heads.eagle3.formats.safeailab import KEYS as EAGLE3_KEYS
from models.heads.layer_config import layer_json

MODEL_TYPES = ("llama", "mistral", "qwen2")  # of the target; the layer is Llama's for all of them
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    foreign = (*EAGLE3_KEYS, "speculators_model_type", "medusa_num_heads")
    return (
        config.get("num_hidden_layers") == 1
        and config.get("model_type") in MODEL_TYPES
        and any(name in ARCHITECTURES for name in config.get("architectures") or ())
        and not any(key in config for key in foreign)
    )


def read(
    fields: Fields, shapes: Shapes, provided: ConversionOptions, architectures: tuple[str, ...] = ARCHITECTURES
) -> ParsedConfig:
    notes: list[str] = []
    fields.only("model_type", *MODEL_TYPES)
    fields.only("architectures", *([name] for name in architectures))
    layer = llama.read_layer(fields, notes)
    if layer.num_layers != 1:
        raise ValueError(f"config.json: num_hidden_layers={layer.num_layers}: an EAGLE head has one layer")
    bias = fields.maybe("bias", bool)
    if bias is None:
        notes.append("bias is not stated: true, SafeAILab's default")
    fields.only("qkv_bias", False)
    return ParsedConfig(EagleConfig(layer, bias is not False, EMBEDDING in shapes), notes=notes)


def write(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(EagleConfig, checkpoint.config)
    return layer_json(config.layer) | {"bias": config.bias}


def losses(checkpoint: Checkpoint) -> list[str]:
    config = cast(EagleConfig, checkpoint.config)
    notes = []
    if config.bias:
        notes.append("vLLM 0.32 builds fc without a bias and refuses fc.bias; SafeAILab's own code reads it")
    if not config.own_embedding:
        notes.append(f"SafeAILab's own code wants {EMBEDDING}; vLLM shares the target's where there is none")
    return notes


FORMAT = Format(
    name="safeailab-eagle",
    heads=("eagle",),
    matches=matches,
    read=read,
    write=write,
    blame=((r"^fc\.bias", ("bias",)), (r"^fc", ("hidden_size",)), *llama.BLAME),
    losses=losses,
    states_tokens=False,
)
FORMATS = (FORMAT,)
# our export differs in the architecture, by which vLLM knows EAGLE heads
LAYOUT = replace(
    FORMAT,
    matches=lambda config, files: config.get("architectures") == [ARCHITECTURE],
    read=partial(read, architectures=(ARCHITECTURE,)),
)
