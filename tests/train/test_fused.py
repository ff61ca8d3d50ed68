"""LM head and loss in chunks against the dense form: sums, gradients, and that full logits never exist at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from infer.engine import Engine
from infer.options.cli import compose
from models.targets.llama import LlamaTarget
from tests.heads import make_head, make_objective
from tests.train.running import SETTINGS
from train.config import TrainConfig
from train.data.sequences import Batch, Sequences
from train.features import teacher
from train.features.online import compute_features
from train.features.teacher import teach
from train.loop import train
from train.objectives.losses import SharedGradients, chunked_sums
from train.storage.run_folder import read_budget

CHUNK = 13  # slots
CASES = [("eagle3", "ttt", {"loss": loss}) for loss in ("kl", "ce", "lk_hybrid")] + [
    ("eagle3.1", "ttt", {"reduction": "sequence"}),
    ("eagle", "eagle", {"steps": 2}),
    ("medusa", "medusa", {"steps": 5}),
    ("mlp, tied", "mlp", {"steps": 5}),
    ("p-eagle, one layer", "p-eagle", {}),
]


@pytest.fixture(scope="module")
def batch(responses: Sequences) -> Batch:
    return responses.batch(range(4))


@pytest.mark.parametrize(("variant", "name", "settings"), CASES)
def test_equals_the_dense_form(
    engine: Engine, tiny_target: LlamaTarget, batch: Batch, variant: str, name: str, settings: dict, monkeypatch
) -> None:
    head = make_head(tiny_target, variant)
    features = compute_features(engine.target, batch, head.config.aux_layers)
    results, widest = {}, 0
    logits = head.logits

    def watched(state: torch.Tensor, depth: int) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, len(state))
        return logits(state, depth)

    for fused in (False, True):
        objective = make_objective(head, name, fused=fused, **settings)
        if fused:
            monkeypatch.setattr(teacher, "CHUNK_ELEMENTS", CHUNK * head.config.draft_vocab_size)
            monkeypatch.setattr(head, "logits", watched)
        taught = teach(engine.target, features.hidden, batch, head.target_ids, keep=not fused)
        assert (taught.probs.shape[1] == 0) == fused
        loss, sums = objective(batch, features, taught, objective.denominators(batch))
        (3 * loss).backward()  # a factor, as with accumulation over processes
        gradients = {key: p.grad for key, p in head.named_parameters() if p.grad is not None}
        results[fused] = loss.detach(), torch.stack(list(sums)), gradients
        head.zero_grad()
    assert widest == CHUNK
    (loss, sums, dense), (again, chunked, fused_gradients) = results[False], results[True]
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(chunked, sums, rtol=1e-4, atol=1e-4)
    assert fused_gradients.keys() == dense.keys()
    for key, gradient in dense.items():
        torch.testing.assert_close(
            fused_gradients[key], gradient, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_gradients_of_all_depths_add_up_in_one_tensor() -> None:
    """They are those of float64, and five depths take no more memory than one."""
    generator = torch.Generator().manual_seed(0)
    slots, width, drafts, peaks = 12, 4, 4096, []
    labels = torch.arange(slots)
    for depths in (1, 5):
        weight = torch.nn.Parameter(torch.randn(drafts, width, generator=generator))
        states = [torch.randn(slots, width, generator=generator).requires_grad_() for _ in range(depths)]
        factors = [torch.tensor(0.7**depth / slots) for depth in range(depths)]

        def compare(
            states: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor = weight
        ) -> tuple[torch.Tensor, ...]:
            costs = torch.nn.functional.cross_entropy(states @ weight.T, rows, reduction="none")
            return ((costs * weights).sum(),)

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            gradients, total = SharedGradients([weight]), torch.zeros(())
            for state, factor in zip(states, factors, strict=True):
                (cost,) = chunked_sums(compare, state, torch.ones(slots), labels, 5, gradients, factor)
                total = total + factor * cost
            (3 * gradients.attach(total)).backward()
        peaks.append(peak(record))
        wide = [value.detach().double().requires_grad_() for value in (weight, *states)]
        pairs = zip(wide[1:], factors, strict=True)
        costs = [factor * compare(state, torch.ones(slots), labels, wide[0])[0] for state, factor in pairs]
        expected = torch.autograd.grad(3 * torch.stack(costs).sum(), wide)
        for value, gradient in zip((weight, *states), expected, strict=True):
            assert value.grad is not None
            torch.testing.assert_close(value.grad.double(), gradient, rtol=1e-4, atol=1e-7)
    assert peaks[1] - peaks[0] < drafts * width


def peak(record: Any) -> int:
    """Return the highest number of bytes allocated during the profile, from the allocator's events in order."""
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        highest = max(highest, current)
    return highest


def test_under_autocast(engine: Engine, tiny_target: LlamaTarget, batch: Batch, monkeypatch) -> None:
    """The chunks share the weight that autocast has cast, although their graphs are freed one after another."""
    head = make_head(tiny_target, "eagle3")
    features = compute_features(engine.target, batch, head.config.aux_layers)
    gradients = []
    for fused in (False, True):
        monkeypatch.setattr(teacher, "CHUNK_ELEMENTS", CHUNK * head.config.draft_vocab_size)
        objective = make_objective(head, "ttt", fused=fused)
        taught = teach(engine.target, features.hidden, batch, head.target_ids, keep=not fused)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = objective(batch, features, taught, objective.denominators(batch), metrics=False)
        loss.backward()
        gradients.append({key: p.grad for key, p in head.named_parameters() if p.grad is not None})
        head.zero_grad()
    for key, gradient in gradients[0].items():
        assert (gradients[1][key] - gradient).norm() <= 0.02 * gradient.norm(), key


def test_a_run_from_the_command_line(tiny_target_folder, tmp_path) -> None:
    settings = [*SETTINGS, f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "steps=2", "run=one"]
    config = compose("train", TrainConfig, [*settings, "objective.fused=true"])
    assert train(config) is not None
    budget = read_budget(tmp_path / "one")
    assert budget is not None
    assert budget.decided == 2


def test_only_where_parameters_are_whole() -> None:
    config = compose("train", TrainConfig, [*SETTINGS, "objective.fused=true"])
    config.parallel.name = "zero3"
    with pytest.raises(ValueError, match=r"objective\.fused=true: needs parallel=single or ddp, not zero3"):
        config.__post_init__()
