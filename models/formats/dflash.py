"""Shared by the formats of block drafters: Qwen3's layers, the masks of their blocks, tensors that copy the target's.

A flat file is z-lab's: a Qwen3Config with a section `dflash_config`, in which SpecForge writes DSpark too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import Tensor

from models.config import TargetConfig
from models.fields import MOST, Fields
from models.formats import eagle3, llama
from models.formats.checkpoint import Checkpoint, Format, ParsedConfig
from models.heads.config import EMBEDDING, LM_HEAD, HeadShape
from models.heads.dflash.config import DFlashConfig
from models.heads.dspark.config import DSparkConfig
from models.heads.layer_config import QWEN3, SLIDING

T = TypeVar("T")
Read = Callable[..., ParsedConfig]
BLAME = (
    (r"^fc\.weight", ("hidden_size", "aux_hidden_state_layer_ids", "target_layer_ids")),
    (r"^(hidden_norm|norm)", ("hidden_size",)),
    (r"^lm_head", ("draft_vocab_size", "hidden_size")),
    (r"^(d2t|t2d)$", ("draft_vocab_size", "vocab_size")),
    (r"(q|k)_norm", ("head_dim",)),
    (r"^markov_head", ("markov_rank", "markov_head_type", "vocab_size", "draft_vocab_size")),
    (r"^confidence_head", ("enable_confidence_head", "confidence_head_with_markov", "markov_rank")),
    (r"^candidate_selector", ("selector_rank", "vocab_size", "draft_vocab_size", "hidden_size")),
    (r"_conv\.", ("conv_group_size", "conv_kernel_size", "hidden_size")),
    *llama.BLAME,
)
ALIASES = (("midlayer.", "layers.0."), ("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))


def flat_format(name: str, heads: tuple[str, ...], architecture: str, read: Read, **more: Any) -> Format:
    """Return a format of flat files with this architecture."""

    def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
        return "speculators_model_type" not in config and architecture in (config.get("architectures") or ())

    fields: dict[str, Any] = {
        "weights": ("model.safetensors",),
        "prefixes": ("model.",),
        "aliases": ALIASES,
        "blame": BLAME,
        "incoming": incoming,
        "losses": flat_losses,
        "states_tokens": False,
        "final_state": False,  # past the norm where transformers computes it, before it in vLLM
        "write": lambda checkpoint: cast(DFlashConfig, checkpoint.config).flat_json(architecture),
    }
    return Format(name=name, heads=heads, matches=matches, read=read, **fields | more)


def read_flat(
    fields: Fields, architecture: str, notes: list[str], *, from_anchor: bool
) -> tuple[dict[str, Any], Fields]:
    """Read a flat config.json: the fields of DFlashConfig, and the section, of which the caller reads the rest.

    `from_anchor`: what a file that does not state `sample_from_anchor` means by that.
    """
    fields.only("architectures", [architecture])
    fields.only("model_type", "qwen3")
    fields.ignore("num_target_layers")  # of the target; target_layer_ids name those that are read
    section = fields.need_section("dflash_config")
    layer, causal = read_masks(fields, section, read_layers(fields, notes), notes)
    section.only("attention_sink_bias", False)
    section.only("target_hidden_size", layer.hidden_size)
    alignment = {
        "sample_from_anchor": read_once(fields, section, "sample_from_anchor", bool),
        "shift_label": section.maybe("shift_label", bool),  # the same, as the trainers call it
    }
    shape: dict[str, Any] = {
        "layer": layer,
        "draft_vocab_size": fields.size("draft_vocab_size", layer.vocab_size),
        "aux_layers": read_layer_ids(
            read_once(fields, section, "target_layer_ids", list), f"{section.name}: target_layer_ids", first=-1
        ),
        "causal_layers": causal,
        "sample_from_anchor": read_alignment(alignment, from_anchor, notes, architecture),
    }
    for key in ("block_size", "mask_token_id"):
        shape[key] = read_once(fields, section, key, int)
        if shape[key] is None:
            raise ValueError(f"{section.name}: {key} is missing")
    notes += window_notes(DFlashConfig(**shape), from_row=True)
    return shape, section


def read_once(fields: Fields, section: Fields, key: str, kind: type[T]) -> T | None:
    """Read a key that some files have at the top and others in the section. Raises ValueError for two that disagree."""
    top, nested = fields.maybe(key, kind), section.maybe(key, kind)
    if top is not None and nested is not None and top != nested:
        raise ValueError(f"{section.name}: {key}={nested!r}, but {top!r} at the top; which was trained? keep one")
    return top if nested is None else nested


def read_alignment(stated: Mapping[str, bool | None], default: bool, notes: list[str], form: str) -> bool:
    """Return whether the anchor's row predicts, from the keys that say so. Raises ValueError if they disagree."""
    values = {value for value in stated.values() if value is not None}
    if len(values) > 1:
        listed = ", ".join(f"{key}={value}" for key, value in stated.items())
        raise ValueError(f"config.json: {listed}: must agree; both say whether the anchor's row predicts")
    if not values:
        notes.append(f"sample_from_anchor is not stated: {str(default).lower()}, the convention of {form}")
    return values.pop() if values else default


