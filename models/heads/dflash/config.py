"""DFlash: the shape of a head and its config.json in the speculators format; options; objective.

Files differ in what they state of the masks inside a block. Here every layer is full or has a window, and its rows see
the whole block or, block-causal, the rows before them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from models.checks import number
from models.config import TargetConfig
from models.heads.config import DecoderShape, Facts, NewHeadConfig
from models.heads.layer_config import (
    check_draft_vocabulary,
    check_layer_ids,
    check_mask_token,
    draft_vocabulary,
    head_layer,
    speculators_json,
    spread_layers,
    windowed_json,
)
from models.heads.objectives import BlockObjectiveConfig

MAX_BLOCK = 64  # rows of a block see each other by a mask of 64 bits


@dataclass(frozen=True)
class DFlashConfig(DecoderShape):
    """`layer` holds the decoder layers' sizes and windows, and their number; its vocab_size is the target's.

    A window of W lets a row see W positions before the anchor where it sees its whole block, and where it is
    block-causal W positions up to itself. `sample_from_anchor`: the anchor's row yields the first drafted token.
    """

    name: ClassVar[str] = "dflash"
    algorithm: ClassVar[str] = "dflash"
    speculator: ClassVar[str] = "DFlashSpeculator"
    reads_lm_head: ClassVar[bool] = True

    layer: TargetConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    causal_layers: tuple[bool, ...]  # whether the rows of a layer see only the rows of their block before them
    sample_from_anchor: bool = False

    def __post_init__(self) -> None:
        assert len(self.causal_layers) == self.layer.num_layers
        # what the formats have keys for: one size of windows, and one mask kind of the layers with and without one
        assert len(set(self.layer.windows) - {None}) <= 1
        assert all(len(self.causal(windowed=windowed)) <= 1 for windowed in (False, True))
        check_draft_vocabulary(self.draft_vocab_size, self.vocab_size)
        if not 2 <= self.block_size <= MAX_BLOCK:
            raise ValueError(f"head.block_size={self.block_size}: must be 2 to {MAX_BLOCK}")
        check_mask_token(self.mask_token_id, self.vocab_size)

    @property
    def target_hidden_size(self) -> int:
        """The target's, whose embedding and LM head the head uses."""
        return self.layer.hidden_size

    @property
    def max_depth(self) -> int:
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def donor_layers(self) -> range:
        return range(-self.layer.num_layers, 0)

    @property
    def first_row(self) -> int:
        """The row of depth 0: the anchor's, or the first mask's where the anchor's row predicts nothing."""
        return 0 if self.sample_from_anchor else 1

    def block_rows(self, depth: int) -> int:
        """Return the number of rows of a block from which `depth` tokens are drafted.

        Rows that see later rows were trained with all of them; others do not depend on how many follow.
        """
        return self.first_row + depth if all(self.causal_layers) else self.block_size

    def causal(self, *, windowed: bool) -> set[bool]:
        """Return the mask kinds of the layers with a window, or of those without: none or one."""
        layers = enumerate(self.causal_layers)
        return {causal for index, causal in layers if (self.layer.window(index) is not None) == windowed}

    def to_json(self, facts: Facts) -> dict[str, Any]:
        return self.speculators_json(facts)

    def speculators_json(self, facts: Facts) -> dict[str, Any]:
        """Return the speculators config.json that vLLM reads, every flag written out.

        Its full layers are bidirectional; `causal_head`, which says otherwise, is a key of JetSpec's files.
        """
        return speculators_json(self, windowed_json(self.layer), facts) | {
            "target_hidden_size": self.target_hidden_size,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "aux_hidden_state_layer_ids": list(self.aux_layers),
            "sliding_window_non_causal": self.causal(windowed=True) == {False},
            "sample_from_anchor": self.sample_from_anchor,
            **({"causal_head": True} if self.causal(windowed=False) == {True} else {}),
            **self.further_json(),
        }

    def flat_json(self, architecture: str, **more: Any) -> dict[str, Any]:
        """Return z-lab's flat config.json: a Qwen3Config and a section, which `more` is added to.

        Raises ValueError for masks that have no key.
        """
        kinds = set(self.causal_layers)
        if len(kinds) > 1 and (self.causal(windowed=True), self.causal(windowed=False)) != ({True}, {False}):
            raise ValueError(
                "causal_layers: this format has one mask for all layers, or a causal one for those with a window"
            )
        keys = ("block_size", "mask_token_id", "sample_from_anchor")
        return windowed_json(self.layer) | {
            "architectures": [architecture],
            **({"is_causal": kinds.pop()} if len(kinds) == 1 else {}),
            "draft_vocab_size": self.draft_vocab_size,
            "dflash_config": {
                **{key: getattr(self, key) for key in keys},
                "target_layer_ids": [index - 1 for index in self.aux_layers],
                **self.further_json(),
                **more,
            },
        }

    @classmethod
    def further(cls) -> tuple[str, ...]:
        """Return the fields of a head that extends this one, which have the same names in a config.json."""
        return tuple(each.name for each in fields(cls))[len(fields(DFlashConfig)) :]

    def further_json(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.further()}


@dataclass
class DFlashOptions(NewHeadConfig):
    shape_type: ClassVar[type[DFlashConfig]] = DFlashConfig
    objectives: ClassVar = {"dflash": BlockObjectiveConfig}
    fuses_layers: ClassVar = True
    files: ClassVar = "The files follow the `speculators` format (`dflash`), which vLLM reads as well."

    num_layers: int = number(5, low=1)
    intermediate_size: int | None = number(None, low=1)  # null for these four: the target's
    num_heads: int | None = number(None, low=1)
    num_kv_heads: int | None = number(None, low=1)
    head_dim: int | None = number(None, low=1)
    aux_layers: list[int] | None = None  # HF hidden_states indices; null: as many as head.num_layers, evenly spread
    # at most this many draft tokens; null or more than the target has: all of them
    draft_vocab_size: int | None = number(None, low=1)
    block_size: int = number(8, low=2, high=MAX_BLOCK)  # rows of a block: the anchor and masks
    mask_token_id: int | None = None  # placeholder for tokens not drafted yet; null: the end-of-text token
    sample_from_anchor: bool = False  # the anchor's row predicts too, so that a block drafts one token more
    window: int | None = number(None, low=1)  # all layers see at most so many positions before the block; null: all
    causal: bool = False  # a row of a block sees only the rows before it (JetSpec, arXiv 2606.18394)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_ids(self.aux_layers)

    @property
    def max_depth(self) -> int:
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def for_target(self, target: TargetConfig) -> DFlashConfig:
        """Return the shape, with sizes and rotary embedding of the target's layers where none are set.

        `mask_token_id` null: the end of text, which is never an anchor.
        """
        sizes = {key: getattr(self, key) for key in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")}
        layer = head_layer(target, num_layers=self.num_layers, qk_norm=True, window=self.window, **sizes)
        aux = spread_layers(self.num_layers, target.num_layers) if self.aux_layers is None else self.aux_layers
        check_layer_ids(aux, target)
        mask = next(iter(target.eos_token_ids), 0) if self.mask_token_id is None else self.mask_token_id
        return self.shape_type(
            layer=layer,
            draft_vocab_size=draft_vocabulary(self.draft_vocab_size, target),
            aux_layers=tuple(sorted(aux)),
            block_size=self.block_size,
            mask_token_id=mask,
            sample_from_anchor=self.sample_from_anchor,
            causal_layers=(self.causal,) * self.num_layers,
            **{key: getattr(self, key) for key in self.shape_type.further()},
        )
