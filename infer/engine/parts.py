"""The parts of an engine around its KV pool, which are built together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infer.config import EngineConfig
from infer.devices import memory_left
from infer.kvcache.hybrid import HybridPool
from infer.kvcache.memory import (
    DeviceFacts,
    EngineSizes,
    MemoryPlan,
    engine_sizes,
    plan_memory,
    weight_bytes,
    workspace_bytes,
)
from infer.kvcache.pool import KVPool
from infer.processes.target_worker import Shard
from infer.speculation.proposers.head import ModelProposer
from infer.steps.runner import Runner
from infer.steps.scheduler import Scheduler


class Parts(NamedTuple):
    sizes: EngineSizes
    memory: MemoryPlan
    pool: KVPool
    runner: Runner
    scheduler: Scheduler


def build_parts(config: EngineConfig, context: int, shard: Shard, drafters: Sequence[ModelProposer]) -> Parts:
    """Build the pool for the KV layers of the target and then of the drafters, and what addresses it.

    `context`: tokens of the longest request.
    """
    target, device, dtype = shard.target, shard.device, shard.dtype
    draft_layers = [layer for drafter in drafters for layer in drafter.needs.kv_layers]
    weights = weight_bytes(target, *(drafter.module for drafter in drafters))
    free = memory_left(config, device, shard.free(), weights)
    facts = DeviceFacts(device.type, free, workspace_bytes(1, target.config, dtype))
    sizes = engine_sizes(config, context, facts)
    shapes = [*shard.layer_shapes, *draft_layers]
    models = [target.config, *(drafter.hybrid for drafter in drafters if drafter.hybrid is not None)]
    memory = plan_memory(config, models, shapes, dtype, sizes=sizes, weights=weights, free=free)
    layers = shard.allocate(memory.pages, config.page_size, draft_layers, state_slots=memory.states.slots)
    make_pool, first = (HybridPool if memory.states.slots else KVPool), len(shapes) - len(draft_layers)
    pool = make_pool(layers, max_requests=config.max_batch, max_positions=context)
    for drafter in drafters:
        drafter.attach(pool, first, memory.states.draft_slots)
        first += len(drafter.needs.kv_layers)
    limits = {"max_rows": sizes.max_rows, "prefill_chunk": sizes.prefill_chunk}
    return Parts(sizes, memory, pool, Runner(shard, pool), Scheduler(pool, max_batch=config.max_batch, **limits))