def read_layer_ids(ids: list[Any] | None, where: str, *, first: int) -> tuple[int, ...]:
    """Return the target's layers as HF hidden_states indices. `first`: the id that the format gives the embedding.

    That is 0, or -1 where ids are 0-based outputs of layers. Raises ValueError for ids that do not ascend.
    """
    if ids is None:
        raise ValueError(f"{where} is missing")
    if not ids or any(type(layer) is not int for layer in ids) or ids != sorted(set(ids)) or ids[0] < first:
        raise ValueError(f"{where}={ids}: expected whole numbers that ascend from {first}, the embedding")
    return tuple(layer - first for layer in ids)


def read_layers(fields: Fields, notes: list[str]) -> TargetConfig:
    """Read the keys of a Qwen3Config that say what the layers compute: norms, sizes, windows.

    Raises ValueError where a key is absent for which readers have different defaults.
    """
    fields.need("head_dim", int, "Qwen3Config takes it for 128")
    if fields.values.get("rope_theta") is None and "rope_theta" not in fields.take("rope_parameters", dict, {}):
        raise ValueError(f"{fields.name}: rope_theta is missing; vLLM takes it for 1000000 and transformers for 10000")
    fields.only("is_neox_style", True)
    layer = llama.read_sizes(fields, notes)
    windows = llama.read_windows(fields, layer.num_layers)
    return replace(layer, architecture=QWEN3, qk_norm=True, windows=windows)


def read_masks(
    fields: Fields, section: Fields, layer: TargetConfig, notes: list[str]
) -> tuple[TargetConfig, tuple[bool, ...]]:
    """Return the layer with its windows, and which layers are block-causal, of a flat config.json.

    vLLM's rule: `is_causal` decides, else `dflash_config.causal`, else only layers that `layer_types` gives a window
    are block-causal. Without such layers `use_swa` gives every layer a window. JetSpec's `causal_head` makes all
    layers block-causal. Raises ValueError for keys that contradict each other.
    """
    size = None if section.values.get("swa_window_size") is None else section.size("swa_window_size")
    section.ignore("swa_window_size")
    if layer.windows and size not in (None, *layer.windows):
        raise ValueError(
            f"{section.name}: swa_window_size={size}, but sliding_window={fields.values['sliding_window']} at the top; "
            "which was trained? keep one"
        )
    if forced := section.take("use_swa", bool, False) and not layer.windows:
        layer = replace(layer, windows=(size or fields.size("sliding_window"),) * layer.num_layers)
    nested, causal = section.maybe("causal", bool), fields.maybe("is_causal", bool)
    causal = nested if causal is None else causal
    if section.take("causal_head", bool, False):
        if causal is False:
            raise ValueError(f"{section.name}: causal_head=True, though is_causal or causal is false")
        causal = True
    if causal is None and layer.windows:
        notes.append(
            f"whether blocks are causal is not stated: by vLLM's rule those layers that layer_types calls {SLIDING} are"
        )
    full, windowed = (False, not forced) if causal is None else (causal, causal)
    return layer, causal_layers(layer, full=full, windowed=windowed)


