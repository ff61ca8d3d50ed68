"""DSpark as DeepSpec writes it, with its keys at the top of a flat Qwen3Config, and SpecForge, in `dflash_config`.

Liquid AI's heads for LFM2.5 have SpecForge's layout with the Markov head's keys at the top, and rotate numbers 2 i and
2 i + 1 of a head as a pair. Queries and keys are put in our order as they are read, so that these are i and D / 2 + i.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from models.fields import Fields
from models.formats import dflash, speculators
from models.formats.checkpoint import Checkpoint, ConversionOptions, ParsedConfig, Shapes
from models.heads.config import HeadShape
from models.heads.dflash.config import DFlashConfig
from models.heads.dspark.config import DSparkConfig
from models.heads.layer_config import windowed_json

DEEPSPEC, SPECFORGE, LIQUID = "Qwen3DSparkModel", "DSparkDraftModel", "Lfm2DSparkDraftModel"
ROTATED = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
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


def read_liquid(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    shape, section = dflash.read_flat(fields, LIQUID, notes, from_anchor=True)
    section.ignore("num_target_layers")
    fields.ignore("runtime_block_size")  # how many rows a server should verify
    if fields.need("rope_is_neox_style", bool):
        raise ValueError(f"{fields.name}: rope_is_neox_style=True: only false is supported, as Liquid AI writes it")
    notes += section.done()
    return ParsedConfig(dflash.markov_shape(shape, dflash.read_markov(fields), notes), notes=notes)


def write_liquid(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(DSparkConfig, checkpoint.config)
    flat, further = config.flat_json(LIQUID), config.further_json()
    top = {"block_size": config.block_size, **further, "rope_is_neox_style": False}
    section = {key: value for key, value in flat["dflash_config"].items() if key not in top}
    return flat | top | {"dflash_config": section}


def to_halves(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, str]:
    """Put queries and keys, and the weights of their norms, from pairs of neighbours in the order of halves."""
    remarks, ordered = dflash.incoming(tensors, config), reordered(tensors, config, (-1, 2))
    tensors |= ordered
    return remarks | dict.fromkeys(ordered, "rotated pairs of neighbours, now in the order of halves")


def to_neighbours(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, Tensor]:
    return tensors | reordered(tensors, config, (2, -1))


def reordered(tensors: dict[str, Tensor], config: HeadShape, matrix: tuple[int, int]) -> dict[str, Tensor]:
    """Return what is rotated, the numbers of each head as a matrix of this shape, transposed."""
    size, rotated = cast(DFlashConfig, config).layer.head_dim, dict[str, Tensor]()
    for name, value in tensors.items():
        if name.rpartition(".self_attn.")[2] in ROTATED:
            heads = value.unflatten(0, (-1, size)).unflatten(1, matrix)
            rotated[name] = heads.transpose(1, 2).flatten(0, 2)
    return rotated


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
LIQUID_FORMAT = dflash.flat_format(
    "liquid-dspark",
    ("dspark",),
    LIQUID,
    read_liquid,
    write=write_liquid,
    incoming=to_halves,
    outgoing=to_neighbours,
    losses=SPECFORGE_FORMAT.losses,
    kind=dflash.markov_kind,
)
FORMATS, LAYOUT = (speculators.FORMAT, DEEPSPEC_FORMAT, SPECFORGE_FORMAT, LIQUID_FORMAT), speculators.FORMAT
