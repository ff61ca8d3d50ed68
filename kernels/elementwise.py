"""The row-wise operations of a decoder layer: RMSNorm, layer norm, rotary embedding, gated and plain activations.

Without gradients CUDA devices use Triton kernels (kernels/triton/elementwise.py) and CPUs C kernels
(kernels/cpu/rows.c): torch needs five to eight calls for each, which cost more than the arithmetic. With gradients CPUs
use row_gradients.py. torch is used elsewhere, and for odd sizes or mixed dtypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import row_gradients
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, active_dtype, norm_dtype, uses_triton
from kernels.triton import INTERPRETED

Gate = Literal["silu", "gelu"]
# As Hugging Face names them; "gelu" is exact, by erf, and "relu2" the square of ReLU
Activation = Literal["relu", "relu2", "gelu", "gelu_pytorch_tanh"]
VECTORS = 64  # numbers that torch computes at once at most; a rest has other bits
SERIAL = 2**14  # numbers that torch computes in one thread; more it divides anywhere, and a part's end gets other bits


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, centered: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Divide x `[..., H]` by its root mean square (arXiv 1910.07467) and scale it; fp32 statistics, as in HF's Llama.

    With `centered` as in HF's Gemma: the scale is 1 + weight, and in 16 bits only the product is rounded. `out_dtype`:
    as of `norm_dtype` by default, or autocast's, of an input of a product. Of x in fp32 only the output is rounded.
    """
    mixed = x.dtype is torch.float32 and weight.dtype is torch.bfloat16  # which C reads as well
    if (native := _native(x.shape[-1], x, x if mixed else weight)) is None:
        return _norm_without_c(x, weight, eps, centered, out_dtype)
    rows, out = _rows(x), torch.empty(x.shape, dtype=out_dtype or norm_dtype(x, weight))
    pointers, kinds = zip(*((tensor.data_ptr(), KINDS[tensor.dtype]) for tensor in (rows, weight, out)), strict=True)
    native.rms_norm(*pointers, rows.shape[0], rows.stride(0), rows.shape[1], eps, *kinds, centered)
    return out


