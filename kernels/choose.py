"""From logits to a token by one rule, greedy or sampled: argmax over v of log p'(v) + g(seed, position, v).

p' is the distribution after temperature, min-p, top-k and top-p; g is Gumbel noise from a counter-based hash of (seed,
position, token id), so the choice depends on the row's logits, parameters and seed alone - never on the batch, on what
was drafted, or on a generator's state (arXiv 2408.07978, 2506.05632). At temperature 0 there is no noise. Ties go to
the lowest token id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


@dataclass
class ChoiceParameters:
    """Per row, `[R]`: temperature, top_k (0 = off), top_p (1 = off), min_p (0 = off), the seed's 32-bit halves."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_low: Tensor
    seed_high: Tensor

    def rows(self, index: Tensor) -> ChoiceParameters:
        fields = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed_low, self.seed_high)
        return ChoiceParameters(*(value[index] for value in fields))


def mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every input bit moves every output bit (finaliser of MurmurHash3)."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def gumbel_noise(seed_low: Tensor, seed_high: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """g(seed, position, v) in fp32: seeds and positions `[R]`, token_ids `[V]` or `[R, V]` -> `[R, V]`.

    The row's key passes the mixer three times and the token id is mixed with it twice, so neighbouring seeds,
    positions and ids give unrelated noise. Integer arithmetic: the same bits on every device.
    """
    key = mix32(mix32(mix32(seed_low) ^ seed_high) ^ (positions & MASK32))
    word = mix32(((mix32(token_ids & MASK32) + key[:, None] * 0x9E3779B1) & MASK32) ^ key[:, None])
    uniform = ((word.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def restrict(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits `[R, V]` (already divided by the temperature) with -inf outside min-p, then top-k, then top-p of the rest.

    min-p (arXiv 2407.01082) leaves out what is less likely than that share of the likeliest. Top-p keeps the smallest
    set of most likely tokens whose probability reaches it, the last one included. Tokens that tie with the last one
    kept stay too, so that no set depends on a sort's order.
    """
    if bool((min_p > 0).any()):
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.log()[:, None], -torch.inf)
    by_k, by_p = bool((top_k > 0).any()), bool((top_p < 1).any())
    if not (by_k or by_p):
        return logits
    ordered = logits.sort(dim=-1, descending=True).values
    size = logits.shape[1]
    if by_k:
        last = torch.where(top_k > 0, top_k, size).clamp(max=size) - 1
        threshold = ordered.gather(1, last[:, None])
        logits = logits.masked_fill(logits < threshold, -torch.inf)
        ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
    if by_p:
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability
        kept = (before < top_p[:, None]) & (ordered > -torch.inf)
        last = kept.sum(-1).clamp(min=1) - 1
        threshold = torch.where(top_p < 1, ordered.gather(1, last[:, None])[:, 0], -torch.inf)
        logits = logits.masked_fill(logits < threshold[:, None], -torch.inf)
    return logits


def choose(
    logits: Tensor, parameters: ChoiceParameters | None, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """The chosen column of each row: logits `[R, V]`, positions `[R]` -> `[R]` int64.

    `parameters` None: every row is greedy. `token_ids` `[V]` are the target ids of the columns (a draft vocabulary), so
    that a drafter meets the target's noise; by default columns are target ids.
    """
    return choice_keys(logits, parameters, positions, token_ids).argmax(-1)


def choice_keys(
    logits: Tensor, parameters: ChoiceParameters | None, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """What `choose` takes the largest of, `[R, V]`; a drafter takes the few largest. Arguments as there."""
    if parameters is None:
        return logits
    keys = law(logits, parameters)
    sampled = (parameters.temperature > 0).nonzero()[:, 0]
    if len(sampled):
        p = parameters.rows(sampled)
        ids = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
        keys[sampled] += gumbel_noise(p.seed_low, p.seed_high, positions[sampled], ids)
    return keys


def law(logits: Tensor, parameters: ChoiceParameters | None) -> Tensor:
    """Logits `[R, V]` of the law p' that a row is sampled from (a greedy row's own logits), in fp32 and new memory."""
    law = logits.float().clone()
    if parameters is None:
        return law
    sampled = (parameters.temperature > 0).nonzero()[:, 0]
    if len(sampled):
        p = parameters.rows(sampled)
        law[sampled] = restrict(law[sampled] / p.temperature[:, None], p.top_k, p.top_p, p.min_p)
    return law