def causal_layers(layer: TargetConfig, *, full: bool, windowed: bool) -> tuple[bool, ...]:
    """Return the mask kind of each layer, given those of layers without and with a window."""
    return tuple(full if layer.window(index) is None else windowed for index in range(layer.num_layers))


def window_notes(config: DFlashConfig, *, from_row: bool) -> list[str]:
    """Return a note if this format's readers count windows otherwise than Headway; see DFlashConfig for how that does.

    `from_row`: they count back from each row of a block, itself included; otherwise from the anchor, for every row.
    """
    counted = config.causal(windowed=True)
    if counted == {False} and from_row:
        return [
            f"windows: this format counts from each row, Headway from the anchor: up to {config.block_size} "
            "positions more are seen"
        ]
    if counted == {True} and not from_row:
        return [
            f"windows: this format counts from the anchor, Headway from each row: up to {config.block_size} "
            "positions fewer are seen"
        ]
    return []


def check_whole_vocabulary(config: HeadShape, form: str) -> None:
    if config.draft_vocab_size < config.vocab_size:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocab_size}: {form} has room for the target's whole vocabulary only"
        )


def flat_losses(checkpoint: Checkpoint) -> list[str]:
    return window_notes(cast(DFlashConfig, checkpoint.config), from_row=True)


def incoming(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, str]:
    """Leave out what copies the target's embedding and LM head; complete the maps of a draft vocabulary."""
    remarks = eagle3.incoming(tensors, config)
    copies = (EMBEDDING, LM_HEAD) if config.draft_vocab_size == config.vocab_size else (EMBEDDING,)
    for name in copies:
        tensor = tensors.get(name)
        if tensor is not None and tuple(tensor.shape) == (config.vocab_size, config.hidden_size):
            del tensors[name]
            remarks[name] = "the target's, which the head uses in place"
    return remarks


# keys that only its training reads
TRAINING = ("num_anchors", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma")


def read_markov(fields: Fields) -> dict[str, Any]:
    """Read the keys of DSpark's Markov head and confidence head.

    A key of a part that the head does not have may be absent, any other not: readers' defaults differ.
    """
    fields.ignore(*TRAINING)
    rank, confident = fields.need("markov_rank", int), fields.need("enable_confidence_head", bool)
    kind, with_markov = fields.maybe("markov_head_type", str), fields.maybe("confidence_head_with_markov", bool)
    if not 0 <= rank <= MOST:
        raise ValueError(f"{fields.name}: markov_rank={rank}: must be 0 to {MOST}")
    if rank and kind is None:
        raise ValueError(f"{fields.name}: markov_head_type is missing, though markov_rank={rank}")
    if confident and with_markov is None:
        raise ValueError(f"{fields.name}: confidence_head_with_markov is missing, though enable_confidence_head=True")
    return dict(zip(DSparkConfig.further(), (rank, kind or "vanilla", confident, bool(with_markov)), strict=True))


def markov_shape(shape: Mapping[str, Any], markov: Mapping[str, Any], notes: list[str]) -> DFlashConfig:
    """Return the head's shape: DFlash's if there is no Markov head. Raises ValueError for a confidence head alone."""
    if markov["markov_rank"]:
        return DSparkConfig(**shape, **markov)
    if markov["enable_confidence_head"]:
        raise ValueError("config.json: markov_rank=0, enable_confidence_head=True: no head has only the latter")
    notes.append("markov_rank is 0: a DFlash head")
    return DFlashConfig(**shape)


def markov_kind(fields: Mapping[str, Any]) -> str:
    """Return the kind of head that `markov_shape` makes of these keys."""
    return "dspark" if fields.get("markov_rank") else "dflash"


def markov_losses(config: HeadShape) -> list[str]:
    kind = getattr(config, "markov_head_type", "vanilla")
    return [] if kind == "vanilla" else [f"vLLM serves markov_head_type=vanilla only; this head is {kind}"]
