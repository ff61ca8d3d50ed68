"""Heads on targets unlike Llama: training and serving agree.

Gemma scales its embedding for its own layers only; OPT and GPT-BigCode add learned positions, of which heads see none.
"""

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
from tests.unit.reference import randomise_biases_and_norms
from train.acceptance import simulate
from train.data.sequences import Sequences
from train.features.online import compute_features

BORROWING = "eagle, the target's embedding"
LEARNED = {
    "opt": ("OPTConfig", {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 6, "init_std": 0.2}),
    "gpt bigcode": ("GPTBigCodeConfig", {"n_embd": 64, "n_inner": 96, "n_layer": 6, "initializer_range": 0.2}),
}


@pytest.fixture(params=["gemma", *LEARNED])
def folder(request: pytest.FixtureRequest, gemma_folder: Path, tmp_path: Path) -> Path:
    if request.param == "gemma":
        return gemma_folder
    import transformers

    torch.manual_seed(5)
    kind, options = LEARNED[request.param]
    sizes = {"vocab_size": 384, "num_attention_heads": 4, "max_position_embeddings": 512, "eos_token_id": 0}
    config = getattr(transformers, kind)(**sizes | {"bos_token_id": 0} | options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    randomise_biases_and_norms(tmp_path)
    return tmp_path


@pytest.mark.parametrize("variant", [BORROWING, "eagle3"])
def test_a_head_drafts_as_it_was_trained(variant: str, folder: Path) -> None:
    head = make_head(load_target(str(folder)), variant)
    limits = EngineConfig(max_tokens_in_cache=2048, max_batch=8)
    drafts = ProposerConfig(name="head", max_draft_tokens=STEPS)
    engine = Engine(load_target(str(folder)), proposer="none", config=limits, proposer_config=drafts)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 384, (6 + 4 * index,), generator=generator).tolist() for index in range(4)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = engine.generate(prompts, params)
    rows = [(a.prompt_ids + a.token_ids, [False] * len(a.prompt_ids) + [True] * len(a.token_ids)) for a in plain]
    responses = Sequences.of(rows)
    memorise(head, engine.target, responses, STEPS, rounds=80)
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
