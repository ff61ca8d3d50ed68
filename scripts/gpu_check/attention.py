"""Paged attention: checks against float64 and for batch invariance, and the time of a step's attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infer.speculation.tree import DraftTree
from kernels.attention import PagedAttention, plan_attention
from kernels.reference import attention as oracle
from kernels.rows import AttentionRows
from kernels.triton.attention import TritonAttention
from scripts.gpu_check.measure import Item, close, same, timed
from scripts.gpu_check.plan import BF16, RANKS, SERVED, KernelCheck

PAGE = 16
BOUND = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
LLAMA = (32, 8, 128)  # query heads, KV heads, head size of Llama-3.1-8B
OTHERS = ((7, 1, 64), (8, 4, 80), (8, 2, 96), (4, 1, 256))
NODES, START = 24, 1019  # of a draft, close to the end of a split
STEPS = ((16, 5), (16, 8), (64, 4))  # requests and rows of each: 80, 128 and 256 rows together
TIMED = (  # requests, rows of each, context
    (1, 1, 1024), (1, 16, 1024), (1, 64, 1024), (16, 5, 1024), (16, 8, 1024), (64, 4, 1024), (1, 16, 32768),
    (8, 1, 32768), (8, 16, 32768), (64, 1, 2048),
    (1, 512, 4096),  # a prefill chunk
)  # fmt: skip

Sizes = tuple[int, int, int]


def make(lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return q, k and v of every position, a full KV cache pool and a page table with scattered pages."""
    generator = torch.Generator(device).manual_seed(sum(lengths))
    pages = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)) + 1
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int64)
    for b, row_pages in enumerate(order.split(pages)):
        table[b, : len(row_pages)] = row_pages

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    cache = random(2, kv_heads, (sum(pages) + 1) * PAGE, dim)
    q, k, v = (random(sum(lengths), count, dim) for count in (heads, kv_heads, kv_heads))
    return q, k, v, cache, table.to(device)


def planned(case: Any, starts: list[int], counts: list[int], tree_mask: Tensor | None = None) -> PagedAttention:
    q, _, _, cache, table = case
    rows = AttentionRows.blocks(table, starts, counts, page_size=PAGE, tree_mask=tree_mask)
    return plan_attention(rows, q.shape[1], cache.shape[1], q.shape[2], q.dtype, cache.dtype)


def random_tree(nodes: int) -> DraftTree:
    generator = torch.Generator().manual_seed(nodes)
    parents = [-1, *(int(torch.randint(max(0, n - 4), n, (), generator=generator)) for n in range(1, nodes))]
    return DraftTree.assemble(torch.arange(nodes)[None], torch.tensor([parents]), torch.tensor([nodes]))


def checks(device: torch.device) -> Iterator[KernelCheck]:
    if device.type != "cuda":
        small, dtype = (4, 2, 64), torch.float32
        for name, compared in (("", compare), (", bits", bits), (", fp8 cache", eight_bits)):
            items = partial(compared, small, dtype, 29, 5, device)
            yield KernelCheck("correctness", "attention" + name, 1, SERVED, items)
        items = partial(steps, small, dtype, (2, 3), 29, device)
        yield KernelCheck("correctness", "attention, 2 x 3 rows", 1, SERVED, items)
        yield KernelCheck("timings", "attention", 1, SERVED, partial(time, (2, 3, 40), small, dtype, device))
        return
    for shape in TIMED:
        label = f"attention, {shape[0]} x {shape[1]} rows, context {shape[2]}"
        yield KernelCheck("timings", label, 1, SERVED, partial(time, shape, LLAMA, torch.bfloat16, device))
    items = partial(eight_bits, LLAMA, torch.bfloat16, START, NODES, device)
    yield KernelCheck("correctness", "attention, fp8 cache", 2, SERVED, items)
    for step in STEPS:
        items = partial(steps, LLAMA, torch.bfloat16, step, START, device)
        yield KernelCheck("correctness", f"attention, {step[0]} x {step[1]} rows", 2, SERVED, items)
    for dtype, rank in RANKS.items():
        for sizes in (LLAMA, *OTHERS):
            first = SERVED if sizes == LLAMA and rank == BF16 else rank
            label, case = f"attention, {named(sizes, dtype)}", (sizes, dtype, START, NODES, device)
            yield KernelCheck("correctness", label, 2, first, partial(compare, *case))
            yield KernelCheck("correctness", f"{label}, bits", 2, first, partial(bits, *case))


def named(sizes: Sizes, dtype: torch.dtype) -> str:
    heads, kv_heads, dim = sizes
    return f"{heads} and {kv_heads} heads of {dim}, {dtype}"


def compare(sizes: Sizes, dtype: torch.dtype, start: int, nodes: int, device: torch.device) -> Iterator[Item]:
    """Compare a chain and a tree of `nodes` after `start` positions with float64."""
    tree, dim = random_tree(nodes), sizes[2]
    q, k, v, cache, table = make([start + nodes], *sizes, dtype, device)
    new = (q[:nodes], k[:nodes], v[:nodes])
    for kind, tree_mask, ancestors in (("chain", None, None), ("tree", tree.ancestors[0], tree.ancestors)):
        tree_mask = None if tree_mask is None else tree_mask.to(device)
        actual = planned((*new, cache, table), [start], [nodes], tree_mask)(*new, cache, dim**-0.5)
        true = partial(expected, new[0], cache, table, start, nodes, dim, ancestors)
        yield close("attention", f"{kind} of {nodes} at {start}, {named(sizes, dtype)}", actual, true, BOUND[dtype])


