"""z-lab's DFlash, which SpecForge writes too: a flat Qwen3Config and a section `dflash_config`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

from models.fields import Fields
from models.formats import dflash, speculators
from models.formats.checkpoint import Checkpoint, ConversionOptions, Format, ParsedConfig, Shapes
from models.heads.dflash.config import DFlashConfig, qwen3_json

ARCHITECTURE = "DFlashDraftModel"


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return "speculators_model_type" not in config and ARCHITECTURE in (config.get("architectures") or ())


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    """Masks follow vLLM's rule: `is_causal` decides, else `dflash_config.causal`, else only layers with a window are
    block-causal; `use_swa` gives every layer a window in which a row sees its whole block.
    """
    notes: list[str] = []
    fields.only("architectures", [ARCHITECTURE])
    fields.only("model_type", "qwen3")
    fields.ignore("num_target_layers")  # of the target; target_layer_ids name those that are read
    layer = dflash.read_layers(fields, notes)
    section = fields.need_section("dflash_config")
    stated, is_causal = section.maybe("causal", bool), fields.maybe("is_causal", bool)
    causal = stated if is_causal is None else is_causal
    if section.take("causal_head", bool, False):
        causal = True
    full, windowed = (False, True) if causal is None else (causal, causal)
    if causal is None and layer.windows:
        notes.append("the masks of blocks are not stated: layers with a window are block-causal, the others are not")
    if section.take("use_swa", bool, False):
        layer = replace(layer, windows=(section.size("swa_window_size"),) * layer.num_layers)
        windowed = False
    section.ignore("swa_window_size")
    section.only("attention_sink_bias", False)
    section.only("projector_type", "dflash")
    section.only("target_hidden_size", layer.hidden_size)
    sizes = [size for size in (section.maybe("block_size", int), fields.maybe("block_size", int)) if size is not None]
    if not sizes or len(set(sizes)) > 1:
        raise ValueError("config.json: block_size: must be stated, at the top or in dflash_config, or agree in both")
    from_anchor = section.maybe("sample_from_anchor", bool)
    if from_anchor is None:
        notes.append("sample_from_anchor is not stated: false, as in z-lab's heads")
    outputs = section.numbers("target_layer_ids")
    if outputs is None:
        raise ValueError(f"{section.name}: target_layer_ids is missing")
    if outputs != sorted(set(outputs)) or outputs[0] < -1:
        raise ValueError(f"{section.name}: target_layer_ids={outputs}: must ascend from -1, the embedding")
    config = DFlashConfig(
        layer=layer,
        draft_vocab_size=layer.vocab_size,
        aux_layers=tuple(output + 1 for output in outputs),
        block_size=sizes[0],
        mask_token_id=section.need("mask_token_id", int),
        causal_layers=dflash.causal_layers(layer, full=full, windowed=windowed),
        sample_from_anchor=bool(from_anchor),
    )
    section.done()
    return ParsedConfig(config, notes=notes)


def write(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(DFlashConfig, checkpoint.config)
    if config.draft_vocab_size < config.vocab_size:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocab_size}: dflash has room for the target's whole vocabulary only; "
            "speculators holds this head"
        )
    kinds = set(config.causal_layers)
    if len(kinds) > 1 and (config.causal(windowed=True), config.causal(windowed=False)) != ({True}, {False}):
        raise ValueError("causal_layers: dflash has one mask for all layers, or a causal one for those with a window")
    return qwen3_json(config.layer) | {
        "architectures": [ARCHITECTURE],
        **({"is_causal": kinds.pop()} if len(kinds) == 1 else {}),
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [index - 1 for index in config.aux_layers],
            "sample_from_anchor": config.sample_from_anchor,
        },
    }


FORMAT = Format(
    name="dflash",
    heads=("dflash",),
    weights=("model.safetensors",),
    matches=matches,
    read=read,
    write=write,
    prefixes=("model.",),
    aliases=(("midlayer.", "layers.0."), ("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")),
    blame=dflash.BLAME,
    incoming=dflash.incoming,
    states_tokens=False,
)
FORMATS, LAYOUT = (speculators.FORMAT, FORMAT), speculators.FORMAT
