"""Rules of acceptance that give something up: block verification and typical acceptance.

What they give up: infer/speculation/lossy.py.

Laws are probabilities in fp32 and stay where they are; what is decided for a request is a few numbers. Coins and the
noise of a draw have the same bits everywhere, as the choice rule's have (kernels/noise.py), sums over a vocabulary are
fp64: on the same laws a GPU decides what a CPU does, but for sums that meet a coin to within fp64's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.noise import MASK32, exact_log, gumbel_noise, mix32
from kernels.triton import in_use

COINS = 0x2545F491
GOLDEN = 0x9E3779B1
LEAST = 2.0**-126  # below it fp32 has no normal numbers, and weights count as zero
TYPICAL_EPSILON, TYPICAL_DELTA = 0.3, 0.09  # of Medusa's utils.py


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
    weights = weights.float()
    noise = gumbel_noise(
        torch.tensor([seed & MASK32]),
        torch.tensor([seed >> 32]),
        torch.tensor([position]),
        torch.arange(len(weights)),
    )
    return int((exact_log(weights.clamp(min=LEAST)) + noise[0]).masked_fill(weights < LEAST, -torch.inf).argmax())


def block(
    laws: Tensor,
    tokens: Sequence[Sequence[int]],
    drawn: Sequence[Tensor | None],
    seeds: Sequence[int],
    roots: Sequence[int],
) -> list[tuple[int, int]]:
    """Block verification (arXiv 2403.10444) of one chain per request, K drafted tokens after a root at its position.

    laws `[R, V]`: the target's after the root and after each drafted token, K + 1 rows of each request, one request
    after another. drawn[b] `[K, V]`: the laws that its tokens were drawn from; None if they were not drawn but certain.
    The drafts' noise must be independent of the coins and of the target's noise. Answers, per request, how many drafted
    tokens are accepted, and the token after them.
    """
    if in_use(laws.device):
        from kernels.triton import acceptance as gpu

        return gpu.block(laws, tokens, drawn, seeds, roots)
    parts = laws.cpu().split([len(own) + 1 for own in tokens])
    return [block_of(*request) for request in zip(parts, drawn, tokens, seeds, roots, strict=True)]


def block_of(target: Tensor, draft: Tensor | None, tokens: Sequence[int], seed: int, root: int) -> tuple[int, int]:
    """Of one request: target `[K + 1, V]`, draft `[K, V]`."""
    K, target = len(tokens), target.double()
    if draft is None:
        draft = torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.int64), target.shape[1])
    draft = draft.to(target)
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
        residual = weights[accepted] * target[accepted] - draft[accepted]
        if float(residual.max()) < LEAST:  # the laws agree to the last bit: nothing is left to correct
            residual = target[accepted]
    return accepted, draw(residual, seed, root + accepted)


def likely(laws: Tensor, above: Tensor, tokens: Tensor) -> Tensor:
    """Typical acceptance (Medusa, arXiv 2401.10774): whether a drafted token is likely enough where it stands.

    laws `[R, V]`; above `[M]`: the row of each token's parent; tokens `[M]`. bool `[M]`: whether the token's
    probability there exceeds min(epsilon, delta * exp(-entropy)), the entropy being that of the row.
    """
    probability = laws[above, tokens].double()
    if in_use(laws.device):
        from kernels.triton import acceptance as gpu

        entropy = gpu.entropy(laws)
    else:
        entropy = entropy_of(laws)
    least = math.log(TYPICAL_DELTA) - entropy[above]
    return (probability > TYPICAL_EPSILON) | (probability.log() > least)


def entropy_of(laws: Tensor) -> Tensor:
    """fp64 `[R]`."""
    logs = exact_log(laws.clamp(min=LEAST))
    return -(laws.double() * logs.double()).sum(-1)
