"""DSpark head (arXiv 2607.05147): DFlash, with logits that are corrected by the token before, and a confidence.

The Markov head adds a bias to the LM head's logits: a low-rank map of the embedding of the token before, which may be
gated by the row's state, or go through a small recurrent state of the block. The confidence head predicts whether the
token of a row will be accepted, provided that those before it are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.elementwise import uniform
from kernels.operands import Transition
from models.heads.block import Corrector
from models.heads.dflash import head as dflash
from models.heads.dspark.config import DSparkConfig
from models.heads.weights import HeadModule
from models.layers import Embedding, Linear
from models.targets.llama import LlamaTarget


class MarkovHead(nn.Module):
    """`markov_w1` `[V, r]` embeds the token before, `markov_w2` `[Vd, r]` turns a message `[..., r]` into a bias."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, size, self.kind = config.markov_rank, config.hidden_size, config.markov_head_type
        self.rank = rank
        self.markov_w1 = Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)  # not packed: drafts read single rows
        if self.kind == "gated":
            self.gate_proj = Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = Linear(2 * rank + size, 3 * rank)

    def message(self, states: Tensor, embedded: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Return the message `[..., r]` and what is carried on, from states `[..., H]` and embedded `[..., r]`."""
        if self.kind == "vanilla":
            return embedded, carried
        if self.kind == "gated":
            gate = uniform(torch.sigmoid, self.gate_proj(torch.cat([states, embedded], dim=-1)))
            return gate * embedded, carried
        keep, candidate, out = self.joint_proj(torch.cat([carried, embedded, states], dim=-1)).chunk(3, dim=-1)
        keep = uniform(torch.sigmoid, keep)
        return out.tanh(), keep * carried + (1 - keep) * candidate.tanh()


class ConfidenceHead(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = Linear(size, 1)


class MarkovCorrector(Corrector):
    """A depth's state is the row's state, the embedding of the token before and, unless vanilla, the message."""

    def __init__(self, markov: MarkovHead, confidence: ConfidenceHead | None) -> None:
        self._markov, self._confidence, self.predicts_acceptance = markov, confidence, confidence is not None

    def num_candidates(self, configured: int) -> int:
        return configured

    def begin(self, states: Tensor) -> Tensor:
        return states.new_zeros(*states.shape[:-1], self._markov.rank if self._markov.kind == "rnn" else 0)

    def walk(self, states: Tensor, before: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self._markov.markov_w1(before).to(states.dtype)
        message, carried = self._markov.message(states, embedded, carried)
        parts = [states, embedded] if message is embedded else [states, embedded, message]
        return torch.cat(parts, dim=-1), carried

    def corrected(self, logits: Tensor, state: Tensor) -> Tensor:
        return logits + self._markov.markov_w2(self.query(state))

    def transition(self, states: Tensor) -> Transition:
        markov = self._markov
        return Transition(markov.markov_w2.weight, markov.markov_w1.weight if markov.kind == "vanilla" else None)

    def query(self, state: Tensor) -> Tensor:
        return state[..., -self._markov.rank :]

    def confidence(self, state: Tensor) -> Tensor:
        assert self._confidence is not None
        proj = self._confidence.proj
        return F.logsigmoid(proj(state[..., : proj.in_features]).float()).squeeze(-1)


class DSparkHead(dflash.DFlashHead):
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            extra = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(config.hidden_size + extra)

    @property
    def corrector(self) -> MarkovCorrector:
        return MarkovCorrector(self.markov_head, self.confidence_head)


def initialize(head: DSparkHead, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """As DFlash's; the bias and the confidence's logit start at zero."""
    dflash.initialize(head, target, from_target=from_target, seed=seed)
    head.markov_head.markov_w2.weight.zero_()
    biased = [module for module in head.markov_head.modules() if isinstance(module, Linear)]
    if head.confidence_head is not None:
        head.confidence_head.proj.weight.zero_()
        biased.append(head.confidence_head.proj)
    for linear in biased:
        if linear.bias is not None:
            linear.bias.zero_()


HEAD = HeadModule(DSparkHead, initialize, dflash.pack)
