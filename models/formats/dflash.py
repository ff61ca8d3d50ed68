"""Shared by the formats of DFlash: Qwen3's layers, the masks of their blocks, tensors that copy the target's."""

from __future__ import annotations

from dataclasses import replace

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
    *llama.BLAME,
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
