"""Fused LM head and loss, one chunk of slots at a time: logits and probabilities of all slots never exist together.

The vocabulary-wide tensors of a draft's loss (logits, the target's distribution, the gradient of both) are computed for
one chunk, reduced immediately to gradients of states and parameters, and freed. The loss is a scalar, so its gradient
can be computed in the forward pass, up to a factor; the backward pass recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Compare = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def chunked_sums(
    compare: Compare, states: Tensor, weights: Tensor, rows: Tensor, size: int, parameters: Iterable[nn.Parameter]
) -> tuple[Tensor, ...]:
    """Add up `compare(states, weights, rows)`, which returns sums over slots, over chunks of `size` of states `[N, S]`.

    The first sum can be differentiated once, with respect to the states and those `parameters` that `compare` uses.
    """
    if not torch.is_grad_enabled():
        chunks = zip(states.split(size), weights.split(size), rows.split(size), strict=True)
        return added(compare(*chunk) for chunk in chunks)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return EagerGradients.apply(compare, size, states, weights, rows, *trained)


def added(parts: Iterable[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column).sum(0) for column in zip(*parts, strict=True))


class EagerGradients(torch.autograd.Function):
    """Computes sums over chunks, and in the same pass the gradients of the first sum."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, compare: Compare, size: int, states: Tensor, weights: Tensor, rows: Tensor, *parameters: Tensor
    ):
        parts: list[list[Tensor]] = []
        state_grads: list[Tensor] = []
        param_grads: list[Tensor | None] = [None] * len(parameters)
        for chunk, weight, index in zip(states.split(size), weights.split(size), rows.split(size), strict=True):
            with torch.enable_grad():
                chunk = chunk.detach().requires_grad_()
                sums = compare(chunk, weight, index)
                state_grad, *others = torch.autograd.grad(sums[0], (chunk, *parameters), allow_unused=True)
            state_grads.append(state_grad)
            for place, gradient in enumerate(others):
                before = param_grads[place]
                param_grads[place] = gradient if before is None else before.add_(gradient)
            parts.append([value.detach() for value in sums])
        ctx.used = [gradient is not None for gradient in param_grads]
        ctx.save_for_backward(torch.cat(state_grads), *(gradient for gradient in param_grads if gradient is not None))
        total, *rest = added(parts)
        ctx.mark_non_differentiable(*rest)
        return total, *rest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state_grad, *rest = ctx.saved_tensors
        left = iter(rest)
        return None, None, state_grad * grad, None, None, *(next(left) * grad if used else None for used in ctx.used)
