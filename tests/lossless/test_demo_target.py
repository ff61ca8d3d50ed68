"""Losslessness on real text: held-out prompts of the demo target; no drafts, n-gram and a head; fp32 and bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.config import EngineConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.demo.corpus import held_out_prompts
from models.heads.eagle3.config import Eagle3Options
from models.heads.eagle3.head import Eagle3Head
from models.heads.weights import initialize, set_vocabulary
from models.targets import load_target
from models.tokenizer import Tokenizer
from models.vocab import build_draft_vocab

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
MODES = [
    SamplingParams(max_tokens=32),
    SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=11),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identical_token_ids_on_held_out_prompts(dtype):
    target = load_target(str(DEMO), dtype=dtype)
    config = Eagle3Options(draft_vocab_size=1024).for_target(target.config)
    head = Eagle3Head(config)
    set_vocabulary(head, *build_draft_vocab(torch.arange(target.config.vocab_size).flip(0), 1024, [0]))
    initialize(head, target, from_target=True)
    tokenizer = Tokenizer.load(DEMO)
    engine = Engine(target, tokenizer=tokenizer, head=head, proposer="none", config=EngineConfig(max_batch=8))
    prompts = held_out_prompts(tokenizer, 8, 48)
    for params in MODES:
        engine.set_proposer("none")
        expected = [engine.generate([prompt], params)[0] for prompt in prompts]
        texts = {completion.text for completion in expected}
        assert len(texts) == len(prompts), "prompts that all continue alike would test one thing"
        for proposer in ("none", "ngram", "head"):
            engine.set_proposer(proposer)
            together = engine.generate(prompts, params)
            assert [c.token_ids for c in together] == [c.token_ids for c in expected]
            assert [c.text for c in together] == [c.text for c in expected]
        for proposer in ("ngram", "head"):
            engine.set_proposer(proposer)
            alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
            assert alone == [c.token_ids for c in expected]


def test_the_demo_fits_its_promises():
    from transformers import AutoModelForCausalLM

    assert (DEMO / "model.safetensors").stat().st_size <= 34 * 10**6
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    assert 10e6 <= model.num_parameters() <= 18e6
    assert model.config.num_hidden_layers >= 12
    assert model.config.max_position_embeddings >= 1024
    assert model.config.tie_word_embeddings
