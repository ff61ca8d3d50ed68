"""Each head's objective against its published definition, computed naively from the formulas; and what all share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from infer.engine import Engine
from models.attention import CausalAttention, repeat_kv
from models.heads.base import Head
from models.heads.weights import checkpoint_tensors
from models.targets.llama import LlamaTarget
from tests.heads import make_head, make_objective
from train.data import alignment
from train.data.sequences import Batch, Sequences
from train.features.online import Features, compute_features
from train.features.teacher import Teacher, teach
from train.objectives.base import Objective
from train.objectives.draft_states import draft_states
from train.objectives.losses import overlap, slot_losses

K = 4


@pytest.fixture(scope="module")
def batch(responses: Sequences) -> Batch:
    return responses.batch(range(4))


def features_of(head: Head, engine: Engine, batch: Batch) -> Features:
    return compute_features(engine.target, batch, head.config.aux_layers)


def run(objective: Objective, engine: Engine, batch: Batch, generator: torch.Generator | None = None) -> tuple:
    features = features_of(objective.head, engine, batch)
    teacher = teach(engine.target, features.hidden, batch, objective.head.target_ids)
    return objective(batch, features, teacher, objective.denominators(batch), True, generator)


def served_slots(batch: Batch, depth: int) -> list[tuple[int, int]]:
    """Return the (row, slot) pairs from which `depth` more tokens are drafted within the response."""
    rows, length = batch.ids.shape
    return [
        (row, slot)
        for row in range(rows)
        for slot in range(length - 2 - depth)
        if batch.assistant[row, slot + 1 : slot + 3 + depth].all()
    ]


def loss_of(objective: Objective, cost, batch: Batch) -> float:  # type: ignore[no-untyped-def]
    """Return Σ_k w^k times the mean over slots of `cost(row, slot, depth)`."""
    total = 0.0
    for depth in range(objective.steps):
        slots = served_slots(batch, depth)
        total += objective.config.step_weight**depth * sum(cost(row, slot, depth) for row, slot in slots) / len(slots)
    return total


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_eagle(engine: Engine, tiny_target: LlamaTarget, batch: Batch, bias: bool) -> None:
    """1.0 SmoothL1(f^, f) + 0.1 CE(p, q) at the next slot, where CE is taken here minus p's entropy."""
    head = make_head(tiny_target, "eagle, fc with bias" if bias else "eagle")
    objective = make_objective(head, "eagle")
    f = features_of(head, engine, batch).hidden
    embedded = F.embedding(alignment.shift_left(batch.ids, 1), tiny_target.embedding_weight)
    x = F.linear(torch.cat([embedded, f], dim=-1), head.fc.weight, head.fc.bias)
    rotary = head.rotary.rows(torch.arange(f.shape[1]).expand_as(batch.ids), x.dtype)
    predicted = head.layers[0](x, rotary, CausalAttention())

    def cost(row: int, slot: int, depth: int) -> float:
        assert depth == 0
        distance = F.smooth_l1_loss(predicted[row, slot], f[row, slot + 1]).item()
        p = engine.target.logits(f[row, slot + 1]).softmax(-1)
        log_q = F.linear(predicted[row, slot], tiny_target.lm_head.weight).log_softmax(-1)
        return distance + 0.1 * float((p * (p.log() - log_q)).sum())

    assert run(objective, engine, batch)[0].item() == pytest.approx(loss_of(objective, cost, batch), rel=1e-4)


def test_eagle_learns_from_its_own_predictions_when_harmonised(
    engine: Engine, tiny_target: LlamaTarget, batch: Batch
) -> None:
    head = make_head(tiny_target, "eagle")
    one_step, three_steps = (make_objective(head, "eagle", steps=steps) for steps in (1, 3))
    loss, sums = run(three_steps, engine, batch)
    alone, first = run(one_step, engine, batch)
    assert sums.loss[0] == pytest.approx(first.loss[0].item(), rel=1e-5)
    assert loss.item() == pytest.approx(float((sums.loss / sums.count).sum()), rel=1e-5)
    assert loss.item() > 2 * alone.item()
    loss.backward()
    assert {name for name, p in head.named_parameters() if p.grad is None} == {"embed_tokens.weight"}


