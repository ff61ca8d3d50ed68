"""LM head and loss as one kernel in training: sums and gradients are the dense form's; and when it is not used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.engine import Engine
from kernels import vocabulary
from models.targets.llama import LlamaTarget
from tests.heads import make_head, make_objective
from train.data import alignment
from train.data.sequences import Batch, Sequences
from train.features.layout import Layout
from train.features.online import compute_features
from train.features.store import CachedFeatures
from train.objectives.base import Objective
from train.objectives.losses import NarrowWeights

needs_compiler = pytest.mark.skipif(
    not vocabulary.supported(torch.device("cpu"), torch.float32), reason="needs a C compiler"
)
CASES = [
    ("eagle3", "ttt", {}),
    ("eagle3", "ttt", {"loss": "ce", "drop_out_of_vocab": False}),
    ("eagle3.1", "ttt", {"loss": "label", "reduction": "sequence"}),
    ("eagle", "eagle", {"steps": 2}),
    ("medusa, shared and truncated", "medusa", {"steps": 5}),
    ("medusa, truncated", "medusa", {"steps": 5, "labels": "hard"}),
    ("mlp, tied", "mlp", {"steps": 5}),
    ("p-eagle, one layer", "p-eagle", {}),
]


@pytest.fixture(scope="module")
def batch(responses: Sequences) -> Batch:
    return responses.batch(range(4))


def learn(objective: Objective, engine: Engine, batch: Batch, precision: torch.dtype | None = None) -> tuple:
    features = compute_features(engine.target, batch, objective.head.config.aux_layers)
    teacher = objective.teach(engine.target, features.hidden, batch)
    assert (teacher.logits is not None) == objective.native
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        loss, sums = objective(batch, features, teacher, objective.denominators(batch))
    (3 * loss).backward()  # a factor, as with accumulation over processes
    gradients = {key: p.grad for key, p in objective.head.named_parameters() if p.grad is not None}
    objective.head.zero_grad()
    return loss.detach(), torch.stack(list(sums)), gradients


@needs_compiler
def test_what_is_stored_of_the_whole_vocabulary_saves_its_logits_and_changes_no_cost(
    engine: Engine, tiny_target: LlamaTarget, batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    responses: Sequences,
) -> None:  # fmt: skip
    objective = make_objective(make_head(tiny_target, "eagle3"), "ttt")
    config = objective.head.config
    layout = Layout.for_head(engine.target, config, None)
    store = CachedFeatures(tmp_path / "none", engine.target, config.aux_layers, responses, layout)
    store.fill(2, (0, 1), lambda: None, show=False)
    features = store(batch)
    assert features.whole is not None
    expected = objective.teach(engine.target, features.hidden, batch)
    assert expected.in_vocab.any()
    assert not expected.in_vocab.all()
    taught = alignment.teacher_rows(batch.assistant)
    assert torch.equal(features.whole.log_z != 0, taught)  # the LM head runs on what a teacher reads alone
    unknown = features.whole._replace(log_z=torch.zeros_like(features.whole.log_z))
    again = objective.teach(engine.target, features.hidden, batch, unknown)
    monkeypatch.setattr(LlamaTarget, "logits", lambda *_: pytest.fail("logits of the whole vocabulary"))
    actual = objective.teach(engine.target, features.hidden, batch, features.whole)
    for teacher in (actual, again):
        assert teacher.logits is not None
        assert expected.logits is not None
        assert torch.equal(teacher.logits.logits.logits, expected.logits.logits.logits)
        assert torch.equal(teacher.logits.logits.log_z, expected.logits.logits.log_z)
        assert torch.equal(teacher.in_vocab, expected.in_vocab)
        torch.testing.assert_close(teacher.mass, expected.mass)


@needs_compiler
@pytest.mark.parametrize(("variant", "name", "settings"), CASES)
def test_equals_the_dense_form(
    engine: Engine, tiny_target: LlamaTarget, batch: Batch, variant: str, name: str, settings: dict
) -> None:
    head = make_head(tiny_target, variant)
    native, dense = (make_objective(head, name, fused=fused, **settings) for fused in (None, False))
    assert (native.native, dense.native) == (True, False)
    (loss, sums, native_grads), (expected, dense_sums, gradients) = (learn(o, engine, batch) for o in (native, dense))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums, dense_sums, rtol=1e-4, atol=1e-4)
    assert native_grads.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            native_grads[key], gradient, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@needs_compiler
def test_under_autocast_weights_are_narrowed_once_a_forward(
    engine: Engine, tiny_target: LlamaTarget, batch: Batch
) -> None:
    head = make_head(tiny_target, "eagle3")
    native, dense = (make_objective(head, "ttt", fused=fused) for fused in (None, False))
    (_, _, native_gradients), (_, _, gradients) = (learn(o, engine, batch, torch.bfloat16) for o in (native, dense))
    for key, gradient in gradients.items():
        assert (native_gradients[key] - gradient).norm() <= 0.02 * gradient.norm(), key
    weight, narrow = head.get_parameter("lm_head.weight"), NarrowWeights()
    with torch.autocast("cpu", torch.bfloat16):
        first = narrow(weight)
        assert narrow(weight) is first
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=0.1, fused=True).step()
        narrow.renew()
        assert torch.equal(narrow(weight), weight.detach().bfloat16())
        assert not torch.equal(narrow(weight), first)
        frozen = weight.detach()
        narrowed = narrow(frozen)
        narrow.renew()
        assert narrow(frozen) is narrowed


@needs_compiler
@pytest.mark.parametrize("loss", ["tv", "lk", "lk_hybrid"])
def test_other_losses_keep_the_dense_form(tiny_target: LlamaTarget, loss: str) -> None:
    assert not make_objective(make_head(tiny_target, "eagle3"), "ttt", loss=loss).native


def test_without_a_compiler(engine: Engine, tiny_target: LlamaTarget, batch: Batch, monkeypatch) -> None:
    head = make_head(tiny_target, "eagle3")
    expected = learn(make_objective(head, "ttt", fused=False), engine, batch)
    monkeypatch.setattr(vocabulary, "library", lambda: None)
    objective = make_objective(head, "ttt")
    assert not objective.native
    assert torch.equal(learn(objective, engine, batch)[0], expected[0])
