"""The small operations of a layer and a step: checks against float64 or torch, and times at Llama-3.1-8B's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise import add_rms_norm, embed_norm_gelu, norm_beside, rms_norm, silu_mul
from kernels.gather import gather_rows
from kernels.move import move_slots
from kernels.residual import residual_silu
from kernels.rotary import QKNorm, rotate_and_write
from scripts.gpu_check.measure import Item, close, same, timed
from scripts.gpu_check.plan import BF16, RANKS, SERVED, KernelCheck

BOUND = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
HEADS = 5  # of Medusa


def sizes(device: torch.device) -> tuple[int, int, int, int, int]:
    """Return hidden size, inner size, query heads, KV heads and head size."""
    return (4096, 14336, 32, 8, 128) if device.type == "cuda" else (64, 96, 4, 2, 16)


def mlp_case(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return x, delta, a norm's weight, and gate and up in one tensor."""
    hidden, inner, *_ = sizes(device)
    shapes = (rows, hidden), (rows, hidden), (hidden,), (rows, 2 * inner)
    return tuple(torch.randn(*shape, device=device).to(dtype) for shape in shapes)


def attention_case(
    rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, QKNorm, Tensor]:
    """Return qkv, cos, sin, norm and cache."""
    _, _, heads, kv_heads, dim = sizes(device)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device=device).to(dtype)
    angles = torch.randn(rows, 1, dim, device=device)
    weights = torch.randn(2, dim, device=device).to(dtype)
    cache = torch.zeros(2, kv_heads, 2 * rows, dim, dtype=dtype, device=device)
    return qkv, angles.cos().to(dtype), angles.sin().to(dtype), QKNorm(weights[0], weights[1], 1e-5), cache


def checks(device: torch.device) -> Iterator[KernelCheck]:
    on_gpu = device.type == "cuda"
    for dtype, rank in RANKS.items() if on_gpu else ((torch.float32, SERVED),):
        case, rank = (37 if on_gpu else 3, dtype, device), SERVED if rank == BF16 else rank
        yield KernelCheck("correctness", f"layers, {dtype}", 3, rank, partial(compare, *case))
        yield KernelCheck("correctness", f"heads, {dtype}", 2, rank, partial(head_steps, *case))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for rows in (1, 16, 512) if on_gpu else (2,):
        yield KernelCheck("timings", f"layers and heads, {rows} rows", 2, SERVED, partial(time, rows, dtype, device))
    yield KernelCheck("timings", "move", 1, SERVED, partial(time_move, dtype, device))


