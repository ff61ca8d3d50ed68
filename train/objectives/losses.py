"""Losses of a draft's logits against the target's distribution: one value per slot, as pure functions.

p is the target's distribution, q the draft's, both over the draft vocabulary; p~ is p renormalized to it. A drafted
token is accepted with probability Σ min(p, q), which the losses of arXiv 2602.23881 (tv, lk, lk_hybrid) optimise
directly.

In the fused forms logits and probabilities of all slots never exist together: the vocabulary-wide tensors of a draft's
loss are computed for one chunk of slots, reduced immediately to gradients of states and parameters, and freed. The loss
is a scalar, so its gradient can be computed in the forward pass, up to a factor; the backward pass recomputes nothing.
The gradient of an LM head is as large as the LM head: all depths add theirs to one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.layers import Linear
from train.features.teacher import Teacher


def slot_losses(loss: str, logits: Tensor, teacher: Teacher) -> Tensor:
    """Return the loss `[N]` of logits `[N, Vd]` against N rows of the teacher.

    kl: KL(p~ || q). ce: cross-entropy with the target's argmax in the draft vocabulary. label: cross-entropy with the
    sequence's token; 0 where it is outside the draft vocabulary. tv: 1 - Σ min(p, q). lk: -log Σ min(p, q). lk_hybrid:
    λ kl + (1 - λ) tv with λ = exp(-Σ min(p, q)), per slot and detached: KL while the draft is poor.
    """
    if loss == "ce":
        return F.cross_entropy(logits, teacher.draft_choice, reduction="none")
    if loss == "label":
        return F.cross_entropy(logits, teacher.label, reduction="none", ignore_index=-1)
    if loss == "kl":
        return SoftCrossEntropy.apply(logits, teacher.probs) + teacher.negentropy
    accepted = overlap(logits, teacher)
    if loss == "tv":
        return 1 - accepted
    if loss == "lk":
        return -accepted.clamp(min=torch.finfo(accepted.dtype).tiny).log()
    assert loss == "lk_hybrid"
    share = (-accepted.detach()).exp()
    return share * slot_losses("kl", logits, teacher) + (1 - share) * (1 - accepted)


def overlap(logits: Tensor, teacher: Teacher) -> Tensor:
    """Return Σ_v min(p, q) over the full vocabulary, `[N]`."""
    return torch.minimum(logits.softmax(-1), teacher.probs * teacher.mass[:, None]).sum(-1)


def agreement(logits: Tensor, teacher: Teacher) -> Tensor:
    """Return whether the draft's argmax is the target's over the full vocabulary, bool `[N]`."""
    return (logits.argmax(-1) == teacher.draft_choice) & teacher.in_vocab


class SoftCrossEntropy(torch.autograd.Function):
    """`-Σ_v p_v log softmax(z)_v` per row, for rows of p that sum to one. Saves only z and p of that size."""

    @staticmethod
    def forward(ctx, logits: Tensor, probs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        log_z = logits.logsumexp(-1)
        ctx.save_for_backward(logits, log_z, probs)
        return log_z - torch.linalg.vecdot(probs, logits)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        logits, log_z, probs = ctx.saved_tensors
        return (logits - log_z[:, None]).exp_().sub_(probs).mul_(grad[:, None]), None


Compare = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


class SharedGradients:
    """Gradients of parameters, each one tensor to which every call of `chunked_sums` in a forward pass adds."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._sums: list[Tensor | None] = [None] * len(self.parameters)

    def add(self, gradients: Iterable[Tensor | None], factor: Tensor) -> None:
        """Add `factor` `[]` times each gradient; None for a parameter that was not used. May overwrite them."""
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                before = self._sums[place]
                self._sums[place] = gradient.mul_(factor) if before is None else before.addcmul_(gradient, factor)

    def attach(self, loss: Tensor) -> Tensor:
        """Return `loss`; its backward pass, of which there may be one, also gives the parameters these gradients."""
        pairs = zip(self.parameters, self._sums, strict=True)
        used = [(parameter, total) for parameter, total in pairs if total is not None]
        if not used:
            return loss
        parameters, totals = zip(*used, strict=True)
        return Attached.apply(loss, totals, *parameters)


