"""Memory is planned before allocation: the default pool shrinks to fit, a configured one that does not is refused."""

from __future__ import annotations

import pytest
import torch

from infer.config import EngineConfig
from infer.engine import Engine
from infer.kvcache.memory import MIB, plan_memory, weight_bytes, workspace_bytes
from infer.kvcache.tensors import LayerShape
from models.config import TargetConfig
from models.layers import pack
from models.targets import load_target

LAYERS = [LayerShape(2, 16)] * 4
PER_PAGE = 16 * 4 * 4 * 2 * 2 * 16


def plan(target, free=None, context=512, **config):
    sizes = TargetConfig.from_json(target.config_json | {"max_position_embeddings": context})
    return plan_memory(EngineConfig(**config), sizes, LAYERS, torch.float32, weights=7, free=free)


@pytest.fixture
def target(tiny_target_folder):
    from models.config import read_json

    loaded = load_target(str(tiny_target_folder))
    loaded.config_json = read_json(tiny_target_folder / "config.json")
    return loaded


def test_the_default_pool_holds_a_batch_of_contexts_within_bounds(target):
    assert plan(target, context=1024).pages == 32 * 1024 // 16
    assert plan(target, context=8192).pages == 65536 // 16  # at the upper bound
    assert plan(target, context=131072).pages == 131072 // 16  # but one request must fit
    assert plan(target, max_tokens_in_cache=100).pages == 7


def test_the_default_pool_shrinks_to_what_is_free(target):
    workspace = workspace_bytes(512, target.config, torch.float32)
    small = plan(target, free=workspace * 2 + 100 * PER_PAGE)
    assert small.pages < 1024
    assert small.kv + small.workspace < workspace * 2 + 100 * PER_PAGE
    assert small.kv == (small.pages + 1) * PER_PAGE
    assert str(small) == f"weights 0 MiB, KV {small.kv / MIB:.0f} MiB, workspace {workspace / MIB:.0f} MiB"


def test_a_wish_that_does_not_fit_is_refused_and_says_what_would(target):
    free = workspace_bytes(512, target.config, torch.float32) * 2 + 100 * PER_PAGE
    fitting = plan(target, free=free).pages * 16
    with pytest.raises(ValueError, match=rf"engine\.max_tokens_in_cache=50000: .* {fitting} tokens would fit"):
        plan(target, free=free, max_tokens_in_cache=50000)
    assert plan(target, free=free, max_tokens_in_cache=fitting).pages * 16 == fitting
    with pytest.raises(ValueError, match="smaller model"):
        plan(target, free=1000)


def test_weights_are_counted_once_packed_or_not(target):
    before = weight_bytes(target)
    assert before == sum(p.numel() * p.element_size() for p in target.parameters())
    pack(target)
    assert weight_bytes(target) == before


def test_the_engine_takes_what_it_planned(tiny_target_folder, tiny_head_folder, monkeypatch):
    from models.heads.files import load_head

    target = load_target(str(tiny_target_folder))
    small = EngineConfig(max_tokens_in_cache=4096)
    engine = Engine(target, head=load_head(tiny_head_folder, target=target), config=small)
    held = sum(cache.numel() * cache.element_size() for cache in engine._pool.layers.caches)
    assert held == engine.memory.kv
    assert engine.memory.weights > weight_bytes(target)  # it includes the head's
    monkeypatch.setattr("infer.parallel.target_worker.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"engine\.max_tokens_in_cache"):
        Engine(load_target(str(tiny_target_folder)))
