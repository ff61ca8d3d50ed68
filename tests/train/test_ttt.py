"""The training-time-test objective against its definition, computed naively."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from infer.engine import Engine
from models.attention import TrainingTimeTestAttention
from models.demo.corpus import cut_prompts
from models.heads.eagle3.config import Eagle3Options
from models.heads.eagle3.head import Eagle3Head
from models.heads.objectives import TttConfig
from models.heads.weights import initialize
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from models.vocab import target_ids
from tests.heads import make_head as make_any_head
from tests.train.conftest import STEPS, make_head
from tests.train.launching import ROOT
from train.data import alignment
from train.data.sequences import Batch, Sequences
from train.features import teacher
from train.features.online import Features, compute_features
from train.features.teacher import teach
from train.objectives.base import Objective, StepSums
from train.objectives.draft_states import draft_states
from train.objectives.losses import SoftCrossEntropy


@pytest.fixture(scope="module")
def batch(responses: Sequences) -> Batch:
    return responses.batch(range(len(responses)))


@pytest.fixture(scope="module")
def features(engine: Engine, batch: Batch) -> Features:
    return compute_features(engine.target, batch, engine.target.config.default_aux_layers)


def objective(head: Eagle3Head, **settings: object) -> Objective:
    return Objective(head, TttConfig(**{"name": "ttt", "steps": STEPS, **settings}))  # type: ignore[arg-type]


def test_a_head_that_starts_from_the_target_learns_real_text_sooner() -> None:
    """On the demo target. Its first loss is higher: the target's last layer is sure of the token that is known."""
    folder = ROOT / "models" / "demo"
    prompts = cut_prompts(Tokenizer.load(folder), "train", 8, 48, seed=0)
    target = load_target(str(folder))
    rows = Sequences.of([(prompt, [False] * 8 + [True] * 40) for prompt in prompts]).batch(range(8))
    losses = dict[bool, list[float]]()
    for from_target in (True, False):
        head = Eagle3Head(Eagle3Options().for_target(target.config))
        initialize(head, target, from_target=from_target)
        ttt, aux = objective(head), compute_features(target, rows, head.config.aux_layers)
        optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-3)
        losses[from_target] = []
        for _ in range(8):
            loss, _ = run(ttt, target, rows, aux)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[from_target].append(float(loss))
    assert losses[True][0] > losses[False][0]
    assert losses[True][-1] < losses[False][-1] - 0.3


def run(ttt: Objective, target: LlamaTarget, batch: Batch, features: Features) -> tuple[torch.Tensor, StepSums]:
    targets = teach(target, features.hidden, batch, ttt.head.target_ids)
    return ttt(batch, features, targets, ttt.denominators(batch))


def slow(
    head: Eagle3Head, target: LlamaTarget, batch: Batch, features: Features, *, weight: float, drop: bool, loss: str
) -> tuple[float, list[list[float]]]:
    """Compute by slot and step, over all slots of the batch and the full vocabulary, by docs/design.md, Alignment."""
    attention, state = TrainingTimeTestAttention(), head.fuse(features.aux)
    length = batch.ids.shape[1]
    total, rows = 0.0, []
    ids = target_ids(head.d2t)
    for step in range(STEPS):
        attention.begin_step(step)
        tokens = F.pad(batch.ids, (0, 1 + step))[:, 1 + step :]
        positions = (torch.arange(length) + step).clamp(max=length - 1).expand_as(batch.ids)
        state = head.step(tokens, state, positions, attention, step)
        logits = head.logits(state, step)
        sums, cost = [0.0] * 5, 0.0
        for row in range(len(batch.ids)):
            for slot in range(length - 2 - step):
                if not batch.assistant[row, slot + 1 : slot + 3 + step].all():
                    continue
                p = target.logits(features.hidden[row, slot + 1 + step]).softmax(-1)
                log_q = logits[row, slot].log_softmax(-1)
                q = torch.zeros_like(p).scatter(0, ids, log_q.exp())
                restricted = p[ids] / p[ids].sum()
                inside = bool(head.t2d[p.argmax()])
                if loss == "kl":
                    value = float((restricted * (restricted.log() - log_q)).sum())
                else:
                    value = -float(log_q[restricted.argmax()])
                cost += value if inside or not drop else 0.0
                sums[0] += 1
                sums[1] += inside
                sums[2] += value if inside else 0.0
                sums[3] += float(q.argmax() == p.argmax())
                sums[4] += float(torch.minimum(p, q).sum())
        total += weight**step * cost / sums[0]
        rows.append(sums)
    return total, rows


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, {}),
        ({"loss": "ce", "step_weight": 1.0}, {}),
        ({"drop_out_of_vocab": False}, {"norm_output": True}),
        ({"step_weight": 0.5}, {"norm_before_residual": True, "fc_norm": True}),
    ],
)
@torch.no_grad()
def test_loss_and_metrics_equal_the_definition(
    settings: dict, flags: dict, engine: Engine, tiny_target: LlamaTarget, responses: Sequences,
    batch: Batch, features: Features,
) -> None:  # fmt: skip
    head = make_head(tiny_target, responses, vocab=48, **flags)
    ttt = objective(head, **settings)
    loss, sums = run(ttt, engine.target, batch, features)
    expected, rows = slow(
        head, engine.target, batch, features,
        weight=ttt.config.step_weight, drop=ttt.config.drop_out_of_vocab, loss=ttt.config.loss,
    )  # fmt: skip
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for step, row in enumerate(rows):
        assert [float(column[step]) for column in sums] == pytest.approx(row, rel=1e-5)


