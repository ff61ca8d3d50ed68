"""A draft's loss over the vocabulary, fused with the LM head: logits exist only for a block of rows, while in cache.

Contract: for N rows x `[N, S]` and an LM head W `[V, S]` the cost of row i is KL(p || softmax(W x)), p a teacher's row,
or the cross-entropy with a label. Products are in W's dtype with fp32 sums; logits and their gradient are rounded to it
between product and softmax; the softmax, costs and statistics are fp32. Gradients of the weighted sum of costs are
computed in the forward pass, so the backward pass only scales them; it can be called once. Several rows may share a
teacher's row: its logits are computed once, and its probabilities are never materialised.

A row's cost depends on that row alone. Terms of probability zero are zero, whatever the logit. The cost and gradient of
a row that contains NaN, or whose largest logit is not finite, are NaN.

Implemented in C for the CPU (kernels/cpu/vocabulary.c). On other devices, and without a compiler, `supported` returns
False and callers compute logits and probabilities with torch.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, address

BLOCK_ELEMENTS = 2**23  # logits per block: 16 MB in bf16
KEPT_ELEMENTS = 2**26  # logit gradients kept for one product into the LM head's gradient: 128 MB in bf16
LossArguments = structure("vocabulary_loss_args")  # of vocabulary.c
TeachArguments = structure("vocabulary_teach_args")  # of vocabulary.c


class TeacherLogits(NamedTuple):
    """R rows of the teacher's distribution exp(logits - log_z) over V columns."""

    logits: Tensor  # [R, V] fp32 or bf16
    log_z: Tensor  # [R] fp32
    negentropy: Tensor  # [R] Σ p log p
    mass: Tensor  # [R] factor on p in its overlap with the draft's distribution q: Σ min(q, mass p)


class Choices(NamedTuple):
    choice: Tensor  # int64 [R], argmax over all columns
    draft_choice: Tensor  # int64 [R], argmax over the draft vocabulary, as an index into it


class Costs(NamedTuple):
    """Costs and statistics of N rows."""

    total: Tensor  # Σ weights cost, the only differentiable field
    cost: Tensor  # [N]
    best: Tensor  # int64 [N], the draft's argmax
    overlap: Tensor | None  # [N] Σ min(q, mass p)


def supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `linear_loss` supports this device and dtype."""
    return device.type == "cpu" and dtype in KINDS and library() is not None


def teacher_logits(logits: Tensor, ids: Tensor | None) -> tuple[TeacherLogits, Choices]:
    """Make a teacher from a target's logits `[R, V]`, restricted to the draft vocabulary `ids` `[Vd]`, None for all.

    `mass` is the probability of the draft vocabulary.
    """
    full, drafted, kept = teach_rows(logits, ids)
    log_z = drafted.most + drafted.sum.log()
    negentropy = drafted.dot / drafted.sum - drafted.sum.log()
    mass = (log_z - full.most - full.sum.log()).exp()
    return TeacherLogits(kept, log_z, negentropy, mass), Choices(full.best, drafted.best)


def linear_loss(
    x: Tensor,
    weight: Tensor,
    weights: Tensor,
    teacher: TeacherLogits | None,
    rows: Tensor | None,
    label: Tensor | None = None,
    *,
    narrow: Tensor | None = None,
    overlap: bool = True,
) -> Costs:
    """Compute the costs of x `[N, S]` through W `[V, S]`, weighted by `weights` `[N]`.

    `rows` int64 `[N]`: the teacher's row of each. With `label` int64 `[N]` the cost is the cross-entropy with these
    columns, 0 for negative labels; else KL to the teacher. `narrow`: W in the dtype of the products. `overlap` needs a
    teacher.
    """
    assert teacher is not None or (label is not None and not overlap)
    narrow = weight.detach() if narrow is None else narrow
    gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    total, cost, best, overlaps = LinearLoss.apply(
        x, weight, narrow, weights.float().contiguous(), teacher, rows, label, overlap, gradient
    )
    return Costs(total, cost, best, overlaps if overlap else None)


class LinearLoss(torch.autograd.Function):
    """As `linear_loss`; gradients of the first output, up to a factor, are computed in the forward pass."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, x: Tensor, weight: Tensor, narrow: Tensor, weights: Tensor, teacher: TeacherLogits | None,
        rows: Tensor | None, label: Tensor | None, overlap: bool, gradient: bool,
    ):  # fmt: skip
        states = x.to(narrow.dtype).contiguous()
        if teacher is not None and label is not None and not overlap:
            teacher = None  # not used
        grad_states = x.new_empty(x.shape) if gradient else None
        wanted, grad_weight, parts = gradient and weight.requires_grad, None, []
        for span in spans(len(x), KEPT_ELEMENTS // len(narrow)):
            kept = states.new_empty(span.stop - span.start if wanted else 0, len(narrow))
            for block in spans(span.stop - span.start, BLOCK_ELEMENTS // len(narrow)):
                part = slice(span.start + block.start, span.start + block.stop)
                out = kept[block] if wanted else states.new_empty(part.stop - part.start, len(narrow))
                torch.mm(states[part], narrow.t(), out=out)
                block_rows, block_label = (None if column is None else column[part] for column in (rows, label))
                factor = weights[part] if gradient else None
                parts.append(block_costs(out, teacher, block_rows, block_label, factor, overlap=overlap))
                if grad_states is not None:
                    grad_states[part] = out @ narrow
            if wanted:
                product = (kept.t() @ states[span]).to(weight.dtype)
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        cost, best, overlaps = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.gradients = grad_states, grad_weight
        ctx.mark_non_differentiable(cost, best, overlaps)
        return (cost * weights).sum(), cost, best, overlaps

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = ctx.gradients
        del ctx.gradients
        scaled = (None if value is None else value.mul_(grad) for value in gradients)
        return *scaled, None, None, None, None, None, None, None


def block_costs(
    logits: Tensor,
    teacher: TeacherLogits | None,
    rows: Tensor | None,
    label: Tensor | None,
    factor: Tensor | None,
    *,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cost, argmax and overlap (or empty) of logits `[N, V]`; with `factor` their gradient overwrites them."""
    if label is not None and factor is not None:
        factor = factor.where(label >= 0, 0.0)
    taught, log_z, mass = (None, None, None) if teacher is None else (teacher.logits, teacher.log_z, teacher.mass)
    peak, total, dot, overlaps, best = loss_rows(logits, taught, rows, log_z, mass, label, factor, overlap=overlap)
    cost = peak + total.log() - dot
    if label is not None:
        cost = cost.where(label >= 0, 0.0)
    else:
        assert teacher is not None
        cost = cost + teacher.negentropy[rows]
    return cost, best, cost.new_empty(0) if overlaps is None else overlaps


def spans(count: int, size: int) -> list[slice]:
    """Split 0 .. count into equal parts of at most max(1, `size`): a short last part costs as much as a full one."""
    parts = max(1, -(-count // max(1, size)))
    return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


class Statistics(NamedTuple):
    """Statistics of rows of logits z, `[R]` each."""

    most: Tensor  # the largest
    sum: Tensor  # Σ exp(z - most)
    dot: Tensor  # Σ exp(z - most) (z - most)
    best: Tensor  # int64, the first column of the largest


def _threads(rows: int) -> int:
    return max(1, min(rows, torch.get_num_threads()))


def loss_rows(
    logits: Tensor,
    taught: Tensor | None,
    teacher: Tensor | None,
    log_z: Tensor | None,
    mass: Tensor | None,
    label: Tensor | None,
    factor: Tensor | None,
    *,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Call vocabulary_loss: return largest, sum, dot, overlap and best of logits `[N, V]`.

    With `factor` `[N]` the logits are overwritten with their gradient. All tensors are contiguous.
    """
    native, (rows, size) = library(), logits.shape
    assert native is not None
    assert logits.is_contiguous()
    assert taught is None or (taught.is_contiguous() and taught.shape[1] == size)
    threads = _threads(rows)
    scratch = torch.empty(threads, 2, -(-size // LANES) * LANES)
    most, total, dot = torch.empty(3, rows)
    overlaps = torch.empty(rows) if overlap else None
    best = torch.empty(rows, dtype=torch.int64)
    tensors = {
        "logits": logits, "taught": taught, "teacher": teacher, "label": label, "factor": factor, "log_z": log_z,
        "mass": mass, "most": most, "sum": total, "dot": dot, "overlap": overlaps, "best": best, "scratch": scratch,
    }  # fmt: skip
    native.vocabulary_loss(
        ctypes.byref(
            LossArguments(
                **{name: address(value) for name, value in tensors.items()},
                rows=rows,
                size=size,
                kind=KINDS[logits.dtype],
                taught_kind=KINDS[logits.dtype if taught is None else taught.dtype],
                threads=threads,
            )
        )
    )
    return most, total, dot, overlaps, best


def teach_rows(logits: Tensor, ids: Tensor | None) -> tuple[Statistics, Statistics, Tensor]:
    """Return statistics of logits `[R, V]` and of their columns `ids` `[Vd]` (None: all), and the columns `[R, Vd]`."""
    native, (rows, size) = library(), logits.shape
    assert native is not None
    logits = logits.contiguous()
    drafts = size if ids is None else len(ids)
    drafted = logits if ids is None else logits.new_empty(rows, drafts)
    ids = None if ids is None else ids.contiguous()
    values, best = torch.empty(3, 2, rows), torch.empty(2, rows, dtype=torch.int64)
    native.vocabulary_teach(
        ctypes.byref(
            TeachArguments(
                logits=logits.data_ptr(),
                ids=address(ids),
                drafted=drafted.data_ptr(),
                **{name: value.data_ptr() for name, value in zip(("most", "sum", "dot"), values, strict=True)},
                best=best.data_ptr(),
                rows=rows,
                size=size,
                drafts=drafts,
                kind=KINDS[logits.dtype],
                threads=_threads(rows),
            )
        )
    )
    most, total, dot = values
    full, part = (Statistics(most[index], total[index], dot[index], best[index]) for index in (0, 1))
    return full, full if ids is None else part, drafted
