"""Plans an engine's sizes and memory before anything is allocated: rows of a step, weights, KV pool, workspace.

What the configuration leaves open follows from the device. On a GPU with much free memory prompts are read in longer
chunks, so that their products use the tensor cores, and the cache holds a context for every request. Elsewhere the
sizes are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from infer.config import EngineConfig
from infer.kvcache.states import NO_STATES, StatePlan, plan_states
from infer.kvcache.tensors import kv_dtype
from kernels.attention import LayerShape
from models.config import TargetConfig
from models.layers import Linear, PackedEmbedding

MIB, GIB = 2**20, 2**30
ROWS, MOST_ROWS = 512, 4096  # of a step: the default, and the most that pays on a GPU
CACHE_TOKENS = 65536  # the default cache where memory is not plentiful
LARGE = 40 * GIB  # free memory from which on a GPU's sizes follow from it: GPUs of 80 GB and more
ROWS_SHARE = 0.05  # of the free memory for the activations of a step
SPARE = 0.1  # share of free memory left for everything that is not planned here


class DeviceFacts(NamedTuple):
    """What sizes follow from, in bytes, once the weights are loaded."""

    kind: str  # "cpu", "cuda"
    free: int | None  # memory that can still be allocated; None if unknown
    per_row: int  # a generous bound on what a row of a step needs


class EngineSizes(NamedTuple):
    prefill_chunk: int  # prompt tokens of one request per step
    max_rows: int  # rows of one target forward; batches whose verifies have more are not captured as CUDA graphs
    cache_tokens: int  # KV pool, if so much fits

    def __str__(self) -> str:
        return f"up to {self.max_rows} rows, {self.prefill_chunk} of a prompt"


def engine_sizes(config: EngineConfig, context: int, facts: DeviceFacts) -> EngineSizes:
    """Return the sizes of an engine: what `config` sets, else what suits the device.

    `context`: tokens of the longest request.
    """
    large = facts.kind == "cuda" and facts.free is not None and facts.free >= LARGE
    rows, bound = ROWS, CACHE_TOKENS if config.memory_share is None else config.max_batch * context
    if large and facts.free is not None:
        fitting = int(facts.free * ROWS_SHARE) // facts.per_row
        rows = max(ROWS, min(MOST_ROWS, 1 << fitting.bit_length() - 1)) if fitting else ROWS
        bound = config.max_batch * context
    chunk = config.prefill_chunk or (rows // 2 if config.max_rows is None else min(rows // 2, config.max_rows))
    tokens = config.max_tokens_in_cache or max(context, min(config.max_batch * context, bound))
    return EngineSizes(chunk, config.max_rows or max(rows, chunk, config.max_batch), tokens)


def context_of(config: EngineConfig, target: TargetConfig) -> int:
    """Return the tokens of the longest request. Raises ValueError for more than the target has positions for."""
    wanted, most = config.max_model_len, target.max_position_embeddings
    if wanted is not None and wanted > most:
        longer = (
            "a longer one needs a rope scaling by name in config.json: "
            f'"rope_scaling": {{"rope_type": "yarn", "factor": '
            f'{-(-wanted // most)}, "original_max_position_embeddings": {most}}}'
        )
        if target.learned_positions:
            longer = "it has learned a vector for each of these positions, and none for more"
        elif target.unrotated:
            longer = "it knows no positions: for longer texts raise max_position_embeddings in config.json"
        raise ValueError(
            f"engine.max_model_len={wanted}: the model's context is {most} tokens, which this only shortens; {longer}"
        )
    return wanted or most


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of this process, rank 0 of `ranks`, in bytes. `pages`: KV pool pages of `page_size` tokens each."""

    weights: int
    kv: int
    workspace: int
    pages: int
    ranks: int = 1
    states: StatePlan = NO_STATES  # of recurrent layers

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV": self.kv, "states": self.states.bytes, "workspace": self.workspace}
        text = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in parts.items() if size or name != "states")
        return text if self.ranks == 1 else f"{text} (rank 0 of {self.ranks})"


def plan_memory(
    config: EngineConfig,
    models: Sequence[TargetConfig],
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    *,
    sizes: EngineSizes,
    weights: int,
    free: int | None,
) -> MemoryPlan:
    """Plan the size of the KV pool.

    `models`: the target, and a hybrid that drafts. `free`: bytes left beside the weights; None if unknown. The pool
    holds `sizes.cache_tokens`, or what fits. Raises ValueError if engine.max_tokens_in_cache or one page does not.
    """
    per_value = kv_dtype(config.kv_dtype, dtype).itemsize
    per_page = config.page_size * per_value * sum(shape.vectors * shape.kv_heads * shape.head_dim for shape in layers)
    workspace, tokens = workspace_bytes(sizes.max_rows, models[0], dtype), sizes.cache_tokens
    pages, states = -(-tokens // config.page_size), plan_states(config, models, dtype)
    if free is not None:
        fitting = int((free * (1 - SPARE) - workspace - states.bytes) // per_page) - 1  # less the null block
        if fitting < 1 or (config.max_tokens_in_cache and pages > fitting):
            left = "free" if config.memory_share is None else f"left of engine.memory_share={config.memory_share}"
            raise ValueError(
                f"engine.max_tokens_in_cache={tokens}: its KV needs {pages * per_page / MIB:.0f} MiB and a step "
                f"{workspace / MIB:.0f} MiB{states}, but {free / MIB:.0f} MiB are {left}; "
                + (f"{fitting * config.page_size} tokens would fit" if fitting > 0 else "use a smaller model or dtype")
            )
        pages = min(pages, fitting)
    return MemoryPlan(weights, (pages + 1) * per_page, workspace, pages, config.tensor_parallel, states)


def workspace_bytes(rows: int, target: TargetConfig, dtype: torch.dtype) -> int:
    """Return a generous bound on what a forward of `rows` rows holds at once: a layer's activations and fp32 logits."""
    widest = max(2 * target.intermediate_size, target.attention_width)
    hidden = target.hidden_size * (4 * dtype.itemsize + 2 * 4)  # the residual stream is fp32
    return rows * (hidden + 2 * widest * dtype.itemsize + 2 * 4 * target.vocab_size)


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
