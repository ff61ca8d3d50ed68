"""Elementwise operations, gathers and moves in Triton against float64 and against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels import elementwise
from kernels.copies import gather_rows, move_slots, read_slots, write_kv
from kernels.operands import QKNorm
from kernels.residual import residual_silu
from kernels.rotary import rotate_and_write
from tests.device import BF16, DEVICE, FP16, FP32, ON_GPU, served, sized
from tests.pairwise import parametrize_pairs

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
pytestmark = pytest.mark.usefixtures("in_triton")


@pytest.fixture(params=list(TOLERANCE))
def dtype(request):
    return request.param


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(actual, expected, dtype):
    assert actual.dtype == dtype
    return (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(1, 16), (3, 100), (2, 2, 320)])
@torch.no_grad()
def test_rms_norm_with_and_without_a_sum(dtype, shape):
    x, delta, weight = (
        random(*shape, dtype=dtype) * 3,
        random(*shape, dtype=dtype, seed=1),
        random(shape[-1], dtype=dtype),
    )
    expected = F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    assert close(elementwise.rms_norm(x, weight, 1e-5), expected, dtype)
    normed, total = elementwise.add_rms_norm(x, delta, weight, 1e-5)
    assert close(total, x.double() + delta.double(), dtype)
    assert close(normed, F.rms_norm(total.double(), shape[-1:], weight.double(), 1e-5), dtype)
    assert torch.equal(elementwise.rms_norm(total, weight, 1e-5), normed)
    assert torch.equal(elementwise.rms_norm(x[:1], weight, 1e-5), elementwise.rms_norm(x, weight, 1e-5)[:1])


@pytest.mark.parametrize("shape", [(1, 16), (3, 100), (2, 2, 1320)])
@torch.no_grad()
def test_layer_norm_and_activations(dtype, shape):
    x, weight, bias = (
        random(*shape, dtype=dtype) * 3 + 1,
        random(shape[-1], dtype=dtype),
        random(shape[-1], dtype=dtype, seed=1),
    )
    expected = F.layer_norm(x.double(), shape[-1:], weight.double(), bias.double(), 1e-5)
    normed = elementwise.layer_norm(x, weight, bias, 1e-5)
    assert close(normed, expected, dtype)
    assert torch.equal(elementwise.layer_norm(x[:1], weight, bias, 1e-5), normed[:1])
    for activation, approximate in (("gelu", "none"), ("gelu_pytorch_tanh", "tanh")):
        active = elementwise.activate(x, activation)
        assert close(active, F.gelu(x.double(), approximate=approximate), dtype)
        assert torch.equal(elementwise.activate(x[:1], activation), active[:1])


@pytest.mark.parametrize("narrow", [BF16, FP16])
@torch.no_grad()
def test_norms_of_a_stream_in_fp32_round_once(narrow):
    """Triton's interpreter truncates to bf16, so of that the unrounded norm is compared."""
    x, delta, weight = random(3, 100, dtype=FP32) * 3, random(3, 100, dtype=FP32, seed=1), random(100, dtype=narrow)
    for centered in (False, True):
        expected = F.rms_norm((x + delta).double(), (100,), centered + weight.double(), 1e-5)
        normed, total = elementwise.add_rms_norm(x, delta, weight, 1e-5, centered=centered)
        assert torch.equal(total, x + delta)
        inside = elementwise.rms_norm(total, weight, 1e-5, centered=centered, out_dtype=FP32)
        assert close(inside, expected, FP32)
        assert close(normed, expected, narrow)
        assert torch.equal(elementwise.rms_norm(total, weight, 1e-5, centered=centered), normed)
        assert narrow is BF16 or torch.equal(normed, inside.to(narrow))
    expected = F.layer_norm(x.double(), (100,), weight.double(), weight.double(), 1e-5)
    assert close(elementwise.layer_norm(x, weight, weight, 1e-5, out_dtype=FP32), expected, FP32)
    assert close(elementwise.layer_norm(x, weight, weight, 1e-5), expected, narrow)


@torch.no_grad()
def test_centered_norms(dtype):
    x, delta, weight = (random(3, 100, dtype=dtype), random(3, 100, dtype=dtype, seed=1), random(100, dtype=dtype))
    expected = F.rms_norm(x.double(), (100,), 1 + weight.double(), 1e-6)
    assert close(elementwise.rms_norm(x, weight, 1e-6, centered=True), expected, dtype)
    normed, total = elementwise.add_rms_norm(x, delta, weight, 1e-6, centered=True)
    assert torch.equal(elementwise.rms_norm(total, weight, 1e-6, centered=True), normed)


