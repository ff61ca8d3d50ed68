"""vllm-project/speculators, the format that vLLM serves EAGLE-3 and P-EAGLE from; Headway exports these two in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from models.fields import Fields
from models.formats import eagle3
from models.formats.checkpoint import ConversionOptions, Format, ParsedConfig, Shapes, Verifier
from models.formats.llama import read_layer
from models.heads.config import EMBEDDING
from models.heads.eagle3.config import Eagle3Config
from models.heads.p_eagle.config import PEagleConfig

KINDS: dict[str, type[Eagle3Config]] = {shape.algorithm: shape for shape in (Eagle3Config, PEagleConfig)}


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return config.get("speculators_model_type") in KINDS


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    kind = fields.need("speculators_model_type", str)
    if kind not in KINDS:
        raise ValueError(f"config.json: speculators_model_type={kind!r}: one of {', '.join(KINDS)}")
    fields.ignore("speculators_version", "architectures", "enable_sp_ulysses")
    verifier, speculative_tokens = read_proposal(fields, kind)
    section = fields.need_section("transformer_layer_config")
    section.only("model_type", "llama")
    section.ignore("architectures")  # left by the trainer; model_type decides
    layer = read_layer(section, notes)
    section.done()
    options: dict[str, Any] = {}
    if kind == "peagle":
        options["mask_token_id"] = fields.need("mask_token_id", int)
        if fields.values.get("num_depths") is None:
            notes.append(f"num_depths is not stated: {speculative_tokens}, the speculative_tokens")
        options["num_depths"] = fields.size("num_depths", speculative_tokens)
    else:
        fields.only("mask_token_id")
    trained = fields.take("embed_requires_grad", bool, kind == "peagle")
    config = KINDS[kind](
        layer=layer,
        draft_vocab_size=fields.size("draft_vocab_size"),
        aux_layers=eagle3.read_aux_layers(fields, provided, notes, raw=False),
        target_hidden_size=fields.size("target_hidden_size", layer.hidden_size),
        norm_before_residual=fields.need(
            "norm_before_residual", bool, "vLLM takes it for true and speculators for false, so it must be stated"
        ),
        embed_requires_grad=trained,
        own_embedding=fields.take("own_embedding", bool, trained or EMBEDDING in shapes),
        **eagle3.read_flags(fields, notes),
        **options,
    )
    return ParsedConfig(config, verifier, speculative_tokens, notes)


def read_proposal(fields: Fields, algorithm: str) -> tuple[Verifier | None, int]:
    section = fields.need_section("speculators_config")
    section.only("algorithm", algorithm)
    section.ignore("default_proposal_method")
    methods = section.need("proposal_methods", list)
    if not methods or not isinstance(methods[0], dict):
        raise ValueError(f"{section.name}: proposal_methods={methods!r}: expected a list of objects")
    tokens = Fields(methods[0], f"{section.name}: proposal_methods[0]").size("speculative_tokens")
    verifier = section.section("verifier")
    section.done()
    return (None if verifier is None else read_verifier(verifier)), tokens


def read_verifier(fields: Fields) -> Verifier | None:
    name, architectures = fields.maybe("name_or_path", str), fields.maybe("architectures", list)
    fields.done()
    return Verifier(name, str(architectures[0]) if architectures else None) if name else None


FORMAT = Format(
    name="speculators",
    heads=tuple(shape.name for shape in KINDS.values()),
    matches=matches,
    read=read,
    aliases=(("midlayer.", "layers.0."),),
    optional=eagle3.shared_with_target,
    blame=eagle3.BLAME,
    incoming=eagle3.incoming,
)
