"""Shared by the formats of DFlash: Qwen3's layers, the masks of their blocks, tensors that copy the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from models.config import TargetConfig
from models.fields import Fields
from models.formats import eagle3, llama
from models.heads.config import EMBEDDING, LM_HEAD, HeadShape
from models.heads.dflash.config import SLIDING
from models.targets.qwen2 import typed_windows

BLAME = (
    (r"^fc\.weight", ("hidden_size", "aux_hidden_state_layer_ids", "target_layer_ids")),
    (r"^(hidden_norm|norm)", ("hidden_size",)),
    (r"^lm_head", ("draft_vocab_size", "hidden_size")),
    (r"^(d2t|t2d)$", ("draft_vocab_size", "vocab_size")),
    (r"(q|k)_norm", ("head_dim",)),
    (r"^markov_head", ("markov_rank", "markov_head_type", "vocab_size")),
    (r"^confidence_head", ("enable_confidence_head", "confidence_head_with_markov", "markov_rank")),
    *llama.BLAME,
)
ALIASES = (("midlayer.", "layers.0."), ("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))


def read_flat(fields: Fields, architecture: str, notes: list[str]) -> tuple[dict[str, Any], Fields]:
    """Read z-lab's flat Qwen3Config and its section `dflash_config`: the fields of DFlashConfig, and the section.

    Masks follow vLLM's rule: `is_causal` decides, else `dflash_config.causal`, else only layers with a window are
    block-causal; `use_swa` gives every layer a window in which a row sees its whole block.
    """
    fields.only("architectures", [architecture])
    fields.only("model_type", "qwen3")
    fields.ignore("num_target_layers")  # of the target; target_layer_ids name those that are read
    layer, section = read_layers(fields, notes), fields.need_section("dflash_config")
    in_section, is_causal = section.maybe("causal", bool), fields.maybe("is_causal", bool)
    causal = in_section if is_causal is None else is_causal
    if section.take("causal_head", bool, False):
        causal = True
    full, windowed = (False, True) if causal is None else (causal, causal)
    if causal is None and layer.windows:
        notes.append("the masks of blocks are not stated: layers with a window are block-causal, the others are not")
    if section.take("use_swa", bool, False):
        layer, windowed = replace(layer, windows=(section.size("swa_window_size"),) * layer.num_layers), False
    section.ignore("swa_window_size")
    section.only("attention_sink_bias", False)
    section.only("target_hidden_size", layer.hidden_size)
    sizes = {size for size in (section.maybe("block_size", int), fields.maybe("block_size", int)) if size is not None}
    if len(sizes) != 1:
        raise ValueError("config.json: block_size: must be stated, at the top or in dflash_config, or agree in both")
    from_anchor = section.maybe("sample_from_anchor", bool)
    if from_anchor is None:
        notes.append("sample_from_anchor is not stated: false, as in z-lab's heads")
    shape = {
        "layer": layer,
        "draft_vocab_size": fields.size("draft_vocab_size", layer.vocab_size),
        "aux_layers": read_outputs(section),
        "block_size": sizes.pop(),
        "mask_token_id": section.need("mask_token_id", int),
        "causal_layers": causal_layers(layer, full=full, windowed=windowed),
        "sample_from_anchor": bool(from_anchor),
    }
    return shape, section


def read_outputs(fields: Fields) -> tuple[int, ...]:
    """Read `target_layer_ids`, 0-based outputs of layers (-1: the embedding's), as HF hidden_states indices."""
    outputs = fields.numbers("target_layer_ids")
    if outputs is None:
        raise ValueError(f"{fields.name}: target_layer_ids is missing")
    if outputs != sorted(set(outputs)) or outputs[0] < -1:
        raise ValueError(f"{fields.name}: target_layer_ids={outputs}: must ascend from -1, the embedding")
    return tuple(output + 1 for output in outputs)


def check_whole_vocabulary(config: HeadShape, form: str) -> None:
    if config.draft_vocab_size < config.vocab_size:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocab_size}: {form} has room for the target's whole vocabulary only"
        )


def read_layers(fields: Fields, notes: list[str]) -> TargetConfig:
    """Read the keys of a Qwen3Config, with its defaults, that say what the layers compute: norms, sizes, windows."""
    layer = llama.read_sizes(fields, notes)
    windows = read_windows(fields, layer.num_layers)
    return replace(layer, architecture="Qwen3ForCausalLM", qk_norm=True, windows=windows)


def read_windows(fields: Fields, count: int) -> tuple[int | None, ...]:
    """Read the window of each layer, () for none, from `layer_types`, `sliding_window` and `use_sliding_window`.

    Raises ValueError for kinds of layers that are unknown or not as many as the layers, and for a window that is
    missing or whose layers are not stated.
    """
    kinds, used = fields.maybe("layer_types", list), fields.maybe("use_sliding_window", bool)
    window = None if fields.values.get("sliding_window") is None else fields.size("sliding_window")
    fields.ignore("sliding_window")
    if kinds is None:
        if used:
            raise ValueError(f"{fields.name}: use_sliding_window=True: layer_types must say which layers have a window")
        return ()
    windows = typed_windows(kinds, window or 0, count)
    if not any(size is not None for size in windows):
        return ()
    if window is None or used is False:
        raise ValueError(
            f"{fields.name}: sliding_window={window}, use_sliding_window={used}: no window, though layer_types has "
            f"{SLIDING!r}"
        )
    return windows


def causal_layers(layer: TargetConfig, *, full: bool, windowed: bool) -> tuple[bool, ...]:
    """Return the mask kind of each layer, given those of layers without and with a window."""
    return tuple(full if layer.window(index) is None else windowed for index in range(layer.num_layers))


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
