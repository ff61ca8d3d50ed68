"""Kernel launches at the sizes of Llama-3.1-8B and at other head sizes, on meta tensors."""

from __future__ import annotations

from functools import partial

import torch

from kernels.operands import (
    LEADING,
    NO_LIMITS,
    SHARED,
    Candidates,
    ChoiceParameters,
    Drafting,
    Frontier,
    Lattice,
    Limits,
    Nodes,
    Progress,
    QKNorm,
    Shaping,
    Transition,
)
from kernels.recurrent_rows import RecurrentRows
from kernels.rows import AttentionRows
from kernels.triton import (
    acceptance,
    advance,
    choose,
    convolution,
    early_exit,
    elementwise,
    gather,
    recurrence,
    residual,
    rows,
    shape,
    tree,
    verify,
    walk,
)
from kernels.triton.attention import TritonAttention
from kernels.triton.ggml import block_rows, ggml_linear
from kernels.triton.linear import linear
from kernels.triton.move import move_slots
from kernels.triton.range_attention import RangesAttention
from kernels.triton.rotary import rotate_and_write, write_kv
from kernels.weights.ggml_tiles import Storage, empty_tiles

META = torch.device("meta")
BF16, FP32 = torch.bfloat16, torch.float32
SLOTS = 2**20
LATENT = {"dim": 576, "value": 512, "heads": 128, "kv_heads": 1}
INT4 = Storage(4, 0, True, 128, "half_zero")  # in groups of 128 with zero points, as AWQ stores weights
INT8 = Storage(8, 0, True, 14336, "bfloat")  # by rows
FP8 = Storage(8, 0, False, 14336, "bfloat", True)


def empty(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device=META)


def attend(
    dim, *, whole, tree=False, dtype=BF16, cache_dtype=None, window=None, heads=32, kv_heads=8, short=False,
    sinks=False, value=None,
):  # fmt: skip
    """`short`: a draft head's layer and one page; every argument that can be 1 is, so Triton makes it a constant.

    `value`: how many numbers of a key are its value.
    """
    count = 1 if short else 16
    index = empty(count, dtype=torch.int64)
    tree_mask = index if tree else None
    table = empty(1, 1 if short else 4096, dtype=torch.int64)
    laid_out = AttentionRows(table, index, index, index, tree_mask, 16, 16 if short else 32768, (count,), int(short))
    plan = TritonAttention(laid_out, heads, kv_heads, dim, dtype, value, whole=whole)
    cache = empty(2 if value is None else 1, kv_heads, SLOTS, dim, dtype=cache_dtype or dtype)
    q = empty(count, heads, dim, dtype=dtype)
    plan.read(q, cache, dim**-0.5, window, empty(heads, dtype=dtype) if sinks else None)


def multiply(rows, dtype=BF16, outputs=4096, **epilogue):
    linear(empty(rows, 14336, dtype=dtype), empty(outputs, 14336, dtype=dtype), None, **epilogue)


def multiply_and_add(rows, launch=multiply, outputs=4096, **options):
    launch(rows, outputs=outputs, residual=empty(rows, outputs, dtype=FP32), out_dtype=FP32, **options)


def multiply_blocks(rows, name, outputs=4096, inputs=14336, dtype=BF16, storage=None, **epilogue):
    """`storage`: of groups, in place of the blocks of that name."""
    tiles = empty_tiles(name, outputs, inputs, META, storage)
    ggml_linear(empty(rows, inputs, dtype=dtype), [tiles], None, **epilogue)


def residuals(rows):
    """The second layer of five Medusa heads."""
    residual.residual_silu(empty(5, rows, 4096), empty(5, 4096, 4096), empty(5, 4096))


def rotate(norm, cache_dtype=BF16, *, rows=4, dim=128, centered=False):
    weight = empty(dim)
    angles = empty(rows, 1, dim)
    cache = empty(2, 8, SLOTS, dim, dtype=cache_dtype)
    slots = empty(rows, dtype=torch.int64)
    qk_norm = QKNorm(weight, weight, 1e-5, centered) if norm else None
    rotate_and_write(empty(rows, 48, dim), angles, angles, qk_norm, slots, cache, 32)


