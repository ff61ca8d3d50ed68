"""How many rows a step has and how many tokens the KV cache holds, where the configuration leaves it to the device.

On a GPU with much free memory prompts are read in longer chunks, so that their products use the tensor cores, and the
cache holds a context for every request. Elsewhere the sizes are those of a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

from infer.config import EngineConfig
from models.config import TargetConfig

GIB = 2**30
ROWS, MOST_ROWS = 512, 4096  # of a step: the default, and the most that pays on a GPU
CACHE_TOKENS = 65536  # the default cache where memory is not plentiful
LARGE = 40 * GIB  # free memory from which on a GPU's sizes follow from it: GPUs of 80 GB and more
ROWS_SHARE = 0.05  # of the free memory for the activations of a step


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
        raise ValueError(
            f"engine.max_model_len={wanted}: the model's context is {most} tokens, which this only shortens; a longer "
            f'one needs a rope scaling by name in config.json: "rope_scaling": {{"rope_type": "yarn", "factor": '
            f'{-(-wanted // most)}, "original_max_position_embeddings": {most}}}'
        )
    return wanted or most
