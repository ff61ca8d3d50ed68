"""Times of every kernel at the sizes of Llama-3.1-8B: `gpu_check.sh` runs these functions. Nothing here is a test; in
the interpreter each call is made once, at a small size.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels import acceptance, elementwise
from kernels.block_attention import block_attention
from kernels.choose import choose, choose_best, logprobs
from kernels.convolution import two_taps
from kernels.copies import gather_rows, move_slots
from kernels.early_exit import exit_level
from kernels.linear import PackedLinear
from kernels.operands import Nodes
from kernels.recurrence import convolve, scan
from kernels.recurrent_rows import RecurrentRows
from kernels.residual import residual_silu
from kernels.rotary import rotate_and_write
from kernels.shape import shape
from kernels.triton.attention import TritonAttention
from kernels.ttt_attention import ttt_attention
from kernels.verify import accept
from kernels.walk import walk_chain
from tests.device import BF16, DEVICE, FP32, ON_GPU, served, sized
from tests.kernels.recurrent_tokens import make_tokens
from tests.kernels.triton import (
    test_acceptance,
    test_attention,
    test_choose,
    test_early_exit,
    test_elementwise,
    test_linear,
    test_packed_weights,
    test_training,
    test_verify,
    test_walk,
)
from tests.kernels.triton.test_convolution import taps_case
from tests.kernels.triton.test_decoder_layers import COUNT, KERNEL, Layers

DTYPE = sized(FP32, BF16)
LAYERS = sized({"tiny": (64, 96)}, test_linear.LAYERS)
PACKED_LAYERS = sized({"tiny": (256, 96)}, {"down": (14336, 4096), "gate and up": (4096, 28672)})
PACKED = test_packed_weights.ALL[: len(test_packed_weights.FORMATS) + 1]
LLAMA = sized(150, 128256)  # vocabulary
TEXTS = sized(  # requests, rows of each, context
    [(2, 3, 40)],
    [
        (1, 1, 1024), (1, 16, 1024), (1, 64, 1024), (16, 5, 1024), (16, 8, 1024), (64, 4, 1024), (1, 16, 32768),
        (8, 1, 32768), (8, 16, 32768), (64, 1, 2048),
        (1, 512, 4096),  # a prefill chunk
    ],
)  # fmt: skip


def first(cases):
    """Return parameters of what serves an 8B model."""
    return [served(case) for case in cases]


@pytest.mark.gpu(seconds=2)
@pytest.mark.parametrize("name", first(LAYERS))
@torch.no_grad()
def measure_linear(in_triton, timed, name):
    """Every weight format, and F.linear as "linear, library": the difference is the cost of batch invariance."""
    inputs, outputs = LAYERS[name]
    weight = (torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5).to(DTYPE)
    formats = test_linear.FORMATS
    linears = {f"linear, weights {each}": PackedLinear(weight, weight_format=each) for each in formats}
    for count in sized((2,), (1, 16, 32, 64, 80, 128, 256, 512)):
        x = torch.randn(count, inputs, device=DEVICE).to(DTYPE)
        case, others = f"{name}, {count} rows, {DTYPE}", (x.numel() + count * outputs) * x.element_size()
        for kernel, linear in linears.items():
            timed(kernel, case, linear.bytes + others, linear, x)
        timed("linear, library", case, weight.numel() * weight.element_size() + others, F.linear, x, weight)


@pytest.mark.gpu(seconds=1)
@pytest.mark.parametrize("text", first(TEXTS))
def measure_attention(in_triton, timed, text):
    (batch, rows, context), (_, _, dim) = text, test_attention.LLAMA
    case = test_attention.filled([context] * batch, *test_attention.LLAMA, DTYPE)
    q, _, _, cache, _ = case
    masks = {"attention": None}
    if 1 < rows <= 64:
        masks["attention, tree"] = test_attention.random_tree(rows).ancestors[0].repeat(batch).to(DEVICE)
    for kind, mask in masks.items():
        plan = test_attention.planned(case, [context - rows] * batch, [rows] * batch, mask)
        assert isinstance(plan, TritonAttention)
        label = f"{batch} x {rows} rows, context {context}, {DTYPE}"
        for name, pool in ((kind, cache), (kind + ", fp8 cache", cache.to(torch.float8_e4m3fn))):
            moved = pool[:, :, test_attention.PAGE :].numel() * pool.itemsize
            timed(name, label, moved, plan.read, q[: batch * rows], pool, dim**-0.5)


@pytest.mark.gpu(seconds=1)
@pytest.mark.parametrize("rows", first(sized((2,), (1, 16, 64))))
def measure_choice(in_triton, timed, rows):
    logits, positions = test_choose.row_case(rows, LLAMA, DTYPE)
    moved, p, case = (
        logits.numel() * logits.element_size(),
        test_choose.shaping_of(rows, LLAMA),
        f"{rows} x {LLAMA}, {DTYPE}",
    )
    read = moved + sum(x.numel() * x.element_size() for x in (p.prompt, p.output, p.bias, p.allowed) if x is not None)
    timed("penalties, bias and mask", case, read + 4 * logits.numel(), shape, logits, p)
    timed("log-probabilities", f"8 and the chosen, {case}", 2 * moved, logprobs, logits, positions % LLAMA, 8)
    for kind in test_choose.KINDS:
        timed("choose", f"{kind}, {case}", moved, choose, logits, test_choose.sampling_of(kind, rows), positions)


@pytest.mark.gpu(seconds=1)
@pytest.mark.parametrize("rows", first(sized((1,), (1, 8))))
def measure_draft_vocabulary(in_triton, timed, rows):
    size = sized(90, 32000)
    logits, positions = test_choose.row_case(rows, size, DTYPE)
    ids, p = torch.arange(size, device=DEVICE) * 2, test_choose.sampling_of("sampled", rows)
    case, moved = f"{rows} x {size}, m = 8, {DTYPE}", logits.numel() * logits.element_size()
    timed("draft top-m", case, moved, choose_best, logits, p, positions, ids, 8)


@pytest.mark.gpu(seconds=2)
@pytest.mark.parametrize("rows", first(sized((2,), (1, 16, 512))))
@torch.no_grad()
def measure_layers_and_heads(in_triton, timed, rows):
    size, heads = DTYPE.itemsize, test_elementwise.SIZES[2]
    x, delta, weight, gate_up = test_elementwise.mlp_case(rows, DTYPE)
    qkv, cos, sin, norm, cache = test_elementwise.attention_case(rows, DTYPE)
    states, ids, table, scale, shift, weights, biases = test_elementwise.head_case(rows, DTYPE)
    slots, index = torch.arange(rows, device=DEVICE), torch.arange(0, rows, 2, device=DEVICE)
    residual = (weights.numel() + (1 + test_elementwise.HEADS) * states.numel()) * size
    step, beside = (0.3, scale, shift, 1e-6), (scale, shift, 1e-6)
    rotated, written = 2 * (qkv.numel() + cos.numel()) * size, (qkv, cos, sin, norm, slots, cache, heads)
    calls = (  # kernel, bytes, function and its arguments
        ("MLP head step", 3 * states.numel() * size, elementwise.embed_norm_gelu, states, ids, table, *step),
        ("Medusa's residual blocks", residual, residual_silu, states[None], weights, biases),
        ("norms beside each other", 4 * states.numel() * size, elementwise.norm_beside, states, states, *beside),
        ("gather of features", 6 * len(index) * states.shape[1] * size, gather_rows, (states, states, states), index),
        ("add and RMSNorm", 4 * x.numel() * size, elementwise.add_rms_norm, x, delta, weight, 1e-5),
        ("SiLU and product", gate_up.numel() * size * 3 // 2, elementwise.silu_mul, gate_up),
        ("rotary, QK norm, write", rotated, rotate_and_write, *written),
    )
    for kernel, moved, call, *args in calls:
        timed(kernel, f"{rows} rows, {DTYPE}", moved, call, *args)


@pytest.mark.gpu(seconds=1, served=True)
def measure_move(in_triton, timed):
    layers, paths = sized((2, 1), (32, 8))
    *_, kv_heads, dim = test_elementwise.SIZES
    stack = torch.zeros(layers, 2, kv_heads, 64 * paths, dim, dtype=DTYPE, device=DEVICE)
    source = (torch.arange(paths)[:, None] * 64 + torch.arange(1, 13, 2)).flatten().to(DEVICE)
    destination = (torch.arange(paths)[:, None] * 64 + torch.arange(6)).flatten().to(DEVICE)
    moved = 2 * stack[:, :, :, : len(source)].numel() * DTYPE.itemsize
    timed("move", f"{paths} paths of 6, {layers} layers, {DTYPE}", moved, move_slots, stack, source, destination)


@pytest.mark.gpu(seconds=2)
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize(
    ("batch", "width", "trees"), sized([(1, 2, 1)], [(1, 1, 0), (4, 1, 0), (4, 16, 1), (1, 512, 0)])
)
@torch.no_grad()
def measure_recurrence(in_triton, timed, batch, width, trees, delta):
    """A layer of Qwen3.5-4B's sizes, or of a Mamba-2 of as many numbers: steps, trees of two branches, a prompt."""
    heads, groups, size, channels = sized((2, 1, 16, 32), (32, 16, 128, 8192))
    tokens = make_tokens(
        batch * width, DTYPE, delta=delta, channels=channels, heads=heads, groups=groups, keys=size, values=size
    ).to(DEVICE)
    parents = torch.tensor([(node + 1) // 2 - 1 for node in range(width)] * batch, dtype=torch.int32, device=DEVICE)
    slots, advance = torch.arange(batch, device=DEVICE), torch.full((batch,), not trees, device=DEVICE)
    rows = RecurrentRows((width,) * batch, slots, advance, parents if trees else None)
    whole, passes = slice(None), batch * (1 if trees else 2)  # a state that advances is read and written
    case = f"{batch} x {width}{' as trees' if trees else ''}, {'delta' if delta else 'Mamba-2'}, {DTYPE}"
    x, gates = tokens.x(whole), (tokens.decay, tokens.gain, tokens.states)
    moved = (2 * x.numel() + passes * tokens.windows[0].numel()) * DTYPE.itemsize
    convolution = partial(convolve, x, tokens.weight, None, tokens.windows, rows, silu=True)
    timed("convolution of ancestors", case, moved, convolution)
    moved = tokens.qkv.numel() * DTYPE.itemsize + 4 * (tokens.decay.numel() * size + passes * tokens.states[0].numel())
    timed("recurrence", case, moved, partial(scan, *tokens.parts(whole), *gates, rows, delta=delta))


@pytest.mark.gpu(seconds=2)
@pytest.mark.parametrize("rows", first(sized((3,), (1, 8, 64))))
def measure_decoder_layers(in_triton, timed, rows):
    """The time of a layer is what a step of few rows consists of: that of all layers, by their number."""
    layers = Layers(rows)
    for name, pdl in ((KERNEL, True), (f"{KERNEL}, ordinary launches", False)):
        timed(name, f"{COUNT} layers, {rows} rows, {DTYPE}", layers.moved, layers.run, pdl)


@pytest.mark.gpu(seconds=1)
@pytest.mark.parametrize(("batch", "nodes"), [served(*case) for case in sized([(2, 16)], [(1, 16), (64, 64)])])
def measure_accept(in_triton, timed, batch, nodes):
    inputs = [x.to(DEVICE) for x in test_verify.tree_case(batch, nodes)]
    *nodes, choices = inputs
    moved = sum(x.numel() * x.element_size() for x in inputs)
    timed("accept", f"{batch} trees of {nodes}", moved, accept, Nodes(*nodes), choices)


@pytest.mark.gpu(seconds=4)
@pytest.mark.parametrize("layer", PACKED_LAYERS)
@torch.no_grad()
def measure_packed_weights(in_triton, timed, layer):
    inputs, outputs = PACKED_LAYERS[layer]
    for name in PACKED:
        linear = test_packed_weights.packed(test_packed_weights.random_rows(name, (inputs, outputs)), DTYPE)
        for count in sized((2,), (1, 16, 64, 256)):
            x = torch.randn(count, inputs, device=DEVICE).to(DTYPE)
            moved = linear.bytes + (x.numel() + count * outputs) * x.element_size()
            timed(f"linear, {name}", f"{layer}, {count} rows, {DTYPE}", moved, linear, x)


@pytest.mark.gpu(seconds=3)
@pytest.mark.parametrize("batch", sized((2,), (1, 32)))
@torch.no_grad()
def measure_drafting(in_triton, timed, batch):
    slots, size, rank = sized((3, 60, 8), (15, 32000, 256))
    lattice, transition, before, positions = test_walk.lattice_case(batch, slots, size, rank, DTYPE)
    case, moved = f"{batch} chains of {slots}, rank {rank}, {DTYPE}", batch * slots * 10 * rank * DTYPE.itemsize
    timed("walk", case, moved, walk_chain, lattice, transition, before, None, positions)
    hidden, rows, group = sized((96, 5, 16), (4096, 16, 16))
    z, base, deltas = taps_case(hidden, rows, batch, group, DTYPE)
    moved = (2 * z.numel() + deltas.numel()) * DTYPE.itemsize
    timed("two taps", f"{batch} blocks of {rows}, {DTYPE}", moved, two_taps, z, base, deltas, 0, rows)
    chains = test_early_exit.exit_case(batch, 5)
    timed("early exit", f"{batch} chains", chains[1].numel() * 4, exit_level, *chains, 1, test_early_exit.LEAST)


@pytest.mark.gpu(seconds=4)
def measure_acceptance(in_triton, timed):
    batch, drafted, size = test_acceptance.CHAINS
    inputs = test_acceptance.chains()
    target_probs, moved = inputs[0], 4 * batch * size * (2 * drafted + 1)
    case = f"{batch} chains of {drafted}, vocabulary {size}"
    # The host reads what block verification accepts.
    timed("block verification", case, moved, acceptance.block, *inputs, capture=False)
    typical = test_acceptance.typical(target_probs)
    timed("typical acceptance", case, 4 * target_probs.numel(), acceptance.typical_mask, *typical)


@pytest.mark.gpu(seconds=3)
def measure_loss(timed):
    slots, width, drafts, chunk = sized((20, 16, 50, 7), (4096, 4096, 32000, 2048))
    inputs = test_training.loss_case(slots, width, drafts)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = test_training.fused(*inputs, chunk)
        loss.backward()

    moved = 4 * sum(value.numel() for value in inputs)  # each once, in fp32; compute-bound
    timed("fused LM head and KL", f"{slots} x {width} x {drafts}, bf16", moved, step, capture=False)


@pytest.mark.gpu(seconds=5)
def measure_training_time_test(in_triton, timed):
    """A head of Llama-3.1-8B's sizes in the last of seven steps, and the torch form, which stores all scores."""
    small, large = (1, 40, 30, 4, 2, 16, 2), (1, 4096, 4096, 32, 8, 128, 6)
    case = test_training.Unrolled(*sized(small, large), BF16)
    inputs = case.tensors()
    label = f"{case.rows} rows, step {case.later}, {case.heads} heads, both passes"
    moved = 2 * 2 * sum(x.numel() for x in (inputs[0], *inputs[1], *inputs[2]))  # read; gradient written
    for name, form in (("training-time test", ttt_attention), ("training-time test, torch", test_training.dense)):
        timed(name, label, moved, test_training.both_passes, form, *inputs, capture=False)


@pytest.mark.gpu(seconds=11 if ON_GPU else 1)
def measure_block_drafter(in_triton, timed):
    """A layer of Qwen3-8B's sizes over 512 blocks, and the torch form, which stores all scores."""
    case = test_training.Blocks(*sized((1, 40, 5, 6, 4, 2, 16), (1, 4096, 512, 16, 32, 8, 128)), BF16)
    inputs = case.tensors()
    moved = 2 * 2 * sum(x.numel() for x in inputs[0])  # read; gradient written
    for name, form in (
        ("block drafter", block_attention),
        ("block drafter, torch", test_training.dense_block_attention),
    ):
        timed(name, f"{case}, both passes", moved, case.both_passes, form, *inputs, capture=False)