def write(cache_dtype=BF16, *, rows=4, dim=128, value=None):
    cache = empty(2 if value is None else 1, 8 if value is None else 1, SLOTS, dim, dtype=cache_dtype)
    k = empty(rows, cache.shape[1], dim)
    write_kv(cache, empty(rows, dtype=torch.int64), k, k[..., :value])


def norms(rows, width):
    """Norms over 4096 columns of `rows` rows that lie `width` columns apart."""
    x, weight = empty(rows, width)[:, :4096], empty(4096)
    elementwise.rms_norm(x, weight, 1e-5)
    elementwise.add_rms_norm(x, x, weight, 1e-5)
    elementwise.layer_norm(x, weight, weight, 1e-5)
    stream = empty(rows, width, dtype=FP32)[:, :4096]
    elementwise.rms_norm(stream, weight, 1e-5)
    elementwise.add_rms_norm(stream, stream, weight, 1e-5)
    elementwise.layer_norm(stream, weight, weight, 1e-5)
    elementwise.norm_beside(x, x, weight, weight, 1e-5)
    ids = empty(rows, dtype=torch.int64)
    elementwise.embed_norm_gelu(x, ids, empty(128256, 4096), 0.3, weight, weight, 1e-6)


def pick(rows, size, count, *, sampled=True, restricted=False, drafting=False):
    """Choose from a vocabulary of `size`; `drafting`: a head's draft vocabulary, with log-probabilities."""
    index, number = empty(rows, dtype=torch.int64), empty(rows, dtype=FP32)
    parameters = ChoiceParameters(number, index, number, number, index, index) if sampled else None
    ids = empty(size, dtype=torch.int64) if drafting else None
    thresholds = number if restricted else None
    choose.best_columns(
        empty(rows, size, dtype=FP32), parameters, index, ids, count, thresholds, mass=drafting, noise=True,
        block=choose.BLOCK,
    )  # fmt: skip


def stroll(rows, width, levels, count, *, sampled=True, given=False, size=64, rank=256):
    """Walk over the candidates of blocks of `levels` slots; `given`: the nodes' queries are."""
    ids = empty(rows, levels, size, dtype=torch.int64)
    lattice = Lattice(ids, ids, empty(rows, levels, size, dtype=FP32))
    table, before = empty(32000, rank), empty(rows, width, dtype=torch.int64)
    transition = Transition(table, None if given else table, None if given else empty(rows, levels, rank))
    index, number = empty(rows, dtype=torch.int64), empty(rows, dtype=FP32)
    parameters = ChoiceParameters(number, index, number, number, index, index, NO_LIMITS) if sampled else None
    query = empty(rows, width, rank) if given else None
    walk.walk(
        lattice, transition, None if given else before, query, parameters, index, first=0, levels=levels, count=count
    )


def pick_among(rows, size):
    """Choose from candidates of each row."""
    index, number = empty(rows, dtype=torch.int64), empty(rows, dtype=FP32)
    parameters = ChoiceParameters(number, index, number, number, index, index, NO_LIMITS)
    ids = empty(rows, size, dtype=torch.int64)
    choose.best(empty(rows, size, dtype=FP32), parameters, index, ids, 1, mass=True)


def thresholds(limits, dtype=FP32):
    number, index = empty(4, dtype=FP32), empty(4, dtype=torch.int64)
    parameters = ChoiceParameters(number, index, number, number, index, index, limits)
    choose.find_thresholds(empty(4, 128256, dtype=dtype), parameters)


def shape_all():
    """All fields of `Shaping` at once."""
    counts, index = empty(262144, dtype=FP32), empty(4, 5, dtype=torch.int64)
    prompt, allowed = empty(262144, dtype=torch.bool), empty(4, 8192, dtype=torch.int32)
    shape.shape(empty(4, 262144), Shaping(1.1, 0.3, 0.2, prompt, counts, index, counts, allowed))