@torch.no_grad()
def test_gathered_rows_lie_beside_each_other(dtype):
    parts = [random(5, 1100, dtype=dtype, seed=seed) for seed in range(6)]
    parts[1] = random(5, 2200, dtype=dtype)[:, 1100:]  # a slice of wider rows
    index = torch.tensor([4, 0, 4], device=DEVICE)
    for count in (1, 3, 6):
        expected = torch.cat([part[index] for part in parts[:count]], dim=-1)
        assert torch.equal(gather_rows(parts[:count], index), expected)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_residual_blocks_of_all_heads(dtype, bias):
    """The first layer reads one state for all heads, the next layer one state per head."""
    size = 80  # no multiple of a tile
    weight = random(3, size, size, dtype=dtype) * size**-0.5
    offset = random(3, size, dtype=dtype, seed=1) if bias else None
    for x in (random(1, 5, size, dtype=dtype, seed=2), random(3, 5, size, dtype=dtype, seed=3)):
        products = x.double() @ weight.double().transpose(1, 2)
        products = products if offset is None else products + offset[:, None].double()
        actual = residual_silu(x, weight, offset)
        assert close(actual, x.double() + F.silu(products), dtype)
        assert torch.equal(residual_silu(x[:, 3:4], weight, offset), actual[:, 3:4])


@pytest.mark.parametrize("spread", [1.0, 200.0])  # far beyond where e^x overflows
@torch.no_grad()
def test_silu_mul(dtype, spread):
    x = random(3, 2200, dtype=dtype)
    x[:, :1100] *= spread
    gate, up = x.double().chunk(2, -1)
    actual = elementwise.silu_mul(x)
    assert actual.isfinite().all()
    assert close(actual, F.silu(gate) * up, dtype)


@pytest.mark.parametrize("spread", [1.0, 200.0])
@torch.no_grad()
def test_gelu_mul(dtype, spread):
    x = random(3, 2200, dtype=dtype)
    x[:, :1100] *= spread
    gate, up = x.double().chunk(2, -1)
    actual = elementwise.gelu_mul(x)
    assert actual.isfinite().all()
    assert close(actual, F.gelu(gate, approximate="tanh") * up, dtype)


@parametrize_pairs(
    {
        "dtype": list(TOLERANCE),
        "heads, kv_heads, dim": [(4, 2, 64), (7, 1, 80), (3, 3, 16), (2, 1, 256)],
        "normed": ["not", "normed", "centered"],
    }
)
@torch.no_grad()
def test_rotate_and_write_is_what_its_parts_are(monkeypatch, dtype, heads, kv_heads, dim, normed):
    """Against the same function in torch; the input is a slice of wider rows, and other slots keep their values."""
    qkv = random(3, 2 * (heads + 2 * kv_heads), dim, dtype=dtype)[:, : heads + 2 * kv_heads]
    angles = random(3, 1, dim, dtype=torch.float32, seed=1)
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = random(dim, dtype=dtype, seed=2), random(dim, dtype=dtype, seed=3)
    norm = None if normed == "not" else QKNorm(*weights, 1e-6, normed == "centered")
    cache = random(2, kv_heads, 8, dim, dtype=dtype, seed=4)
    slots = torch.tensor([6, 1, 2], device=DEVICE)
    written, expected = cache.clone(), cache.clone()
    q = rotate_and_write(qkv, *rotary, norm, slots, written, heads)
    monkeypatch.setenv("HEADWAY_KERNELS", "torch")
    assert close(q, rotate_and_write(qkv, *rotary, norm, slots, expected, heads).double(), dtype)
    assert close(written, expected.double(), dtype)
    untouched = [0, 3, 4, 5, 7]
    assert torch.equal(written[:, :, untouched], cache[:, :, untouched])


def test_keys_and_values_are_written_in_8_bits():
    """Values are rounded to nearest as in torch and saturate at e4m3's largest. Moves copy them unchanged."""
    qkv = random(3, 8, 16, dtype=torch.float32)
    qkv[0, 6, 3], qkv[1, 5, 2] = 1e4, -1e4
    rotary = torch.ones(3, 1, 16, device=DEVICE), torch.zeros(3, 1, 16, device=DEVICE)
    cache = torch.zeros(2, 2, 8, 16, device=DEVICE).to(torch.float8_e4m3fn)
    slots = torch.tensor([6, 1, 2], device=DEVICE)
    q = rotate_and_write(qkv, *rotary, None, slots, cache, 4)
    assert torch.equal(q, qkv[:, :4])
    wide = torch.stack([qkv[:, 4:6], qkv[:, 6:]]).transpose(1, 2).clamp(-448, 448)
    stored = read_slots(cache, slots).float()
    assert torch.equal(stored, wide.to(torch.float8_e4m3fn).float())
    assert stored.abs().max() == 448
    move_slots(cache[None], slots, torch.tensor([0, 3, 4], device=DEVICE))
    assert torch.equal(read_slots(cache, torch.tensor([0, 3, 4], device=DEVICE)).float(), stored)