@torch.no_grad()
@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("variant", ["medusa, two layers", "medusa, shared and truncated"])
def test_medusa(engine: Engine, tiny_target: LlamaTarget, batch: Batch, variant: str, labels: str) -> None:
    """Σ_h 0.8^h CE(head_h(f[i]), t[i+2+h])."""
    head = make_head(tiny_target, variant)
    objective = make_objective(head, "medusa", labels=labels, steps=K)
    f, ids = features_of(head, engine, batch).hidden, head.target_ids

    def cost(row: int, slot: int, depth: int) -> float:
        x = f[row, slot]
        for layer in head.blocks[depth].layers:
            x = x + F.silu(F.linear(x, layer.weight, layer.bias))
        log_q = F.linear(x, (head.lm_head if head.config.shared else head.lm_heads[depth]).weight).log_softmax(-1)
        p = engine.target.logits(f[row, slot + 1 + depth]).softmax(-1)
        if labels == "hard":
            columns = (ids == batch.ids[row, slot + 2 + depth]).nonzero()
            return -log_q[columns[0, 0]].item() if len(columns) else 0.0
        if p.argmax() not in ids:
            return 0.0
        p = p[ids] / p[ids].sum()
        return float((p * (p.log() - log_q)).sum())

    assert run(objective, engine, batch)[0].item() == pytest.approx(loss_of(objective, cost, batch), rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["mlp", "mlp, tied", "mlp, inner_dim", "mlp, scale_input"])
def test_mlp(engine: Engine, tiny_target: LlamaTarget, batch: Batch, variant: str) -> None:
    """Σ_h CE(head_h, t[i+2+h]), each head from f[i] and t[i+1..i+1+h] by the formulas of the paper."""
    head = make_head(tiny_target, variant)
    objective = make_objective(head, "mlp", steps=K)
    f = features_of(head, engine, batch).hidden
    n, inner, tied = head.config.n_predict, head.config.inner_dim, head.config.tie_weights
    sw = 0.5 ** (0.5 / n)
    ew = math.sqrt((1 - sw**2) * inner / 2)

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + 1e-6)

    def cost(row: int, slot: int, depth: int) -> float:
        s = f[row, slot]
        if head.config.scale_input:
            s = norm(s) / math.sqrt(2)
        for h in range(depth + 1):
            index = 0 if tied else h
            e = head.emb[index].weight[batch.ids[row, slot + 1 + h]]
            s = head.proj[min(h, 1) if tied else h].weight @ s + ew / sw * e
            s = norm(s) * head.ln[index].weight + head.ln[index].bias
            s = s * 0.5 * (1 + torch.erf(s / math.sqrt(2)))
        return -(head.head[0 if tied else depth].weight @ s).log_softmax(-1)[batch.ids[row, slot + 2 + depth]].item()

    assert run(objective, engine, batch)[0].item() == pytest.approx(loss_of(objective, cost, batch), rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["lstm", "lstm, untied", "lstm, stacks", "lstm, deep projections"])