def plan(batch, width, *, branching=False):
    """The rows of a padded batch, and of one that the host laid out."""
    index, table = empty(batch, dtype=torch.int64), empty(33, 4096, dtype=torch.int64)
    words = empty(batch * width, dtype=torch.int64) if branching else None
    fields = rows.grid(table, index, index, width, 1, 0, words, 16)
    request, committed, offset, _ = fields
    rows.addresses(table, request, committed, offset, words, 16)
    if words is not None:
        rows.tails(table, request, committed, words, 16, 64)


def move_on(batch, width, *, branching=False):
    wide, narrow = empty(batch, width, dtype=torch.int64), empty(batch, width, dtype=torch.int32)
    index, results = empty(batch, dtype=torch.int64), empty(batch, LEADING + 2 * width, dtype=torch.int64)
    progress = Progress(index, index, index, wide, index, index, results)
    nodes, table = Nodes(wide, narrow, narrow, wide, index), empty(33, 4096, dtype=torch.int64)
    advance.advance(nodes, wide, progress, table, 16, width=width, is_chain=not branching)


def grow(batch, nodes, fan_out):
    """A level of trees, and the best nodes of its candidates."""
    wide, number = empty(batch, nodes, dtype=torch.int64), empty(batch, nodes, dtype=FP32)
    token, value = empty(batch, nodes, fan_out, dtype=torch.int64), empty(batch, nodes, fan_out, dtype=FP32)
    index, frontier = empty(batch, dtype=torch.int64), Frontier(number, wide, wide)
    level = tree.grow_level(frontier, token, value, None, fan_out, first=4, ran=4)
    fixed = empty(nodes * fan_out, dtype=FP32), empty(2, dtype=torch.int64)
    tree.grow_level(frontier, token, value, fixed, fan_out, first=4, ran=4)
    depth = empty(nodes * fan_out, dtype=torch.int64)
    tree.best_nodes(index, Candidates(level.token, level.parent, depth, level.score), index, index, 16)


def leave_early(batch):
    number, index = empty(batch, dtype=FP32), empty(batch, dtype=torch.int64)
    chains = Drafting(empty(batch, dtype=torch.bool), index, number)
    early_exit.exit_level(chains, empty(batch, SHARED + 10, dtype=FP32), index, number, 0, 1e-3)


def accept(typical_mask=None):
    wide, narrow = empty(8, 64, dtype=torch.int64), empty(8, 64, dtype=torch.int32)
    verify.accept(wide, narrow, narrow, wide, empty(8, dtype=torch.int64), wide, typical_mask)


def verify_blocks():
    """Chains of five sampled tokens, and of one token, where every argument that can be 1 is."""
    numbers = dict.fromkeys(("rows", "ids", "counts", "places", "seeds", "roots", "out"), empty(4, dtype=torch.int64))
    probs = empty(24, 128256, dtype=FP32)
    for width in (5, 1):
        acceptance.launch(probs, probs, **numbers, width=width, block=acceptance.BLOCK)


def attend_ranges(dim, length=4096, rows=512 * 16, tail=512 * 16, *, batch=2, dtype=BF16):
    """A layer in training, forward and backward: rows over a sequence and their tails, those of 512 blocks of 16."""
    shapes = (rows, 32), (length, 8), (length, 8), (tail, 8), (tail, 8)
    q, *keys = (empty(batch, *shape, dim, dtype=dtype) for shape in shapes)
    out = RangesAttention.apply(q.requires_grad_(), *keys, *[empty(batch, rows, dtype=torch.int32)] * 4)
    torch.autograd.grad(out, q, torch.empty_like(out))


