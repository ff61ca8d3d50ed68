"""A block drafter's draft: how many torch operations it takes, and the same drafts without C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from infer.speculation.proposers.draft_loops.base import Unread
from kernels import walk
from kernels.cpu.library import library
from models.decoder import FusedDecoder
from models.targets import load_target
from tests.conftest import MakeTarget
from tests.heads import make_head
from tests.operations import counted

DEPTH = 5
CHAIN: dict[str, Any] = {"max_draft_tokens": DEPTH}
TREE: dict[str, Any] = {"tree": "beam:4x5:16"}
KINDS = {
    "dflash": {},
    "dspark": {},
    "dspark, gated": {},
    "dspark, rnn": {"draft_vocab_size": 208},
    "dflash2": {"num_layers": 2},
}
# Torch operations of a draft of two requests: a chain of any length, a tree of 4 x 5. Before the walk a chain of 5
# took 39, 64 and 137.
OPERATIONS = {"dflash": (36, 119), "dspark": (43, 140), "dflash2": (44, 141)}
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(make_target_folder: MakeTarget) -> MakeEngine:
    folder = make_target_folder(seed=6, num_attention_heads=2, num_key_value_heads=1)  # head size 32, as C needs

    def engine_for(kind: str, shape: dict[str, Any], dtype: torch.dtype = torch.float32) -> Engine:
        head = make_head(load_target(str(folder)), kind, **KINDS[kind])
        return Engine(
            load_target(str(folder), dtype=dtype),
            head=head.to(dtype),
            proposer="head",
            config=EngineConfig(prefill_chunk=16, max_rows=64, max_batch=4, threads=1),
            proposer_config=ProposerConfig(name="head", **shape),
        )

    return engine_for


def drafting(engine: Engine, requests: int = 2) -> Unread:
    """Run requests until all decode; return what the head has not read of them."""
    for row in range(requests):
        params = SamplingParams(max_tokens=40, temperature=0.8 * (row % 2 == 0), seed=7 + row, ignore_eos=True)
        engine.add(torch.arange(5 + 9 * row).tolist(), params)
    for _ in range(6):
        engine.step()
    running = list(engine._scheduler.running)
    assert len(running) == requests
    proposer = engine._head
    assert proposer is not None
    return proposer._unread_rows(running, [request.drafter.kept for request in running], DEPTH)


def draft(engine: Engine, unread: Unread, depth: int = DEPTH) -> Any:
    proposer = engine._head
    assert proposer is not None
    if proposer.shape is not None:
        return proposer.loop.tree(unread, proposer.shape, depth)
    return proposer.loop.chain(unread, torch.full((len(unread.root),), depth), depth)


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_draft_is_few_operations(make: MakeEngine, kind: str) -> None:
    counts = list[int]()
    for shape, depth in ((CHAIN, DEPTH), (CHAIN, 2), (TREE, DEPTH)):
        engine = make(kind, shape)
        unread = drafting(engine)
        with torch.inference_mode():
            draft(engine, unread, depth)  # makes tables
            with counted() as operations:
                draft(engine, unread, depth)
        counts.append(operations.total)
    deep, shallow, tree = counts
    assert abs(deep - shallow) <= 1  # fewer depths than the block has are copied
    most_of_a_chain, most_of_a_tree = OPERATIONS[kind]
    assert deep <= most_of_a_chain
    assert tree <= most_of_a_tree


@pytest.mark.parametrize("shape", [CHAIN, TREE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_without_c_it_drafts_the_same(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, shape: dict[str, Any]
) -> None:
    """The walk and the fused decoder, with convolutions, against the operations that they join."""
    engine = make(kind, shape, dtype)
    unread = drafting(engine, 3)
    with torch.inference_mode():
        fused = draft(engine, unread)
        monkeypatch.setattr(walk, "fused_walk", lambda *parts: None)
        monkeypatch.setattr(FusedDecoder, "over", lambda *parts, **options: None)
        again = draft(engine, unread)
    if shape is CHAIN:
        assert torch.equal(fused.length, again.length)
    if dtype is torch.float32:
        assert torch.equal(fused.token, again.token)
    if shape is TREE:
        finite = fused.score > -torch.inf
        tolerance = 1e-4 if dtype is torch.float32 else 0.3
        torch.testing.assert_close(
            fused.score[finite].sort().values, again.score[finite].sort().values, atol=tolerance, rtol=tolerance
        )
