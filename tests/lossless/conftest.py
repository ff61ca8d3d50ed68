from __future__ import annotations

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from models.heads import load_head
from models.targets import load_target


@pytest.fixture(scope="session")
def make_engine(tiny_target_folder, tiny_head_folder, make_target_folder):
    """`make_engine(dtype, proposer, **engine config)`; the tiny target stops at no token, so lengths are its own.

    `draft_model`: "same" drafts with the target itself, which is always right in greedy choice, "other" with another.
    """

    def make(dtype=torch.float32, proposer="head", drafts=4, shape=None, draft_model=None, tokenizer=None, **config):
        target = load_target(str(tiny_target_folder), dtype=dtype)
        smaller = None
        if draft_model is not None:
            folder = tiny_target_folder if draft_model == "same" else make_target_folder(seed=11, num_hidden_layers=1)
            smaller = load_target(str(folder), dtype=dtype)
        head = load_head(tiny_head_folder, dtype=dtype, target=target)
        drafting = ProposerConfig(name="auto", max_draft_tokens=drafts, ngram_min=1, ngram_max=3, **(shape or {}))
        return Engine(
            target,
            tokenizer=tokenizer,
            head=head,
            draft_model=smaller,
            proposer=proposer,
            config=EngineConfig(**config),
            proposer_config=drafting,
        )

    return make


@pytest.fixture(scope="session")
def prompts():
    """Lengths around the page (16), the tile (256) and the chunk; some repeat themselves, so that n-grams match."""
    generator = torch.Generator().manual_seed(0)
    cut = [torch.randint(1, 384, (n,), generator=generator).tolist() for n in (1, 2, 15, 16, 17, 70, 255, 256, 300)]
    return [*cut, [5, 6, 7] * 12, [9] * 40]
