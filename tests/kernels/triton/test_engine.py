"""The engine on the Triton kernels, in the interpreter: equal token ids without drafts, with chains and with trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import triton as switch
from kernels.triton.attention import TritonAttention
from tests.lossless.conftest import make_small_engine  # noqa: F401
from tests.lossless.plain import GREEDY, SAMPLED, ids

PROMPTS = [[7, 8, 9], list(range(20, 38))]
PARAMS = [replace(GREEDY, max_tokens=4), replace(SAMPLED, max_tokens=4)]


@pytest.fixture
def kernels_used(monkeypatch):
    """Run the engine on Triton, as on a GPU; the kinds of step for which attention was planned."""
    monkeypatch.setenv(switch.SWITCH, "triton")
    monkeypatch.setattr("infer.engine.core.probe_exactness", lambda *parts: None)  # minutes in the interpreter
    kinds = set()

    class Seen(TritonAttention):
        def __init__(self, rows, *sizes):
            kinds.add("tree" if rows.tree_mask is not None else "rows")
            super().__init__(rows, *sizes)

    monkeypatch.setattr("kernels.triton.attention.TritonAttention", Seen)
    return kinds


def test_speculation_changes_no_token(kernels_used, make_small_engine):  # noqa: F811
    plain = make_small_engine(torch.float32, "none", max_batch=1, threads=1)
    expected = [ids(plain.generate([prompt], params))[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    # accepted chains, and trees with graphs
    drafts = {"draft_model": None, "head": {"tree": "beam:3x4:6"}}
    graphs = {"draft_model": {}, "head": {"graphs": "on"}}
    for proposer, shape in drafts.items():
        engine = make_small_engine(
            torch.float32, proposer, shape, threads=1, prefill_chunk=16, max_batch=2, **graphs[proposer]
        )
        completions = engine.generate(PROMPTS, PARAMS)
        assert ids(completions) == expected
        assert all(completion.stats.drafted > 0 for completion in completions)
        if proposer == "draft_model":
            assert all(completion.stats.accepted > 0 for completion in completions)
    assert kernels_used == {"rows", "tree"}
