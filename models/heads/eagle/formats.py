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
from models.heads.eagle3.formats import KEYS as EAGLE3_KEYS
from models.heads.layer_config import layer_json

MIXTRAL = "MixtralForCausalLM"
# of the target; the layer is Llama's for all of them
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": MIXTRAL,
    "qwen2": "Qwen2ForCausalLM",
}
EXPERTS = ("num_experts_per_tok", "num_local_experts")  # of the target
Q_BIAS, O_BIAS = (f"layers.0.self_attn.{name}_proj.bias" for name in "qo")


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    foreign = (*EAGLE3_KEYS, "speculators_model_type", "medusa_num_heads", "num_nextn_predict_layers")
    return (
        config.get("num_hidden_layers") == 1
        and config.get("model_type") in FAMILIES
        and any(name in FAMILIES.values() for name in config.get("architectures") or ())
        and not any(key in config for key in foreign)
    )


def read(
    fields: Fields,
    shapes: Shapes,
    provided: ConversionOptions,
    architectures: Collection[str] = tuple(FAMILIES.values()),
) -> ParsedConfig:
    notes: list[str] = []
    fields.only("model_type", *FAMILIES)
    fields.only("architectures", *([name] for name in architectures))
    if fields.values.get("architectures") == [MIXTRAL]:
        check_mixtral(fields, provided, notes)
    layer = llama.read_layer(fields, notes)
    if layer.num_layers != 1:
        raise ValueError(f"config.json: num_hidden_layers={layer.num_layers}: an EAGLE head has one layer")
    stated = any(fields.values.get(key) is not None for key in ("attention_bias", "qkv_bias"))
    if not stated and Q_BIAS in shapes and O_BIAS not in shapes:
        notes.append("qkv_bias is not stated: true, as the file holds biases of q, k and v")
        layer = replace(layer, attention_bias=True)
    bias = fields.maybe("bias", bool)
    if bias is None:
        notes.append("bias is not stated: true, SafeAILab's default")
    return ParsedConfig(EagleConfig(layer, bias is not False, EMBEDDING in shapes), notes=notes)


def check_mixtral(fields: Fields, provided: ConversionOptions, notes: list[str]) -> None:
    """Raise ValueError for another target. The head's layer has no experts; the keys on them are its target's."""
    fields.ignore(*EXPERTS)
    of_target = {key: fields.values[key] for key in EXPERTS if key in fields.values}
    notes += [f"{key}={value!r} is the target's: the head's layer has no experts" for key, value in of_target.items()]
    target = provided.verifier and provided.verifier.architecture
    if target not in (None, MIXTRAL):
        raise ValueError(f"config.json: architectures={[MIXTRAL]}: a head for Mixtral, not for {target}")


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
