"""Memory estimate of a run by part, from the sizes of target and head; no weight is loaded.

A step's activations come on top, and what no configuration key changes: Python and torch, 0.6 GB on a CPU.
Whether they fit an update shows, which check=true tries; if not, `out_of_memory` names the keys that need less.
"""

from __future__ import annotations

from infer.kvcache.tensors import kv_dtype
from models.config import ATTENTION
from models.heads.base import Head
from models.layers import Linear
from models.targets.llama import LlamaTarget
from train.config import WHOLE, TrainConfig
from train.features.online import feature_bytes, fits_cache
from train.preparation.models import pool_for, processes

GB = 1e9
VALUE, STATE = 4, 16  # bytes of a trained parameter: its value in fp32; with gradient and Adam's two moments
NARROW = {"int8": 1.0, "fp8": 1.0, "int4": 0.53}  # bytes of a quantized weight, int4 with the scales of groups of 128
CURES = {
    "target": "model.dtype=bfloat16, engine.tensor_parallel=, features.target=sharded with more processes, a smaller "
    "target, engine.weights=int8 or int4",
    "KV": "a smaller engine.max_tokens_in_cache, engine.max_batch or data.max_prompt_tokens, engine.kv_dtype=fp8",
    "head and optimiser": "a smaller head.draft_vocab_size or head, parallel=fsdp with more processes",
    "features": "features.cache_gb=0 or features=offline, or a smaller batch_size",
    "step": "a smaller batch_size with accumulate=, a smaller sequence_length or head.draft_vocab_size, "
    "objective.checkpointing=true or objective.fused=true",
}
SIGNS = "out of memory", "ALLOC_FAILED", "DefaultCPUAllocator", "Cannot allocate memory"  # of CUDA, torch, the system


def memory_parts(config: TrainConfig, target: LlamaTarget, head: Head, tokens: int) -> dict[str, int]:
    """Return the bytes of this process by part, but activations; `tokens` is the total over all sequences."""
    sizes, item = target.config, kv_dtype(config.engine.kv_dtype, target.norm.weight.dtype).itemsize
    per_token = sizes.cached_numbers(config.engine.tensor_parallel) * sizes.count(ATTENTION) * item
    trained, frozen = parameters(head)
    divided = 1 if config.parallel.name in WHOLE else processes()
    kept = features_in_memory(config, target, head, tokens)
    return {
        "target": target_bytes(target, config),
        "KV": (pool_for(config).max_tokens_in_cache or 0) * per_token,
        "head and optimiser": (trained * STATE + frozen * VALUE) // divided,
        "features": kept + feature_bytes(target, head.config.aux_layers, config.batch_size * config.sequence_length),
    }


def target_bytes(target: LlamaTarget, config: TrainConfig) -> int:
    """Return this process's bytes: linear layers are sharded over ranks or processes, and quantized."""
    item, linear = target.norm.weight.element_size(), {m.weight for m in target.modules() if isinstance(m, Linear)}
    numbers = sum(weight.numel() for weight in linear)
    rest = max(sum(p.numel() for p in target.parameters()) - numbers, target.embed_tokens.weight.numel())  # if tied
    ranks = processes() if config.features.target == "sharded" else config.engine.tensor_parallel
    return int(numbers * NARROW.get(config.engine.weight_format, item)) // ranks + rest * item


def features_in_memory(config: TrainConfig, target: LlamaTarget, head: Head, tokens: int) -> int:
    """Return the bytes of the in-memory feature cache over all sequences; 0 if there is none."""
    cached = fits_cache(config.features, target, head.config.aux_layers, tokens)
    return feature_bytes(target, head.config.aux_layers, tokens) if cached else 0


def parameters(head: Head) -> tuple[int, int]:
    """Return the numbers of trained and of frozen parameters."""
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    return trained, sum(p.numel() for p in head.parameters()) - trained


def out_of_memory(error: Exception) -> str | None:
    """Return a message that names the keys which lower what a run needs; None for any other error."""
    reason = (str(error) or "in Python").splitlines()[0]
    if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in SIGNS):
        return None
    cures = "; ".join(f"for the {part}, {cure}" for part, cure in reversed(CURES.items()))
    return f"out of memory ({reason}). What needs less: {cures}"
