"""Acceptance rules that give up a guarantee of the exact rule. None is a default; a response names the rule it used.

- `block` (block verification, arXiv 2403.10444): the text follows the target's distribution exactly, and acceptance
  lengths are a little greater than with the exact rule, but a seed no longer determines the text, which also depends on
  what was drafted. Chains only; a step whose draft is a tree is verified by the exact rule.
- `typical` (Medusa, arXiv 2401.10774): accepts a drafted token if its probability under the target exceeds a threshold
  that falls with the target's entropy. The text no longer follows the target's distribution.
- `synthetic`: accepts at given rates, whatever the target chooses. For benchmarks of the engine; the text is
  meaningless.

At temperature 0 `block` and `typical` are the exact rule (infer/speculation/verify.py).

Target distributions (`probs`) are fp32 probabilities and stay on their device; a decision is a few numbers per request.
Coins and sampling noise have the same bits on every device (kernels/noise.py) and sums over the vocabulary are fp64, so
a GPU decides as a CPU does on the same distributions, unless a sum is within fp64 rounding of a coin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.noise import COINS, LEAST, MASK32, exact_log, gumbel_noise, mix32, stream


def coin(seed: int, root: int, index: int) -> float:
    """Return a uniform number in (0, 1), determined by the seed, the root's position and the index in the step."""
    high = (seed >> 32) ^ stream(COINS, root)
    word = mix32(mix32(mix32(torch.tensor([seed & MASK32])) ^ high) ^ index)
    return (float(word) + 0.5) * 2.0**-32


def synthetic(rates: Sequence[float], drafted: int, seed: int, root: int) -> int:
    """Return how many tokens of a chain are accepted: the i-th with probability `rates[i]`, if all before it were.

    Past the last rate nothing is accepted.
    """
    accepted = 0
    while accepted < min(drafted, len(rates)) and coin(seed, root, accepted + 1) < rates[accepted]:
        accepted += 1
    return accepted


def draw(weights: Tensor, seed: int, position: int) -> int:
    """Sample a token from unnormalized weights `[V]`, with the noise that the target's choice at `position` uses."""
    weights = weights.float()
    noise = gumbel_noise(
        torch.tensor([seed & MASK32]), torch.tensor([seed >> 32]), torch.tensor([position]), torch.arange(len(weights))
    )
    return int((exact_log(weights.clamp(min=LEAST)) + noise[0]).masked_fill(weights < LEAST, -torch.inf).argmax())


def block(
    probs: Tensor,
    tokens: Sequence[Sequence[int]],
    draft_probs: Sequence[Tensor | None],
    seeds: Sequence[int],
    roots: Sequence[int],
) -> list[tuple[int, int]]:
    """Verify one chain per request by block verification (arXiv 2403.10444): K drafted tokens after a root.

    probs `[R, V]`: the target's distributions after the root and after each drafted token, K + 1 rows per request, one
    request after another. draft_probs[b] `[K, V]`: the distributions that b's tokens were sampled from; None if they
    were chosen deterministically. roots: their positions. The drafts' noise must be independent of the coins and of the
    target's noise. Returns, per request, the number of accepted drafted tokens and the token after them.
    """
    if uses_triton(probs.device):
        from kernels.triton import acceptance as gpu

        return gpu.block(probs, tokens, draft_probs, seeds, roots)
    parts = probs.cpu().split([len(drafted) + 1 for drafted in tokens])
    return [verify_block(*request) for request in zip(parts, draft_probs, tokens, seeds, roots, strict=True)]


def verify_block(target: Tensor, draft: Tensor | None, tokens: Sequence[int], seed: int, root: int) -> tuple[int, int]:
    """Block verification of one request: target `[K + 1, V]`, draft `[K, V]`."""
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
            residual_mass = float((weights[index] * target[index] - draft[index]).clamp(min=0).sum())
            gap = residual_mass + 1 - weights[index]
            chance = residual_mass / gap if gap > 0 else 1.0
        if coin(seed, root, index) <= chance:
            accepted = index
    residual = target[K]
    if accepted < K:
        residual = weights[accepted] * target[accepted] - draft[accepted]
        if float(residual.max()) < LEAST:  # the distributions agree bit for bit, so there is no residual
            residual = target[accepted]
    return accepted, draw(residual, seed, root + accepted)


def typical_mask(probs: Tensor, parents: Tensor, tokens: Tensor, thresholds: Tensor, alphas: Tensor) -> Tensor:
    """Return which drafted tokens typical acceptance (Medusa, arXiv 2401.10774) accepts, bool `[M]`.

    probs `[R, V]`; parents `[M]`: the row of each token's parent; tokens `[M]`; thresholds and alphas fp64 `[M]`. A
    token is accepted if its probability in that row exceeds min(threshold, alpha * exp(-entropy of the row)).
    """
    probability = probs[parents, tokens].double()
    if uses_triton(probs.device):
        from kernels.triton import acceptance as gpu

        entropy = gpu.entropy(probs)
    else:
        entropy = entropy_of(probs)
    by_entropy = alphas.log() - entropy[parents]
    return (probability > thresholds) | (probability.log() > by_entropy)


def entropy_of(probs: Tensor) -> Tensor:
    """Return the entropy of each row, in nats, fp64 `[R]`."""
    logs = exact_log(probs.clamp(min=LEAST))
    return -(probs.double() * logs.double()).sum(-1)
