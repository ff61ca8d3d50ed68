"""Memory estimate of a run by part, from the sizes of target and head; no weight is loaded.

Activations are counted in a dry run: the head's own code runs forward and backward on torch's meta tensors, which have
only shape and dtype, and the bytes alive at the same time are counted, in fp32; those of precision=bf16 are about a
sixth less. Assumes full batches in which every token is trained on, an upper bound for real ones. Excludes what no
configuration key changes: Python and torch, 0.6 GB on a CPU, and memory that an allocator reserves.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infer.kvcache.tensors import kv_dtype
from infer.options.devices import resolve_device
from kernels.linear import reads_narrow
from kernels.quantize import narrow_bytes
from kernels.vocabulary import BLOCK_ELEMENTS, TeacherLogits
from models.heads.base import Head
from models.heads.borrowing import borrow, borrowed_by
from models.layers import Linear
from models.targets import LAYERS
from models.targets.llama import LlamaTarget
from models.targets.zero3 import shared_elements
from train.config import WHOLE, MuonConfig, TrainConfig
from train.data.sequences import Batch
from train.distributed.strategies import hidden_matrices
from train.features.online import feature_bytes, fits_cache
from train.objectives import teacher
from train.objectives.base import Objective
from train.objectives.draft_states import draft_states
from train.objectives.registry import OBJECTIVES
from train.objectives.teacher import SharedLogits, Teacher
from train.preparation.models import make_head, pool_for, processes

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
    # unpacked, of what the head uses in place; one if they are tied
    lm_head, embedding = target.lend()
    borrowed = {lm_head.weight, embedding} if any(borrowed_by(head)) else ()
    return {
        "target": target_bytes(target, config),
        "KV": (pool_for(config).max_tokens_in_cache or 0) * per_token,
        "head and optimiser": state_bytes(config, target, head) + sum(weight.nbytes for weight in borrowed),
        "features": cached + feature_bytes(target, head.config.aux_layers, batch),
        "activations": activation_bytes(config, target, head),
    }


def state_bytes(config: TrainConfig, target: LlamaTarget, head: Head) -> int:
    """Return the bytes of head, gradients and optimiser, sharded as `parallel` says, and of copies of the head."""
    trained, frozen = parameters(head)
    name, total = config.parallel.name, trained + frozen
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
    return max(layer, teaching, learning)


def target_bytes(target: LlamaTarget, config: TrainConfig) -> int:
    """Return this process's bytes: linear layers sharded over ranks, and quantized where a kernel supports that.

    Of a target that is sharded over processes: unsharded tensors, layer shards, and the two layers gathered at a time.
    """
    dtype, ranks = target.norm.weight.dtype, config.engine.tensor_parallel
    if config.features.target == "sharded":
        unsharded = sum(p.numel() for name, p in target.named_parameters() if not name.startswith(LAYERS))
        return (unsharded + sum(shared_elements(list(target.layers), processes()))) * dtype.itemsize
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


def features_in_memory(config: TrainConfig, target: LlamaTarget, head: Head, tokens: int) -> int:
    """Return the bytes of the in-memory feature cache over all sequences; 0 if there is none."""
    cached = fits_cache(config.features, target, head.config.aux_layers, tokens)
    return feature_bytes(target, head.config.aux_layers, tokens) if cached else 0


def parameters(head: Head) -> tuple[int, int]:
    """Return the numbers of trained and of frozen parameters."""
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    return trained, sum(p.numel() for p in head.parameters()) - trained


class LiveBytes(TorchDispatchMode):
    """While active, counts bytes of live tensors created since it was entered (`now`), and their maximum (`peak`).

    torch's MemTracker refuses modules that are called more than once in a forward, as every step calls the head's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        pointer = storage._cdata
        if pointer in self._storages:
            return
        size = storage.nbytes()
        self._storages.add(pointer)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, pointer, size)

    def _drop(self, pointer: int, size: int) -> None:
        self._storages.discard(pointer)
        self.now -= size


def meta_objective(config: TrainConfig, target: LlamaTarget) -> Objective:
    """Return the objective around a head on the meta device, like `target`."""
    with torch.device("meta"):
        head = make_head(config.head, target.config)
        borrow(head, target)
        head.float()  # what is borrowed too, as in training
        return OBJECTIVES[config.objective.name](head, config.objective)


def rehearse(config: TrainConfig, target: LlamaTarget, rows: int, length: int) -> int:
    """Return the peak bytes beside parameters, gradients and optimiser, for `rows` rows of `length` slots.

    `target` is on the meta device too.
    """
    objective = meta_objective(config, target)
    head, ids = objective.head, torch.zeros(rows, length, dtype=torch.int64)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), tuple(range(rows)))
    first, slots = objective.slots(batch, torch.Generator())
    pairs = [
        pair._replace(**{name: value.to("meta") for name, value in pair._asdict().items() if name != "share"})
        for pair in objective.pairs(batch, first, slots)
    ]
    with torch.device("meta"):
        feature = torch.zeros(rows, length, target.config.hidden_size, dtype=target.norm.weight.dtype)
        aux, denominators = [feature] * len(head.config.aux_layers), torch.ones(objective.steps)
        with LiveBytes() as live:
            teacher = meta_teacher(objective, len(pairs[0].rows), feature.dtype, target.config.vocab_size)
            states = draft_states(head, ids.to("meta"), aux, objective.steps, first, [s.to("meta") for s in slots])
            loss, _ = objective.losses(states, pairs, teacher, denominators, True)
            forward = live.peak
            loss.backward()
        gradients = sum(p.grad.numel() * p.grad.element_size() for p in head.parameters() if p.grad is not None)
    return max(forward, live.peak - gradients)


def meta_teacher(objective: Objective, rows: int, dtype: torch.dtype, vocab_size: int) -> Teacher:
    """Return a teacher of as many bytes as `Objective.teach` makes, for `rows` served slots."""
    head = objective.head
    column, drafts = torch.zeros(rows), head.config.draft_vocab_size
    logits, width = None, 0 if objective.fused else drafts
    if objective.native:
        teacher_logits = TeacherLogits(torch.zeros(rows, drafts, dtype=dtype), column, column, column)
        logits, width = SharedLogits(teacher_logits, column.long()), 0
    return Teacher(
        probs=torch.zeros(rows, width), negentropy=column, mass=column,
        choice=column.long(), draft_choice=column.long(), in_vocab=column.bool(), label=column.long(),
        hidden=torch.zeros(rows, head.config.target_hidden_size),
        make_probs=(lambda hidden: hidden.new_zeros(len(hidden), vocab_size)[:, :drafts].softmax(-1))
        if objective.fused else None,
        logits=logits,
    )  # fmt: skip
