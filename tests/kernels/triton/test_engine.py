"""The engine on the Triton kernels, in the interpreter: token ids with and without drafts, in chains and in trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import triton as switch
from tests.lossless.conftest import make_small_engine  # noqa: F401
from tests.lossless.plain import GREEDY, SAMPLED, ids

PROMPTS = [[7, 8, 9] * 4, list(range(20, 51)), [3]]


@pytest.fixture
def in_triton(monkeypatch):
    monkeypatch.setenv(switch.SWITCH, "triton")
    monkeypatch.setattr("infer.engine.probe_exactness", lambda *parts: None)  # minutes in the interpreter


@pytest.mark.parametrize("shape", [None, {"tree_width": 3, "tree_nodes": 7}])
def test_speculation_changes_no_token(in_triton, make_small_engine, shape):  # noqa: F811
    plain = make_small_engine(torch.float32, "none", max_batch=1, threads=1)
    engine = make_small_engine(torch.float32, "head", shape, threads=1, prefill_chunk=16)
    for params in (replace(GREEDY, max_tokens=8), replace(SAMPLED, max_tokens=8)):
        expected = [ids(plain.generate([prompt], params))[0] for prompt in PROMPTS]
        completions = engine.generate(PROMPTS, params)
        assert ids(completions) == expected
        assert sum(completion.stats.drafted for completion in completions) > 0
