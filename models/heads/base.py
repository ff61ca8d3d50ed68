"""The protocol of heads: what training, engine and checkpoints ask of every one of them.

Slot i holds token t[i+1] and the target's hidden states at position i; depth d is the d-th token drafted from it,
t[i+2+d]. `step` answers a state, `logits` what a state says of the token at its depth. A recurrent head makes the state
of a depth from the state and the token before it; a parallel head needs neither, so one forward answers every depth.
Knows nothing about batches, caches or losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kernels.draft import DraftParts
from kernels.quantise import WeightFormat
from models.attention import Attention
from models.layers import Linear, pack
from models.targets.llama import LlamaTarget


class AttentionShape(NamedTuple):
    """The layers of a head that keep KV, all of one shape."""

    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class HeadShape(Protocol):
    """What a head is, as its config.json says it. One frozen dataclass per head, which besides has the class method
    `for_target(target, **options)`: a new head by the keys of its group in infer/options/head_config.py. Raises
    ValueError naming the key that does not fit. How a config.json is read is the matter of models/formats.
    """

    @property
    def vocab_size(self) -> int: ...  # of the target

    @property
    def target_hidden_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...  # of the head's own states

    @property
    def draft_vocab_size(self) -> int: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...  # hidden states that `fuse` wants, LAST for the final one

    @property
    def max_depth(self) -> int | None: ...  # how many tokens it can draft; None for no bound

    def to_json(self, *, verifier: str, verifier_architecture: str, speculative_tokens: int) -> dict[str, Any]:
        """config.json with every flag written out, because readers disagree on defaults."""
        ...


class Head(nn.Module, ABC):
    """Parameters with `requires_grad` are what is trained; `checkpoint_layout` names what is written."""

    name: ClassVar[str]  # head=<name>
    config_class: ClassVar[Any]  # its HeadShape
    parallel: ClassVar[bool] = False
    config: Any  # of config_class

    @property
    def attention(self) -> AttentionShape | None:
        """None for a head that attends to nothing and keeps no KV."""
        return None

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
        """The maps of models/vocab.py; a head over the whole vocabulary has nothing to keep of them."""
        assert d2t.numel() == self.config.draft_vocab_size

    @abstractmethod
    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        """Features of the target, one `[..., Ht]` per aux layer -> the state `[..., S]` that depth 0 starts from."""

    @abstractmethod
    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        """ids, positions `[...]`, state `[..., S]` -> the state of `depth`, `[..., S']`.

        Depth 0 takes the fused state and token t[i+1] at rotary position i. Depth d of a recurrent head takes the state
        of depth d - 1 and the token drafted there, at position i + d; that of a parallel head what `mask_slot` says.
        """

    def before_lm_head(self, state: Tensor, depth: int) -> Tensor:
        """What `step` answered for this depth -> what the LM head of the depth reads, `[..., S]`."""
        return state

    @abstractmethod
    def lm_head_at(self, depth: int) -> nn.Module:
        """`[..., S]` -> `[..., Vd]`."""

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """What `step` answered for this depth -> `[..., Vd]`."""
        return self.lm_head_at(depth)(self.before_lm_head(state, depth))

    def all_logits(self, state: Tensor, depths: int) -> Tensor:
        """Of a parallel head: `logits` at depths 0 to `depths` - 1 of one state, `[R, S]` -> `[R, depths, Vd]`."""
        return torch.stack([self.logits(state, depth) for depth in range(depths)], dim=1)

    def stack_layers(self) -> None:
        """Lays the weights of layers that are run at once beside each other; called before they are packed."""

    def pack(self, *, exact: bool, weight_format: WeightFormat) -> None:
        """As models.layers.pack. What is borrowed is the target's, and stays as it is."""
        pack(self, exact=exact, weight_format=weight_format)

    def draft_parts(self) -> DraftParts | None:
        """For kernels that run whole levels of a draft, once it is packed; None where none runs its layers."""
        return None

    @property
    def reads_lm_head(self) -> bool:
        """Whether a new head needs the target's LM head, whatever it starts from."""
        return False

    def mask_slot(self) -> tuple[int, Tensor] | None:
        """Of a parallel head: token id and state `[S]` of each row past depth 0.

        These rows follow the slot's own, one per depth, in the same forward. None where every depth's logits are read
        from the slot's own row.
        """
        return None

    def borrow(self, target: LlamaTarget) -> None:
        """Takes what this head uses of the target itself, by reference. To be called before the first step."""

    @abstractmethod
    def initialise(self, target: LlamaTarget, *, from_target: bool, seed: int = 0) -> None:
        """Weights of a new head, after `set_vocabulary`. `target` must not be packed. Borrows from it, if it must."""

    def checkpoint_layout(self) -> dict[str, tuple[str, ...]]:
        """Parameter or buffer name -> names of the checkpoint's tensors that are concatenated to make it."""
        layout: dict[str, tuple[str, ...]] = {}
        for name, _ in self.named_parameters():
            if "qkv_proj" in name:
                layout[name] = tuple(name.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj"))
            elif "gate_up_proj" in name:
                layout[name] = tuple(name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj"))
            else:
                layout[name] = (name,)
        return layout

    def merged_sizes(self) -> dict[str, list[int]]:
        """Rows of each part of the merged tensors, for writing them apart."""
        sizes: dict[str, list[int]] = {}
        for name, parts in self.checkpoint_layout().items():
            if "qkv_proj" in name:
                assert self.attention is not None
                _, heads, kv_heads, head_dim = self.attention
                sizes[name] = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
            elif len(parts) > 1:
                rows = self.get_parameter(name).shape[0]
                sizes[name] = [rows // len(parts)] * len(parts)
        return sizes


class Borrowed:
    """The target's LM head and embedding in use by a head that has none of its own: shared, never copied with it."""

    def __init__(self, lm_head: Linear, embedding: Tensor) -> None:
        self.lm_head, self.embedding = lm_head, embedding

    def __deepcopy__(self, memo: dict[int, Any]) -> Borrowed:
        return self

    def apply(self, change: Callable[[Tensor], Tensor]) -> Borrowed:
        """Of another dtype or on another device; itself where that changes nothing."""
        embedding = change(self.embedding)
        if embedding is self.embedding:
            return self
        assert self.lm_head.packed is None, "a packed LM head stays as it is"
        tied = self.lm_head.weight is self.embedding
        lm_head = Linear(*reversed(self.lm_head.weight.shape), bias=False, device="meta")
        weight = embedding if tied else change(self.lm_head.weight)
        lm_head.weight = nn.Parameter(weight.detach(), requires_grad=False)
        return Borrowed(lm_head, lm_head.weight if tied else embedding)
