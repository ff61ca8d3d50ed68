"""Sequences packed into a row are learnt as if each had its own: features, losses and gradients of every head."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from infer.options.cli import compose
from models.attention import CausalAttention
from models.heads import HEADS
from models.heads.objectives import BlockObjectiveConfig
from models.targets.llama import LlamaTarget
from tests.conftest import MakeTarget
from tests.heads import ONE_OF_EACH, VARIANTS, make_head, make_objective
from tests.pairwise import parametrize_each
from train.checkpoint import find_checkpoint, load_file
from train.config import TrainConfig
from train.data import alignment
from train.data.sequences import Batch, Sequences, best_fit
from train.features.layout import Layout
from train.features.online import Features, compute_features
from train.features.store import CachedFeatures
from train.features.teacher import teach
from train.loop import train
from train.objectives.base import Objective
from train.publishing.trackers import read_metrics

K = 3
PACKS = [[2, 0, 4], [1], [3, 5]]


@pytest.fixture(scope="module")
def documents() -> Sequences:
    """Return sequences with every kind of boundary: target tokens from the first on or to the last, prompts, turns."""
    draw = random.Random(3)
    masks = [
        [True] * 9, [False] * 4 + [True] * 8, [True] * 5, [False, True, True, True, False, False, True, True, True],
        [False] * 2 + [True] * 9, [True, True, False, True, True, True],
    ]  # fmt: skip
    return Sequences.of([([draw.randrange(1, 384) for _ in mask], mask) for mask in masks])


def test_packs_are_full_and_hold_every_item_once() -> None:
    draw = random.Random(0)
    for room in (7, 40, 200):
        lengths = [draw.randint(1, min(room, 60)) for _ in range(300)]
        packs = best_fit(lengths, room)
        assert sorted(itertools.chain.from_iterable(packs)) == list(range(300))
        filled = [sum(lengths[item] for item in pack) for pack in packs]
        assert max(filled) <= room
        # at most one pack is half empty, or two of them would have been merged
        assert sum(2 * total <= room for total in filled) <= 1
        assert best_fit(lengths, room) == packs
    # an item goes to the fullest pack that has room: 3 goes to 7, not to 5
    assert best_fit([7, 5, 3], 10) == [[0, 2], [1]]


def inside(features: Features, batch: Batch, sequences: Sequences) -> dict[int, torch.Tensor]:
    """Return the features of each sequence's own tokens, `[parts, tokens, H]`, by sequence."""
    parts = torch.stack([*features.aux, features.hidden])
    lengths = sequences.lengths.tolist()
    return {
        index: parts[:, place.row, place.first : place.first + lengths[index]]
        for index, place in zip(batch.rows, batch.places, strict=True)
    }


@pytest.fixture(scope="module", params=["llama", "mistral"])
def target(request: pytest.FixtureRequest, tiny_target: LlamaTarget, make_target_folder: MakeTarget) -> LlamaTarget:
    """Return a target with full attention, and one with a sliding window shorter than the documents."""
    if request.param == "llama":
        return tiny_target
    from dataclasses import replace

    from models.targets.mistral import MistralTarget

    config = replace(tiny_target.config, windows=(4,) * tiny_target.config.num_layers)
    mistral = MistralTarget(config)
    mistral.load_state_dict(tiny_target.state_dict())
    return mistral.eval().requires_grad_(False)


def test_features_are_those_of_each_document_alone(target: LlamaTarget, documents: Sequences, tmp_path: Path) -> None:
    aux = (2, 4, 5)
    packed = documents.packed(PACKS)
    features = inside(compute_features(target, packed, aux), packed, documents)
    for index in range(len(documents)):
        alone = documents.batch([index])
        (expected,) = inside(compute_features(target, alone, aux), alone, documents).values()
        torch.testing.assert_close(features[index], expected, rtol=1e-4, atol=1e-5)
    cached = CachedFeatures(tmp_path / "unused", target, aux, documents, Layout.of(target, aux))
    cached.fill(2, (0, 1), lambda: None, room=16, show=False)
    for index, value in inside(cached(packed), packed, documents).items():
        torch.testing.assert_close(value, features[index], rtol=1e-4, atol=1e-5)