def test_lstm(engine: Engine, tiny_target: LlamaTarget, batch: Batch, variant: str) -> None:
    """As `test_mlp`, each state by the formulas of Arctic's speculator, from the tensors of a checkpoint."""
    head = make_head(tiny_target, variant)
    objective, tensors, config = make_objective(head, "mlp", steps=K), checkpoint_tensors(head), head.config
    f, size = features_of(head, engine, batch).hidden, config.inner_dim[0]
    sw = 0.5 ** (0.5 / config.n_predict)
    scale = math.sqrt((1 - sw**2) * size / 2) / sw

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + 1e-6)

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def run_layers(x: Tensor, name: str, first: int) -> Tensor:
        """Run the modules of a Sequential from `first` on: vectors are norms, and a GELU has no tensors."""
        index = first
        while f"{name}.{index}.weight" in tensors or f"{name}.{index + 1}.weight" in tensors:
            weight = tensors.get(f"{name}.{index}.weight")
            if weight is None:
                x = gelu(x)
            else:
                x = weight @ x if weight.ndim == 2 else norm(x) * weight + tensors[f"{name}.{index}.bias"]
            index += 1
        return x

    def cost(row: int, slot: int, depth: int) -> float:
        s, c = f[row, slot], torch.zeros(size)
        if config.scale_input:
            s = norm(s) / math.sqrt(2)
        for h in range(depth + 1):
            token, proj, index = batch.ids[row, slot + 1 + h], min(h, 1), 0 if config.tie_weights else h
            if config.method == "sum_rnn":
                e = run_layers(tensors[f"emb.{index}.0.weight"][token], f"emb.{index}", 1)
                p = run_layers(s, f"proj.{proj if config.tie_weights else h}", 0)
                s = gelu(run_layers(p + scale * e, f"ln.{index}", 0))
                continue
            z = {
                gate: tensors[f"{gate}_proj.{proj}.weight"] @ s
                + scale * tensors["forget_emb.0.weight" if config.tie_lstm_embs else f"{gate}_emb.0.weight"][token]
                for gate in ("forget", "input", "output", "cell")
            }
            g = gelu(norm(z["cell"]) * tensors["cell_ln.0.weight"] + tensors["cell_ln.0.bias"])
            c = c * z["forget"].sigmoid() + g * z["input"].sigmoid()
            s = gelu(norm(c) * tensors["state_ln.0.weight"] + tensors["state_ln.0.bias"]) * z["output"].sigmoid()
        lm_head = tensors[f"head.{0 if config.tie_weights else depth}.weight"]
        return -(lm_head @ s).log_softmax(-1)[batch.ids[row, slot + 2 + depth]].item()

    assert run(objective, engine, batch)[0].item() == pytest.approx(loss_of(objective, cost, batch), rel=1e-4)


class DenseAttention:
    """Attention of R rows under the mask `mask` `[R, R]`."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        groups = q.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(q, repeat_kv(k, groups), repeat_kv(v, groups), attn_mask=self.mask)
        return out.transpose(1, 2).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["p-eagle", "p-eagle, one layer", "p-eagle, norms"])
@pytest.mark.parametrize("sampled", [False, True])
def test_p_eagle_is_one_forward_under_its_mask(
    engine: Engine, tiny_target: LlamaTarget, batch: Batch, variant: str, sampled: bool
) -> None:
    """All rows (slot, depth) at once: each sees depth-0 rows of slots up to its own, and its slot's shallower rows."""
    head = make_head(tiny_target, variant)
    features = features_of(head, engine, batch)
    length, first = batch.ids.shape[1], 5
    columns = None
    if sampled:
        objective = make_objective(head, "p-eagle", steps=K, ratio=0.6, min_ratio=0.1)
        columns = objective.columns(first, length, torch.Generator().manual_seed(1))
    by_depth = [torch.arange(first, length)] * K if columns is None else columns
    rows = [(slot, 0) for slot in range(length)]
    rows += [(slot, depth) for depth in range(1, K) for slot in by_depth[depth].tolist()]
    mask = torch.tensor(
        [[(d2 == 0 and a2 <= a) or (a2 == a and d2 <= d) for a2, d2 in rows] for a, d in rows], dtype=torch.bool
    )
    mask_id, mask_state = head.mask_slot()
    masks = len(rows) - length
    ids = torch.cat([alignment.shift_left(batch.ids, 1), torch.full((len(batch.ids), masks), mask_id)], dim=1)
    state = torch.cat([head.fuse(features.aux), mask_state.expand(len(batch.ids), masks, -1)], dim=1)
    positions = torch.tensor([min(a + d, length - 1) for a, d in rows]).expand_as(ids)
    dense = head.step(ids, state, positions, DenseAttention(mask), 0)
    begin = 0
    states = draft_states(head, batch.ids, features.aux, K, first, columns)
    for depth, part in enumerate(states):
        expected = dense[:, :length][:, by_depth[0]] if depth == 0 else dense[:, begin : begin + len(by_depth[depth])]
        assert torch.allclose(part, expected, atol=1e-5)
        begin = length if depth == 0 else begin + len(by_depth[depth])


