"""Recurrent layers: a causal depthwise convolution and a linear recurrence, each with a state per request.

Contract of both: a row follows its parent, which is another row of its request or, for the first ones, the request's
state. So the rows of a prompt, of one token, of a chain and of a draft tree are one case, and a row's bits depend on
its ancestors alone. The state of a request whose rows are `advance`d becomes that of its last row; all other states
stay, and are brought up to date by the same functions over the rows of the accepted path (`RecurrentRows.along`).

Order of evaluation, everywhere: token by token from the state, which is fp32 and is kept as it is stored. Sums over the
key's numbers have one order, taps go from the oldest. The convolution's inputs are stored in the dtype of x.

CUDA devices use Triton kernels (kernels/triton/recurrence.py), CPUs C kernels (kernels/cpu/recurrence.c). torch is used
with gradients, without a C compiler, and for sizes that are no whole vectors.
"""

from __future__ import annotations

import ctypes
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, address, threads, uses_triton
from kernels.elementwise import uniform
from kernels.recurrent_rows import L2_EPS, RecurrentRows
from kernels.triton import INTERPRETED

ConvolveArguments = structure("convolve_args")  # of recurrence.h
ScanArguments = structure("scan_args")
MOST_TAPS = 8  # of a convolution in C


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor | None, rows: RecurrentRows, *, silu: bool
) -> Tensor:
    """Convolve each row's channels with its ancestors': `[R, C]`, in the dtype of x `[R, C]`.

    weight `[C, K]`, oldest tap first; windows `[S, K - 1, C]` in the dtype of x: the inputs of the last committed rows,
    oldest first, which are zeros before a text begins. Sums in fp32, rounded once, after SiLU if there is one.
    """
    (count, channels), taps = x.shape, weight.shape[1]
    if _in_triton(x) and x.stride(1) == 1:
        from kernels.triton import recurrence as gpu

        return gpu.convolve(x, weight, bias, windows, rows, silu=silu)
    native = native_for(channels, x, x if windows is None else windows)
    if native is None or taps > MOST_TAPS or x.stride(1) != 1 or weight.dtype not in KINDS:
        return _convolve_in_torch(x, weight, bias, windows, rows, silu=silu)
    assert windows is None or windows.is_contiguous()
    out, weight = torch.empty(count, channels, dtype=x.dtype), weight.t().contiguous()
    if bias is not None and bias.dtype is not weight.dtype:
        weight, bias = weight.float(), bias.float()
    arguments = ConvolveArguments(
        **rows.fields,
        parents=address(rows.parents),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=address(bias),
        windows=address(windows),
        out=out.data_ptr(),
        stride=x.stride(0),
        channels=channels,
        taps=taps,
        silu=silu,
        kind=KINDS[x.dtype],
        weight_kind=KINDS[weight.dtype],
        threads=threads(count * channels * taps),
    )
    native.convolve(ctypes.addressof(arguments))
    return out


def _convolve_in_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor | None, rows: RecurrentRows, *, silu: bool
) -> Tensor:
    taps = weight.shape[1]
    ancestors = rows.ancestors(taps - 1)
    state = None if windows is None or rows.slots is None else windows[rows.slots]  # [B, K - 1, C]
    out = torch.zeros((), device=x.device) if bias is None else bias.float()
    for tap in range(taps - 1):
        index = ancestors[:, tap]
        past = x[index.clamp(min=0)]
        outside = torch.zeros_like(past) if state is None else state[rows.owner, (index + taps - 1).clamp(max=taps - 2)]
        out = out + weight[:, tap].float() * torch.where((index >= 0)[:, None], past, outside).float()
    out = out + weight[:, -1].float() * x.float()
    if state is not None and windows is not None:
        _advance(x, windows, rows)
    return (uniform(F.silu, out) if silu else out).to(x.dtype)