def test_no_slot_reaches_into_another_document(documents: Sequences) -> None:
    packed, padded = documents.packed(PACKS), documents.batch(range(len(documents)))
    assert packed.starts is not None
    together, apart = (alignment.step_masks(batch.assistant, K) for batch in (packed, padded))
    taught, alone = (alignment.teacher_rows(batch.assistant) for batch in (packed, padded))
    for index, place in zip(packed.rows, packed.places, strict=True):
        length = int(documents.lengths[index])
        span = slice(place.first, place.first + length)
        assert torch.equal(together[:, place.row, span], apart[:, index, :length])
        assert torch.equal(taught[place.row, span], alone[index, :length])
        assert alignment.positions(packed.ids, packed.starts)[place.row, span].tolist() == list(range(length))
    assert together.sum() == apart.sum() > 0


def losses(objective: Objective, target: LlamaTarget, batch: Batch) -> tuple[torch.Tensor, ...]:
    features = compute_features(target, batch, objective.head.config.aux_layers)
    teacher = teach(target, features.hidden, batch, objective.head.target_ids)
    loss, sums = objective(batch, features, teacher, objective.denominators(batch), True, None)
    objective.zero_grad()
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])
    return loss.detach(), torch.stack(list(sums)), gradients


OBJECTIVES = [
    (variant, name)
    for variant in ONE_OF_EACH
    for name, keys in HEADS[VARIANTS[variant][0]].objectives.items()
    if not issubclass(keys, BlockObjectiveConfig)  # whose anchors are random
]


@parametrize_each({"variant, name": OBJECTIVES, "reduction": ["token", "sequence"]})
def test_losses_are_those_of_the_documents_unpacked(
    variant: str, name: str, reduction: str, tiny_target: LlamaTarget, documents: Sequences
) -> None:
    head = make_head(tiny_target, variant)
    options = {} if head.config.max_depth else {"steps": K}
    objective = make_objective(head, name, reduction=reduction, **options)
    packed = losses(objective, tiny_target, documents.packed(PACKS))
    padded = losses(objective, tiny_target, documents.batch(range(len(documents))))
    for actual, expected in zip(packed, padded, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert padded[0] > 0


def test_what_packing_would_break_is_seen(tiny_target: LlamaTarget, documents: Sequences) -> None:
    """Without its boundaries a packed row has other features, so that the comparisons above can fail."""
    packed = documents.packed(PACKS)
    boundless = packed._replace(starts=None)
    assert CausalAttention()._seen is None
    separate, mixed = (compute_features(tiny_target, batch, ()).hidden[0, 5:9] for batch in (packed, boundless))
    assert not torch.allclose(separate, mixed, atol=1e-2)


def test_a_packed_run_resumes_with_the_same_bits(tiny_target_folder: Path, tmp_path: Path) -> None:
    settings = [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "head.draft_vocab_size=200", "packing=true",
        "overwrite=true",
        "data.num_sequences=12", "data.max_new_tokens=16", "data.prompt_tokens=12", "sequence_length=64",
        "batch_size=2", "minutes=null", "steps=4", "eval_prompts=2", "eval_max_tokens=8", "tracker=none",
        "precision=fp32", "engine.max_tokens_in_cache=1024", "objective.steps=2", "eval_draft_tokens=2",
        "checkpoint_every=2", "keep_checkpoints=3",
    ]  # fmt: skip

    def run(*more: str) -> dict[str, torch.Tensor]:
        assert train(compose("train", TrainConfig, [*settings, *more])) is not None
        path = find_checkpoint(tmp_path / more[0][4:] / "checkpoints")
        assert path is not None
        return load_file(path / "module.safetensors")

    uninterrupted = run("run=whole")
    rows = [row for row in read_metrics(tmp_path / "whole") if "train/tokens" in row]
    # two packs of two sequences of 28 tokens each: more than two padded rows would hold
    assert rows[0]["train/tokens"] > 2 * 28
    (tmp_path / "whole" / "checkpoints" / "latest").write_text("step-000002\n")
    again = run("run=whole")
    stored = run("run=stored", "features=offline")
    for name, value in uninterrupted.items():
        assert torch.equal(again[name], value), name
        torch.testing.assert_close(stored[name].float(), value.float(), rtol=1e-3, atol=1e-4)
