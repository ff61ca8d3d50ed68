"""What a run holds in memory, part by part, from the sizes of target and head; no weight is loaded.

Of full batches in which every token is learnt, which real ones are not. Without what no key changes: Python and torch,
0.6 GB on a CPU, and what an allocator holds back.
"""

from __future__ import annotations

from dataclasses import replace

from infer.kvcache.tensors import kv_dtype
from kernels.linear import reads_narrow
from kernels.quantise import narrow_bytes
from kernels.vocabulary import BLOCK_ELEMENTS
from models.heads.base import Head
from models.layers import Linear
from models.lora import linear_layers
from models.targets import LAYERS
from models.targets.llama import LlamaTarget
from models.targets.zero3 import shared_elements
from train.config import WHOLE, OnlineFeaturesConfig, TrainConfig
from train.features.online import feature_bytes
from train.objective_config import Medusa2ObjectiveConfig
from train.objectives import teacher
from train.planning.activations import meta_objective, rehearse
from train.planning.shapes import device_of, processes
from train.preparation import pool_for

GB = 1e9
VALUE, STATE = 4, 16  # bytes of a trained parameter: its value in fp32; with gradient and Adam's two moments
CURES = {
    "target": "model.dtype=bfloat16, engine.tensor_parallel=, features.target=sharded with more processes, a smaller "
    "target, engine.weights=int8 or int4",
    "KV": "a smaller engine.max_tokens_in_cache, engine.max_batch or data.max_prompt_tokens, engine.kv_dtype=fp8",
    "head and optimiser": "a smaller head.draft_vocab_size or head",
    "features": "features.cache_gb=0 or features=offline, or a smaller batch_size",
    "activations": "a smaller batch_size with accumulate=, a smaller sequence_length or head.draft_vocab_size, "
    "objective.checkpointing=true or objective.fused=true",
}


def memory_parts(config: TrainConfig, target: LlamaTarget, head: Head, tokens: int) -> dict[str, int]:
    """Bytes of this process by part; `tokens` of all sequences."""
    sizes, batch = target.config, config.batch_size * config.sequence_length
    item = kv_dtype(config.engine.kv_dtype, target.norm.weight.dtype).itemsize
    per_token = 2 * sizes.num_kv_heads * sizes.head_dim * sizes.num_layers * item
    cached = features_in_memory(config, target, head, tokens)
    return {
        "target": target_bytes(target, config) + copies_of_target(target, config),
        "KV": (pool_for(config).max_tokens_in_cache or 0) * per_token // config.engine.tensor_parallel,
        "head and optimiser": state_bytes(config, target, head),
        "features": cached + feature_bytes(target, head.config.aux_layers, batch),
        "activations": activation_bytes(config, target, head),
    }


def state_bytes(config: TrainConfig, target: LlamaTarget, head: Head) -> int:
    """The head with gradients and optimiser, as `parallel` divides it, and the copies of it."""
    trained, frozen = parameters(head)
    name, whole = config.parallel.name, trained + frozen
    if isinstance(config.objective, Medusa2ObjectiveConfig):
        trained += adapter_parameters(target, config.objective)
    held = trained * STATE + frozen * VALUE
    if name == "ddp":
        held += trained * VALUE  # what is exchanged lies beside the gradients
    elif name not in WHOLE:
        # gathered for a forward, its gradient before it is divided, and the whole copy that is measured and saved
        divided = held if name != "zero2" else trained * STATE
        held = divided // processes() + (2 * whole + trained) * VALUE
    item = target.norm.weight.element_size()
    return held + (whole * item if item != VALUE else 0)  # in the target's dtype while it is measured


