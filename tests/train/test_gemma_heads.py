"""Heads on a Gemma target, which scales its embedding for its own layers only: training and serving agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams, SpeculationStats
from models.targets import load_target
from tests.heads import make_head, memorise
from tests.train.conftest import STEPS
from train.data.sequences import Sequences
from train.evaluation import simulate
from train.features.online import compute_features


@pytest.mark.parametrize("variant", ["eagle, the target's embedding", "eagle3"])
def test_a_head_drafts_as_it_was_trained(variant: str, gemma_folder: Path) -> None:
    head = make_head(load_target(str(gemma_folder)), variant)
    limits = EngineConfig(max_tokens_in_cache=2048, max_batch=8)
    drafts = ProposerConfig(name="head", max_draft_tokens=STEPS)
    engine = Engine(load_target(str(gemma_folder)), proposer="none", config=limits, proposer_config=drafts)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 384, (6 + 4 * index,), generator=generator).tolist() for index in range(4)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = engine.generate(prompts, params)
    rows = [(a.prompt_ids + a.token_ids, [False] * len(a.prompt_ids) + [True] * len(a.token_ids)) for a in plain]
    responses = Sequences.of(rows)
    memorise(head, engine.target, responses, STEPS, rounds=50)
    batch = responses.batch(range(len(rows)))
    simulated = simulate(head, batch, compute_features(engine.target, batch, head.config.aux_layers), STEPS)
    engine.set_proposer("head", head)
    completions = engine.generate(prompts, params)
    assert [c.token_ids for c in completions] == [a.token_ids for a in plain]
    served = SpeculationStats()
    for completion in completions:
        served.merge(completion.stats)
    assert simulated.acceptance_length > 1.5
    assert simulated.acceptance_length == pytest.approx(served.acceptance_length, rel=1e-6)
