"""z-lab's DFlash2: the flat config.json of DFlash with the sizes of convolutions and selector."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from models.fields import Fields
from models.formats import dflash
from models.formats.checkpoint import Checkpoint, ConversionOptions, Format, ParsedConfig, Shapes
from models.heads.dflash2.config import ARCHITECTURE, KEYS, DFlash2Config


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return ARCHITECTURE in (config.get("architectures") or ())


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    shape, section = dflash.read_flat(fields, ARCHITECTURE, notes)
    section.only("projector_type", "dflash2")
    section.only("conv_kernel_size", 2)
    for key in ("output_multiplier", "input_embedding_scale"):
        section.only(key, 1.0, 1)
    section.only("final_logit_softcapping")
    config = DFlash2Config(**shape, **{key: section.size(key) for key in KEYS})
    section.done()
    return ParsedConfig(config, notes=notes)


def write(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(DFlash2Config, checkpoint.config)
    dflash.check_whole_vocabulary(config, "dflash2")
    written = config.to_json(**checkpoint.facts(needs_verifier=False))
    return {key: value for key, value in written.items() if key not in ("verifier", "speculative_tokens")}


LAYOUT = Format(
    name="dflash2",
    heads=("dflash2",),
    weights=("model.safetensors",),
    matches=matches,
    read=read,
    write=write,
    prefixes=("model.",),
    aliases=dflash.ALIASES,
    blame=(
        (r"candidate_selector", ("selector_rank", "vocab_size", "hidden_size")),
        (r"_conv\.", ("conv_group_size", "hidden_size")),
        *dflash.BLAME,
    ),
    incoming=dflash.incoming,
    states_tokens=False,
)
FORMATS = (LAYOUT,)
