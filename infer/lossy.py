"""Acceptance rules that give something up. None is a default; a response says which rule made it.

- `block` (block verification, arXiv 2403.10444): the text follows the target's law exactly, and runs are a little
  longer than with the exact rule, but a seed no longer fixes the text: it depends on what was drafted. Chains only; a
  step whose draft is a tree is verified by the exact rule.
- `typical` (Medusa, arXiv 2401.10774): accepts a drafted token that is likely enough where the target is uncertain.
  The text no longer follows the target's law.
- `synthetic`: accepts at given rates, whatever the target says. For measuring the engine; the text means nothing.

Where nothing is sampled (temperature 0) `block` and `typical` are the exact rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.noise import MASK32, gumbel_noise, mix32

# Noise for other purposes than the target's choice. Drafts and coins are drawn anew in every step, so their streams
# depend on where the step's root stands: what a rejected draft has shown must not be used again.
DRAFTS, COINS = 0x5BD1E995, 0x2545F491
GOLDEN = 0x9E3779B1
TYPICAL_EPSILON, TYPICAL_DELTA = 0.3, 0.09  # of Medusa's utils.py


@dataclass(frozen=True)
class Verdict:
    path: list[int]  # accepted nodes, the root first
    bonus: int  # the token after them


def stream(purpose: int, root: int) -> int:
    """What to xor a seed's upper half with, for noise of one purpose in the step whose root stands at `root`."""
    return (purpose + root * GOLDEN) & MASK32


def coin(seed: int, root: int, index: int) -> float:
    """Uniform in (0, 1), by seed, step and place in the step."""
    high = (seed >> 32) ^ stream(COINS, root)
    word = mix32(mix32(mix32(torch.tensor([seed & MASK32])) ^ high) ^ index)
    return (float(word) + 0.5) * 2.0**-32


def draw(weights: Tensor, seed: int, position: int) -> int:
    """A token by its weight `[V]` (any scale), under the noise of the target's own choice at `position`."""
    noise = gumbel_noise(
        torch.tensor([seed & MASK32]),
        torch.tensor([seed >> 32]),
        torch.tensor([position]),
        torch.arange(len(weights)),
    )
    return int((weights.log() + noise[0].to(weights.dtype)).argmax())


def block(target: Tensor, draft: Tensor | None, tokens: Sequence[int], seed: int, root: int) -> Verdict:
    """Block verification of a chain of K drafted tokens after a root at position `root`.

    target `[K + 1, V]`: the target's law after the root and after each drafted token. draft `[K, V]`: the law that
    each token was drawn from; None if it was not drawn but certain. The draft's noise must be independent of the
    coins and of the target's noise.
    """
    K, target = len(tokens), target.double()
    if draft is None:
        draft = torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.int64), target.shape[1])
    draft = draft.double()
    weights = [1.0]
    for token, p, q in zip(tokens, target, draft, strict=False):
        weights.append(min(weights[-1] * float(p[token] / q[token]), 1.0))
    accepted = 0
    for index in range(1, K + 1):
        chance = weights[index]
        if index < K:
            left = float((weights[index] * target[index] - draft[index]).clamp(min=0).sum())
            gap = left + 1 - weights[index]
            chance = left / gap if gap > 0 else 1.0
        if coin(seed, root, index) <= chance:
            accepted = index
    residual = target[K]
    if accepted < K:
        residual = (weights[accepted] * target[accepted] - draft[accepted]).clamp(min=0)
        if not float(residual.sum()):  # the laws agree to the last bit: nothing is left to correct
            residual = target[accepted]
    return Verdict(list(range(accepted + 1)), draw(residual, seed, root + accepted))


def typical(law: Tensor, tokens: Sequence[int], parents: Sequence[int], choice: Sequence[int]) -> Verdict:
    """law `[N, V]`: the target's at every node of a tree; `choice`: its exact choice there."""
    law = law.double()
    entropy = -torch.special.xlogy(law, law).sum(-1)
    least = (TYPICAL_DELTA * torch.exp(-entropy)).clamp(max=TYPICAL_EPSILON).tolist()
    depth, best = [0] + [-1] * (len(tokens) - 1), 0
    for node in range(1, len(tokens)):
        above, token = parents[node], tokens[node]
        if depth[above] >= 0 and (token == choice[above] or float(law[above, token]) > least[above]):
            depth[node] = depth[above] + 1
            if depth[node] > depth[best]:
                best = node
    path = [best]
    while path[-1]:
        path.append(parents[path[-1]])
    return Verdict(path[::-1], choice[best])


def synthetic(rates: Sequence[float], drafted: int, choice: Sequence[int], seed: int, root: int) -> Verdict:
    """Accepts the i-th drafted token of a chain with probability `rates[i]`, given those before it; 0 past the last."""
    accepted = 0
    while accepted < min(drafted, len(rates)) and coin(seed, root, accepted + 1) < rates[accepted]:
        accepted += 1
    return Verdict(list(range(accepted + 1)), choice[accepted])
