"""The tensor side of serving: the target, or one rank's part of it, with the KV cache of its layers. Knows no requests.

Every operation of a step on the target's tensors goes through here, addressed by slots and rows, so that every tensor
parallel rank can do the same (infer/processes/tensor_parallel.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from infer.devices import free_bytes
from infer.kvcache.states import HybridLayers
from infer.kvcache.tensors import KVLayers, kv_dtype
from kernels.attention import LayerShape
from kernels.rows import AttentionRows
from kernels.slower import say_slower, slower_attention, slower_layers
from kernels.weights.quantize import WeightFormat
from models.config import ATTENTION
from models.layers import Linear, pack
from models.targets.llama import LlamaTarget, TargetOutput


class Shard:
    """A target, or one rank's part of it, which it takes over and packs for serving. Call `allocate` before use."""

    ranks = 1
    _make_layers: Callable[..., KVLayers] = KVLayers

    def __init__(
        self,
        target: LlamaTarget,
        *,
        exact: bool = True,
        weights: WeightFormat = "same",
        activations: str = "same",
        kv: str = "same",
    ) -> None:
        """Raises ValueError for `activations` "int8", unlike "auto", if no linear layer can multiply integers."""
        self.target = target
        pack(target, exact=exact, weight_format=weights)
        self.linears = [m.packed for m in target.modules() if isinstance(m, Linear) and m.packed is not None]
        # on every layer that can: a list, since `any` of a generator would end at the first
        self.integer = activations != "same" and any([linear.quantize_rows() for linear in self.linears])
        if activations == "int8" and not self.integer:
            raise ValueError(
                "engine.activations=int8: no linear layer of this target has weights that are integers and read by a "
                "kernel in C; use engine.activations=same, or on a CPU quantize the weights too: engine.weights=int8"
            )
        weight = target.norm.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.kv_dtype = kv_dtype(kv, self.dtype)
        self._num_heads, kv_heads, head_dim = target.heads
        latent = target.config.latent
        self.value_dim = None if latent is None else latent.rank
        say_slower(slower_layers(self.linears, "engine.weights"))
        say_slower(slower_attention(head_dim, self.dtype, self.device, self.kv_dtype, self.value_dim))
        self.layer_shapes = [LayerShape(kv_heads, head_dim, self.value_dim)] * target.config.count(ATTENTION)
        if target.recurrent is not None:
            self._make_layers = partial(HybridLayers, target=target)
        self._kv: KVLayers | None = None

    @property
    def kv(self) -> KVLayers:
        assert self._kv is not None, "allocate first"
        return self._kv

    def free(self) -> int | None:
        """Release the KV cache; return how many bytes are then free for it, or None if unknown."""
        if self._kv is not None:
            self._kv.free()
            self._kv = None
        return free_bytes(self.device)

    def allocate(
        self, num_pages: int, page_size: int, others: Sequence[LayerShape] = (), state_slots: int = 0
    ) -> KVLayers:
        """Allocate KV for the target's layers and, after them, for those of proposers (`others`).

        `state_slots`: of each recurrent layer of a hybrid target.
        """
        self._kv = self._make_layers(
            [*self.layer_shapes, *others],
            tree_layers=len(self.layer_shapes),
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device=self.device,
            **({"state_slots": state_slots} if state_slots else {}),
        )
        return self._kv

    def forward(self, ids: Tensor, positions: Tensor, rows: AttentionRows, aux: Sequence[int]) -> TargetOutput:
        """Run the target on rows with ids and positions `[R]`; `aux`: the hidden states to return as features."""
        attention = self.kv.attention(rows, self._num_heads)
        return self.target(ids, positions, attention, aux_layers=aux)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden)

    def check(self) -> None:
        """Raises RankLost if another rank, if there is any, has ended."""

    def close(self) -> None:
        """End the other ranks, if any."""
