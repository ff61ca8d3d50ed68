"""What the trainer reports is what serving gets: simulated acceptance against the engine's, logits against logits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from infer.engine import Engine
from infer.proposers.base import Budget
from infer.proposers.head import HeadProposer
from infer.request import Request, SamplingParams, SpeculationStats
from infer.tree import DraftTree
from models.heads.eagle3 import Eagle3Head
from models.targets.llama import LlamaTarget
from tests.train.conftest import STEPS, make_head
from train.acceptance import simulate, walk
from train.data import Sequences
from train.features import compute_features
from train.objectives.ttt import draft_states


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
    assert counts(walk(table([[0, 0]] * 9), 3, 8)) == (4, 4, 5, 0)  # the last two steps may draft one and none


def test_a_match_behind_a_miss_counts_nothing() -> None:
    assert counts(walk(table([[0, 1, 1]] * 9), 3, 8))[3] == 0


def test_walk_of_perfect_drafts() -> None:
    """9 tokens after the first: 5 from four drafts and a bonus, then 4 from the three that are still allowed."""
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


@pytest.mark.parametrize("which", ["random", "trained", "post_norm"])
def test_simulated_acceptance_equals_the_engines(
    which: str, engine: Engine, tiny_target: LlamaTarget, responses: Sequences, trained_head: Eagle3Head
) -> None:
    heads = {"trained": trained_head, "random": make_head(tiny_target, responses)}
    heads["post_norm"] = make_head(tiny_target, responses, norm_output=True, norm_before_residual=True)
    head = heads[which]
    batch = responses.batch(range(len(responses)))
    features = compute_features(engine.target, batch, head.config.aux_layers)
    simulated = simulate(head, batch, features, STEPS)
    assert simulated == engine_stats(engine, head, responses)
    if which == "trained":
        assert simulated.acceptance_length > 2  # runs of every length, or equality would say little
        assert all(0 < count < simulated.steps for count in simulated.accepted_by_position)


def test_responses_that_end_by_themselves(engine: Engine, responses: Sequences, trained_head: Eagle3Head) -> None:
    """Each response is made to stop at its tenth token, often inside a run of accepted drafts."""
    total, rows = SpeculationStats(), []
    engine.set_proposer("head", trained_head)
    for index in range(len(responses)):
        ids, assistant = responses.row(index)
        prompt, response = ids[~assistant].tolist(), ids[assistant].tolist()
        params = SamplingParams(max_tokens=40, stop_token_ids=(response[9],))
        [completion] = engine.generate([prompt], params)
        assert completion.finish_reason == "stop"
        total.merge(completion.stats)
        kept = completion.token_ids
        rows.append((prompt + kept, [False] * len(prompt) + [True] * len(kept)))
    engine.set_proposer("none")
    batch = Sequences.of(rows).batch(range(len(rows)))
    features = compute_features(engine.target, batch, trained_head.config.aux_layers)
    simulated = simulate(trained_head, batch, features, STEPS)
    assert (simulated.steps, simulated.emitted) == (total.steps, total.emitted)
    assert simulated.acceptance_length > 1.5


@pytest.mark.parametrize("flags", [{}, {"norm_output": True}, {"norm_before_residual": True, "fc_norm": True}])
def test_training_logits_equal_the_engines_cached_chain(
    flags: dict, engine: Engine, tiny_target: LlamaTarget, responses: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every logit row that a draft was chosen from, at every depth, in fp32, to 1e-5."""
    head = make_head(tiny_target, responses, **flags)
    seen: list[tuple[list[int], list[int], list[Tensor]]] = []  # tokens so far, draft, logits by depth
    rows: list[Tensor] = []
    real_propose, real_choose = HeadProposer.propose, HeadProposer._choose

    def choose(self: HeadProposer, state: Tensor, slots: list[int], parameters: None) -> Tensor:
        rows.append(self._head.logits(state)[0])
        return real_choose(self, state, slots, parameters)

    def propose(self: HeadProposer, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        rows.clear()
        tree = real_propose(self, requests, budgets)
        drafted = int(tree.length[0]) - 1
        seen.append((list(requests[0].tokens), tree.token[0, 1 : 1 + drafted].tolist(), rows[:drafted]))
        return tree

    monkeypatch.setattr(HeadProposer, "_choose", choose)
    monkeypatch.setattr(HeadProposer, "propose", propose)
    ids, assistant = responses.row(0)
    engine.set_proposer("head", head)
    engine.generate([ids[~assistant].tolist()], SamplingParams(max_tokens=16))
    engine.set_proposer("none")

    compared = 0
    for tokens, draft, logits in seen:
        whole = Sequences.of([(tokens + draft, [True] * len(tokens + draft))]).batch([0])
        features = compute_features(engine.target, whole, head.config.aux_layers)
        with torch.no_grad():
            states = draft_states(head, whole.ids, features.aux, max(1, len(draft)))
            mine = [head.logits(state[0, len(tokens) - 2]) for state in states]
        for depth, row in enumerate(logits):
            assert (mine[depth] - row).abs().max() <= 1e-5 * row.abs().max(), (
                f"depth {depth} after {len(tokens)} tokens"
            )
            compared += 1
    assert compared > 3 * STEPS
