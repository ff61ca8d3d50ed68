"""Plans the memory of serving before it is allocated: weights, KV pool, workspace of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infer.config import EngineConfig
from infer.kvcache.tensors import LayerShape, kv_dtype
from infer.options.engine_sizes import EngineSizes
from models.config import TargetConfig
from models.layers import Linear, PackedEmbedding

MIB = 2**20
SPARE = 0.1  # share of free memory left for everything that is not planned here


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of this process, rank 0 of `ranks`, in bytes. `pages`: KV pool pages of `page_size` tokens each."""

    weights: int
    kv: int
    workspace: int
    pages: int
    ranks: int = 1

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("KV", self.kv), ("workspace", self.workspace))
        text = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in parts)
        return text if self.ranks == 1 else f"{text} (rank 0 of {self.ranks})"


def plan_memory(
    config: EngineConfig,
    target: TargetConfig,
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    *,
    sizes: EngineSizes,
    weights: int,
    free: int | None,
) -> MemoryPlan:
    """Plan the size of the KV pool.

    `free`: bytes that may still be allocated once the weights are loaded; None if unknown. The pool holds
    `sizes.cache_tokens`, or what fits. Raises ValueError if engine.max_tokens_in_cache, or even one page, does not fit.
    """
    per_value = kv_dtype(config.kv_dtype, dtype).itemsize
    per_page = config.page_size * per_value * sum(2 * shape.kv_heads * shape.head_dim for shape in layers)
    workspace, tokens = workspace_bytes(sizes.max_rows, target, dtype), sizes.cache_tokens
    pages = -(-tokens // config.page_size)
    if free is not None:
        fitting = int((free * (1 - SPARE) - workspace) // per_page) - 1  # less the null block
        if fitting < 1 or (config.max_tokens_in_cache and pages > fitting):
            left = "free" if config.memory_share is None else f"left of engine.memory_share={config.memory_share}"
            raise ValueError(
                f"engine.max_tokens_in_cache={tokens}: its KV needs {pages * per_page / MIB:.0f} MiB and a step "
                f"{workspace / MIB:.0f} MiB, but {free / MIB:.0f} MiB are {left}; "
                + (f"{fitting * config.page_size} tokens would fit" if fitting > 0 else "use a smaller model or dtype")
            )
        pages = min(pages, fitting)
    return MemoryPlan(weights, (pages + 1) * per_page, workspace, pages, config.tensor_parallel)


def workspace_bytes(rows: int, target: TargetConfig, dtype: torch.dtype) -> int:
    """Return a generous bound on what a forward of `rows` rows holds at once: a layer's activations and fp32 logits."""
    widest = max(2 * target.intermediate_size, (target.num_heads + 2 * target.num_kv_heads) * target.head_dim)
    return rows * (4 * target.hidden_size * dtype.itemsize + 2 * widest * dtype.itemsize + 2 * 4 * target.vocab_size)


def weight_bytes(*modules: nn.Module) -> int:
    """Return the bytes of all parameters, packed ones included; a shared tensor counts once."""
    seen: dict[int, int] = {}
    for module in modules:
        for child in module.modules():
            if isinstance(child, (Linear, PackedEmbedding)) and child.packed is not None:
                seen[id(child.packed)] = child.packed.bytes
            for parameter in child.parameters(recurse=False):
                seen[parameter.data_ptr()] = parameter.numel() * parameter.element_size()
    return sum(seen.values())