def _advance(x: Tensor, windows: Tensor, rows: RecurrentRows) -> None:
    assert rows.slots is not None
    columns = windows.shape[1]
    for b, (begin, end) in enumerate(itertools.pairwise(rows.first.tolist())):
        if bool(rows.advance[b]) and end > begin:
            slot = rows.slots[b]
            windows[slot] = torch.cat([windows[slot], x[begin:end]])[-columns:]


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor, states: Tensor | None, rows: RecurrentRows, *,
    delta: bool,
) -> Tensor:  # fmt: skip
    """Run a linear recurrence over the rows, per head: S <- decay S + k u^T, out = S^T q, `[R, H, V]` in fp32.

    u = gain v (Mamba-2, arXiv 2405.21060), or with `delta` u = gain (v - S^T k), of S after the decay, where q and k
    are divided by their norms and q by the root of K (gated delta net, arXiv 2412.06464). q, k `[R, G, K]`: head h has
    those of group h // (H / G); v `[R, H, V]`; decay, gain `[R, H]` fp32; states `[S, H, K, V]` fp32.
    """
    (count, heads, values), (_, groups, keys) = v.shape, k.shape
    native, in_triton = native_for(values, v, q, k), _in_triton(v)
    if not in_triton and (native is None or keys % LANES):
        return _scan_in_torch(q, k, v, decay, gain, states, rows, delta=delta)
    assert states is None or (states.dtype is torch.float32 and states.is_contiguous())
    q, k, v = (x if _has_whole_rows(x) else x.contiguous() for x in (q, k, v))
    decay, gain = decay.float().contiguous(), gain.float().contiguous()
    if in_triton:
        from kernels.triton import recurrence as gpu

        return gpu.scan(q, k, v, decay, gain, states, rows, delta=delta)
    assert native is not None
    out, (visits, places) = torch.empty(count, heads, values), rows.visits
    team = threads(2 * count * heads * keys * values)
    scratch = torch.empty(team * native.scan_scratch(keys, values, places))
    arguments = ScanArguments(
        **rows.fields,
        visits=address(visits),
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        decay=decay.data_ptr(),
        gain=gain.data_ptr(),
        states=address(states),
        out=out.data_ptr(),
        scratch=scratch.data_ptr(),
        rows=count,
        places=places,
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        heads=heads,
        groups=groups,
        keys=keys,
        values=values,
        delta=delta,
        kind=KINDS[v.dtype],
        threads=team,
    )
    native.scan(ctypes.addressof(arguments))
    return out


def _scan_in_torch(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor, states: Tensor | None, rows: RecurrentRows, *,
    delta: bool,
) -> Tensor:  # fmt: skip
    heads, groups = v.shape[1], k.shape[1]
    q, k, v = q.float(), k.float(), v.float()
    if delta:
        q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    q, k = (x.repeat_interleave(heads // groups, dim=1) for x in (q, k))
    zero = torch.zeros(heads, k.shape[-1], v.shape[-1], device=v.device)
    begins, slots = rows.first.tolist(), None if rows.slots is None else rows.slots.tolist()
    above, out, nodes = rows.above.tolist(), list[Tensor](), dict[int, Tensor]()
    for b, (begin, end) in enumerate(itertools.pairwise(begins)):
        base = zero if states is None or slots is None else states[slots[b]].clone()
        nodes.clear()
        for row in range(begin, end):
            state = (nodes[above[row]] if above[row] >= 0 else base) * decay[row, :, None, None]
            u = v[row] - (state * k[row, :, :, None]).sum(1) if delta else v[row]
            state = state + k[row, :, :, None] * (gain[row, :, None] * u)[:, None, :]
            out.append((state * q[row, :, :, None]).sum(1))
            nodes[row] = state
            if rows.parents is None:
                nodes.pop(row - 1, None)
        if states is not None and slots is not None and bool(rows.advance[b]) and end > begin:
            states[slots[b]] = nodes[end - 1]
    return torch.stack(out)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _in_triton(x: Tensor) -> bool:
    if x.device.type == "cpu" and not INTERPRETED:
        return False
    return x.is_floating_point() and not torch.is_grad_enabled() and uses_triton(x.device)


def native_for(size: int, first: Tensor, *others: Tensor) -> ctypes.CDLL | None:
    """Return the C library if it supports these: on a CPU, one supported dtype, whole vectors, no gradients."""
    if first.device.type != "cpu" or size % LANES or first.dtype not in KINDS or torch.is_grad_enabled():
        return None
    if any(x.dtype is not first.dtype for x in others) or (INTERPRETED and uses_triton(first.device)):
        return None
    return library()


def _has_whole_rows(x: Tensor) -> bool:
    """Return whether each row of x `[R, G, K]` is contiguous."""
    return x.stride()[1:] == (x.shape[2], 1)