def activation_bytes(config: TrainConfig, target: LlamaTarget, head: Head) -> int:
    """The most that a step holds at once: while the target runs, while its logits teach, or while the head learns."""
    sizes, item = target.config, target.norm.weight.element_size()
    rows, length = config.batch_size, config.sequence_length
    batch, vocabulary, draft = rows * length, sizes.vocab_size, head.config.draft_vocab_size
    wide = sizes.experts.active * sizes.experts.intermediate_size if sizes.experts else sizes.intermediate_size
    layer = batch * item * (3 * wide + 8 * sizes.hidden_size)
    chunk = 4 * 4 * vocabulary * min(batch, max(1, teacher.CHUNK_ELEMENTS // vocabulary))
    on_gpu = device_of(config).type == "cuda"
    if config.objective.fused is None and (on_gpu or getattr(config.features, "top_k", None)):
        config = replace(config, objective=replace(config.objective, fused=on_gpu))
    if meta_objective(config, target).native:
        teaching = item * (2 * min(vocabulary * batch, BLOCK_ELEMENTS) + draft * batch)
    else:
        teaching = chunk + (0 if config.objective.fused else 2 * 4 * draft * batch)
    learning = rehearse(config, target, rows, length)
    if on_gpu:  # its kernel holds no scores, which alone grow with the square of the length
        learning = min(learning, 2 * rehearse(config, target, 2 * rows, max(1, length // 2)) - learning)
    if isinstance(config.objective, Medusa2ObjectiveConfig):
        learning += sizes.num_layers * layer + chunk  # the target's own, through which gradients flow
    return max(layer, teaching, learning)


def copies_of_target(target: LlamaTarget, config: TrainConfig) -> int:
    """Of Medusa-2: one that is not packed and is trained, and while it is measured another with adapters merged."""
    if not isinstance(config.objective, Medusa2ObjectiveConfig):
        return 0
    return 2 * sum(p.numel() * p.element_size() for p in {id(p): p for p in target.parameters()}.values())


def adapter_parameters(target: LlamaTarget, objective: Medusa2ObjectiveConfig) -> int:
    adapted = [layer for _, name, layer in linear_layers(target.layers) if name in objective.lora_on]
    return sum(objective.lora_rank * (layer.in_features + layer.out_features) for layer in adapted)


def target_bytes(target: LlamaTarget, config: TrainConfig) -> int:
    """Of this process's part: linear layers divided among ranks, and in few bits where a kernel reads these."""
    dtype, ranks = target.norm.weight.dtype, config.engine.tensor_parallel
    if config.features.target == "sharded":
        return sharded_bytes(target, processes())
    weight_format, device = config.engine.weight_format, device_of(config)

    def size(linear: Linear) -> int:
        outputs, inputs = linear.weight.shape
        if weight_format == "same" or not reads_narrow(inputs, dtype, device):
            return outputs * inputs * dtype.itemsize
        return narrow_bytes(outputs, inputs, weight_format)

    linear = {id(m.weight): m for m in target.modules() if isinstance(m, Linear)}
    whole = sum(p.numel() for p in {id(p): p for p in target.parameters()}.values())
    whole -= sum(m.weight.numel() for m in linear.values())
    tied = target.embed_tokens.weight.numel() if target.config.tie_word_embeddings else 0
    return sum(size(m) for m in linear.values()) // ranks + (whole + tied) * dtype.itemsize


def sharded_bytes(target: LlamaTarget, count: int) -> int:
    """One process's share of the layers, the two that are whole at a time, and what is never divided."""
    tensors = {id(p): p.numel() for name, p in target.named_parameters() if not name.startswith(LAYERS)}
    return (sum(tensors.values()) + sum(shared_elements(list(target.layers), count))) * target.norm.weight.itemsize


def features_in_memory(config: TrainConfig, target: LlamaTarget, head: Head, tokens: int) -> int:
    """Bytes of the cache over all sequences; 0 if there is none."""
    size = feature_bytes(target, head.config.aux_layers, tokens)
    settings = config.features
    return size if isinstance(settings, OnlineFeaturesConfig) and size <= settings.cache_gb * GB else 0


def parameters(head: Head) -> tuple[int, int]:
    """Trained and frozen ones."""
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    return trained, sum(p.numel() for p in head.parameters()) - trained
