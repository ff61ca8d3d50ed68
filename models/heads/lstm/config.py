"""LSTM speculator: its shape and config.json in Arctic's layout (`ArcticLSTMSpeculatorPreTrainedModel`); options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from models.checks import choice, number
from models.config import TargetConfig
from models.heads.config import Facts
from models.heads.mlp.config import SpeculatorOptions, SpeculatorShape

METHODS = LSTM, RNN = "sum_lstm", "sum_rnn"


@dataclass(frozen=True)
class LstmConfig(SpeculatorShape):
    """`inner_dim`: the width of the sum of state and embedding; with `sum_rnn` those of the layers after it follow.

    `emb_layers` and `proj_layers` count the layers of the embedding and of the projection, 1 with `sum_lstm`, whose
    gates read one embedding if `tie_lstm_embs`.
    """

    name: ClassVar[str] = "lstm"

    vocab_size: int
    target_hidden_size: int
    method: str
    inner_dim: tuple[int, ...]
    emb_layers: int
    proj_layers: int
    n_predict: int
    tie_weights: bool
    tie_lstm_embs: bool
    scale_input: bool

    @property
    def has_gates(self) -> bool:
        return self.method == LSTM

    @property
    def sequences(self) -> bool:
        return not self.has_gates

    @property
    def tie_gates(self) -> bool:
        return self.tie_lstm_embs

    @property
    def widths(self) -> Sequence[int]:
        return self.inner_dim

    def to_json(self, facts: Facts) -> dict[str, Any]:
        return {
            "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "method": self.method,
            "vocab_size": self.vocab_size,
            "input_hidden_dim": self.target_hidden_size,
            "inner_dim": dotted(self.inner_dim),
            "emb_dim": dotted([self.width] * self.emb_layers),
            "proj_dim": dotted([self.width] * self.proj_layers),
            "n_predict": self.n_predict,
            "tie_weights": self.tie_weights,
            "tie_lstm_embs": self.tie_lstm_embs,
            "scale_input": self.scale_input,
            "top_k_tokens_per_head": [1] * self.n_predict,
            "n_candidates": self.n_predict,
            "num_lookahead_tokens": facts.speculative_tokens,
            "base_model_archs": [facts.architecture] if facts.architecture else [],
            "verifier": facts.verifier_json,
        }


def dotted(sizes: Sequence[int]) -> str:
    """Return widths as Arctic's programs read them, "4096" or "4096.4096"."""
    return ".".join(map(str, sizes))


@dataclass
class LstmOptions(SpeculatorOptions):
    files: ClassVar = "The files follow Arctic's layout of LSTM speculators."

    n_predict: int = number(3, low=1)
    method: str = choice(LSTM, *METHODS)  # sum_rnn: an MLP speculator, whose parts may have several layers
    inner_dim: list[int] | None = number(None, low=1)  # width, and those of layers after the sum; null: the target's
    emb_layers: int = number(1, low=1)
    proj_layers: int = number(1, low=1)
    tie_weights: bool = True  # all heads share their weights, but for the first projection
    tie_lstm_embs: bool = True  # all gates read one embedding
    scale_input: bool = True  # norm the target's hidden state first

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = {
            "tie_weights": self.tie_weights,
            "n_predict": self.n_predict > 1,
            "inner_dim": len(self.inner_dim or [1]) == 1,
            "emb_layers": self.emb_layers == 1,
            "proj_layers": self.proj_layers == 1,
        }
        wrong = [key for key, fit in fits.items() if not fit]
        if self.method == LSTM and wrong:
            raise ValueError(
                f"head.{wrong[0]}={getattr(self, wrong[0])}: head.method={LSTM} has one cell of one width, and at "
                f"least two depths, which share it; say head.method={RNN}, or leave the key out"
            )

    def for_target(self, target: TargetConfig) -> LstmConfig:
        return LstmConfig(
            target.vocab_size,
            target.hidden_size,
            self.method,
            tuple(self.inner_dim or [target.hidden_size]),
            self.emb_layers,
            self.proj_layers,
            self.n_predict,
            self.tie_weights,
            self.tie_lstm_embs and self.method == LSTM,
            self.scale_input,
        )
