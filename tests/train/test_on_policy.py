"""Training on drafts of the head: the target's and the head's states on a branch are those of the branch's sequence."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from infer.engine import Engine
from infer.options.cli import compose
from models.attention import CausalAttention
from models.heads.base import RecurrentHead
from models.targets import load_target
from models.targets.llama import LlamaTarget
from tests.heads import make_head, make_objective
from tests.train.conftest import STEPS, write_family
from tests.train.running import assert_equal, run, tensors
from tests.train.test_family_heads import FAMILIES
from train.config import TrainConfig
from train.data.sequences import Batch, Sequences
from train.features.online import branch_states, compute_features, features_in_context
from train.loop import Run, train
from train.objectives import alignment, on_policy
from train.objectives.base import Objective, StepSums
from train.objectives.draft_states import draft_states
from train.objectives.on_policy import Drafts
from train.planning.plan import make_plan, target_forwards
from train.publishing.trackers import read_metrics

SLOTS = 5


@pytest.fixture(scope="module")
def batches(responses: Sequences) -> list[Batch]:
    """Two rows with padding, and rows of several documents."""
    return [responses.batch([0, 5]), responses.packed([[0, 3], [5]])]


def sequence_of(batch: Batch, row: int, slot: int, drafted: Tensor) -> Tensor:
    """Return the document of a slot up to the token that it reads, and the tokens drafted behind it, `[1, L]`."""
    first = 0 if batch.starts is None else int(batch.starts[row, slot])
    return torch.cat([batch.ids[row, first : slot + 2], drafted])[None]


def last_state(target: LlamaTarget, ids: Tensor) -> Tensor:
    return target(ids, torch.arange(ids.shape[1])[None], CausalAttention()).hidden[0, -1]


@pytest.mark.parametrize("family", [None, "gemma", "gpt oss", "deepseek v3", "opt"])
@torch.no_grad()
def test_the_target_on_a_branch_is_the_target_on_its_sequence(
    family: str | None, tiny_target: LlamaTarget, batches: list[Batch], tmp_path: Path
) -> None:
    target = tiny_target
    if family is not None:  # windows, sinks, latents, learned positions
        kind, options = FAMILIES[family]
        target = load_target(str(write_family(kind, tmp_path, **options)))
    for batch in batches:
        features = features_in_context(target, batch, (2,))
        expected = compute_features(target, batch, (2,))
        assert torch.equal(features.aux[0], expected.aux[0])
        assert torch.equal(features.hidden, expected.hidden)
        slots = torch.stack([served.nonzero()[[0, 7, -4], 0] for served in alignment.served(batch.assistant)])
        tokens = torch.randint(1, 384, (*slots.shape, 3), generator=torch.Generator().manual_seed(0))
        assert features.context is not None
        hidden = branch_states(features.context, batch, slots, tokens)
        for row, column, depth in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(3)).tolist():
            ids = sequence_of(batch, row, int(slots[row, column]), tokens[row, column, : depth + 1])
            assert torch.allclose(hidden[row, column, depth], last_state(target, ids), atol=2e-5), (row, column, depth)


@pytest.mark.parametrize("variant", ["eagle3", "eagle", "mtp", "mlp", "lstm"])
@torch.no_grad()
def test_the_head_on_its_drafts_is_the_head_forced_to_read_them(
    variant: str, tiny_target: LlamaTarget, batches: list[Batch]
) -> None:
    head = make_head(tiny_target, variant)
    assert isinstance(head, RecurrentHead)
    for batch in batches:
        features = compute_features(tiny_target, batch, head.config.aux_layers)
        slots = alignment.served_slots(alignment.served(batch.assistant))
        columns = torch.tensor([[0, 3, 8], [1, 4, 5]])
        drafts = Drafts(head, columns, torch.Generator().manual_seed(0))
        states, plain = (
            list(draft_states(head, batch.ids, features.aux, STEPS, 0, [slots] * STEPS, batch.starts, redraft))
            for redraft in (drafts, None)
        )
        others = torch.ones_like(slots, dtype=torch.bool).scatter_(1, columns, False)
        assert all(torch.equal(a[others], b[others]) for a, b in zip(states, plain, strict=True))
        tokens = torch.stack(drafts.tokens, dim=-1)
        assert torch.isin(tokens, head.target_ids).all()
        for row, column in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
            place = int(columns[row, column])
            slot = int(slots[row, place])
            ids = sequence_of(batch, row, slot, tokens[row, column])
            length = ids.shape[1] - tokens.shape[-1]  # t[i+1] included: slot i is the last but one of them
            first = slot + 2 - length
            aux = [F.pad(f[row, None, first : slot + 2], (0, 0, 0, tokens.shape[-1])) for f in features.aux]
            for state, alone in zip(states, draft_states(head, ids, aux, STEPS), strict=True):
                assert torch.allclose(state[row, place], alone[0, length - 2], atol=1e-5)


def on_drafts(objective: Objective, target: LlamaTarget, batch: Batch) -> tuple[Tensor, StepSums]:
    features = features_in_context(target, batch, objective.head.config.aux_layers)
    generator = torch.Generator().manual_seed(3)
    return objective(batch, features, None, objective.denominators(batch), generator=generator)


def by_hand(
    objective: Objective, target: LlamaTarget, batch: Batch, slots: Tensor, tokens: Tensor
) -> tuple[float, list[list[float]]]:
    """Compute loss and sums by slot and step, each by the target's and the head's run on the explicit sequence."""
    head, total, rows = objective.head, 0.0, []
    ids, masks = head.target_ids, alignment.step_masks(batch.assistant, STEPS)
    chosen = [{int(slot): tokens[row, column] for column, slot in enumerate(slots[row])} for row in range(len(slots))]
    aux = compute_features(target, batch, head.config.aux_layers).aux
    for step in range(STEPS):
        sums, cost = [0.0] * 5, 0.0
        for row, slot in masks[step].nonzero().tolist():
            drafted = chosen[row].get(slot, batch.ids[row, slot + 2 :])[:step]
            if slot in chosen[row] and torch.isin(drafted, torch.tensor(target.end_tokens)).any():
                continue
            sequence = sequence_of(batch, row, slot, drafted)
            p = target.logits(last_state(target, sequence)).softmax(-1)
            ahead = [F.pad(feature[row, None, : slot + 2], (0, 0, 0, step)) for feature in aux]
            state = list(draft_states(head, sequence, ahead, step + 1))[-1][0, slot]
            log_q = head.logits(state, step).log_softmax(-1)
            q = torch.zeros_like(p).scatter(0, ids, log_q.exp())
            restricted = p[ids] / p[ids].sum()
            inside = bool(torch.isin(p.argmax(), ids))
            cost += float((restricted * (restricted.log() - log_q)).sum()) * inside
            sums[0] += 1
            sums[1] += inside
            sums[2] += float((restricted * (restricted.log() - log_q)).sum()) * inside
            sums[3] += float(q.argmax() == p.argmax())
            sums[4] += float(torch.minimum(p, q).sum())
        total += objective.step_weight**step * cost / float(masks[step].sum())
        rows.append(sums)
    return total, rows


@pytest.mark.parametrize("fused", [None, True, False])
def test_loss_and_sums_equal_the_definition(
    fused: bool | None, tiny_target: LlamaTarget, engine: Engine, responses: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that a branch which ends its text is left there; the tokens of half the vocabulary end one here."""
    head = make_head(tiny_target, "eagle3")
    objective = make_objective(head, "ttt", steps=STEPS, fused=fused, on_policy=0.5, on_policy_slots=SLOTS)
    batch, drawn = responses.batch([0, 3]), list[Drafts]()
    monkeypatch.setattr(engine.target, "end_tokens", tuple(head.target_ids[::8].tolist()))
    monkeypatch.setattr(on_policy, "Drafts", lambda *inputs: drawn.append(Drafts(*inputs)) or drawn[-1])
    loss, sums = on_drafts(objective, engine.target, batch)
    loss.backward()
    slots = alignment.served_slots(alignment.served(batch.assistant)).gather(1, drawn[0].columns)
    assert slots.shape == (2, SLOTS)
    tokens = torch.stack(drawn[0].tokens, dim=-1)
    text = torch.stack([batch.ids.gather(1, slots + 2 + depth) for depth in range(STEPS - 1)], dim=-1)
    assert (tokens != text).any()
    with torch.no_grad():
        expected, rows = by_hand(objective, engine.target, batch, slots, tokens)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for step, row in enumerate(rows):
        assert [float(column[step]) for column in sums] == pytest.approx(row, rel=1e-4)
    counts = alignment.step_masks(batch.assistant, STEPS).flatten(1).sum(1)
    assert 0 < counts[-1] - sums.count[-1] < counts[-1]  # behind end tokens
    assert all(math.isfinite(float(p.grad.sum())) for p in head.parameters() if p.grad is not None)


