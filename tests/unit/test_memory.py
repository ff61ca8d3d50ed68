"""Memory is planned before allocation: the default pool shrinks to fit, a configured one that does not is refused."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from infer.config import EngineConfig
from infer.engine import Engine
from infer.kvcache.memory import GIB, MIB, DeviceFacts, engine_sizes, plan_memory, weight_bytes, workspace_bytes
from infer.kvcache.pool import KVPool
from infer.kvcache.tensors import KVLayers
from kernels.attention import LayerShape
from kernels.copies import read_slots, write_kv
from models.config import TargetConfig
from models.layers import pack
from models.targets import load_target

LAYERS = [LayerShape(2, 16)] * 4
PER_PAGE = 16 * 4 * 4 * 2 * 2 * 16


def plan(target, free=None, context=512, **config):
    sizes = TargetConfig.from_json(target.config_json | {"max_position_embeddings": context})
    engine, per_row = EngineConfig(**config), workspace_bytes(1, sizes, torch.float32)
    steps = engine_sizes(engine, context, DeviceFacts("cpu", free, per_row))
    return plan_memory(engine, [sizes], LAYERS, torch.float32, sizes=steps, weights=7, free=free)


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
    slots = (engine.memory.pages + 1) * small.page_size
    assert slots * sum(cache[:, :, 0].nbytes for cache in engine._pool.layers.caches) == engine.memory.kv
    assert engine.memory.weights > weight_bytes(target)  # it includes the head's
    monkeypatch.setattr("infer.processes.target_worker.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"engine\.max_tokens_in_cache"):
        Engine(load_target(str(tiny_target_folder)))


LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
QWEN_HALF_B = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("sizes", "vocab_size", "gpu", "weights", "expected"),
    [  # GiB of the GPU and of the weights -> rows of a prompt, rows of a step, tokens in the cache
        (QWEN_HALF_B, 151936, 24, 1, (256, 512, 65536)),
        (LLAMA_8B, 128256, 24, 15, (256, 512, 65536)),
        (QWEN_HALF_B, 151936, 80, 1, (1024, 2048, 32 * 32768)),
        (LLAMA_8B, 128256, 80, 15, (1024, 2048, 32 * 32768)),
        (LLAMA_70B, 128256, 80, 37, (512, 1024, 32 * 32768)),  # in 4 bits
        (LLAMA_70B, 128256, 80, 42, (256, 512, 65536)),  # what is left is not much
        (QWEN_HALF_B, 151936, 141, 1, (2048, 4096, 32 * 32768)),
        (LLAMA_8B, 128256, 141, 15, (2048, 4096, 32 * 32768)),
        (LLAMA_70B, 128256, 141, 66, (1024, 2048, 32 * 32768)),  # in 8 bits
    ],
)
def test_sizes_follow_from_what_a_gpu_has_free(target, sizes, vocab_size, gpu, weights, expected):
    config = TargetConfig.from_json(target.config_json | sizes | {"vocab_size": vocab_size})
    free, context = (gpu - weights - 1) * GIB, 32768
    facts = DeviceFacts("cuda", free, workspace_bytes(1, config, torch.bfloat16))
    assert engine_sizes(EngineConfig(), context, facts) == expected
    assert expected[1] * facts.per_row < 0.1 * free
    assert engine_sizes(EngineConfig(), context, facts._replace(kind="cpu")) == (256, 512, 65536)
    assert engine_sizes(EngineConfig(), context, facts._replace(free=None)) == (256, 512, 65536)
    chosen = EngineConfig(prefill_chunk=300, max_rows=400, max_tokens_in_cache=5000)
    assert engine_sizes(chosen, context, facts) == (300, 400, 5000)


def test_sizes_that_are_left_open_fit_those_that_are_not():
    facts = DeviceFacts("cuda", 64 * GIB, 2**20)
    assert engine_sizes(EngineConfig(max_rows=100), 512, facts)[:2] == (100, 100)
    assert engine_sizes(EngineConfig(prefill_chunk=9000), 512, facts)[:2] == (9000, 9000)
    assert engine_sizes(EngineConfig(max_batch=600), 512, DeviceFacts("cpu", None, 2**20))[:2] == (256, 600)
    with pytest.raises(ValueError, match=r"engine\.max_rows=100: must hold engine\.prefill_chunk=300 rows"):
        EngineConfig(prefill_chunk=300, max_rows=100)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory as Linux counts it")
def test_the_cache_takes_memory_for_the_tokens_in_it():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    shape = LayerShape(3, 64)
    kv = KVLayers(
        [shape] * 31, tree_layers=30, num_pages=4096, page_size=16, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    pool = KVPool(kv, max_requests=2, max_positions=2048)
    taken = pool.pages.take(100)
    slots = torch.tensor([page * 16 + offset for page in taken for offset in range(16)])
    keys = torch.randn(31, len(slots), 3, 64).bfloat16()
    values, before = -keys, resident()
    for cache, each, other in zip(kv.caches, keys, values, strict=True):
        write_kv(cache, slots, each, other)
    assert resident() - before < 80 * MIB  # 2048 tokens of 23 KiB, where one huge page of each head is 372 MiB
    for cache, each in zip(kv.caches, keys, strict=True):
        assert read_slots(cache, slots).equal(torch.stack([each, -each]).transpose(1, 2))
    (last,) = pool.pages.take(3996)[-1:]
    kv.copy(taken[0] * 16, last * 16, 16)
    assert all(cache[:, :, last * 16 :][:, :, :16].equal(cache[:, :, slots[:16]]) for cache in kv.caches)


def test_page_ids_do_not_depend_on_the_drafters_layers():
    """A rank without the drafter is told the pages of one that has it."""

    def layers(*drafter: LayerShape) -> KVLayers:
        shapes = [LayerShape(1, 16)] * 2 + list(drafter)
        sizes = {"num_pages": 300, "page_size": 16, "dtype": torch.float32, "device": torch.device("cpu")}
        return KVLayers(shapes, tree_layers=2, **sizes)

    wide = layers(LayerShape(7, 16), LayerShape(2, 16))
    assert wide.page_ids == layers().page_ids
    slots = torch.tensor([page * 16 for page in wide.page_ids])
    written = [torch.randn(len(slots), cache.shape[1], 16) for cache in wide.caches]
    for cache, each in zip(wide.caches, written, strict=True):
        write_kv(cache, slots, each, -each)
    for cache, each in zip(wide.caches, written, strict=True):
        assert read_slots(cache, slots).equal(torch.stack([each, -each]).transpose(1, 2))