def test_some_choices_lie_outside_the_draft_vocabulary(
    engine: Engine, tiny_target: LlamaTarget, responses: Sequences, batch: Batch, features: Features
) -> None:
    """Otherwise the test above would not cover `drop_out_of_vocab`; and dropped slots still count as failures."""
    head = make_head(tiny_target, responses, vocab=48)
    teacher = teach(engine.target, features.hidden, batch, head.target_ids)
    assert 0 < int(teacher.in_vocab.sum()) < len(teacher.in_vocab)
    assert len(teacher.in_vocab) == int(alignment.served(batch.assistant).sum())
    partial_loss, sums = run(objective(head), engine.target, batch, features)
    full_loss, full_sums = run(objective(head, drop_out_of_vocab=False), engine.target, batch, features)
    assert partial_loss.item() < full_loss.item()
    assert torch.equal(sums.correct, full_sums.correct)


@torch.no_grad()
def test_leaving_prompt_slots_out_changes_no_state(random_head: Eagle3Head, batch: Batch, features: Features) -> None:
    first = 5
    full = list(draft_states(random_head, batch.ids, features.aux, STEPS))
    part = list(draft_states(random_head, batch.ids, features.aux, STEPS, first))
    for a, b in zip(full, part, strict=True):
        assert torch.allclose(a[:, first:], b, atol=1e-6)
    slots = alignment.served_slots(alignment.served(batch.assistant))
    assert slots.shape[1] < batch.ids.shape[1] - first
    some = draft_states(random_head, batch.ids, features.aux, STEPS, slots=[slots] * STEPS)
    for a, b in zip(full, some, strict=True):
        assert torch.allclose(alignment.at(a, slots), b, atol=1e-6)


@pytest.mark.parametrize("name", ["eagle3", "eagle3, two layers", "eagle", "mtp", "mlp"])
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_only_served_slots_are_computed(engine: Engine, tiny_target: LlamaTarget, name: str, packed: bool) -> None:
    """Prompts and padding contribute keys, and have no states."""
    masks = [[False] * 3 + [True] * 6, [False] * 4 + [True] * 9 + [False] * 3, [False] * 9]
    documents = Sequences.of([(list(range(7, 7 + len(mask))), mask) for mask in masks])
    batch = documents.packed([[0, 1], [0]]) if packed else documents.batch(range(3))
    head = make_any_head(tiny_target, name)
    features = compute_features(engine.target, batch, head.config.aux_layers)
    served = alignment.served(batch.assistant)
    slots = alignment.served_slots(served)
    full = draft_states(head, batch.ids, features.aux, STEPS, starts=batch.starts)
    computed = alignment.at(served, slots)
    places = computed.flatten().nonzero().squeeze(-1)
    some = draft_states(head, batch.ids, features.aux, STEPS, 0, [slots] * STEPS, batch.starts, places)
    for a, b in zip(full, some, strict=True):
        assert torch.allclose(alignment.at(a, slots)[computed], b[computed], atol=1e-5)
        assert not b[~computed].any()


@torch.no_grad()
def test_padding_and_neighbours_change_nothing(
    engine: Engine, random_head: Eagle3Head, responses: Sequences, batch: Batch, features: Features
) -> None:
    alone = responses.batch([0])
    single_features = compute_features(engine.target, alone, random_head.config.aux_layers)
    length = alone.ids.shape[1]
    states = zip(
        draft_states(random_head, batch.ids, features.aux, STEPS),
        draft_states(random_head, alone.ids, single_features.aux, STEPS),
        strict=True,
    )
    masks = alignment.step_masks(alone.assistant, STEPS)[:, 0]
    for mask, (together, single) in zip(masks, states, strict=True):
        assert torch.allclose(together[0, :length][mask], single[0][mask], atol=1e-5)


def gradients(head: Eagle3Head) -> dict[str, torch.Tensor]:
    grads = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad(set_to_none=True)
    return grads


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.allclose(value, b[name], atol=1e-6), name