def expected(
    q: Tensor, cache: Tensor, table: Tensor, start: int, nodes: int, dim: int, ancestors: Tensor | None = None
) -> Tensor:
    wide = cache.cpu().float() if cache.dtype == torch.float8_e4m3fn else cache.cpu()
    options = {"page_size": PAGE, "scale": dim**-0.5, "ancestors": ancestors}
    return oracle.paged_attention(q.cpu(), wide, table.cpu(), [start], [nodes], **options)


def eight_bits(sizes: Sizes, dtype: torch.dtype, start: int, nodes: int, device: torch.device) -> Iterator[Item]:
    """Compare a chain over an fp8 KV cache with float64 on the stored values."""
    dim = sizes[2]
    q, k, v, cache, table = make([start + nodes], *sizes, dtype, device)
    narrow, new = cache.to(torch.float8_e4m3fn), (q[:nodes], k[:nodes], v[:nodes])
    actual = planned((*new, narrow, table), [start], [nodes])(*new, narrow, dim**-0.5)
    true = partial(expected, new[0], narrow, table, start, nodes, dim)
    yield close("attention, fp8 cache", f"chain of {nodes} at {start}, {dtype}", actual, true, BOUND[dtype])


def steps(sizes: Sizes, dtype: torch.dtype, step: tuple[int, int], start: int, device: torch.device) -> Iterator[Item]:
    """Check that the rows of a step of several requests have the bits that each request's have alone."""
    requests, rows = step
    q, k, v, cache, table = make([start + rows] * requests, *sizes, dtype, device)
    q, k, v = (x[: requests * rows] for x in (q, k, v))
    scale = sizes[2] ** -0.5
    together = planned((q, k, v, cache, table), [start] * requests, [rows] * requests)(q, k, v, cache.clone(), scale)
    alone = []
    for request, part in enumerate(zip(q.split(rows), k.split(rows), v.split(rows), strict=True)):
        case = (*part, cache, table[request : request + 1])
        alone.append(planned(case, [start], [rows])(*part, cache.clone(), scale))
    label = f"{requests} x {rows} rows together and alone, {named(sizes, dtype)}"
    yield same("attention, bits", label, together, torch.cat(alone))


def bits(sizes: Sizes, dtype: torch.dtype, start: int, nodes: int, device: torch.device) -> Iterator[Item]:
    """Check that rows have the same bits in a prompt, in a chain and alone, and in a tree and alone on their paths."""
    case, name, tree = make([start + nodes], *sizes, dtype, device), named(sizes, dtype), random_tree(nodes)
    q, k, v, cache, _ = case
    scale, end = sizes[2] ** -0.5, start + nodes
    whole = planned(case, [0], [end])(q, k, v, cache, scale)
    for width in [1, *(width for width in (nodes, 80, 128, 256) if width <= end)]:
        first_row, rows = min(start, end - width), []
        for first in range(first_row, end, width):
            span = slice(first, first + width)
            rows.append(planned(case, [first], [width])(q[span], k[span], v[span], cache, scale))
        label = f"rows of a prompt and in chains of {width}, {name}"
        yield same("attention, bits", label, torch.cat(rows), whole[first_row:])
    span = slice(start, end)
    tree_mask = tree.ancestors[0].to(cache.device)
    together = planned(case, [start], [nodes], tree_mask)(q[span], k[span], v[span], cache.clone(), scale)
    alone = []
    for node in range(nodes):
        plain = cache.clone()
        for depth, step in enumerate(start + ancestor for ancestor in tree.path(0, node)):
            row = slice(step, step + 1)
            output = planned(case, [start + depth], [1])(q[row], k[row], v[row], plain, scale)
        alone.append(output)
    yield same("attention, bits", f"rows of a tree and alone, {name}", together, torch.cat(alone))


def time(shape: tuple[int, int, int], sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    batch, rows, context = shape
    case = make([context] * batch, *sizes, dtype, device)
    q, _, _, cache, _ = case
    starts, counts = [context - rows] * batch, [rows] * batch
    moved = cache[:, :, PAGE:].numel() * cache.element_size()
    masks: dict[str, Tensor | None] = {"attention": None}
    if 1 < rows <= 64:
        masks["attention, tree"] = random_tree(rows).ancestors[0].repeat(batch).to(device)
    for kind, mask in masks.items():
        plan = planned(case, starts, counts, mask)
        assert isinstance(plan, TritonAttention)
        label = f"{batch} x {rows} rows, context {context}, {dtype}"
        for name, pool in ((kind, cache), (kind + ", fp8 cache", cache.to(torch.float8_e4m3fn))):
            moved_here = moved * pool.itemsize // cache.itemsize
            yield timed(name, label, device, moved_here, plan.read, q[: batch * rows], pool, sizes[2] ** -0.5)
