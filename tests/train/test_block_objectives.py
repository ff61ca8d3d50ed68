"""Objectives of block drafters: random anchors, weights by depth, and the losses of DSpark and DFlash2."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from models.targets.llama import LlamaTarget
from tests.heads import make_head, make_objective
from train.data.sequences import Sequences
from train.features.online import compute_features
from train.features.teacher import teach
from train.objectives.base import Objective
from train.objectives.block import dpace_weights, random_slots

VARIANTS = ("dflash", "dflash, causal window", "dspark", "dspark, rnn", "dflash2", "dflash2, truncated")


def test_random_anchors_are_served_slots() -> None:
    served = torch.zeros(3, 40, dtype=torch.bool)
    served[0, 5:30], served[1, 10:12], served[2, ::3] = True, True, True
    generator = torch.Generator().manual_seed(0)
    drawn = [random_slots(served, 6, generator) for _ in range(50)]
    for slots in drawn:
        assert (slots.diff(dim=1) > 0).all()
        chosen = served.gather(1, slots)
        assert chosen[0].all()
        assert chosen[1].sum() == 2  # all that there are
        assert chosen[2].all()
    assert {int(slot) for slots in drawn for slot in slots[0]} == set(range(5, 30))


def test_dpace_weights_are_the_papers() -> None:
    q = torch.tensor([[0.8, 0.2], [0.5, 0.9], [0.1, 0.4]])
    valid = torch.tensor([[True, True], [True, True], [True, False]])
    s = 0.5 * q + 0.5
    reach = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    first = [reach[0][0] + reach[1][0] + reach[2][0], reach[1][0] + reach[2][0], reach[2][0]]
    second = [reach[0][1] + reach[1][1], reach[1][1], torch.tensor(0.0)]
    assert torch.allclose(dpace_weights(q, valid), torch.stack([torch.stack(first), torch.stack(second)], dim=1))


def run(objective: Objective, target: LlamaTarget, sequences: Sequences, generator: torch.Generator | None = None):
    batch = sequences.batch(range(len(sequences)))
    features = compute_features(target, batch, objective.head.config.aux_layers)
    teacher = objective.teach(target, features.hidden, batch)
    return objective(batch, features, teacher, objective.denominators(batch), generator=generator)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sampled_anchors_stand_for_all(variant: str, tiny_target: LlamaTarget, responses: Sequences) -> None:
    head = make_head(tiny_target, variant)
    full, _ = run(make_objective(head, head.config.name, fused=False), tiny_target, responses)
    objective = make_objective(head, head.config.name, fused=False, num_anchors=6)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        losses = torch.stack([run(objective, tiny_target, responses, generator)[0] for _ in range(60)])
    error = losses.std() / len(losses) ** 0.5
    assert (losses.mean() - full.detach()).abs() < 4 * error
    assert losses.std() > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_trained_parameter_gets_a_gradient(variant: str, tiny_target: LlamaTarget, responses: Sequences) -> None:
    head = make_head(tiny_target, variant)
    for weighting in ("decay", "dpace"):
        head.zero_grad()
        loss, sums = run(make_objective(head, head.config.name, weighting=weighting), tiny_target, responses)
        loss.backward()
        missing = [
            name for name, p in head.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
        ]
        assert missing == []
        assert not any(p.grad is not None for p in head.parameters() if not p.requires_grad)
        assert (sums.count > 0).all()


@torch.no_grad()
def test_dsparks_loss_is_its_formula(tiny_target: LlamaTarget, responses: Sequences) -> None:
    head = make_head(tiny_target, "dspark")
    objective = make_objective(head, "dspark", drop_out_of_vocab=False)
    batch = responses.batch([0])
    features = compute_features(tiny_target, batch, head.config.aux_layers)
    teacher = teach(tiny_target, features.hidden, batch, head.target_ids)
    states = torch.randn(len(teacher.mass), 64 + 32, generator=torch.Generator().manual_seed(1))
    logits, costs = objective.slot_costs(states, teacher, 0)
    h, embedded = states.split([64, 32], dim=-1)
    expected = F.linear(h, tiny_target.lm_head.weight) + F.linear(embedded, head.markov_head.markov_w2.weight)
    assert torch.allclose(logits, expected, atol=1e-5)
    q, p = expected.softmax(-1), teacher.probs
    distance = 0.5 * (q - p).abs().sum(-1)
    confidence = head.confidence_head.proj(states).squeeze(-1).sigmoid()
    accepted = 1 - distance
    entropy = -(accepted * confidence.log() + (1 - accepted) * (1 - confidence).log())
    label = F.cross_entropy(expected, teacher.label, reduction="none")
    assert torch.allclose(costs, 0.9 * distance + 0.1 * label + entropy, atol=1e-4)


@torch.no_grad()
def test_dflash2s_loss_is_its_formula(tiny_target: LlamaTarget, responses: Sequences) -> None:
    head = make_head(tiny_target, "dflash2")
    objective = make_objective(head, "dflash2", drop_out_of_vocab=False, selector_weight=0.5)
    batch = responses.batch([0])
    features = compute_features(tiny_target, batch, head.config.aux_layers)
    teacher = teach(tiny_target, features.hidden, batch, head.target_ids)
    states = torch.randn(len(teacher.mass), 64 + 16, generator=torch.Generator().manual_seed(1))
    logits, costs = objective.slot_costs(states, teacher, 0)
    h, query = states.split([64, 16], dim=-1)
    unary = F.linear(h, tiny_target.lm_head.weight)
    kl = F.kl_div(unary.log_softmax(-1), teacher.probs, reduction="none").sum(-1)
    missed = 0
    for row in range(len(states)):
        candidates = unary[row].topk(head.config.selector_top_k).indices.tolist()
        scores = unary[row] + head.candidate_selector.successor_codebook @ query[row]
        ruled_out = torch.ones(len(scores), dtype=torch.bool)
        ruled_out[candidates] = False
        assert torch.allclose(logits[row], scores.masked_fill(ruled_out, -torch.inf), atol=1e-5)
        label = int(teacher.label[row])
        if label not in candidates:
            candidates[-1], missed = label, missed + 1
        selected = -scores[candidates].log_softmax(-1)[candidates.index(label)]
        assert torch.allclose(costs[row], kl[row] + 0.5 * selected, atol=1e-4)
    assert missed > 0


def test_blocks_see_no_other_document(tiny_target: LlamaTarget, responses: Sequences) -> None:
    """Slots of packed documents draft what they draft alone."""
    from train.objectives.draft_states import draft_states

    head = make_head(tiny_target, "dflash, window")
    rows = [responses.row(index)[0] for index in range(2)]
    generator = torch.Generator().manual_seed(7)
    aux = [torch.randn(1, sum(map(len, rows)), 64, generator=generator) for _ in head.config.aux_layers]
    starts = torch.cat([torch.zeros(len(rows[0])), torch.full((len(rows[1]),), len(rows[0]))]).long()[None]
    packed = list(draft_states(head, torch.cat(rows)[None], aux, 5, starts=starts))
    begin = 0
    for ids in rows:
        end = begin + len(ids)
        alone = list(draft_states(head, ids[None], [feature[:, begin:end] for feature in aux], 5))
        for depth, states in enumerate(alone):
            assert torch.allclose(packed[depth][:, begin : end - 1], states[:, :-1], atol=1e-5)
        begin = end