def recur(batch, width, *, delta=True, trees=False, heads=32, groups=16, keys=128, values=128, slots=True, bias=False):
    """A layer with a convolution of its queries, keys and values, of four taps, and a recurrence over them."""
    parents = empty(batch * width, dtype=torch.int32) if trees else None
    at = empty(batch, dtype=torch.int64) if slots else None
    rows = RecurrentRows((width,) * batch, at, empty(batch, dtype=torch.bool), parents)
    sizes = [groups * keys, groups * keys, heads * values]
    x, weight, windows = empty(batch * width, sum(sizes)), empty(sum(sizes), 4), empty(64, 3, sum(sizes))
    x = recurrence.convolve(x, weight, weight[:, 0] if bias else None, windows, rows, silu=not bias)
    q, k, v = (
        part.unflatten(1, (-1, size)) for part, size in zip(x.split(sizes, 1), (keys, keys, values), strict=True)
    )
    gates, states = empty(batch * width, heads, dtype=FP32), empty(64, heads, keys, values, dtype=FP32)
    recurrence.scan(q, k, v, gates, gates, states, rows, delta=delta)


DISASSEMBLED = ()  # as test_tiles.py does for the kernels whose tiles depend on the device
CASES = {
    "choose, greedy": partial(pick, 4, 128256, 1, sampled=False),
    "choose, sampled": partial(pick, 4, 128256, 1),
    "choose, among the likeliest": partial(pick, 4, 262144, 1, restricted=True),
    "draft the 16 best": partial(pick, 4, 32000, 16, drafting=True),
    "find 64 candidates": partial(pick, 56, 128256, 64),
    "choose among candidates": partial(pick_among, 4, 64),
    "walk along chains": partial(stroll, 8, 1, 7, 1),
    "walk along a chain, greedy": partial(stroll, 1, 1, 1, 1, sampled=False, size=1, rank=1),
    "walk along a level of trees": partial(stroll, 8, 4, 1, 4, given=True),
    "convolution": lambda: convolution.two_taps(empty(40, 4096), empty(2, 2, 4096), empty(40, 1024), 0, 8),
    "convolution, 1 row": lambda: convolution.two_taps(empty(1, 16), empty(2, 2, 16), empty(1, 64), 1, 1),
    "top-k and top-p": partial(thresholds, Limits()),
    "top-p, bf16": partial(thresholds, NO_LIMITS._replace(top_p=True), BF16),
    "min-p": partial(thresholds, NO_LIMITS._replace(min_p=True)),
    "log-probabilities": lambda: choose.logprobs(empty(4, 128256, dtype=FP32), empty(4, dtype=torch.int64), 20),
    "log-probabilities, other counts": lambda: [
        choose.logprobs(empty(1, 128256, dtype=FP32), empty(1, dtype=torch.int64), top) for top in range(9, 33)
    ],
    "shape": shape_all,
    "shape, a mask alone": lambda: shape.shape(empty(4, 262144), Shaping(allowed=empty(4, 8192, dtype=torch.int32))),
    "rows of chains": partial(plan, 8, 6),
    "rows of trees": partial(plan, 8, 16, branching=True),
    "rows, 1 row": partial(plan, 1, 1),
    "advance chains": partial(move_on, 8, 6),
    "advance trees": partial(move_on, 8, 64, branching=True),
    "advance, 1 row": partial(move_on, 1, 1),
    "trees 4 wide": partial(grow, 8, 4, 4),
    "trees 60 wide": partial(grow, 8, 60, 60),
    "trees, 1 node": partial(grow, 1, 1, 1),
    "early exit": partial(leave_early, 8),
    "early exit, 1 row": partial(leave_early, 1),
    "accept": accept,
    "typical acceptance": lambda: accept(empty(8, 64, dtype=torch.bool)),
    "entropies": lambda: acceptance.entropy(empty(24, 128256, dtype=FP32)),
    "entropies, 1 row": lambda: acceptance.entropy(empty(1, 128256, dtype=FP32)),
    "block verification": verify_blocks,
    "verify, head size 128": partial(attend, 128, whole=False),
    "verify a tree, head size 128": partial(attend, 128, whole=False, tree=True),
    "verify a tree by many programs": partial(attend, 128, whole=True, tree=True),
    "prefill, head size 128": partial(attend, 128, whole=True),
    "verify, window": partial(attend, 128, whole=False, window=4096),
    "verify a tree, window": partial(attend, 128, whole=False, tree=True, window=4096),
    "prefill, window": partial(attend, 128, whole=True, window=4096),
    "verify, sinks": partial(attend, 64, whole=False, heads=64, window=128, sinks=True),
    "verify a tree, sinks": partial(attend, 64, whole=True, tree=True, heads=64, sinks=True),
    "prefill, sinks": partial(attend, 64, whole=True, heads=64, sinks=True),
    "verify, fp8 cache": partial(attend, 128, whole=False, cache_dtype=torch.float8_e4m3fn),
    "verify a tree, fp8 cache": partial(attend, 128, whole=False, tree=True, cache_dtype=torch.float8_e4m3fn),
    "verify a tree by many programs, fp8 cache": partial(
        attend, 128, whole=True, tree=True, cache_dtype=torch.float8_e4m3fn
    ),
    "prefill, fp8 cache": partial(attend, 128, whole=True, cache_dtype=torch.float8_e4m3fn),
    "prefill, fp8 cache, window": partial(attend, 128, whole=True, cache_dtype=torch.float8_e4m3fn, window=4096),
    "verify, head size 64": partial(attend, 64, whole=False, dtype=torch.float16),
    "verify, head size 80": partial(attend, 80, whole=False),
    "verify, head size 96": partial(attend, 96, whole=False),
    "verify a tree, head size 96": partial(attend, 96, whole=False, tree=True),
    "prefill, head size 80": partial(attend, 80, whole=True),
    "prefill, head size 96": partial(attend, 96, whole=True),
    "verify, head size 256": partial(attend, 256, whole=False),
    "prefill, head size 256": partial(attend, 256, whole=True),
    "verify, latents": partial(attend, **LATENT, whole=False),
    "verify a tree, latents": partial(attend, **LATENT, whole=False, tree=True),
    "prefill, latents": partial(attend, **LATENT, whole=True),
    "verify a tree, latents in an fp8 cache": partial(
        attend, **LATENT, whole=False, tree=True, cache_dtype=torch.float8_e4m3fn
    ),
    "verify a tree, latents, fp32": partial(attend, **LATENT, whole=False, tree=True, dtype=FP32),
    "one page": partial(attend, 128, whole=False, short=True, window=1),
    "one page, tree": partial(attend, 128, whole=False, tree=True, short=True),
    "one page, tree, by many programs": partial(attend, 128, whole=True, tree=True, short=True),
    "one page, prefill": partial(attend, 128, whole=True, short=True),
    "verify, fp32": partial(attend, 64, whole=False, dtype=FP32),
    "verify a tree, fp32, head size 128": partial(attend, 128, whole=False, tree=True, dtype=FP32),
    "verify, fp32, head size 256, window": partial(attend, 256, whole=False, dtype=torch.float32, window=512),
    "linear, 1 row": partial(multiply, 1),
    "linear, 1 row, odd sizes": lambda: linear(empty(1, 100), empty(77, 100), empty(77)),
    "linear, 64 rows": partial(multiply, 64),
    "linear, 512 rows": partial(multiply, 512),
    "linear, 100 rows": partial(multiply, 100),
    "LM head, 64 rows": partial(multiply, 64, outputs=128256, out_dtype=FP32),
    "LM head, 1 row, Q6_K": partial(multiply_blocks, 1, "Q6_K", 128256, out_dtype=FP32),
    "linear, 200 rows": partial(multiply, 200),
    "linear, 200 rows, activated": partial(multiply, 200, outputs=28672, gate="silu"),
    "linear, 16 rows, int8": partial(multiply_blocks, 16, "int8", storage=INT8),
    "linear, 16 rows, fp8": partial(multiply_blocks, 16, "fp8", storage=FP8),
    "linear, 512 rows, int4": partial(multiply_blocks, 512, "int4", storage=INT4),
    "linear, 16 rows, activated": partial(multiply, 16, outputs=28672, gate="silu"),
    "linear, 16 rows, activated by GELU": partial(multiply, 16, outputs=28672, gate="gelu"),
    "linear, 1 row, odd sizes, activated": lambda: linear(empty(1, 100), empty(78, 100), empty(78), gate="silu"),
    "linear, 16 rows, fp8, activated": partial(multiply_blocks, 16, "fp8", 28672, storage=FP8, gate="silu"),
    "linear, 16 rows, added": partial(multiply_and_add, 16),
    "linear, 1 row, odd sizes, added": lambda: linear(empty(1, 100), empty(77, 100), empty(77), residual=empty(1, 77)),
    "linear, 16 rows, int4, small groups": partial(multiply_blocks, 16, "int4", storage=INT4._replace(group=32)),
    "linear, 16 rows, Q4_K": partial(multiply_blocks, 16, "Q4_K"),
    "linear, 1 row, odd sizes, Q5_1": partial(multiply_blocks, 1, "Q5_1", 77, 96),
    "linear, 16 rows, int4 in groups": partial(multiply_blocks, 16, "int4", storage=INT4),
    "linear, 1 row, odd sizes, fp8 by rows": partial(multiply_blocks, 1, "fp8", 77, 100, storage=FP8),
    "embedding, Q5_K": lambda: block_rows(empty_tiles("Q5_K", 128256, 4096, META), empty(4, dtype=torch.int64), BF16),
    "norms": partial(norms, 4, 4096),
    "norms, 1 row": partial(norms, 1, 3 * 4096),
    "add and centered norm": lambda: elementwise.add_rms_norm(
        empty(4, 1152), empty(4, 1152), empty(1152), 1e-6, centered=True
    ),
    "recurrence of chains": partial(recur, 8, 6),
    "recurrence of trees": partial(recur, 8, 16, trees=True),
    "recurrence, 1 row": partial(recur, 1, 1, heads=1, groups=1, keys=1, values=1),
    "recurrence, Mamba-2": partial(recur, 8, 1, delta=False, groups=1, values=64, bias=True),
    "recurrence, states of 256 rows": partial(recur, 8, 16, delta=False, groups=1, keys=256, values=64, trees=True),
    "recurrence from zeros": partial(recur, 1, 512, slots=False),
    "gather": lambda: gather.gather_rows([empty(64, 4096)] * 3, empty(4, dtype=torch.int64)),
    "residual blocks, 1 row": partial(residuals, 1),
    "residual blocks, 64 rows": partial(residuals, 64),
    "silu": lambda: elementwise.gate_mul(empty(4, 28672), gelu=False),
    "gelu": lambda: elementwise.gate_mul(empty(4, 13824), gelu=True),
    "gelu of all outputs": lambda: elementwise.gelu(empty(4, 24576), tanh=False),
    "gelu of all outputs, by tanh": lambda: elementwise.gelu(empty(1, 24576), tanh=True),
    "rotary": partial(rotate, False),
    "rotary and QK norm": partial(rotate, True),
    "rotary and QK norm, 1 row": partial(rotate, True, rows=1),
    "rotary and centered QK norm": partial(rotate, True, centered=True, dim=256),
    "rotary, fp8 cache": partial(rotate, True, torch.float8_e4m3fn),
    "write": write,
    "write, 1 row of a head": partial(write, rows=1, dim=64),
    "write, latents": partial(write, dim=576, value=512),
    "write, fp8 cache": partial(write, torch.float8_e4m3fn),
    "attention of training, head size 64": partial(attend_ranges, 64, dtype=torch.float16),
    "attention of training, head size 128": partial(attend_ranges, 128),
    "attention of training, head size 256": partial(attend_ranges, 256),
    "attention of training, head size 128, single precision": partial(attend_ranges, 128, dtype=FP32),
    "attention of training, the seventh step": partial(attend_ranges, 128, rows=3000, tail=18000),
    "attention of training, no tails": partial(attend_ranges, 128, tail=0),
    "attention of training, one row": partial(attend_ranges, 128, 1, 1, 1, batch=1),
    "move": lambda: move_slots(
        empty(32, 2, 8, SLOTS, 128), empty(256, dtype=torch.int64), empty(256, dtype=torch.int64)
    ),
}