def chunked_sums(
    compare: Compare,
    states: Tensor,
    weights: Tensor,
    rows: Tensor,
    size: int,
    gradients: SharedGradients,
    factor: Tensor,
) -> tuple[Tensor, ...]:
    """Add up `compare(states, weights, rows)`, which returns sums over slots, over chunks of `size` of states `[N, S]`.

    The first sum can be differentiated once, with respect to the states. Its gradients of parameters, times `factor`
    `[]`, are added to `gradients`: `factor` is the derivative of the whole loss with respect to this sum.
    """
    if not torch.is_grad_enabled():
        chunks = zip(states.split(size), weights.split(size), rows.split(size), strict=True)
        return added(compare(*chunk) for chunk in chunks)
    return EagerGradients.apply(compare, size, gradients, factor.detach(), states, weights, rows)


def added(parts: Iterable[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column).sum(0) for column in zip(*parts, strict=True))


class EagerGradients(torch.autograd.Function):
    """Computes sums over chunks, and in the same pass the gradients of the first sum."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, compare: Compare, size: int, gradients: SharedGradients, factor: Tensor, states: Tensor,
        weights: Tensor, rows: Tensor,
    ):  # fmt: skip
        parts: list[list[Tensor]] = []
        state_grads: list[Tensor] = []
        for chunk, weight, index in zip(states.split(size), weights.split(size), rows.split(size), strict=True):
            with torch.enable_grad():
                chunk = chunk.detach().requires_grad_()
                sums = compare(chunk, weight, index)
                inputs = (chunk, *gradients.parameters)
                state_grad, *others = torch.autograd.grad(sums[0], inputs, allow_unused=True)
            state_grads.append(state_grad)
            gradients.add(others, factor)
            del others  # before the next chunk's are computed
            parts.append([value.detach() for value in sums])
        ctx.save_for_backward(torch.cat(state_grads))
        total, *rest = added(parts)
        ctx.mark_non_differentiable(*rest)
        return total, *rest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (state_grad,) = ctx.saved_tensors
        return None, None, None, None, state_grad * grad, None, None


class Attached(torch.autograd.Function):
    """The identity of a loss; gives parameters gradients that are known up to the loss's own gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *parameters: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = ctx.gradients
        del ctx.gradients  # they become the parameters' gradients: nothing as large is allocated
        return grad, None, *(gradient.mul_(grad) for gradient in gradients)


class NarrowWeights:
    """A cache of weights in autocast's dtype: of a trained weight for one forward, of a frozen one until it changes.

    The version counter is no use for trained weights: fused optimisers change a parameter without incrementing it.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[tuple[object, ...], Tensor]] = {}
        self._trained: set[int] = set()

    def renew(self) -> None:
        """Drop the copies of trained weights. Call it whenever parameters may have changed."""
        for key in self._trained:
            del self._copies[key]
        self._trained.clear()

    def __call__(self, weight: Tensor) -> Tensor:
        kind = weight.device.type
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if cast else weight.dtype
        if dtype == weight.dtype:
            return weight.detach()
        key = weight.data_ptr(), weight._version, weight.shape, dtype
        before, copy = self._copies.get(id(weight), (None, None))
        if copy is None or before != key:
            copy = weight.detach().to(dtype)
            self._copies[id(weight)] = key, copy
            if weight.requires_grad:
                self._trained.add(id(weight))
        return copy


def is_plain(lm_head: nn.Module) -> bool:
    """Return whether the LM head is a plain product with one unpacked matrix, without bias."""
    return type(lm_head) is Linear and lm_head.packed is None and lm_head.bias is None
