"""Start-up checks of exactness: kernels are batch-invariant, and invariant to threads and tensor-parallel splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from infer.processes.target_worker import Shard
from infer.processes.threads import ThreadPlan, cpu_threads
from kernels.attention import LayerShape, assert_rows_independent, plan_attention
from kernels.dispatch import uses_triton
from kernels.elementwise import Gate, gate_mul
from kernels.linear import PackedLinear, assert_row_invariant
from kernels.rows import AttentionRows
from kernels.tiles import KV_TILE
from models.layers import GatedMLP
from models.sharding import even
from models.targets.tensor_parallel import ShardedLinear


@torch.no_grad()  # with gradients torch would run in place of the kernels
def probe_exactness(shard: Shard, threads: ThreadPlan) -> None:
    """Check that a row's bits depend neither on other rows of its batch nor on the number of threads.

    Also checks tensor-parallel splits, if there are several ranks, and the assembler of a GPU's kernels. Raises
    ValueError if a check fails.
    """
    if uses_triton(shard.device):
        from kernels.triton.assembler import assert_not_contracted

        assert_not_contracted(shard.device)
    dtype, device = shard.dtype, shard.device
    shapes = {(linear.in_features, linear.out_features, linear.formats): linear for linear in shard.linears}.values()
    results = []
    for count in {threads.few, threads.many}:
        with cpu_threads(count):
            bits = [assert_row_invariant(linear, linear.dtype, device) for linear in shapes]
            sizes = (*shard.target.heads, dtype, device, shard.kv_dtype, shard.value_dim)
            results.append([*bits, assert_rows_independent(*sizes)])
    for first, other in zip(results[0], results[-1], strict=True):
        if not torch.equal(first, other):
            raise ValueError(
                f"engine.exact=true: {threads.few} and {threads.many} threads give other bits on this machine; "
                "set engine.threads to one number"
            )
    if shard.ranks > 1:
        probe_division(shard, threads.many)


def same_bits(shard: Shard, present: int, other: int) -> bool:
    """Return whether rows get the same bits with `other` threads as with the `present` number."""
    try:
        probe_exactness(shard, ThreadPlan(present, other))
    except ValueError:
        return False
    return True


def probe_division(shard: Shard, threads: int) -> None:
    """Check that ranks with `threads` threads each compute the bits of one process with the threads of all ranks.

    Runs each operation on random tensors of the target's sizes, unsplit and split as the ranks split it. Raises
    ValueError if the bits differ.
    """
    config, modules = shard.target.config, list(shard.target.modules())
    divided = {(m.in_features, m.sizes) for m in modules if isinstance(m, ShardedLinear)}
    inner = {m.down_proj.reads for m in modules if isinstance(m, GatedMLP) and isinstance(m.down_proj, ShardedLinear)}
    shared = config.num_heads if config.num_kv_heads == 1 else config.num_kv_heads
    heads = even(shared, shard.ranks)
    group, length = config.num_heads // shared, 2 * KV_TILE + 40

    probes: list[tuple[str, Callable[[Sequence[int]], Tensor], Sequence[int]]] = [
        (f"a linear layer of {size} inputs", partial(_linear, shard, size), parts) for size, parts in divided
    ]
    activation: Gate = "silu" if config.activation == "silu" else "gelu"
    probes += [("an MLP's activation", partial(_gated, shard, activation), parts) for parts in inner if parts]
    sizes = ((width, keys) for keys in (9, length) for width in (1, 8))
    probes += [("attention", partial(_attention, shard, group, width, keys), heads) for width, keys in sizes]
    for name, compute, parts in probes:
        with cpu_threads(threads * shard.ranks):
            unsplit = compute([sum(parts)])
        with cpu_threads(threads):
            if not torch.equal(compute(parts), unsplit):
                raise ValueError(
                    f"engine.exact=true: on this machine {name} ({shard.dtype}) gives other bits when it is divided in "
                    f"{list(parts)}; engine.tensor_parallel=1, or engine.exact=false, which serves without the promise"
                )


def _linear(shard: Shard, in_features: int, sizes: Sequence[int]) -> Tensor:
    generator, dtype, device = torch.Generator().manual_seed(0), shard.dtype, shard.device
    few = torch.randn(257, in_features, generator=generator).to(device, dtype)  # a whole vocabulary would take seconds
    x = torch.randn(64, in_features, generator=generator).to(device, dtype)
    parts = (torch.arange(sum(sizes), device=device) % len(few)).split(list(sizes))
    return torch.cat([PackedLinear(few[rows])(x) for rows in parts], dim=-1)


def _gated(shard: Shard, activation: Gate, sizes: Sequence[int]) -> Tensor:
    random = torch.randn(2, 3, sum(sizes), generator=torch.Generator().manual_seed(0))
    gate, up = random.to(shard.device, shard.dtype)
    pairs = zip(gate.split(list(sizes), -1), up.split(list(sizes), -1), strict=True)
    return torch.cat([gate_mul(torch.cat(pair, dim=-1), activation) for pair in pairs], dim=-1)


def _attention(shard: Shard, group: int, width: int, length: int, kv_heads: Sequence[int]) -> Tensor:
    """Attend from the last `width` of `length` positions, `kv_heads[r]` KV heads (of `group` queries) at a time.

    If a value is part of its key, or the target has one KV head, all queries share it.
    """
    generator, page_size, dtype, device = torch.Generator().manual_seed(0), 16, shard.dtype, shard.device
    pages, total, dim, value_dim = -(-length // page_size), sum(kv_heads), shard.target.heads[2], shard.value_dim
    one = value_dim is not None or shard.target.config.num_kv_heads == 1
    vectors, stored = 2 if value_dim is None else 1, 1 if one else total
    cache = torch.randn(vectors, stored, (pages + 1) * page_size, dim, generator=generator).to(device, shard.kv_dtype)
    q = torch.randn(width, total, group, dim, generator=generator).to(device, dtype)
    k, v = torch.randn(2, width, stored, dim, generator=generator).to(device, dtype)
    v = v if value_dim is None else k[..., :value_dim]
    table = 1 + torch.arange(pages, device=device)[None]
    out, first = [], 0
    for count in kv_heads:
        span = slice(first, first + count)
        shared = slice(1) if one else span
        rows = AttentionRows.blocks(table, [length - width], [width], page_size=page_size)
        shape = LayerShape(min(count, stored), dim, value_dim)
        plan = plan_attention(rows, count * group, shape, dtype, shard.kv_dtype)
        part = q[:, span].flatten(1, 2).contiguous()
        keys, values, cached = (x[:, shared].contiguous() for x in (k, v, cache))
        out.append(plan(part, keys, values, cached, dim**-0.5))
        first += count
    return torch.cat(out, dim=-1)
