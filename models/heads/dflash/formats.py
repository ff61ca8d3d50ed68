"""z-lab's DFlash, which SpecForge writes too: a flat Qwen3Config and a section `dflash_config`."""

from __future__ import annotations

from typing import Any, cast

from models.fields import Fields
from models.formats import dflash, speculators
from models.formats.checkpoint import Checkpoint, ConversionOptions, ParsedConfig, Shapes
from models.heads.dflash.config import DFlashConfig
from models.heads.dflash.config_json import flat_json

ARCHITECTURE = "DFlashDraftModel"


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    shape, section = dflash.read_flat(fields, ARCHITECTURE, notes, from_anchor=False)
    section.only("projector_type", "dflash")
    notes += section.done()
    return ParsedConfig(DFlashConfig(**shape), notes=notes)


def write(checkpoint: Checkpoint) -> dict[str, Any]:
    return flat_json(cast(DFlashConfig, checkpoint.config), ARCHITECTURE)


FORMAT = dflash.flat_format("dflash", ("dflash",), ARCHITECTURE, read, write=write)
FORMATS, LAYOUT = (speculators.FORMAT, FORMAT), speculators.FORMAT
