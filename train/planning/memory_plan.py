"""Memory estimate of a run by part, from the sizes of target and head; no weight is loaded.

Assumes full batches in which every token is trained on, an upper bound for real ones. Excludes what no configuration
key changes: Python and torch, 0.6 GB on a CPU, and memory that an allocator reserves.
"""

from __future__ import annotations

from dataclasses import replace

from infer.kvcache.tensors import kv_dtype
from infer.options.devices import resolve_device
from kernels.linear import reads_narrow
from kernels.quantize import narrow_bytes
from kernels.vocabulary import BLOCK_ELEMENTS
from models.heads.base import Head
from models.heads.borrowing import borrowed_by
from models.heads.objectives import JointObjectiveConfig
from models.layers import Linear
from models.lora import linear_layers
from models.targets import LAYERS
from models.targets.llama import LlamaTarget
from models.targets.zero3 import shared_elements
from train.config import WHOLE, MuonConfig, TrainConfig
from train.distributed.optimizers import hidden_matrices
from train.features.online import feature_bytes, fits_cache
from train.objectives import teacher
from train.planning.activations import meta_objective, rehearse
from train.planning.shapes import processes
from train.preparation.target import pool_for

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
    """Return the bytes of this process by part; `tokens` is the total over all sequences."""
    sizes, batch = target.config, config.batch_size * config.sequence_length
    item = kv_dtype(config.engine.kv_dtype, target.norm.weight.dtype).itemsize
    per_token = sizes.cached_numbers(config.engine.tensor_parallel) * sizes.num_layers * item
    cached = features_in_memory(config, target, head, tokens)
    return {
        "target": target_bytes(target, config) + copies_of_target(target, config),
        "KV": (pool_for(config).max_tokens_in_cache or 0) * per_token,
        "head and optimiser": state_bytes(config, target, head) + borrowed_bytes(target, head),
        "features": cached + feature_bytes(target, head.config.aux_layers, batch),
        "activations": activation_bytes(config, target, head),
    }


def state_bytes(config: TrainConfig, target: LlamaTarget, head: Head) -> int:
    """Return the bytes of head, gradients and optimiser, sharded as `parallel` says, and of copies of the head."""
    trained, frozen = parameters(head)
    name, total = config.parallel.name, trained + frozen
    if isinstance(config.objective, JointObjectiveConfig):
        trained += adapter_parameters(target, config.objective)
    num_bytes = trained * STATE + frozen * VALUE
    if isinstance(config.optim, MuonConfig):  # one moment, not two
        num_bytes -= VALUE * sum(matrix.numel() for matrix in hidden_matrices(head))
    if name == "ddp":
        num_bytes += trained * VALUE  # DDP's communication buckets lie beside the gradients
    elif name not in WHOLE:
        # gathered for a forward, gradients before they are sharded, and the full copy that is evaluated and saved
        divided = num_bytes if name != "zero2" else trained * STATE
        num_bytes = divided // processes() + (2 * total + trained) * VALUE
    item = target.norm.weight.element_size()
    return num_bytes + (total * item if item != VALUE else 0)  # a copy in the target's dtype during evaluation


def borrowed_bytes(target: LlamaTarget, head: Head) -> int:
    """Return the bytes of unpacked copies of the target's embedding and LM head, if the head uses these in place."""
    if not any(borrowed_by(head)):
        return 0
    weights = {target.embed_tokens.weight, target.lm_head.weight}  # one if they are tied
    return sum(weight.numel() * weight.element_size() for weight in weights)


def activation_bytes(config: TrainConfig, target: LlamaTarget, head: Head) -> int:
    """Return a step's peak bytes: the largest of the target's forward, computing the teacher and training the head."""
    sizes, item = target.config, target.norm.weight.element_size()
    rows, length = config.batch_size, config.sequence_length
    batch, vocabulary, draft = rows * length, sizes.vocab_size, head.config.draft_vocab_size
    width = sizes.experts.active * sizes.experts.intermediate_size if sizes.experts else sizes.intermediate_size
    layer = batch * item * (3 * width + 8 * sizes.hidden_size)
    chunk = 4 * 4 * vocabulary * min(batch, max(1, teacher.CHUNK_ELEMENTS // vocabulary))
    on_gpu = resolve_device(config.model.device).type == "cuda"
    if config.objective.fused is None and (on_gpu or getattr(config.features, "top_k", None)):
        config = replace(config, objective=replace(config.objective, fused=on_gpu))
    if meta_objective(config, target).native:
        teaching = item * (2 * min(vocabulary * batch, BLOCK_ELEMENTS) + draft * batch)
    else:
        teaching = chunk + (0 if config.objective.fused else 2 * 4 * draft * batch)
    learning = rehearse(config, target, rows, length)
    if on_gpu:  # its kernel stores no attention scores, the only part quadratic in length
        learning = min(learning, 2 * rehearse(config, target, 2 * rows, max(1, length // 2)) - learning)
    if config.trains_target:
        learning += sizes.num_layers * layer + chunk  # the target's activations, through which gradients flow
    return max(layer, teaching, learning)


def copies_of_target(target: LlamaTarget, config: TrainConfig) -> int:
    """Return the bytes of copies of a target that is trained too: unpacked in training, merged in evaluation."""
    if not config.trains_target:
        return 0
    return 2 * sum(p.numel() * p.element_size() for p in target.parameters())


def adapter_parameters(target: LlamaTarget, objective: JointObjectiveConfig) -> int:
    adapted = [layer for _, name, layer in linear_layers(target.layers) if name in objective.lora_on]
    return sum(objective.lora_rank * (layer.in_features + layer.out_features) for layer in adapted)


def target_bytes(target: LlamaTarget, config: TrainConfig) -> int:
    """Return this process's bytes: linear layers sharded over ranks, and quantized where a kernel supports that."""
    dtype, ranks = target.norm.weight.dtype, config.engine.tensor_parallel
    if config.features.target == "sharded":
        return sharded_bytes(target, processes())
    weight_format, device = config.engine.weight_format, resolve_device(config.model.device)

    def size(linear: Linear) -> int:
        outputs, inputs = linear.weight.shape
        if weight_format == "same" or not reads_narrow(inputs, dtype, device):
            return outputs * inputs * dtype.itemsize
        return narrow_bytes(outputs, inputs, weight_format)

    linear = {id(m.weight): m for m in target.modules() if isinstance(m, Linear)}
    elements = sum(p.numel() for p in target.parameters()) - sum(m.weight.numel() for m in linear.values())
    tied = target.embed_tokens.weight.numel() if target.config.tie_word_embeddings else 0
    return sum(size(m) for m in linear.values()) // ranks + (elements + tied) * dtype.itemsize


def sharded_bytes(target: LlamaTarget, count: int) -> int:
    """Return the bytes of one process's layer shards, the two layers gathered at a time, and unsharded tensors."""
    unsharded = sum(p.numel() for name, p in target.named_parameters() if not name.startswith(LAYERS))
    return (unsharded + sum(shared_elements(list(target.layers), count))) * target.norm.weight.itemsize


def features_in_memory(config: TrainConfig, target: LlamaTarget, head: Head, tokens: int) -> int:
    """Return the bytes of the in-memory feature cache over all sequences; 0 if there is none."""
    cached = fits_cache(config.features, target, head.config.aux_layers, tokens)
    return feature_bytes(target, head.config.aux_layers, tokens) if cached else 0


def parameters(head: Head) -> tuple[int, int]:
    """Return the numbers of trained and of frozen parameters."""
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    return trained, sum(p.numel() for p in head.parameters()) - trained
