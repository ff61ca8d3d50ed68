"""vllm-project/speculators, the format that vLLM serves EAGLE-3, P-EAGLE and block drafters from.

Our export of these follows it, but for DFlash2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from models.config import TargetConfig
from models.fields import Fields
from models.formats import dflash, eagle3
from models.formats.checkpoint import Checkpoint, ConversionOptions, Format, ParsedConfig, Shapes, Verifier
from models.formats.llama import read_layer
from models.heads.config import EMBEDDING, HeadShape
from models.heads.dflash.config import DFlashConfig
from models.heads.dflash2.config import TAPS, DFlash2Config
from models.heads.dspark.config import DSparkConfig
from models.heads.eagle3.config import Eagle3Config
from models.heads.p_eagle.config import PEagleConfig

EAGLES: dict[str, type[Eagle3Config]] = {shape.algorithm: shape for shape in (Eagle3Config, PEagleConfig)}
BLOCKS: dict[str, type[DFlashConfig]] = {
    shape.algorithm: shape for shape in (DFlashConfig, DSparkConfig, DFlash2Config)
}
KINDS = (*EAGLES, *BLOCKS)
DOMINO = ("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start", "lambda_base_decay_ratio")


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return config.get("speculators_model_type") in KINDS


def kind_of(config: Mapping[str, Any]) -> str:
    algorithm = config["speculators_model_type"]  # one of KINDS, or the config does not match
    return dflash.markov_kind(config) if algorithm == "dspark" else (EAGLES | BLOCKS)[algorithm].name


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    kind = fields.need("speculators_model_type", str)
    if kind not in KINDS:
        raise ValueError(f"config.json: speculators_model_type={kind!r}: one of {', '.join(KINDS)}")
    fields.ignore("speculators_version", "architectures", "enable_sp_ulysses")
    verifier, speculative_tokens = read_proposal(fields, kind)
    section = fields.need_section("transformer_layer_config")
    section.ignore("architectures")  # left by the trainer; model_type decides
    config: Eagle3Config | DFlashConfig
    if kind in BLOCKS:
        section.only("model_type", "qwen3")
        config, blame = _read_block(kind, fields, dflash.read_layers(section, notes), notes), dflash.BLAME
    else:
        section.only("model_type", "llama", "qwen3")
        is_qwen3, blame = section.values.get("model_type") == "qwen3", eagle3.BLAME
        layer = dflash.read_layers(section, notes) if is_qwen3 else read_layer(section, notes, windows=True)
        config = _read_eagle(fields, layer, speculative_tokens, shapes, provided, notes)
    notes += section.done()
    return ParsedConfig(config, verifier, speculative_tokens, notes, blame)


def _read_eagle(
    fields: Fields, layer: TargetConfig, tokens: int, shapes: Shapes, provided: ConversionOptions, notes: list[str]
) -> Eagle3Config:
    kind, options = fields.values["speculators_model_type"], dict[str, Any]()
    if kind == "peagle":
        options["mask_token_id"] = fields.need("mask_token_id", int)
        if fields.values.get("num_depths") is None:
            notes.append(f"num_depths is not stated: {tokens}, the speculative_tokens")
        options["num_depths"] = fields.size("num_depths", tokens)
    else:
        fields.only("mask_token_id")
    trained = fields.take("embed_requires_grad", bool, kind == "peagle")
    return EAGLES[kind](
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


def _read_block(kind: str, fields: Fields, layer: TargetConfig, notes: list[str]) -> DFlashConfig:
    """Full layers are bidirectional, those with a window block-causal unless `sliding_window_non_causal`."""
    fields.only("target_hidden_size", layer.hidden_size)
    fields.only("projector_type", kind)
    fields.ignore(*DOMINO, "auf")  # keys of another head's corrector, and of training
    alignment = {key: fields.maybe(key, bool) for key in ("sample_from_anchor", "shift_label")}
    windowed = not fields.take("sliding_window_non_causal", bool, kind == "dflash2")
    full = fields.take("causal_head", bool, False)
    where = f"{fields.name}: aux_hidden_state_layer_ids"
    shape = {
        "layer": layer,
        "draft_vocab_size": fields.size("draft_vocab_size"),
        "aux_layers": dflash.read_layer_ids(fields.maybe("aux_hidden_state_layer_ids", list), where, first=0),
        "block_size": fields.size("block_size"),
        "mask_token_id": fields.need("mask_token_id", int),
        "causal_layers": dflash.causal_layers(layer, full=full, windowed=windowed),
        "sample_from_anchor": dflash.read_alignment(alignment, kind == "dspark", notes, f"speculators' {kind}"),
    }
    if kind == "dspark":
        config = dflash.markov_shape(shape, dflash.read_markov(fields), notes)
    elif kind == "dflash2":
        config = DFlash2Config(**shape, **read_selector(fields))
    else:
        config = DFlashConfig(**shape)
    notes += dflash.window_notes(config, from_row=False)
    return config


def read_selector(fields: Fields) -> dict[str, Any]:
    """Read the sizes of DFlash2's convolutions and selector."""
    fields.only("conv_kernel_size", TAPS)
    return {key: fields.size(key) for key in DFlash2Config.further()}


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


def incoming(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, str]:
    return (dflash if isinstance(config, DFlashConfig) else eagle3).incoming(tensors, config)


def shared_with_target(config: HeadShape) -> frozenset[str]:
    return frozenset() if isinstance(config, DFlashConfig) else eagle3.shared_with_target(config)


def write(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    if not isinstance(config, DFlashConfig):
        return config.to_json(checkpoint.facts())
    if isinstance(config, DFlash2Config):
        dflash.check_whole_vocabulary(config, "speculators' dflash2")
        if config.sample_from_anchor:
            raise ValueError("sample_from_anchor=True: speculators' dflash2 has no head whose anchor's row predicts")
    return config.speculators_json(checkpoint.facts())


def losses(checkpoint: Checkpoint) -> list[str]:
    config = checkpoint.config
    if not isinstance(config, DFlashConfig):
        sizes = config.hidden_size, config.target_hidden_size
        notes = (
            ["speculators itself has no head of another hidden size than its target's"] if sizes[0] != sizes[1] else []
        )
        missing = EMBEDDING not in checkpoint.tensors
        return [*notes, *["speculators itself leaves an embedding that is not there uninitialized"] * missing]
    notes = dflash.markov_losses(config) + dflash.window_notes(config, from_row=False)
    if True in config.causal(windowed=False):
        notes.append(
            "causal_head is not known to vLLM and speculators, which read layers without a window as bidirectional"
        )
    return notes


FORMAT = Format(
    name="speculators",
    heads=tuple(shape.name for shape in (*EAGLES.values(), *BLOCKS.values())),
    matches=matches,
    read=read,
    write=write,
    aliases=(("midlayer.", "layers.0."),),
    optional=shared_with_target,
    blame=eagle3.BLAME,
    incoming=incoming,
    losses=losses,
    kind=kind_of,
)
