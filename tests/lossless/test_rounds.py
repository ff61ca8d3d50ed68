"""Rounds launched before the last one is read: no token changes, whoever comes, goes or is stopped meanwhile.

On a CPU a round runs when it is launched, which is before the host has read the one before it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from infer.request import SamplingParams
from infer.round_graphs import Launched, RoundGraphs

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=3)
CUT = replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.01)
PROMPTS = [[5, 6, 7], [9] * 17, list(range(10, 50)), [8], [5, 6, 7] * 4]
PARAMS = [GREEDY, SAMPLED, CUT, replace(GREEDY, max_tokens=7), replace(SAMPLED, max_tokens=33)]


@pytest.fixture
def rounds(monkeypatch):
    """What was launched, and how often the host read a round after the next one had been launched."""
    seen: Counter[str] = Counter()
    launch, read = RoundGraphs.launch, Launched.read

    def launched(self):
        seen["launched"] += 1
        return launch(self)

    def reads(self):
        seen["read"] += 1
        seen["late"] += seen["launched"] > seen["read"]
        return read(self)

    monkeypatch.setattr(RoundGraphs, "launch", launched)
    monkeypatch.setattr(Launched, "read", reads)
    return seen


@pytest.mark.parametrize(
    ("proposer", "head"),
    [
        ("none", "eagle3, whole vocabulary"),
        ("head", "eagle3, whole vocabulary"),
        ("head", "eagle"),
        ("head", "mlp"),
        ("head", "medusa"),
        ("head", "p-eagle, one layer"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounds_ahead_change_nothing(make_small_engine, rounds, dtype, proposer, head):
    engine = make_small_engine(dtype, proposer, head=head, threads=1, max_batch=6, graphs="on", rounds_ahead=1)
    ahead = [(own.token_ids, own.stats) for own in engine.generate(PROMPTS, PARAMS)]
    assert rounds["late"] > 10
    assert rounds["launched"] == rounds["read"]
    engine._pool.invariants([])
    engine.config.rounds_ahead = 0
    engine.set_proposer(proposer)
    rounds.clear()
    assert [(own.token_ids, own.stats) for own in engine.generate(PROMPTS, PARAMS)] == ahead
    assert not rounds
