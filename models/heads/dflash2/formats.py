"""z-lab's DFlash2: the flat config.json of DFlash with the sizes of convolutions and selector."""

from __future__ import annotations

from typing import Any, cast

from models.fields import Fields
from models.formats import dflash, speculators
from models.formats.checkpoint import Checkpoint, ConversionOptions, ParsedConfig, Shapes
from models.heads.dflash2.config import ARCHITECTURE, DFlash2Config


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    shape, section = dflash.read_flat(fields, ARCHITECTURE, notes, from_anchor=False)
    section.only("projector_type", "dflash2")
    for part in (fields, section):
        part.only("final_logit_softcapping")
        for key in ("output_multiplier", "input_embedding_scale"):
            part.only(key, 1.0, 1)
    config = DFlash2Config(**shape, **speculators.read_selector(section))
    notes += section.done()
    return ParsedConfig(config, notes=notes)


def write(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(DFlash2Config, checkpoint.config)
    dflash.check_whole_vocabulary(config, "dflash2")
    return config.flat_json(ARCHITECTURE)


FORMAT = dflash.flat_format("dflash2", ("dflash2",), ARCHITECTURE, read, write=write)
FORMATS, LAYOUT = (speculators.FORMAT, FORMAT), FORMAT
