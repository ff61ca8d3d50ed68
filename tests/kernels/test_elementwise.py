"""The C kernels of norm, activation and rotary embedding against torch in float64, and their dispatch."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels import elementwise
from kernels.cache import cache_folder
from kernels.cpu.library import SWITCH, library

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request):
    return request.param


@pytest.fixture
def in_c(monkeypatch):
    """Fails the test if a call falls back to torch."""
    if library() is None:
        pytest.skip("no C compiler on this machine")
    native = elementwise._native

    def must(*arguments):
        output = native(*arguments)
        assert output is not None
        return output

    monkeypatch.setattr(elementwise, "_native", must)


def close(actual, expected, dtype):
    assert actual.dtype == dtype
    scale = expected.abs().max().clamp(min=1)
    assert ((actual.double() - expected).abs().max() / scale) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(1, 16), (5, 256), (2, 3, 4096)])
@torch.no_grad()
def test_rms_norm(in_c, dtype, shape):
    x, weight = torch.randn(shape).to(dtype) * 3, torch.randn(shape[-1]).to(dtype)
    expected = F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    close(elementwise.rms_norm(x, weight, 1e-5), expected, dtype)


@torch.no_grad()
def test_a_centered_norm_scales_by_one_more_and_rounds_once(in_c, dtype):
    x, weight = torch.randn(5, 256).to(dtype) * 3, torch.randn(256).to(dtype)
    expected = F.rms_norm(x.double(), (256,), 1 + weight.double(), 1e-6)
    actual = elementwise.rms_norm(x, weight, 1e-6, centered=True)
    close(actual, expected, dtype)
    if dtype is torch.bfloat16:  # correctly rounded, except next to the middle of two values
        assert (actual == expected.to(dtype)).float().mean() > 0.99


@pytest.mark.parametrize("centered", [False, True])
@torch.no_grad()
def test_the_norm_of_a_stream_in_fp32_rounds_once(in_c, centered):
    x, weight = torch.randn(5, 256) * 3, torch.randn(256).bfloat16()
    expected = F.rms_norm(x.double(), (256,), centered + weight.double(), 1e-5)
    options = {"eps": 1e-5, "centered": centered}
    inside = elementwise.rms_norm(x, weight, **options, out_dtype=torch.float32)
    close(inside, expected, torch.float32)
    actual = elementwise.rms_norm(x, weight, **options)
    assert torch.equal(actual, inside.bfloat16())
    assert torch.equal(elementwise.rms_norm(x[2:3], weight, **options), actual[2:3])


@pytest.mark.parametrize("norm", ["rms", "centered", "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_the_norm_of_a_stream_in_torch(norm, dtype):
    x, weight, bias = torch.randn(5, 100) * 3, torch.randn(100).to(dtype), torch.randn(100).to(dtype)
    if norm == "layer":
        operation = partial(elementwise.layer_norm, x, weight, bias, 1e-5)
        expected = F.layer_norm(x.double(), (100,), weight.double(), bias.double(), 1e-5)
    else:
        operation = partial(elementwise.rms_norm, x, weight, 1e-5, centered=norm == "centered")
        expected = F.rms_norm(x.double(), (100,), (norm == "centered") + weight.double(), 1e-5)
    inside = operation(out_dtype=torch.float32)
    close(inside, expected, torch.float32)
    assert torch.equal(operation(), inside.to(dtype))


@torch.no_grad()
def test_rms_norm_of_rows_that_lie_apart(in_c, dtype):
    wide, weight = torch.randn(6, 96).to(dtype), torch.randn(32).to(dtype)
    x = wide[:, 32:64]
    close(elementwise.rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (32,), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("spread", [1.0, 200.0])  # far beyond where e^x overflows
@torch.no_grad()
def test_silu_mul(in_c, dtype, spread):
    x = (torch.randn(7, 64) * spread).to(dtype)
    gate, up = x.double().chunk(2, -1)
    actual = elementwise.silu_mul(x)
    assert actual.isfinite().all()
    close(actual, F.silu(gate) * up, dtype)


@pytest.mark.parametrize("spread", [1.0, 200.0])
@torch.no_grad()
def test_gelu_mul(in_c, dtype, spread):
    x = (torch.randn(7, 64) * spread).to(dtype)
    gate, up = x.double().chunk(2, -1)
    actual = elementwise.gelu_mul(x)
    assert actual.isfinite().all()
    close(actual, F.gelu(gate, approximate="tanh") * up, dtype)
    assert torch.equal(elementwise.gelu_mul(x[4:5]), actual[4:5])


@pytest.mark.parametrize("size", [768, 1024, 100])
@torch.no_grad()
def test_layer_norm_and_activations_by_row(dtype, size):
    """In torch, with the bits of a row wherever it stands, also beside thousands that several threads share."""
    x, weight, bias = (torch.randn(*shape, size).to(dtype) for shape in ((300,), (), ()))
    expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
    normed = elementwise.layer_norm(x, weight, bias, 1e-5)
    close(normed, expected, dtype)
    rows = (0, 1, 150, 299)
    assert all(torch.equal(elementwise.layer_norm(x[i : i + 1], weight, bias, 1e-5)[0], normed[i]) for i in rows)
    wanted = {
        "relu": F.relu(x.double()),
        "gelu": F.gelu(x.double()),
        "gelu_pytorch_tanh": F.gelu(x.double(), approximate="tanh"),
    }
    for activation, values in wanted.items():
        active = elementwise.activate(x, activation)
        close(active, values, dtype)
        assert all(torch.equal(elementwise.activate(x[i : i + 1], activation)[0], active[i]) for i in rows)
        assert torch.equal(elementwise.activate(x[:, 16:48].contiguous(), activation), active[:, 16:48])


@torch.no_grad()
def test_rotate_takes_a_slice_of_merged_projections(in_c, dtype):
    merged, angles = torch.randn(5, 8, 64).to(dtype), torch.randn(5, 1, 64)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x = merged[:, :6]
    first, second = x.double().chunk(2, -1)
    expected = x.double() * cos.double() + torch.cat([-second, first], -1) * sin.double()
    close(elementwise.rotate(x, cos, sin), expected, dtype)


@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_company(in_c, dtype):
    x, weight = torch.randn(9, 128).to(dtype), torch.randn(128).to(dtype)
    norm, gated = elementwise.rms_norm(x, weight, 1e-5), elementwise.silu_mul(x)
    assert torch.equal(elementwise.rms_norm(x[4:5], weight, 1e-5), norm[4:5])
    assert torch.equal(elementwise.silu_mul(x[4:5]), gated[4:5])


def test_with_gradients_it_is_torch():
    x = torch.randn(3, 32, requires_grad=True)
    weight = torch.ones(32, requires_grad=True)
    elementwise.rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad is not None
    elementwise.silu_mul(x).sum().backward()
    centered = elementwise.rms_norm(x, weight, 1e-5, centered=True)
    torch.testing.assert_close(centered, F.rms_norm(x, (32,), 1 + weight, 1e-5))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(elementwise.gelu_mul(x), F.gelu(gate, approximate="tanh") * up)


@torch.no_grad()
def test_mixed_dtypes_and_odd_sizes_go_to_torch():
    weight = torch.ones(32)
    assert elementwise.rms_norm(torch.randn(2, 32).bfloat16(), weight.bfloat16(), 1e-5).dtype == torch.bfloat16
    assert elementwise._native(32, torch.randn(2, 32).bfloat16(), weight) is None
    assert elementwise._native(24, torch.randn(2, 24)) is None
    assert elementwise.silu_mul(torch.randn(2, 24)).shape == (2, 12)


PRINT_LIBRARY = "import logging; logging.basicConfig(); from kernels.cpu.library import library; print(library())"


@pytest.fixture
def library_in_a_new_process(forked):
    def run(**environment):
        return forked(["-c", PRINT_LIBRARY], env=os.environ | {key: str(value) for key, value in environment.items()})

    return run


def test_a_switch_turns_the_c_kernels_off(library_in_a_new_process):
    assert library_in_a_new_process(**{SWITCH: "torch"}).stdout.strip() == "None"


def test_without_a_compiler_torch_serves_and_the_log_says_so(tmp_path, library_in_a_new_process):
    run = library_in_a_new_process(PATH=tmp_path, CC="", XDG_CACHE_HOME=tmp_path)
    assert run.stdout.strip() == "None"
    assert "no C compiler" in run.stderr


def test_a_compiler_that_fails_is_reported_and_leaves_no_file(tmp_path, library_in_a_new_process):
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such thing >&2\nexit 1\n')
    broken.chmod(0o755)
    run = library_in_a_new_process(CC=broken, XDG_CACHE_HOME=tmp_path)
    assert run.stdout.strip() == "None"
    assert "could not build" in run.stderr
    assert "no such thing" in run.stderr
    assert list((tmp_path / "headway").iterdir()) == []


def test_the_library_lies_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "headway"