@pytest.mark.parametrize("cache_dtype", [FP32, torch.float8_e4m3fn])
def test_values_that_are_not_finite_are_stored_as_zeros_under_a_key_of_nan(cache_dtype):
    """Of this row and KV head alone; a key that is NaN, or saturates, changes no value."""
    qkv = random(4, 8, 16, dtype=FP32)
    qkv[0, 6, 3], qkv[1, 7, 9], qkv[2, 4, 1], qkv[2, 5, 15] = torch.nan, -torch.inf, torch.nan, 1e4
    rotary = torch.ones(4, 1, 16, device=DEVICE), torch.zeros(4, 1, 16, device=DEVICE)
    slots = torch.tensor([6, 1, 2, 4], device=DEVICE)
    cache, expected = (torch.zeros(2, 2, 8, 16, device=DEVICE).to(cache_dtype) for _ in range(2))
    q = rotate_and_write(qkv, *rotary, None, slots, cache, 4)
    assert torch.equal(q, qkv[:, :4])
    write_kv(expected, slots, qkv[:, 4:6], qkv[:, 6:])
    for stored in (read_slots(cache, slots).float(), read_slots(expected, slots).float()):
        keys, values = stored
        assert keys.isnan().any(-1).tolist() == [[True, False, True, False], [False, True, False, False]]
        assert values.isfinite().all()
        assert (values[0, 0, 3], values[1, 1, 9]) == (0, 0)
        assert torch.equal(values[:, 2:], qkv[2:, 6:].transpose(0, 1).to(cache_dtype).float())


@pytest.mark.parametrize("count", [1, 5, 40])
def test_moves_read_everything_before_they_write(count):
    """Paths of two trees move to the front of their blocks, so some sources are destinations of other moves."""
    stack = random(2, 2, 3, 128, 20, dtype=torch.float32)
    generator = torch.Generator().manual_seed(count)
    source = torch.cat([64 * b + torch.randperm(63, generator=generator)[:count].sort().values + 1 for b in (0, 1)])
    destination = torch.cat([64 * b + torch.arange(count) for b in (0, 1)])
    expected = stack.clone()
    expected[:, :, :, destination] = stack[:, :, :, source]
    move_slots(stack, source.to(DEVICE), destination.to(DEVICE))
    assert torch.equal(stack, expected)


BOUND = {FP32: 1e-5, FP16: 3e-3, BF16: 2e-2}
HEADS = 5  # of Medusa
SIZES = sized((64, 96, 4, 2, 16), (4096, 14336, 32, 8, 128))  # hidden and inner size, query and KV heads, head size
ROWS = sized(3, 37)
DTYPES = [served(BF16) if ON_GPU else BF16, FP16, FP32]