def test_it_learns_what_follows_its_drafts(tiny_target: LlamaTarget, engine: Engine, responses: Sequences) -> None:
    """The same draws every time: the loss on them falls further than by training on the text alone."""
    ends = list[float]()
    for share in (0.0, 1.0):
        head, batch = make_head(tiny_target, "eagle3"), responses.batch(range(6))
        objective = make_objective(head, "ttt", steps=STEPS, on_policy=1.0, on_policy_slots=64)
        optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3)
        features = features_in_context(engine.target, batch, head.config.aux_layers)
        teacher = objective.teach(engine.target, features.hidden, batch)
        for step in range(40):
            generator = torch.Generator().manual_seed(step)
            inputs = features if share else features._replace(context=None)
            objective(batch, inputs, teacher, objective.denominators(batch), generator=generator)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(float(on_drafts(objective, engine.target, batch)[0].detach()))
    assert ends[1] < ends[0]


def test_a_batch_that_serves_no_slot_is_harmless(tiny_target: LlamaTarget, engine: Engine) -> None:
    nothing = Batch(torch.ones(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.bool), (0, 1))
    objective = make_objective(make_head(tiny_target, "eagle3"), "ttt", steps=STEPS, on_policy=1.0)
    loss, sums = on_drafts(objective, engine.target, nothing)
    loss.backward()
    assert loss.item() == 0.0
    assert sums.count.tolist() == [0.0] * STEPS


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in read_metrics(folder) if "train/loss" in row]