def test_p_eagles_sample_is_nested_and_stands_for_all_slots(
    engine: Engine, tiny_target: LlamaTarget, batch: Batch
) -> None:
    head = make_head(tiny_target, "p-eagle, one layer")
    objective = make_objective(head, "p-eagle", steps=K, ratio=0.5, min_ratio=0.3)
    columns = objective.columns(5, 45, torch.Generator().manual_seed(0))
    assert [len(column) for column in columns] == [40, 20, 12, 12]
    for before, column in itertools.pairwise(columns):
        assert set(column.tolist()) <= set(before.tolist())
        assert column.tolist() == sorted(column.tolist())
    with torch.no_grad():
        full = run(objective, engine, batch)[0].item()
        drawn = [run(objective, engine, batch, torch.Generator().manual_seed(seed))[0].item() for seed in range(60)]
    assert len(set(drawn)) > 50
    spread = torch.tensor(drawn).std().item() / math.sqrt(len(drawn))
    assert abs(sum(drawn) / len(drawn) - full) < 4 * spread


def teacher_of(probs: Tensor, mass: Tensor) -> Teacher:
    choice = probs.argmax(-1)
    negentropy = (probs * probs.log()).sum(-1)
    return Teacher(probs, negentropy, mass, choice, choice, torch.ones_like(choice).bool(), choice, probs)


def test_losses_and_their_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(6, 9, generator=generator, dtype=torch.float64).softmax(-1)
    mass = torch.rand(6, generator=generator, dtype=torch.float64)
    teacher, q, p = teacher_of(probs, mass), logits.softmax(-1), probs * mass[:, None]
    accepted = torch.minimum(p, q).sum(-1)
    kl = (probs * (probs.log() - q.log())).sum(-1)
    share = torch.exp(-accepted.detach())
    expected = {
        "kl": kl,
        "ce": -q.log().gather(1, teacher.choice[:, None])[:, 0],
        "label": -q.log().gather(1, teacher.label[:, None])[:, 0],
        "tv": 1 - accepted,
        "lk": -accepted.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - accepted),
    }
    for loss, value in expected.items():
        actual = slot_losses(loss, logits, teacher)
        assert torch.allclose(actual, value), loss
        gradients = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (actual, value)]
        assert torch.allclose(*gradients), loss
    assert torch.allclose(overlap(logits, teacher), accepted)
    # with a mass of 1, tv is half the L1 distance
    full = teacher_of(probs, torch.ones(6, dtype=torch.float64))
    assert torch.allclose(slot_losses("tv", logits, full), 0.5 * (probs - q).abs().sum(-1))


def test_a_label_outside_the_draft_vocabulary_costs_nothing() -> None:
    probs = torch.full((2, 4), 0.25)
    teacher = teacher_of(probs, torch.ones(2))._replace(label=torch.tensor([2, -1]))
    assert slot_losses("label", torch.zeros(2, 4), teacher).tolist() == pytest.approx([math.log(4), 0.0])


@torch.no_grad()
def test_reduction_by_sequence_counts_every_sequence_alike(
    engine: Engine, tiny_target: LlamaTarget, responses: Sequences
) -> None:
    ids, assistant = responses.row(0)
    short = (ids[:-25].tolist(), assistant[:-25].tolist())
    rows = Sequences.of([short, *(tuple(part.tolist() for part in responses.row(row)) for row in (1, 2))])
    head = make_head(tiny_target, "eagle3")
    by_sequence = make_objective(head, "ttt", steps=K, reduction="sequence")
    together = run(by_sequence, engine, rows.batch([0, 1, 2]))[0].item()
    alone = [run(by_sequence, engine, rows.batch([row]))[0].item() for row in range(3)]
    assert together == pytest.approx(sum(alone) / 3, rel=1e-4)
    token = run(make_objective(head, "ttt", steps=K), engine, rows.batch([0, 1, 2]))[0].item()
    assert token != pytest.approx(together, rel=1e-4)


