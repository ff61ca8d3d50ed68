"""What is stored for every token of a sequence, and how: hidden states and the teacher (train/features/store.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.weights.quantize import quantize
from models.config import LAST
from models.heads.config import HeadShape
from models.targets.llama import LlamaTarget
from train.config import OfflineFeaturesConfig
from train.features import teacher
from train.features.online import Features, TopTokens, WholeVocabulary, stored_layers

WHOLE = "whole_vocabulary"  # in a manifest; a store of an older version, and of a head that drafts all tokens, has none


@dataclass(frozen=True)
class Layout:
    """What is stored for every token: hidden states as they are or in fp8, the last one or top-k log-probabilities.

    features        [tokens, layers, H]   in the target's dtype, or fp8 (e4m3) with
    scales          [tokens, layers]      fp32: what a token's largest value in a layer was divided by
    top_log_probs   [tokens, k]           fp16: the k largest of the target's log-probabilities (its logits less
    top_ids         [tokens, k]           int32   their log-sum-exp), which stand for the state after the final norm
    log_z           [tokens]              fp32    log-sum-exp and argmax of the target's logits, with which updates of a
    choice          [tokens]              int32   head with a draft vocabulary multiply this vocabulary's rows alone
    """

    layers: tuple[int, ...]  # ascending
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    fp8: bool = False
    top_k: int | None = None
    whole: bool = False  # log_z and choice are stored

    @classmethod
    def of(
        cls, target: LlamaTarget, aux_layers: Sequence[int], settings: OfflineFeaturesConfig | None = None
    ) -> Layout:
        """Make the layout. Raises ValueError if `top_k` exceeds the target's vocabulary."""
        top_k, fp8 = (settings.top_k, settings.dtype == "fp8") if settings else (None, False)
        if top_k is not None and top_k > target.config.vocab_size:
            raise ValueError(f"features.top_k={top_k}: the target has {target.config.vocab_size} tokens; give fewer")
        layers = stored_layers(aux_layers) if top_k is None else sorted({*aux_layers})
        sizes = target.config.hidden_size, target.config.vocab_size
        return cls(tuple(layers), *sizes, target.norm.weight.dtype, fp8, top_k)

    @classmethod
    def for_head(cls, target: LlamaTarget, head: HeadShape, settings: OfflineFeaturesConfig | None) -> Layout:
        """Make the layout for a head's training. Of states in fp8 the teacher's logits would be others."""
        layout = cls.of(target, head.aux_layers, settings)
        whole = layout.top_k is None and not layout.fp8 and head.draft_vocab_size < layout.vocab_size
        return replace(layout, whole=whole)

    @property
    def token_bytes(self) -> int:
        value = 1 if self.fp8 else self.dtype.itemsize
        scales = 4 * len(self.layers) if self.fp8 else 0
        return len(self.layers) * self.hidden_size * value + scales + 6 * (self.top_k or 0) + 8 * self.whole

    @property
    def reads_logits(self) -> bool:
        return self.top_k is not None or self.whole

    def record(self) -> dict[str, Any]:
        """Return the manifest entries of this layout."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "layers": list(self.layers),
            "hidden_size": self.hidden_size,
            "stored": "fp8" if self.fp8 else "same",
            "top_k": self.top_k,
            **({WHOLE: True} if self.whole else {}),
        }

    def described(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a manifest with the entries of this layout in place of those of another."""
        return {key: value for key, value in record.items() if key != WHOLE} | self.record()

    def encode(
        self, states: Tensor, target: LlamaTarget, hidden: Tensor, taught: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return what to store, on the CPU, of states `[tokens, layers, H]` and `[tokens, H]` after the final norm.

        Log-sum-exp and argmax are 0, unknown, but for those that a teacher reads: `taught` bool `[tokens]`, on the CPU.
        """
        if taught is None or not self.whole:
            return self.encode_states(states) | self.encode_logits(hidden, target.logits)
        computed = self.encode_logits(hidden[taught], target.logits).items()
        placed = {name: value.new_zeros(len(hidden)).masked_scatter(taught, value) for name, value in computed}
        return self.encode_states(states) | placed

    def encode_states(self, states: Tensor) -> dict[str, Tensor]:
        """Return what to store, on the CPU, of states `[tokens, layers, H]`."""
        tensors = {"features": states}
        if self.fp8:
            stored, scales = quantize(states.flatten(0, 1), "fp8")
            tensors = {"features": stored.view(states.shape), "scales": scales.view(states.shape[:2])}
        return {name: value.cpu() for name, value in tensors.items()}

    @torch.no_grad()
    def encode_logits(self, rows: Tensor, logits: Callable[[Tensor], Tensor] = lambda rows: rows) -> dict[str, Tensor]:
        """Return what to store, on the CPU, of the logits `[tokens, V]`: those of `rows` `[tokens, ...]`, in chunks."""
        if not self.reads_logits:
            return {}
        size, k = max(1, teacher.CHUNK_ELEMENTS // self.vocab_size), self.top_k
        chunks = map(logits, rows.split(size))
        pairs = [teacher.whole_vocabulary(chunk) if k is None else chunk.log_softmax(-1).topk(k) for chunk in chunks]
        values, ids = (torch.cat(parts).cpu() for parts in zip(*pairs, strict=True))
        if self.whole:
            return {"log_z": values, "choice": ids.int()}
        return {"top_log_probs": values.half(), "top_ids": ids.int()}

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the states `[..., layers, H]` in the target's dtype."""
        states = stored["features"]
        if not self.fp8:
            return states
        return (states.float() * stored["scales"][..., None]).to(self.dtype)

    def features(self, aux_layers: Sequence[int], states: Tensor, stored: Mapping[str, Tensor]) -> Features:
        """Return features from states `[B, T, layers, H]` and the other tensors stored for the same slots."""
        by_layer = dict(zip(self.layers, states.unbind(2), strict=True))
        aux = tuple(by_layer[layer] for layer in aux_layers)
        if self.top_k is None:
            whole = WholeVocabulary(stored["log_z"], stored["choice"].long()) if self.whole else None
            return Features(aux, by_layer[LAST], whole=whole)
        top = TopTokens(stored["top_log_probs"].float(), stored["top_ids"].long())
        return Features(aux, states.new_zeros(*states.shape[:2], 0), top)