def test_only_the_last_part_of_a_run_differs(settings: list[str], tmp_path: Path) -> None:
    """With stored features too; what is stored is not read there."""
    for name, more in (("off", []), ("on", ["objective.on_policy=0.5"]), ("stored", ["objective.on_policy=0.5"])):
        source = ["features=offline", "features.dtype=fp8"] if name == "stored" else []
        run([*settings, f"run={name}", "steps=6", *more, *source])
    off, on, stored = (losses(tmp_path / name) for name in ("off", "on", "stored"))
    assert on[:3] == off[:3]
    assert all(a != b for a, b in zip(on[3:], off[3:], strict=True))
    assert stored[3:] == pytest.approx(on[3:], rel=0.05)


def test_it_goes_on_bit_for_bit(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [*settings, "steps=6", "objective.on_policy=0.5", "objective.on_policy_slots=4", "run=one"]
    run([*overrides, f"output_dir={tmp_path / 'steady'}"])
    real = Run._between_steps

    def between(self: Run) -> None:
        if self.step in (2, 5):  # before the first update on drafts, and between two of them
            os.kill(os.getpid(), signal.SIGTERM)
        real(self)

    monkeypatch.setattr(Run, "_between_steps", between)
    for _ in range(2):
        assert train(compose("train", TrainConfig, overrides), overrides) is None
    run(overrides)
    assert losses(tmp_path / "one") == losses(tmp_path / "steady" / "one")
    assert_equal(tensors(tmp_path), tensors(tmp_path / "steady"))


def test_it_runs_with_whatever_else_changes_a_step(settings: list[str], tmp_path: Path) -> None:
    """With bf16, packed rows, several batches per update, noise on features and a head of the target's kind."""
    more = [
        "precision=bf16",
        "packing=true",
        "accumulate=2",
        "objective.feature_noise=0.1",
        "objective.reduction=sequence",
    ]
    base = [item for item in settings if not item.startswith("head.")]
    run(base, *more, "head=mtp", "objective=ttt", "objective.on_policy=1", "run=one", "steps=2")
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "one"))


def test_the_plan_counts_what_the_target_computes(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    config = compose("train", TrainConfig, [*settings, "objective.on_policy=0.2", "objective.on_policy_slots=4"])
    drafted = 4 * (config.objective.steps - 1) / config.sequence_length  # type: ignore[operator]
    assert target_forwards(config, kept=False) == pytest.approx(1 + 0.2 * drafted)
    assert target_forwards(config, kept=True) == pytest.approx(0.2 * (1 + drafted))
    plain, planned = (make_plan(replace(config, objective=replace(config.objective, on_policy=x))) for x in (0.0, 0.2))
    line = "the last 20% of the steps run the target, whatever features= is, on the batch and on 4 drafts of each row"
    assert any(line in text for text in planned.lines)
    assert not any("drafts of each row" in text for text in plain.lines)
    kept = config.batch_size * config.sequence_length * 8 * (2 * 2 * 16) * 4  # layers, keys and values, fp32
    assert planned.numbers["memory_bytes"] - plain.numbers["memory_bytes"] == kept


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("objective.steps=1", r"no draft is read with objective\.steps=1; give more"),
        ("objective.loss=label", r"no text says what follows a draft; use another objective\.loss than label"),
        ("parallel=ddp features.target=sharded", r"must be whole in every process; use features\.target=whole"),
        ("engine.tensor_parallel=2", r"must be in one process; use engine\.tensor_parallel=1"),
        ("parallel=fsdp", r"a whole head makes; use parallel=single or ddp"),
    ],
)
def test_refused(line: str, message: str, settings: list[str]) -> None:
    with pytest.raises(ValueError, match=r"objective\.on_policy=0\.2: .*" + message):
        compose("train", TrainConfig, [*settings, "objective.on_policy=0.2", *line.split()])


def test_other_objectives_do_not_have_it(settings: list[str]) -> None:
    with pytest.raises(ValueError, match="on_policy"):
        compose("train", TrainConfig, [*settings, "head=p-eagle", "objective.on_policy=0.2"])
