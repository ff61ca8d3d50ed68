"""Headway's own export: each head in the layout that other software reads, with provenance.json beside it.

Every key that `to_json` writes must be present with the value that it would write, and no other key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from models.fields import Fields, asks_for_nothing, brief
from models.formats import speculators
from models.formats.checkpoint import DRAFT_TOKENS, ConversionOptions, Format, ParsedConfig, Shapes, export_format
from models.heads import HEADS
from models.heads.config import EMBEDDING, PROVENANCE, Facts, HeadShape

ADDED = ("verifier", "own_embedding", "speculative_tokens")  # to the layout of others
FREE = {"torch_dtype", "speculators_version"}  # may differ from what would be written today
FORMER = {"draft_vocab_size"}  # older exports state it of heads of which it is no key; checked by the layout


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return PROVENANCE in files


def layout_of(config: Mapping[str, Any], name: str = "config.json") -> Format:
    layout = next((layout for head in HEADS.values() if (layout := export_format(head)).matches(config, ())), None)
    if layout is None:
        keys = "architectures, speculators_model_type or model_type"
        raise ValueError(f"{name}: of no head that we know ({', '.join(HEADS)}); {keys} would say which")
    return layout


def kind(config: Mapping[str, Any]) -> str:
    layout = layout_of(config)
    return layout.kind(config) if layout.kind else layout.heads[0]


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    values = dict(fields.values)
    added = Fields({key: values.pop(key) for key in ADDED if key in values}, fields.name)
    layout = layout_of(values, fields.name)
    rest = Fields(values, fields.name)
    stated = layout.read(rest, shapes, provided)
    rest.done()
    config: Any = stated.config
    if hasattr(config, "own_embedding"):  # as stated, so that a missing embedding is an error
        config = replace(config, own_embedding=added.take("own_embedding", bool, True))
    verifier = stated.verifier or speculators.read_verifier(added.need_section("verifier"))
    tokens = stated.speculative_tokens or added.take("speculative_tokens", int, config.max_depth or DRAFT_TOKENS)
    if verifier is None or verifier.architecture is None:
        raise ValueError(f"{fields.name}: verifier: name_or_path or architectures is missing")
    check_written(fields.name, fields.values, config.to_json(Facts(verifier.name, verifier.architecture, tokens)))
    return ParsedConfig(config, verifier, tokens, blame=layout.blame)


def check_written(name: str, values: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ValueError, with the file's or section's `name`, for the first key that Headway would write otherwise."""
    for key in sorted((set(expected) | set(values)) - FREE - (FORMER - set(expected))):
        value, wanted = values.get(key), expected.get(key)
        if key not in values:
            raise ValueError(f"{name}: {key} is missing; Headway writes {key}={brief(wanted)}")
        if key not in expected:
            if not asks_for_nothing(value):
                raise ValueError(f"{name}: unknown: {key}={brief(value)}; Headway writes no such key")
        elif (parts := sections(value)) is not None and (others := sections(wanted)) is not None:
            check_written(f"{name}: {key}", parts, others)
        elif value != wanted:
            raise ValueError(f"{name}: {key}={brief(value)}: Headway would write {brief(wanted)}")


def sections(value: Any) -> dict[Any, Any] | None:
    """Return an object, or a list of objects by their places; None for anything else."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else None


def incoming(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, str]:
    """Refuse the changes that are made to other projects' files; only absent tensors may be derived from the rest.

    Raises ValueError for a tensor that would be changed.
    """
    present = set(tensors)
    remarks = export_format(HEADS[config.name]).incoming(tensors, config)
    for name in sorted(present & remarks.keys()):
        raise ValueError(f"{name}: {remarks[name]}; Headway would not write that")
    return remarks


def optional(config: HeadShape) -> frozenset[str]:
    return frozenset(() if getattr(config, "own_embedding", True) else {EMBEDDING})


FORMAT = Format(
    name="headway",
    heads=tuple(HEADS),
    weights=("model.safetensors",),
    matches=matches,
    read=read,
    optional=optional,
    incoming=incoming,
    kind=kind,
)
