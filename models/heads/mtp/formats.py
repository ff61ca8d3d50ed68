"""MTP modules in speculators' layout, which our export follows, and in the checkpoint of a target that ships them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from models.config import TargetConfig, read_config_json
from models.fields import Fields
from models.formats import llama
from models.formats.checkpoint import Checkpoint, ConversionOptions, Format, ParsedConfig, Shapes
from models.formats.speculators import read_proposal
from models.heads.layer_config import FAMILY_KEYS, further_layer, has_own_layers
from models.heads.mtp.config import FLAGS, MtpConfig, MtpOptions
from models.mtp_names import NEMOTRON, layout_of, modules_of
from models.quantized.scheme import SECTION
from models.targets import ARCHITECTURES, read_weights
from models.targets.views import View, Views, stacked_views

MODULES = "num_nextn_predict_layers"
# as in speculators' own modules, whose files state none of these
THEIRS = {"hidden_first": False, "pre_norm": False, "norm_recycled": True, "zero_first": False}
KINDS: dict[str, dict[str, bool]] = {"llama": {}, "qwen2": {"attention_bias": True}, "qwen3": {"qk_norm": True}}
# targets whose modules have their own kind of layer, with experts or an output gate; those of others have Llama's
OWN = (
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"),
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForCausalLM",
)
PLAIN: dict[str, Any] = {"rotary_dim": None, "activation": "silu", "attention_scale": None, "stream_scale": 1.0}


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes = list[str]()
    fields.only("speculators_model_type", MtpConfig.algorithm)
    fields.ignore("speculators_version", "architectures")
    verifier, tokens = read_proposal(fields, MtpConfig.algorithm)
    section = fields.need_section("transformer_layer_config")
    section.ignore("architectures")
    count, centered = fields.size(MODULES, 1), fields.take("centered_norms", bool, False)
    if (architecture := architecture_of(section.values)) in OWN:
        llama.read_sizes(section, notes, partial=True)
        section.ignore(*FAMILY_KEYS)
        layer = further_layer(ARCHITECTURES[architecture].read_config(dict(section.values)).extended(), count)
    else:
        section.only("model_type", *KINDS)
        layer = llama.read_layer(section, notes)  # whose num_hidden_layers are the target's in speculators' files
        layer = replace(layer, num_layers=count, **KINDS[section.need("model_type", str)])
    layer = replace(layer, centered_norms=centered)
    notes += section.done()
    fields.only("draft_vocab_size", layer.vocab_size)
    flags = {flag: fields.take(flag, bool, default) for flag, default in THEIRS.items()}
    unstated = [f"{flag}={value}" for flag, value in flags.items() if flag not in fields.values]
    notes += [f"not stated, so as in speculators: {', '.join(unstated)}"] if unstated else []
    return ParsedConfig(MtpConfig(layer, **flags), verifier, tokens, notes)


def losses(checkpoint: Checkpoint) -> list[str]:
    config = cast(MtpConfig, checkpoint.config)
    stated = {flag: getattr(config, flag) for flag in FLAGS} | {"centered_norms": config.layer.centered_norms}
    other = [f"{key}={value}" for key, value in stated.items() if value != THEIRS.get(key, False)]
    other += [f"{MODULES}={config.layer.num_layers}"] if config.layer.num_layers > 1 else []
    other += [] if config.layer.qk_norm and not config.layer.experts else ["layers but Qwen3's"]
    return [f"speculators' own modules have no {', '.join(other)}"] if other else []


def ships_modules(config: Mapping[str, Any], files: Collection[str] = ()) -> bool:
    """Return whether a config.json is that of a target with modules of its own."""
    return "speculators_model_type" not in config and modules_of(config) > 0


def architecture_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def find_shipped(folder: Path) -> tuple[Views, dict[str, str]]:
    """Return a target's tensors, each read on access, and by our names those of its modules, experts one by one."""
    config = read_config_json(folder / "config.json")
    layout, fields = layout_of(architecture_of(config)), Fields(config, str(folder / "config.json"))
    if layout is NEMOTRON:
        raise ValueError(f"{folder}: tensors mtp.* are of Nemotron's blocks, of which head=mtp has none")
    fields.only("mtp_use_dedicated_embeddings", False)
    sizes = fields.size("num_hidden_layers"), modules_of(config) or 1
    stored, layers, modules = read_weights(folder, torch.float32, None, progress=False), *sizes
    prefixes, views = layout.prefixes(layers, modules), dict[str, View]()
    for name in (name for name in stored if name.startswith(prefixes)):
        views |= stacked_views(stored, name, str) or {name: View(name)}
    tensors = Views(stored, views)
    names = layout.names(tensors, layers, modules)
    return tensors, names


def open_shipped(folder: Path) -> dict[str, Tensor]:
    """Read the modules that a target ships, by our names."""
    tensors, names = find_shipped(folder)
    return {name: tensors[stored] for name, stored in names.items()}


def read_target(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    architecture = architecture_of(fields.values)
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{fields.name}: architectures={architecture!r}: one of {', '.join(ARCHITECTURES)}")
    fields.ignore(*fields.values)
    config = {key: value for key, value in fields.values.items() if key != SECTION}
    target: TargetConfig = ARCHITECTURES[architecture].read_config(config).extended()
    if not has_own_layers(target) and target != replace(target, **PLAIN):
        raise ValueError(f"{fields.name}: head=mtp has no modules of {architecture}'s layers")
    return ParsedConfig(MtpOptions().for_target(target))


def refuse(checkpoint: Checkpoint) -> dict[str, Any]:
    raise ValueError("native-mtp is a part of a target: convert.py --stitch writes it")


LAYOUT = Format(
    name="speculators-mtp",
    heads=(MtpConfig.name,),
    matches=lambda config, files: config.get("speculators_model_type") == MtpConfig.algorithm,
    read=read,
    blame=(*llama.BLAME, (r"^mtp_layers\.", (MODULES, "hidden_size"))),
    losses=losses,
)
NATIVE = Format(
    name="native-mtp",
    heads=(MtpConfig.name,),
    matches=ships_modules,
    read=read_target,
    write=refuse,
    open=open_shipped,
    blame=(*llama.BLAME, (r"^mtp_layers\.", (MODULES, "hidden_size"))),
    states_tokens=False,
)
FORMATS = (LAYOUT, NATIVE)
