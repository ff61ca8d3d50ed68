"""The shape of an MLP speculator, and its config.json in IBM's layout (`mlp_speculator`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from models.config import TargetConfig
from models.targets.llama import LAST

TOP_K = (5, 4, 3, 2)  # of the first heads, then 1


@dataclass(frozen=True)
class MlpConfig:
    """`inner_dim` is the state's width; `tie_weights`: all depths share their weights (depth 0 has its own projection).

    `top_k_tokens_per_head` and `n_candidates` say how IBM's engine grows its candidates.
    """

    vocab_size: int
    target_hidden_size: int
    inner_dim: int
    n_predict: int
    tie_weights: bool
    scale_input: bool
    top_k_tokens_per_head: tuple[int, ...]
    n_candidates: int

    def __post_init__(self) -> None:
        if len(self.top_k_tokens_per_head) != self.n_predict:
            raise ValueError(
                f"head.top_k_tokens_per_head={list(self.top_k_tokens_per_head)}: must be as many as "
                f"head.n_predict={self.n_predict}"
            )

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.inner_dim

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (LAST,)

    @property
    def max_depth(self) -> int:
        return self.n_predict

    @property
    def state_weight(self) -> float:
        """Makes half of the last state's variance come from the target's hidden state, at initialisation."""
        return 0.5 ** (0.5 / self.n_predict)

    @property
    def embedding_weight(self) -> float:
        return math.sqrt((1 - self.state_weight**2) * self.inner_dim / 2)

    @classmethod
    def for_target(
        cls,
        target: TargetConfig,
        *,
        n_predict: int = 3,
        inner_dim: int | None = None,
        tie_weights: bool = False,
        scale_input: bool = False,
        top_k_tokens_per_head: list[int] | None = None,
        n_candidates: int = 5,
    ) -> MlpConfig:
        """`inner_dim` None: the target's hidden size. `top_k_tokens_per_head` None: 5, 4, 3, 2, 1, 1, ..."""
        top_k = top_k_tokens_per_head or [*TOP_K, *[1] * n_predict][:n_predict]
        sizes = target.vocab_size, target.hidden_size, inner_dim or target.hidden_size
        return cls(*sizes, n_predict, tie_weights, scale_input, tuple(top_k), n_candidates)

    def to_json(self, *, verifier: str, verifier_architecture: str, speculative_tokens: int) -> dict[str, Any]:
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": self.vocab_size,
            "emb_dim": self.target_hidden_size,
            "inner_dim": self.inner_dim,
            "n_predict": self.n_predict,
            "tie_weights": self.tie_weights,
            "scale_input": self.scale_input,
            "top_k_tokens_per_head": list(self.top_k_tokens_per_head),
            "n_candidates": self.n_candidates,
            "num_lookahead_tokens": speculative_tokens,
            "verifier": {"name_or_path": verifier, "architectures": [verifier_architecture]},
        }