@torch.no_grad()
def test_feature_noise_is_uniform_and_a_matter_of_the_generator(
    engine: Engine, tiny_target: LlamaTarget, batch: Batch
) -> None:
    head = make_head(tiny_target, "eagle")
    module = make_objective(head, "eagle")
    aux = features_of(head, engine, batch).aux
    noisy = module._noisy(aux, torch.Generator().manual_seed(3))
    difference = torch.cat([(a - b).flatten() for a, b in zip(noisy, aux, strict=True)])
    assert difference.abs().max() <= 0.1 + 1e-5
    assert difference.std() == pytest.approx(0.2 / math.sqrt(12), rel=0.02)
    losses = [run(module, engine, batch, torch.Generator().manual_seed(seed))[0].item() for seed in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]
    assert run(module, engine, batch)[0].item() == run(module, engine, batch)[0].item()


@pytest.mark.parametrize(
    ("variant", "objective", "frozen"),
    [
        ("eagle3, trained embedding", "ttt", set()),
        ("eagle, the target's embedding", "eagle", set()),
        ("medusa", "medusa", set()),
        ("medusa, shared", "medusa", {"lm_head.weight"}),
        ("mlp, tied", "mlp", set()),
        ("lstm, untied", "mlp", set()),
        ("lstm, stacks", "mlp", set()),
        ("p-eagle", "p-eagle", set()),
        ("p-eagle, one layer", "p-eagle", {"embed_tokens.weight"}),
    ],
)
def test_everything_but_what_is_frozen_learns(
    engine: Engine, tiny_target: LlamaTarget, batch: Batch, variant: str, objective: str, frozen: set[str]
) -> None:
    head = make_head(tiny_target, variant)
    before = tiny_target.lm_head.weight.clone()
    module = make_objective(head, objective)
    run(module, engine, batch, torch.Generator().manual_seed(0))[0].backward()
    learning = {name for name, p in head.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert learning == {name for name, _ in head.named_parameters()} - frozen
    assert tiny_target.lm_head.weight.grad is None
    assert torch.equal(tiny_target.lm_head.weight, before)


@pytest.mark.parametrize("variant", ["eagle", "eagle3, two layers", "p-eagle, one layer"])
def test_checkpointing_keeps_less_and_changes_nothing(
    variant: str, engine: Engine, tiny_target: LlamaTarget, batch: Batch
) -> None:
    results = []
    for checkpointing in (False, True):
        head = make_head(tiny_target, variant)
        name = "ttt" if head.config.name != "p-eagle" else "p-eagle"
        module = make_objective(head, name, steps=K, checkpointing=checkpointing)
        results.append(learnt(module, lambda module=module: run(module, engine, batch)[0]))
    compare_learnt(*results, share=0.85)


Learnt = tuple[Tensor, dict[str, Tensor], int]


def learnt(module: Objective, forward: Callable[[], Tensor]) -> Learnt:
    """Return loss, gradients, and how many numbers autograd kept between forward and backward."""
    kept = 0

    def keep(value: Tensor) -> Tensor:
        nonlocal kept
        kept += value.numel()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        loss = forward()
    before = kept
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}, before


def compare_learnt(reference: Learnt, checkpointed: Learnt, *, share: float) -> None:
    assert torch.equal(reference[0], checkpointed[0])
    assert reference[1].keys() == checkpointed[1].keys()
    for name, value in reference[1].items():
        torch.testing.assert_close(checkpointed[1][name], value, rtol=1e-5, atol=1e-7)
    assert checkpointed[2] < share * reference[2]