@torch.no_grad()
def compare(rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    heads = sizes(device)[2]
    x, delta, weight, gate_up = mlp_case(rows, dtype, device)
    normed, total = add_rms_norm(x, delta, weight, 1e-5)
    true = F.rms_norm(total.double(), weight.shape, weight.double(), 1e-5)
    yield close("add and RMSNorm", str(dtype), normed, true, BOUND[dtype])
    yield same("add and RMSNorm", f"its sum, {dtype}", total, x + delta)
    yield same("RMSNorm", f"of that sum, {dtype}", rms_norm(total, weight, 1e-5), normed)
    gate, up = gate_up.double().chunk(2, -1)
    yield close("SiLU and product", str(dtype), silu_mul(gate_up), F.silu(gate) * up, BOUND[dtype])
    qkv, cos, sin, norm, cache = attention_case(rows, dtype, device)
    slots = torch.arange(rows, device=device) * 2
    q = rotate_and_write(qkv, cos, sin, norm, slots, cache, heads)
    plain = cache.cpu().zero_()
    on_cpu = QKNorm(norm.q.cpu(), norm.k.cpu(), norm.eps)
    inputs = (qkv.cpu(), cos.cpu(), sin.cpu(), on_cpu, slots.cpu(), plain, heads)
    yield close("rotary, QK norm, write", f"q, {dtype}", q, rotate_and_write(*inputs), BOUND[dtype])
    yield close("rotary, QK norm, write", f"cache, {dtype}", cache, plain, BOUND[dtype])
    narrow = torch.zeros(cache.shape, device=device).to(torch.float8_e4m3fn)
    rotate_and_write(qkv, cos, sin, norm, slots, narrow, heads)
    yield close("rotary, QK norm, write", f"cache in fp8, {dtype}", narrow, plain, 0.07)
    stack = torch.randn(2, 2, 3, 128, 20, device=device).to(dtype)
    source = torch.arange(3, 60, 5, device=device)
    expected = stack.clone()
    expected[:, :, :, : len(source)] = stack[:, :, :, source]
    move_slots(stack, source, torch.arange(len(source), device=device))
    yield same("move", str(dtype), stack, expected)


def head_case(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return states, ids, embedding table, a norm's scale and shift, and weights and biases of five residual blocks."""
    hidden, *_ = sizes(device)
    shapes = (rows, hidden), (257, hidden), (hidden,), (hidden,), (HEADS, hidden, hidden), (HEADS, hidden)
    x, table, scale, shift, weight, bias = (torch.randn(*shape, device=device).to(dtype) for shape in shapes)
    return x, torch.arange(rows, device=device) * 7 % 257, table, scale, shift, weight * hidden**-0.5, bias


@torch.no_grad()
def head_steps(rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    """Check the parts of heads besides a decoder layer: an MLP speculator's step, Medusa's blocks, fused features."""
    x, ids, table, scale, shift, weight, bias = head_case(rows, dtype, device)
    total = x.double() + 0.3 * table[ids].double()
    true = F.gelu(F.rms_norm(total, scale.shape, scale.double(), 1e-6) + shift.double())
    actual = embed_norm_gelu(x, ids, table, 0.3, scale, shift, 1e-6)
    yield close("MLP head step", str(dtype), actual, true, BOUND[dtype])
    true = x.double() + F.silu(x.double() @ weight.double().transpose(1, 2) + bias[:, None].double())
    actual = residual_silu(x[None], weight, bias)
    yield close("Medusa's residual blocks", f"{HEADS} heads, {dtype}", actual, true, BOUND[dtype])
    alone = residual_silu(x[None, -1:], weight, bias)
    yield same("Medusa's residual blocks, bits", f"the last row alone, {dtype}", alone, actual[:, -1:])
    fused = norm_beside(x, x.flip(0), scale, shift, 1e-6)
    separate = [rms_norm(hidden, norm_weight, 1e-6) for hidden, norm_weight in ((x, scale), (x.flip(0), shift))]
    yield same("norms beside each other", str(dtype), fused, torch.cat(separate, dim=-1))
    parts, index = (x, x.flip(0), x.neg()), torch.arange(0, rows, 2, device=device)
    expected = torch.cat([part[index] for part in parts], dim=-1)
    yield same("gather of features", str(dtype), gather_rows(parts, index), expected)


@torch.no_grad()
def time(rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    heads, size = sizes(device)[2], dtype.itemsize
    x, delta, weight, gate_up = mlp_case(rows, dtype, device)
    qkv, cos, sin, norm, cache = attention_case(rows, dtype, device)
    slots = torch.arange(rows, device=device)
    states, ids, table, scale, shift, weights, biases = head_case(rows, dtype, device)
    index = torch.arange(0, rows, 2, device=device)
    residual = (weights.numel() + (1 + HEADS) * states.numel()) * size
    gathered = 6 * len(index) * states.shape[1] * size
    rotated = 2 * (qkv.numel() + cos.numel()) * size
    calls = (  # kernel, bytes, function and its arguments
        ("MLP head step", 3 * states.numel() * size, embed_norm_gelu, states, ids, table, 0.3, scale, shift, 1e-6),
        ("Medusa's residual blocks", residual, residual_silu, states[None], weights, biases),
        ("norms beside each other", 4 * states.numel() * size, norm_beside, states, states, scale, shift, 1e-6),
        ("gather of features", gathered, gather_rows, (states, states, states), index),
        ("add and RMSNorm", 4 * x.numel() * size, add_rms_norm, x, delta, weight, 1e-5),
        ("SiLU and product", gate_up.numel() * size * 3 // 2, silu_mul, gate_up),
        ("rotary, QK norm, write", rotated, rotate_and_write, qkv, cos, sin, norm, slots, cache, heads),
    )
    for kernel, moved, call, *args in calls:
        yield timed(kernel, f"{rows} rows, {dtype}", device, moved, call, *args)


def time_move(dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    *_, kv_heads, dim = sizes(device)
    layers, paths = (32, 8) if device.type == "cuda" else (2, 1)
    stack = torch.zeros(layers, 2, kv_heads, 64 * paths, dim, dtype=dtype, device=device)
    source = (torch.arange(paths)[:, None] * 64 + torch.arange(1, 13, 2)).flatten().to(device)
    destination = (torch.arange(paths)[:, None] * 64 + torch.arange(6)).flatten().to(device)
    moved = 2 * stack[:, :, :, : len(source)].numel() * dtype.itemsize
    case = f"{paths} paths of 6, {layers} layers, {dtype}"
    yield timed("move", case, device, moved, move_slots, stack, source, destination)
