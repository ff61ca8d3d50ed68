"""Fused LM head and loss, one chunk of slots at a time: logits and probabilities of all slots never exist together.

The vocabulary-wide tensors of a draft's loss (logits, the target's distribution, the gradient of both) are computed for
one chunk, reduced immediately to gradients of states and parameters, and freed. The loss is a scalar, so its gradient
can be computed in the forward pass, up to a factor; the backward pass recomputes nothing. The gradient of an LM head is
as large as the LM head: all depths add theirs to one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