def _norm_without_c(x: Tensor, weight: Tensor, eps: float, centered: bool, out_dtype: torch.dtype | None) -> Tensor:
    if torch.is_grad_enabled() and row_gradients.supported(x, x.shape[-1], weight):
        return row_gradients.norm(x, weight, eps, float(centered), out_dtype or active_dtype(x))
    out_dtype = out_dtype or norm_dtype(x, weight)
    if _in_triton(x):
        from kernels.triton import elementwise as gpu

        return gpu.rms_norm(_rows(x), weight, eps, centered=centered, out_dtype=out_dtype).view(x.shape)
    if centered:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (F.rms_norm(x.to(wide), weight.shape, None, eps) * (1 + weight.to(wide))).to(out_dtype)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(out_dtype)


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm` of x + delta, both `[..., H]`, and the sum, in one pass."""
    if _in_triton(x, delta):
        from kernels.triton import elementwise as gpu

        normed, total = gpu.add_rms_norm(_rows(x), _rows(delta), weight, eps, centered=centered)
        return normed.view(x.shape), total.view(x.shape)
    total = x + delta
    return rms_norm(total, weight, eps, centered=centered), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Subtract the mean of x `[..., H]`, divide by its deviation (arXiv 1607.06450), scale and shift; all in fp32.

    On a CPU torch's own kernel norms each row by itself. `out_dtype` as of `rms_norm`.
    """
    out_dtype = out_dtype or norm_dtype(x, weight)
    if _in_triton(x):
        from kernels.triton import elementwise as gpu

        return gpu.layer_norm(_rows(x), weight, bias, eps, out_dtype=out_dtype).view(x.shape)
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps).to(out_dtype)


def norm_beside(x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, eps: float) -> Tensor:
    """Return `rms_norm` of x and of y, both `[..., H]`, concatenated `[..., 2 H]`: the input of an EAGLE-3 layer."""
    if _in_triton(x, y, x_weight, y_weight):
        from kernels.triton import elementwise as gpu

        return gpu.norm_beside(_rows(x), _rows(y), x_weight, y_weight, eps).view(*x.shape[:-1], 2 * x.shape[-1])
    return torch.cat([rms_norm(x, x_weight, eps), rms_norm(y, y_weight, eps)], dim=-1)


def embed_norm_gelu(
    x: Tensor, ids: Tensor, table: Tensor, factor: float, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """Return gelu(rms_norm(x + factor * table[ids]) + bias), one step of an MLP speculator.

    x `[..., H]`, ids `[...]`, table `[V, H]`; computed in the table's dtype.
    """
    x = x.to(table.dtype)
    if _in_triton(x, table, weight, bias):
        from kernels.triton import elementwise as gpu

        return gpu.embed_norm_gelu(_rows(x), ids.flatten(), table, factor, weight, bias, eps).view(x.shape)
    return uniform(F.gelu, rms_norm(x + factor * F.embedding(ids, table), weight, eps, out_dtype=x.dtype) + bias)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`[..., 2 I]`, gate and up concatenated -> silu(gate) * up `[..., I]`."""
    return gate_mul(gate_up, "silu")


def gelu_mul(gate_up: Tensor) -> Tensor:
    """As `silu_mul`, with the tanh approximation of GELU (arXiv 1606.08415) in place of SiLU."""
    return gate_mul(gate_up, "gelu")


def gate_mul(gate_up: Tensor, gate: Gate) -> Tensor:
    """As `silu_mul` or `gelu_mul`."""
    gelu, size = gate == "gelu", gate_up.shape[-1] // 2
    if (native := _native(size, gate_up)) is None:
        return _gated_without_c(gate_up, gelu, size)
    gate_up = gate_up.contiguous()
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
    call = native.gelu_mul if gelu else native.silu_mul
    call(gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size, KINDS[gate_up.dtype])
    return out


def _gated_without_c(gate_up: Tensor, gelu: bool, size: int) -> Tensor:
    if torch.is_grad_enabled() and row_gradients.supported(gate_up, size):
        return row_gradients.gate_mul(gate_up, gelu=gelu)
    if _in_triton(gate_up):
        from kernels.triton import elementwise as gpu

        return gpu.gate_mul(_rows(gate_up), gelu=gelu).view(*gate_up.shape[:-1], size)
    left, right = gate_up.chunk(2, dim=-1)
    return uniform(partial(F.gelu, approximate="tanh") if gelu else F.silu, left) * right


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return ReLU or GELU (arXiv 1606.08415) of x `[..., I]`, each number with the same bits wherever it stands."""
    if activation in ("relu", "relu2"):
        return F.relu(x) if activation == "relu" else F.relu(x).square()
    approximate = "tanh" if activation == "gelu_pytorch_tanh" else "none"
    if _in_triton(x):
        from kernels.triton import elementwise as gpu

        return gpu.gelu(_rows(x), tanh=approximate == "tanh").view(x.shape)
    return uniform(partial(F.gelu, approximate=approximate), x)


def uniform(operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise operation of torch to x, each number with the same bits wherever it stands.

    On a CPU sigmoid, SiLU, GELU (tanh) and softplus give what a loop of vectors leaves other last bits, and threads
    divide many numbers anywhere. The operations on a row's path go through here, but for those that torch computes by
    vectors to the last number: exp, log, tanh, sine and cosine, softmax, logsumexp (tests/kernels/test_uniform.py).
    """
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return operation(x)
    numbers = F.pad(x.reshape(-1), (0, -x.numel() % VECTORS))
    return torch.cat([operation(part) for part in numbers.split(SERIAL)])[: x.numel()].view(x.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x `[..., heads, D]`, whose two halves form the pairs; `cos`, `sin` `[..., 1, D]`.

    Of narrower tables, `[..., 1, d]`, only the first d numbers of each head are rotated.
    """
    (heads, dim), rotated = x.shape[-2:], cos.shape[-1]
    if rotated < dim:
        return torch.cat([rotate(x[..., :rotated].contiguous(), cos, sin), x[..., rotated:]], dim=-1)
    native = _native(dim // 2, x, cos, sin)
    if native is None or x.ndim != 3 or x.stride()[1:] != (dim, 1):
        if torch.is_grad_enabled() and row_gradients.supported(x, dim // 2, cos, sin):
            return row_gradients.Rotate.apply(x, cos, sin)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], -1) * sin
    out = torch.empty(x.shape, dtype=x.dtype)
    cos, sin = cos.contiguous(), sin.contiguous()
    pointers = (x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr())
    native.rotate(*pointers, x.shape[0], x.stride(0), heads, dim, KINDS[x.dtype])
    return out


def _rows(x: Tensor) -> Tensor:
    """`[..., H]` -> `[R, H]`, each row contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _in_triton(*tensors: Tensor) -> bool:
    first = tensors[0]
    if first.device.type == "cpu" and not INTERPRETED:  # a fast exit: called some seventy times per step
        return False
    plain = first.is_floating_point() and all(tensor.dtype is first.dtype for tensor in tensors)
    return plain and not torch.is_grad_enabled() and uses_triton(first.device)


def _native(size: int, *tensors: Tensor) -> ctypes.CDLL | None:
    """Return the C library if it supports these: on a CPU, one supported dtype, rows of whole vectors, no gradients."""
    first = tensors[0]
    if first.device.type != "cpu" or size % LANES or first.dtype not in KINDS or torch.is_grad_enabled():
        return None
    for tensor in tensors:
        if tensor.dtype is not first.dtype:
            return None
    return None if INTERPRETED and uses_triton(first.device) else library()
