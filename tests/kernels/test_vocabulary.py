"""The fused LM head and loss against float64: costs, gradients and statistics; row invariance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import vocabulary
from kernels.vocabulary import linear_loss, teacher_logits
from tests.kernels.reference.vocabulary import linear_loss as oracle

pytestmark = pytest.mark.skipif(
    not vocabulary.supported(torch.device("cpu"), torch.float32), reason="needs a C compiler"
)
SHAPES = [(1, 40, 16), (7, 37, 24), (33, 16, 8), (65, 515, 16)]  # rows, draft vocabulary, states
KINDS = [torch.float32, torch.bfloat16]


def inputs(count: int, drafts: int, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random inputs. The teacher has more columns than the draft, and rows that several slots or none read."""
    torch.manual_seed(count)
    x, weight = torch.randn(count, size).to(dtype), torch.randn(drafts, size).to(dtype)
    full = (3 * torch.randn(count + 2, drafts + 9)).to(dtype)
    full[0, 3] = full[-1, ::5] = -torch.inf
    return {
        "x": x.float(),
        "weight": weight.float(),
        "full": full,
        "ids": torch.randperm(drafts + 9)[:drafts].sort().values,
        "rows": torch.randint(0, count + 2, (count,)),
        "weights": torch.where(torch.arange(count) % 4 == 3, 0.0, torch.rand(count)),
        "label": torch.randint(-1, drafts, (count,)),
    }


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape: tuple[int, int, int], labelled: bool, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(vocabulary, "BLOCK_ELEMENTS", 10 * shape[1])
    monkeypatch.setattr(vocabulary, "KEPT_ELEMENTS", 20 * shape[1])
    case = inputs(*shape, dtype)
    teacher, choices = teacher_logits(case["full"], case["ids"])
    full, ids, rows = case["full"].double(), case["ids"], case["rows"]
    probs, mass = full[:, ids].softmax(-1), full.softmax(-1)[:, ids].sum(-1)
    assert torch.equal(choices.choice, full.argmax(-1))
    assert torch.equal(choices.draft_choice, full[:, ids].argmax(-1))
    torch.testing.assert_close(teacher.mass.double(), mass, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(teacher.negentropy.double(), torch.xlogy(probs, probs).sum(-1), rtol=1e-5, atol=1e-5)

    label = case["label"] if labelled else None
    x, weight = case["x"].requires_grad_(), case["weight"].requires_grad_()
    costs = linear_loss(x, weight, case["weights"], teacher, rows, label, narrow=weight.detach().to(dtype))
    (3 * costs.total).backward()
    exact_leaves = exact_x, exact_weight = [value.detach().double().requires_grad_() for value in (x, weight)]
    cost, overlap = oracle(exact_x, exact_weight, probs[rows], mass[rows], label)
    total = (case["weights"] * cost).sum()
    (3 * total).backward()
    rtol, atol = (2e-2, 6e-2) if dtype == torch.bfloat16 else (1e-4, 1e-5)
    assert costs.overlap is not None
    torch.testing.assert_close(costs.cost.double(), cost.detach(), rtol=rtol, atol=atol)
    torch.testing.assert_close(costs.total.double(), total.detach(), rtol=rtol, atol=atol)
    torch.testing.assert_close(costs.overlap.double(), overlap.detach(), rtol=rtol, atol=atol)
    if dtype == torch.float32:
        assert torch.equal(costs.best, (exact_leaves[0] @ exact_leaves[1].T).argmax(-1))
    for actual, exact in zip((x, weight), exact_leaves, strict=True):
        assert actual.grad is not None and exact.grad is not None  # noqa: PT018
        error = (actual.grad - exact.grad).norm() / exact.grad.norm()
        assert error < (0.02 if dtype == torch.bfloat16 else 1e-5)


def test_a_row_depends_on_itself_alone_and_on_no_threads() -> None:
    case = inputs(33, 515, 16, torch.float32)
    teacher, _ = teacher_logits(case["full"], case["ids"])
    logits = case["x"] @ case["weight"].T
    before, outputs = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            gradient = logits.clone()
            costs = vocabulary.block_costs(gradient, teacher, case["rows"], None, case["weights"], overlap=True)
            outputs.append([*costs, gradient])
    finally:
        torch.set_num_threads(before)
    for first, second in zip(*outputs, strict=True):
        assert torch.equal(first, second)
    alone = logits[20:21].clone()
    costs = vocabulary.block_costs(alone, teacher, case["rows"][20:21], None, case["weights"][20:21], overlap=True)
    for batch, part in zip(outputs[0], [*costs, alone], strict=True):
        assert torch.equal(batch[20:21], part)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_none(value: float) -> None:
    case = inputs(7, 37, 24, torch.float32)
    teacher, _ = teacher_logits(case["full"], case["ids"])
    logits = case["x"] @ case["weight"].T
    logits[2, 30] = value
    cost, _, both = vocabulary.block_costs(logits, teacher, case["rows"], None, case["weights"], overlap=True)
    wrong = [False, False, True, False, False, False, False]
    assert cost.isnan().tolist() == both.isnan().tolist() == wrong
    assert logits.isnan().all(1).tolist() == logits.isnan().any(1).tolist() == wrong


def test_a_token_that_the_draft_rules_out() -> None:
    """A logit of -inf costs infinity where the teacher's probability is positive, and nothing where it is zero."""
    teacher, _ = teacher_logits(torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]]), None)
    logits = torch.tensor([[1.0, 1.0, -torch.inf]] * 2)
    cost, _, both = vocabulary.block_costs(logits, teacher, torch.tensor([0, 1]), None, torch.ones(2), overlap=True)
    torch.testing.assert_close(cost, torch.tensor([0.0, torch.inf]))
    torch.testing.assert_close(both, torch.tensor([1.0, 2 / 3]))
    torch.testing.assert_close(logits, torch.tensor([[0.0, 0.0, 0.0], [1 / 6, 1 / 6, -1 / 3]]))
