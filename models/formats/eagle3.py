"""Shared by the formats of EAGLE-3: reading auxiliary layer ids, and the two maps of the draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from models.fields import Fields
from models.formats import llama
from models.formats.checkpoint import ConversionOptions
from models.heads.config import EMBEDDING, LM_HEAD, HeadShape
from models.vocab import complete_maps

WHOLE = (torch.int64, torch.int32)
FALSE_IF_ABSENT = ("norm_before_fc", "fc_norm", "norm_output")  # norm_before_residual: up to each format
BLAME = (
    (r"^fc\.weight", ("hidden_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")),
    (r"^lm_head", ("draft_vocab_size", "hidden_size")),
    (r"^(d2t|t2d)$", ("draft_vocab_size", "vocab_size")),
    (r"^input_norm", ("norm_before_fc", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")),
    (r"^fc_norm", ("fc_norm", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")),
    (r"(q|k)_norm", ("model_type", "head_dim")),
    (r"^mask_hidden", ("target_hidden_size", "eagle_aux_hidden_state_layer_ids")),
    *llama.BLAME,
)


def shared_with_target(config: HeadShape) -> frozenset[str]:
    """Return the tensors that a file may omit; they are then the target's, which has them in the same shape."""
    if config.hidden_size != config.target_hidden_size:
        return frozenset()
    return frozenset({EMBEDDING, LM_HEAD} if config.draft_vocab_size == config.vocab_size else {EMBEDDING})


def read_aux_layers(fields: Fields, provided: ConversionOptions, notes: list[str], *, raw: bool) -> tuple[int, ...]:
    """Read HF `hidden_states` indices from the top level or eagle_config, else the default for the verifier's depth.

    `raw`: not the speculators format, so that the ids may also be 0-based layer outputs (SpecForge and NVIDIA write
    these, one less); a first id of 1 is then ambiguous, unless the first two are one less than the default. Raises
    ValueError for that, for two places that disagree, and for ids that do not ascend: readers sort them.
    """
    top, nested, other = fields.numbers("eagle_aux_hidden_state_layer_ids"), None, None
    section = fields.section("eagle_config")
    if section is not None:
        nested, other = section.numbers("eagle_aux_hidden_state_layer_ids"), section.numbers("layer_ids")
        section.only("use_aux_hidden_state", True)
        # keys of NVIDIA's ModelOpt, accepted only with the values of EAGLE-3's forward
        for key in ("use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular"):
            section.only(key, True)
        section.only("use_mtp_layernorm", False)
        section.only("parallel_draft_step", 1)
        section.ignore("parallel_draft_heads_num_layers")  # with one step there are none
        section.ignore("norm_before_fc")  # see read_flags
        notes += section.done()
    stated = [ids for ids in (top, nested, other) if ids is not None]
    if provided.layer_ids is not None and not stated:
        raise ValueError(f"--layer-ids {provided.layer_ids}: config.json names no auxiliary layers")
    if any(ids != stated[0] for ids in stated):
        raise ValueError(
            f"config.json: eagle_aux_hidden_state_layer_ids={top} and eagle_config says {nested or other}; "
            "which of them was trained? keep one"
        )
    if not stated:
        ids = provided.verifier and provided.verifier.default_aux_layers
        if not ids:
            raise ValueError(
                "config.json: eagle_aux_hidden_state_layer_ids is missing, and its default depends on the target's "
                "layers; give --verifier (a folder with its config.json)"
            )
        notes.append(f"auxiliary layers are not stated: {list(ids)}, the default for this verifier")
    else:
        ids = tuple(stated[0])
        default, counted = provided.verifier and provided.verifier.default_aux_layers, provided.layer_ids
        if raw and counted is None and default and ids[:2] == tuple(index - 1 for index in default[:2]):
            counted = "outputs"  # SpecForge's and NVIDIA's default, which as hidden_states would be nobody's
        if raw and ids[0] == 1 and counted is None:
            raise ValueError(
                f"config.json: eagle_aux_hidden_state_layer_ids={list(ids)}: HF hidden_states indices (as vLLM takes "
                "them) or 0-based layer outputs (as SpecForge and NVIDIA write them, and SGLang takes a list that "
                "begins with 1)? Convert with --layer-ids hidden_states or --layer-ids outputs"
            )
        if raw and counted == "outputs":
            notes.append(f"auxiliary layers {list(ids)} are 0-based outputs: {[i + 1 for i in ids]} as hidden_states")
            ids = tuple(i + 1 for i in ids)
    if list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise ValueError(f"config.json: eagle_aux_hidden_state_layer_ids={list(ids)}: must ascend from 0")
    count = fields.maybe("num_aux_hidden_states", int)
    if count is not None and count != len(ids):
        raise ValueError(
            f"config.json: num_aux_hidden_states={count}, but eagle_aux_hidden_state_layer_ids={list(ids)}"
        )
    return tuple(ids)


def read_flags(fields: Fields, notes: list[str]) -> dict[str, bool]:
    """Read the flags that every reader takes for false if absent; norm_before_fc may also be in eagle_config.

    Raises ValueError for two places that disagree.
    """
    flags = {flag: fields.maybe(flag, bool) for flag in FALSE_IF_ABSENT}
    section = fields.section("eagle_config")
    nested = section and section.maybe("norm_before_fc", bool)
    if nested is not None and flags["norm_before_fc"] not in (None, nested):
        raise ValueError(
            f"config.json: norm_before_fc={flags['norm_before_fc']} and eagle_config.norm_before_fc={nested}"
        )
    if nested is not None:
        flags["norm_before_fc"] = nested
    missing = [flag for flag, value in flags.items() if value is None]
    if missing:
        notes.append(f"not stated, so false: {', '.join(missing)}")
    return {flag: bool(value) for flag, value in flags.items()}


def incoming(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, str]:
    """Convert tensors as other projects' files hold them, in place, to ours."""
    remarks = _vocabulary_maps(tensors, config)
    mask = tensors.get("mask_hidden")
    if mask is not None and mask.ndim == 2:  # as vLLM keeps it
        tensors["mask_hidden"] = mask[None]
        remarks["mask_hidden"] = f"{list(mask.shape)} in the source"
    return remarks


def _vocabulary_maps(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, str]:
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if (d2t is None and t2d is None) or not _fits(d2t, t2d, config):
        return {}  # reported by `match`, with all other errors
    maps = complete_maps(d2t, t2d, config.vocab_size)
    if d2t is None and maps.d2t.numel() != config.draft_vocab_size:
        raise ValueError(
            f"t2d marks {maps.d2t.numel()} tokens, though config.json states draft_vocab_size="
            f"{config.draft_vocab_size}, and there is no d2t"
        )
    if config.draft_vocab_size == config.vocab_size:
        if maps.d2t.any():
            raise ValueError(
                f"d2t: maps tokens to others, though a draft vocabulary of the whole {config.vocab_size} tokens needs "
                "no map"
            )
        removed = [name for name in ("d2t", "t2d") if tensors.pop(name, None) is not None]
        return dict.fromkeys(removed, "maps every token to itself")
    tensors["d2t"], tensors["t2d"] = maps.d2t, maps.t2d
    return maps.remarks


def _fits(d2t: Tensor | None, t2d: Tensor | None, config: HeadShape) -> bool:
    d2t_fits = d2t is None or (tuple(d2t.shape) == (config.draft_vocab_size,) and d2t.dtype in WHOLE)
    t2d_fits = t2d is None or (tuple(t2d.shape) == (config.vocab_size,) and t2d.dtype == torch.bool)
    return d2t_fits and t2d_fits
