"""DSpark as DeepSpec writes it, with its keys at the top of a flat Qwen3Config, and SpecForge, in `dflash_config`."""

from __future__ import annotations

from typing import Any, cast

from models.fields import Fields
from models.formats import dflash, speculators
from models.formats.checkpoint import Checkpoint, ConversionOptions, ParsedConfig, Shapes
from models.heads.dflash.config import DFlashConfig
from models.heads.dspark.config import DSparkConfig
from models.heads.layer_config import windowed_json

DEEPSPEC, SPECFORGE = "Qwen3DSparkModel", "DSparkDraftModel"
NO_MARKOV_HEAD = {"markov_rank": 0, "enable_confidence_head": False}  # DeepSpec's DFlash


def read_deepspec(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    """Every row sees its whole block. A head without windows is the only one on whose masks readers agree."""
    notes: list[str] = []
    fields.only("architectures", [DEEPSPEC])
    fields.only("model_type", "qwen3")
    fields.only("is_causal", False)
    fields.ignore("num_target_layers")
    layer = dflash.read_layers(fields, notes)
    if layer.windows:
        raise ValueError(
            f"{fields.name}: layer_types={fields.values['layer_types']}: DeepSpec writes layers without a window; with "
            "one, blocks are causal for vLLM and not for DeepSpec"
        )
    alignment = {"sample_from_anchor": fields.maybe("sample_from_anchor", bool)}
    where = f"{fields.name}: target_layer_ids"
    shape = {
        "layer": layer,
        "draft_vocab_size": layer.vocab_size,
        "aux_layers": dflash.read_layer_ids(fields.maybe("target_layer_ids", list), where, first=-1),
        "block_size": fields.size("block_size"),
        "mask_token_id": fields.need("mask_token_id", int),
        "causal_layers": (False,) * layer.num_layers,
        "sample_from_anchor": dflash.read_alignment(alignment, True, notes, DEEPSPEC),
    }
    return ParsedConfig(dflash.markov_shape(shape, dflash.read_markov(fields), notes), notes=notes)


def write_deepspec(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(DFlashConfig, checkpoint.config)
    dflash.check_whole_vocabulary(config, "deepspec")
    if any(config.causal_layers) or config.layer.windows or not config.sample_from_anchor:
        raise ValueError("deepspec: holds heads whose rows see all positions and whose anchor's row predicts")
    return windowed_json(config.layer) | {
        "architectures": [DEEPSPEC],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [index - 1 for index in config.aux_layers],
        **(config.further_json() if isinstance(config, DSparkConfig) else NO_MARKOV_HEAD),
    }


def deepspec_losses(checkpoint: Checkpoint) -> list[str]:
    return [
        *dflash.markov_losses(checkpoint.config),
        "DeepSpec's loader needs copies of the target's embedding and LM head, which are left out; vLLM shares them",
    ]


def read_specforge(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    shape, section = dflash.read_flat(fields, SPECFORGE, notes, from_anchor=True)
    section.only("projector_type", "dspark")
    section.only("attention_mode", "gqa")
    config = dflash.markov_shape(shape, dflash.read_markov(section), notes)
    notes += section.done()
    return ParsedConfig(config, notes=notes)


def write_specforge(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(DSparkConfig, checkpoint.config)
    return config.flat_json(SPECFORGE, projector_type="dspark", attention_mode="gqa")


DEEPSPEC_FORMAT = dflash.flat_format(
    "deepspec",
    ("dflash", "dspark"),
    DEEPSPEC,
    read_deepspec,
    write=write_deepspec,
    aliases=(*dflash.ALIASES, ("logit_head.", "")),
    losses=deepspec_losses,
    kind=dflash.markov_kind,
)
SPECFORGE_FORMAT = dflash.flat_format(
    "specforge-dspark",
    ("dspark",),
    SPECFORGE,
    read_specforge,
    write=write_specforge,
    losses=lambda checkpoint: dflash.markov_losses(checkpoint.config) + dflash.flat_losses(checkpoint),
    kind=lambda config: dflash.markov_kind(Fields(config).need_section("dflash_config").values),
)
FORMATS, LAYOUT = (speculators.FORMAT, DEEPSPEC_FORMAT, SPECFORGE_FORMAT), speculators.FORMAT
