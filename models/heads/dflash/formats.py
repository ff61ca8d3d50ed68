"""z-lab's DFlash, which SpecForge writes too: a flat Qwen3Config and a section `dflash_config`."""

from __future__ import annotations

from models.fields import Fields
from models.formats import dflash, speculators
from models.formats.checkpoint import ConversionOptions, ParsedConfig, Shapes
from models.heads.dflash.config import DFlashConfig

ARCHITECTURE = "DFlashDraftModel"


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    shape, section = dflash.read_flat(fields, ARCHITECTURE, notes, from_anchor=False)
    section.only("projector_type", "dflash")
    notes += section.done()
    return ParsedConfig(DFlashConfig(**shape), notes=notes)


FORMAT = dflash.flat_format("dflash", ("dflash",), ARCHITECTURE, read)
FORMATS, LAYOUT = (speculators.FORMAT, FORMAT), speculators.FORMAT