def test_everything_but_the_embedding_learns(
    engine: Engine, random_head: Eagle3Head, batch: Batch, features: Features
) -> None:
    run(objective(random_head), engine.target, batch, features)[0].backward()
    grads = gradients(random_head)
    assert grads.keys() == {name for name, _ in random_head.named_parameters()} - {"embed_tokens.weight"}
    assert all(value.abs().max() > 0 for value in grads.values())


def test_accumulated_batches_add_up_to_the_large_one(
    engine: Engine, random_head: Eagle3Head, responses: Sequences, batch: Batch, features: Features
) -> None:
    ttt = objective(random_head)
    loss, sums = run(ttt, engine.target, batch, features)
    loss.backward()
    expected = gradients(random_head)
    denominators = ttt.denominators(batch)
    total, parts = 0.0, []
    for rows in ([0, 1], [2, 3, 4], [5]):
        part = responses.batch(rows)
        part_features = compute_features(engine.target, part, random_head.config.aux_layers)
        taught = teach(engine.target, part_features.hidden, part, random_head.target_ids)
        value, part_sums = ttt(part, part_features, taught, denominators)
        value.backward()
        total += value.item()
        parts.append(torch.stack(list(part_sums)))
    assert total == pytest.approx(loss.item(), rel=1e-5)
    assert torch.allclose(torch.stack(parts).sum(0), torch.stack(list(sums)), rtol=1e-4)
    assert_close(gradients(random_head), expected)


def test_chunks_change_nothing(
    engine: Engine, random_head: Eagle3Head, batch: Batch, features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    ttt = objective(random_head)
    loss, sums = run(ttt, engine.target, batch, features)
    loss.backward()
    expected = gradients(random_head)
    monkeypatch.setattr(teacher, "CHUNK_ELEMENTS", 384 * 17)
    again, chunk_sums = run(ttt, engine.target, batch, features)
    again.backward()
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(torch.stack(list(chunk_sums)), torch.stack(list(sums)), rtol=1e-5)
    assert_close(gradients(random_head), expected)


def test_a_batch_that_serves_no_slot_is_harmless(engine: Engine, random_head: Eagle3Head) -> None:
    nothing = Batch(torch.ones(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.bool), (0, 1))
    empty_features = compute_features(engine.target, nothing, random_head.config.aux_layers)
    loss, sums = run(objective(random_head), engine.target, nothing, empty_features)
    loss.backward()
    assert loss.item() == 0.0
    assert sums.count.tolist() == [0.0] * STEPS
    assert all(torch.isfinite(value).all() for value in gradients(random_head).values())


def test_soft_cross_entropy_equals_torch_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(7, 11, generator=generator, dtype=torch.float64).softmax(-1)
    actual = SoftCrossEntropy.apply(logits, probs)
    assert torch.allclose(actual, F.cross_entropy(logits, probs, reduction="none"))
    assert torch.autograd.gradcheck(lambda z: SoftCrossEntropy.apply(z, probs), logits)


@torch.no_grad()
def test_the_teacher(engine: Engine, random_head: Eagle3Head, batch: Batch, features: Features) -> None:
    teacher = teach(engine.target, features.hidden, batch, random_head.target_ids)
    assert torch.allclose(teacher.probs.sum(-1), torch.ones(len(teacher.probs)))
    p = engine.target.logits(features.hidden[alignment.teacher_rows(batch.assistant)]).softmax(-1)
    assert torch.allclose(teacher.mass, p[:, random_head.t2d].sum(-1))
    assert torch.equal(teacher.choice, p.argmax(-1))
    assert torch.equal(teacher.in_vocab, random_head.t2d[teacher.choice])
    entropy = -(teacher.probs * teacher.probs.log()).nansum(-1)
    assert torch.allclose(teacher.negentropy, -entropy, atol=1e-5)


def test_greedy_responses_are_the_teachers_choices(
    engine: Engine, random_head: Eagle3Head, batch: Batch, features: Features
) -> None:
    """Checks data, features and alignment together: the argmax of p[j] is the token that was emitted at j + 1."""
    teacher = teach(engine.target, features.hidden, batch, random_head.target_ids)
    follows = alignment.shift_left(batch.ids, 1)[alignment.teacher_rows(batch.assistant)]
    assert torch.equal(teacher.choice, follows)


def test_bf16_autocast_keeps_probabilities_in_fp32(
    engine: Engine, random_head: Eagle3Head, batch: Batch, features: Features
) -> None:
    ttt = objective(random_head)
    exact, _ = run(ttt, engine.target, batch, features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough, sums = run(ttt, engine.target, batch, features)
    rough.backward()
    assert rough.dtype == sums.overlap.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.02)
    assert math.isfinite(sum(float(value.sum()) for value in gradients(random_head).values()))