def mlp_case(rows, dtype):
    """Return x, delta, a norm's weight, and gate and up in one tensor."""
    hidden, inner, *_ = SIZES
    shapes = (rows, hidden), (rows, hidden), (hidden,), (rows, 2 * inner)
    return [random(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


def attention_case(rows, dtype):
    """Return qkv, cos, sin, norm and cache."""
    *_, heads, kv_heads, dim = SIZES
    qkv, angles = random(rows, heads + 2 * kv_heads, dim, dtype=dtype), random(rows, 1, dim, dtype=FP32)
    norm = QKNorm(random(dim, dtype=dtype), random(dim, dtype=dtype, seed=1), 1e-5)
    cache = torch.zeros(2, kv_heads, 2 * rows, dim, dtype=dtype, device=DEVICE)
    return qkv, angles.cos().to(dtype), angles.sin().to(dtype), norm, cache


def head_case(rows, dtype):
    """Return states, ids, embedding table, a norm's scale and shift, and weights and biases of five residual blocks."""
    hidden = SIZES[0]
    shapes = (rows, hidden), (257, hidden), (hidden,), (hidden,), (HEADS, hidden, hidden), (HEADS, hidden)
    x, table, scale, shift, weight, bias = (random(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes))
    return x, torch.arange(rows, device=DEVICE) * 7 % 257, table, scale, shift, weight * hidden**-0.5, bias


@pytest.mark.gpu(seconds=3)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_the_operations_of_a_models_layer(compare, dtype):
    heads = SIZES[2]
    x, delta, weight, gate_up = mlp_case(ROWS, dtype)
    normed, total = elementwise.add_rms_norm(x, delta, weight, 1e-5)
    true = F.rms_norm(total.double(), weight.shape, weight.double(), 1e-5)
    compare.close("add and RMSNorm", str(dtype), normed, true, BOUND[dtype])
    if ON_GPU:
        compare.same("add and RMSNorm", f"its sum, {dtype}", total, x + delta)
    else:  # the interpreter truncates to bf16
        compare.close("add and RMSNorm", f"its sum, {dtype}", total, x.double() + delta.double(), BOUND[dtype])
    compare.same("RMSNorm", f"of that sum, {dtype}", elementwise.rms_norm(total, weight, 1e-5), normed)
    gate, up = gate_up.double().chunk(2, -1)
    compare.close("SiLU and product", str(dtype), elementwise.silu_mul(gate_up), F.silu(gate) * up, BOUND[dtype])
    qkv, cos, sin, norm, cache = attention_case(ROWS, dtype)
    slots = torch.arange(ROWS, device=DEVICE) * 2
    q = rotate_and_write(qkv, cos, sin, norm, slots, cache, heads)
    plain = torch.zeros(cache.shape, dtype=FP32)
    on_cpu = QKNorm(norm.q.cpu().float(), norm.k.cpu().float(), norm.eps)
    inputs = [x.cpu().float() for x in (qkv, cos, sin)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_KERNELS", "torch")
        expected = rotate_and_write(*inputs, on_cpu, slots.cpu(), plain, heads)
    compare.close("rotary, QK norm, write", f"q, {dtype}", q, expected, BOUND[dtype])
    compare.close("rotary, QK norm, write", f"cache, {dtype}", cache, plain, BOUND[dtype])
    narrow = torch.zeros(cache.shape, device=DEVICE).to(torch.float8_e4m3fn)
    rotate_and_write(qkv, cos, sin, norm, slots, narrow, heads)
    compare.close("rotary, QK norm, write", f"cache in fp8, {dtype}", narrow, plain, 0.07)
    stack, source = random(2, 2, 3, 128, 20, dtype=dtype), torch.arange(3, 60, 5, device=DEVICE)
    moved = stack.clone()
    moved[:, :, :, : len(source)] = stack[:, :, :, source]
    move_slots(stack, source, torch.arange(len(source), device=DEVICE))
    compare.same("move", str(dtype), stack, moved)


@pytest.mark.gpu(seconds=2)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_the_operations_of_heads(compare, dtype):
    """Besides a decoder layer: an MLP speculator's step, Medusa's residual blocks, fused features."""
    x, ids, table, scale, shift, weight, bias = head_case(ROWS, dtype)
    step = (0.3, scale, shift, 1e-6)
    total = x.double() + 0.3 * table[ids].double()
    true = F.gelu(F.rms_norm(total, scale.shape, scale.double(), 1e-6) + shift.double())
    actual = elementwise.embed_norm_gelu(x, ids, table, *step)
    compare.close("MLP head step", str(dtype), actual, true, BOUND[dtype])
    alone = elementwise.embed_norm_gelu(x[2:], ids[2:], table, *step)
    compare.same("MLP head step, bits", f"without the first rows, {dtype}", alone, actual[2:])
    true = x.double() + F.silu(x.double() @ weight.double().transpose(1, 2) + bias[:, None].double())
    actual = residual_silu(x[None], weight, bias)
    compare.close("Medusa's residual blocks", f"{HEADS} heads, {dtype}", actual, true, BOUND[dtype])
    alone = residual_silu(x[None, -1:], weight, bias)
    compare.same("Medusa's residual blocks, bits", f"the last row alone, {dtype}", alone, actual[:, -1:])
    wide = random(ROWS, 2 * x.shape[1], dtype=dtype, seed=9)[:, x.shape[1] :]  # a slice of wider rows
    fused = elementwise.norm_beside(x, wide, scale, shift, 1e-6)
    separate = [elementwise.rms_norm(hidden, each, 1e-6) for hidden, each in ((x, scale), (wide, shift))]
    compare.same("norms beside each other", str(dtype), fused, torch.cat(separate, dim=-1))
    parts, index = (x, x.flip(0), x.neg()), torch.arange(0, ROWS, 2, device=DEVICE)
    expected = torch.cat([part[index] for part in parts], dim=-1)
    compare.same("gather of features", str(dtype), gather_rows(parts, index), expected)
