"""The protocol of heads: what training, engine and checkpoints require of each of them.

Slot i holds token t[i+1] and the target's hidden states at position i; depth d is the d-th token drafted from it,
t[i+2+d]. `step` returns a state, `logits` the logits of the token at the state's depth. A recurrent head computes the
state of a depth from the previous depth's state and token; a parallel head needs neither, so one forward computes every
depth. Heads are independent of batches, caches and losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kernels.draft import DraftParts
from kernels.quantise import WeightFormat
from models.attention import Attention
from models.layers import pack
from models.targets.llama import LlamaTarget
from models.weights import merged_parts, split_merged


class AttentionShape(NamedTuple):
    """The number of a head's layers that keep KV, and their common shape."""

    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Head(nn.Module, ABC):
    """A draft head. Parameters with `requires_grad` are trained; those in `checkpoint_layout` are exported."""

    parallel: ClassVar[bool] = False
    corrects: ClassVar[bool] = False  # the logits of a depth are those of its LM head, changed by the token before it
    output_layers: ClassVar[tuple[str, ...]] = ("lm_head", "lm_heads")  # modules that map to the vocabulary
    config: Any  # its HeadShape
    notes: Sequence[str] = ()  # on its files: what was assumed, and what nothing reads

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def attention(self) -> AttentionShape | None:
        """The shape of its attention; None for a head without decoder layers, which keeps no KV."""
        layer = getattr(self.config, "layer", None)
        return layer and AttentionShape(layer.num_layers, layer.num_heads, layer.num_kv_heads, layer.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def target_ids(self) -> Tensor:
        """int64 `[Vd]`: the target id of every draft id, ascending."""
        assert self.config.draft_vocab_size == self.config.vocab_size, "a smaller vocabulary has a map of its own"
        return torch.arange(self.config.vocab_size, device=next(self.parameters()).device)

    def draft_to_target(self, draft_ids: Tensor) -> Tensor:
        return self.target_ids[draft_ids]

    def set_vocabulary(self, d2t: Tensor, t2d: Tensor) -> None:
        """Store the maps of models/vocab.py; a head over the whole vocabulary stores nothing."""
        assert d2t.numel() == self.config.draft_vocab_size

    @abstractmethod
    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        """Fuse the target's features, one `[..., Ht]` per aux layer, into the state `[..., S]` that depth 0 reads."""

    @abstractmethod
    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        """Compute the state of `depth`, `[..., S']`, from ids and positions `[...]` and state `[..., S]`.

        Depth 0 takes the fused state and token t[i+1] at rotary position i. Depth d of a recurrent head takes the state
        of depth d - 1 and the token drafted there, at position i + d; that of a parallel head what `mask_slot` returns.
        """

    def before_lm_head(self, state: Tensor, depth: int) -> Tensor:
        """Turn the state that `step` returned for this depth into the input of the depth's LM head, `[..., S]`."""
        return state

    @abstractmethod
    def lm_head_at(self, depth: int) -> nn.Module:
        """Return the LM head of this depth, `[..., S]` -> `[..., Vd]`."""

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Return the logits `[..., Vd]` of the state that `step` returned for this depth."""
        return self.lm_head_at(depth)(self.before_lm_head(state, depth))

    def all_logits(self, state: Tensor, depths: int) -> Tensor:
        """Return a parallel head's logits at depths 0 to `depths` - 1 of one state, `[R, S]` -> `[R, depths, Vd]`."""
        return torch.stack([self.logits(state, depth) for depth in range(depths)], dim=1)

    def stack_layers(self) -> None:
        """Stack the weights of layers that run in one launch; called before they are packed."""

    def pack(self, *, exact: bool, weight_format: WeightFormat) -> None:
        """Pack the linear layers like models.layers.pack. Borrowed modules are the target's and stay as they are.

        With weights that are integers rows are quantised too: that changes drafts alone, and hardly those.
        """
        pack(self, exact=exact, weight_format=weight_format, quantise_rows=True)

    def draft_parts(self) -> DraftParts | None:
        """Return the weights for kernels that run whole draft levels, once packed; None where none runs its layers."""
        return None

    @property
    def reads_lm_head(self) -> bool:
        """Whether initialising a new head needs the target's LM head even without `from_target`."""
        return False

    @property
    def donor_layers(self) -> range:
        """Which of the target's layers `initialise` with `from_target` copies; negative from the last."""
        return range(-1, 0)

    def mask_slot(self) -> tuple[int, Tensor] | None:
        """Return the token id and state `[S]` of each of a parallel head's rows past depth 0.

        These rows follow the slot's row, one per depth, in the same forward. None where the logits of every depth are
        computed from the slot's row alone.
        """
        return None

    def loose_parameters(self) -> list[str]:
        """Return the names of parameters that are read without calling the module that holds them."""
        return [name for name, _ in self.named_parameters(recurse=False)]

    def scratch_places(self, depth: int) -> int:
        """Return to how many places past the root's a parallel head writes KV when it drafts `depth` tokens."""
        return depth - 1

    def borrow(self, target: LlamaTarget) -> None:
        """Keep references to the modules of the target that this head uses. Call before the first step."""

    @abstractmethod
    def initialise(self, target: LlamaTarget, *, from_target: bool, seed: int = 0) -> None:
        """Initialise a new head, after `set_vocabulary`. `target` must not be packed. Calls `borrow` where needed."""

    def checkpoint_layout(self) -> dict[str, tuple[str, ...]]:
        """Return parameter or buffer name -> names of the checkpoint's tensors that are concatenated to make it."""
        return {name: merged_parts(name) for name, _ in self.named_parameters()}

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of its checkpoint, by name."""
        shape = self.attention
        heads = (1, 1) if shape is None else (shape.num_heads, shape.num_kv_heads)
        return split_merged(self, self.checkpoint_layout(), heads)
