"""The acceptance that the trainer simulates equals what the engine measures in serving."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from infer.engine import Engine
from infer.request import SamplingParams, SpeculationStats
from models.heads.eagle3.head import Eagle3Head
from models.targets.llama import LlamaTarget
from tests import heads
from tests.train.conftest import STEPS, make_head
from train.data import alignment
from train.data.sequences import Sequences
from train.evaluation import RANKS, Sampling, count_ranks, draft_matches, rank_accuracies, simulate, walk
from train.features.online import compute_features


def table(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(rows).bool()


def counts(stats: SpeculationStats) -> tuple[int, int, int, int]:
    return stats.steps, stats.emitted, stats.drafted, stats.accepted


def test_walk_accepts_a_run_and_jumps_past_it() -> None:
    # Response t[3..9]; drafts of slot i start at t[i+2]. From root 3 (slot 2): two of three accepted -> root 6.
    # From root 6 (slot 5): two may be drafted, one is accepted -> root 8, which leaves the last token and no draft.
    matches = table([[0, 0, 0]] * 2 + [[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    stats = walk(matches, 3, 10)
    assert counts(stats) == (3, 6, 5, 3)
    assert stats.accepted_by_position == [2, 1, 0]
    assert stats.drafted_by_position == [2, 2, 1]
    assert stats.acceptance_length == 2.0


def test_walk_without_matches_is_plain_decoding() -> None:
    assert counts(walk(table([[0, 0]] * 9), 3, 8)) == (4, 4, 5, 0)  # the last two steps may draft one token and none


def test_a_match_behind_a_miss_counts_nothing() -> None:
    assert counts(walk(table([[0, 1, 1]] * 9), 3, 8))[3] == 0


def test_walk_of_perfect_drafts() -> None:
    """9 tokens after the first: 5 from four drafts and a bonus token, then 4 from the three drafts still allowed."""
    assert counts(walk(table([[1, 1, 1, 1]] * 20), 3, 13)) == (2, 9, 7, 7)


def test_a_response_of_one_token_takes_no_verify() -> None:
    assert counts(walk(table([[1, 1]] * 9), 3, 4)) == (0, 0, 0, 0)


def engine_stats(engine: Engine, head: Eagle3Head, responses: Sequences) -> SpeculationStats:
    rows = [responses.row(index) for index in range(len(responses))]
    engine.set_proposer("head", head)
    try:
        completions = engine.generate(
            [ids[~assistant].tolist() for ids, assistant in rows], SamplingParams(max_tokens=40)
        )
    finally:
        engine.set_proposer("none")
    total = SpeculationStats()
    for completion, (ids, assistant) in zip(completions, rows, strict=True):
        assert completion.token_ids == ids[assistant].tolist()
        total.merge(completion.stats)
    return total


@pytest.mark.parametrize("variant", ["random", "trained", "post_norm"])
def test_simulated_acceptance_equals_the_engines(
    variant: str, engine: Engine, tiny_target: LlamaTarget, responses: Sequences, trained_head: Eagle3Head
) -> None:
    choices = {"trained": trained_head, "random": make_head(tiny_target, responses)}
    choices["post_norm"] = make_head(tiny_target, responses, norm_output=True, norm_before_residual=True)
    head = choices[variant]
    batch = responses.batch(range(len(responses)))
    features = compute_features(engine.target, batch, head.config.aux_layers)
    simulated = simulate(head, batch, features, STEPS)
    assert simulated == engine_stats(engine, head, responses)
    if variant == "trained":
        assert simulated.acceptance_length > 2  # runs of every length, or equality would say little
        assert all(0 < count < simulated.steps for count in simulated.accepted_by_position)


def test_responses_that_end_by_themselves(engine: Engine, responses: Sequences, trained_head: Eagle3Head) -> None:
    """Each response is stopped at its tenth token, often inside a run of accepted drafts."""
    total, rows = SpeculationStats(), []
    engine.set_proposer("head", trained_head)
    for index in range(len(responses)):
        ids, assistant = responses.row(index)
        prompt, response = ids[~assistant].tolist(), ids[assistant].tolist()
        params = SamplingParams(max_tokens=40, stop_token_ids=(response[9],))
        [completion] = engine.generate([prompt], params)
        assert completion.finish_reason == "stop"
        total.merge(completion.stats)
        token_ids = completion.token_ids
        rows.append((prompt + token_ids, [False] * len(prompt) + [True] * len(token_ids)))
    engine.set_proposer("none")
    batch = Sequences.of(rows).batch(range(len(rows)))
    features = compute_features(engine.target, batch, trained_head.config.aux_layers)
    simulated = simulate(trained_head, batch, features, STEPS)
    assert (simulated.steps, simulated.emitted) == (total.steps, total.emitted)
    assert simulated.acceptance_length > 1.5


@pytest.mark.parametrize("variant", ["eagle", "eagle3", "medusa", "mlp", "p-eagle, one layer", "trained"])
def test_simulated_acceptance_of_sampled_responses(
    variant: str, engine: Engine, tiny_target: LlamaTarget, responses: Sequences, trained_head: Eagle3Head
) -> None:
    """Drafts are verified against tokens sampled with the same noise, in the trainer as in the engine."""
    head = trained_head if variant == "trained" else heads.make_head(tiny_target, variant)
    rows = [responses.row(index) for index in range(len(responses))]
    prompts = [ids[~assistant].tolist() for ids, assistant in rows]
    seeds = [7, 2**32 + 1, 2**40, 0, 5, 2**62 + 3]
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=40) for seed in seeds]
    plain = engine.generate(prompts, params)
    engine.set_proposer("head", head)
    total = SpeculationStats()
    for completion, expected in zip(engine.generate(prompts, params), plain, strict=True):
        assert completion.token_ids == expected.token_ids
        total.merge(completion.stats)
    engine.set_proposer("none")
    sampled = Sequences.of(
        [(c.prompt_ids + c.token_ids, [False] * len(c.prompt_ids) + [True] * len(c.token_ids)) for c in plain]
    )
    batch = sampled.batch(range(len(sampled)))
    features = compute_features(engine.target, batch, head.config.aux_layers)
    simulated = simulate(head, batch, features, STEPS, Sampling(0.8, seeds))
    assert (simulated.steps, simulated.emitted) == (total.steps, total.emitted)
    greedy = simulate(head, batch, features, STEPS)
    assert greedy.accepted != simulated.accepted or not simulated.accepted  # the noise matters


def test_ranks_count_what_matches_and_more(
    engine: Engine, responses: Sequences, trained_head: Eagle3Head, tiny_target: LlamaTarget
) -> None:
    batch = responses.batch(range(len(responses)))
    features = compute_features(engine.target, batch, trained_head.config.aux_layers)
    ranks, slots = count_ranks(trained_head, batch, features, STEPS, 500)  # the whole draft vocabulary, and beyond
    masks = alignment.step_masks(batch.assistant, STEPS)
    matches = draft_matches(trained_head, batch, features, STEPS)
    assert ranks[:, 0].tolist() == [int((matches[..., step] & masks[step]).sum()) for step in range(STEPS)]
    for step in range(STEPS):
        predicted = alignment.predicted_tokens(batch.ids, step)[masks[step]]
        assert int(ranks[step].sum()) == int(torch.isin(predicted, trained_head.target_ids).sum()) <= int(slots[step])
    shares = (ranks[:, :RANKS].double() / slots[:, None]).round(decimals=4).tolist()
    pairs = [
        (part, compute_features(engine.target, part, trained_head.config.aux_layers))
        for part in (responses.batch([row]) for row in range(len(responses)))
    ]
    assert rank_accuracies(trained_head, pairs, STEPS) == shares  # over all slots, not a mean of batches
