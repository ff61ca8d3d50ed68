"""Paged attention: checks against float64 and for batch invariance, and the time of a step's attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infer.speculation.tree import DraftTree
from kernels.attention import PagedAttention, plan_attention
from kernels.reference import attention as oracle
from kernels.rows import AttentionRows
from kernels.triton.attention import TritonAttention
from scripts.gpu_check.measure import close, same, timed

PAGE = 16
BOUND = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
LLAMA = (32, 8, 128)  # query heads, KV heads, head size of Llama-3.1-8B


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


def correctness(device: torch.device) -> list[dict[str, Any]]:
    results = []
    on_gpu = device.type == "cuda"
    sizes = [LLAMA, (7, 1, 64), (8, 4, 80), (8, 2, 96), (4, 1, 256)] if on_gpu else [(4, 2, 64)]
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if on_gpu else (torch.float32,)
    start, nodes = (1019, 24) if on_gpu else (29, 5)  # close to the end of a split
    tree = random_tree(nodes)
    for heads, kv_heads, dim in sizes:
        for dtype in dtypes:
            name = f"{heads} and {kv_heads} heads of {dim}, {dtype}"
            q, k, v, cache, table = make([start + nodes], heads, kv_heads, dim, dtype, device)
            for kind, tree_mask, ancestors in (("chain", None, None), ("tree", tree.ancestors[0], tree.ancestors)):
                new = (q[:nodes], k[:nodes], v[:nodes])
                case = (*new, cache, table)
                tree_mask = None if tree_mask is None else tree_mask.to(device)
                actual = planned(case, [start], [nodes], tree_mask)(*new, cache, dim**-0.5)
                options = {"page_size": PAGE, "scale": dim**-0.5, "ancestors": ancestors}
                true = oracle.paged_attention(new[0].cpu(), cache.cpu(), table.cpu(), [start], [nodes], **options)
                results.append(close("attention", f"{kind} of {nodes} at {start}, {name}", actual, true, BOUND[dtype]))
            results += bits(name, (q, k, v, cache, table), start, nodes, tree)
    return [*results, eight_bits(sizes[0], dtypes[-1], start, nodes, device)]


def eight_bits(
    sizes: tuple[int, int, int], dtype: torch.dtype, start: int, nodes: int, device: torch.device
) -> dict[str, Any]:
    """Compare a chain over an fp8 KV cache with float64 on the stored values; `sizes` are as in LLAMA."""
    heads, kv_heads, dim = sizes
    q, k, v, cache, table = make([start + nodes], heads, kv_heads, dim, dtype, device)
    narrow, new = cache.to(torch.float8_e4m3fn), (q[:nodes], k[:nodes], v[:nodes])
    actual = planned((*new, narrow, table), [start], [nodes])(*new, narrow, dim**-0.5)
    options = {"page_size": PAGE, "scale": dim**-0.5}
    true = oracle.paged_attention(new[0].cpu(), narrow.cpu().float(), table.cpu(), [start], [nodes], **options)
    return close("attention, fp8 cache", f"chain of {nodes} at {start}, {dtype}", actual, true, BOUND[dtype])


def bits(name: str, case: Any, start: int, nodes: int, tree: DraftTree) -> list[dict[str, Any]]:
    """Check that rows have the same bits in a prompt, in a chain and alone, and in a tree and alone on their paths."""
    q, k, v, cache, _ = case
    scale, end = q.shape[2] ** -0.5, start + nodes
    prompt = planned(case, [0], [end])(q, k, v, cache, scale)[start:]
    results = []
    for kind, width in (("alone", 1), ("as a chain", nodes)):
        rows = []
        for first in range(start, end, width):
            span = slice(first, first + width)
            rows.append(planned(case, [first], [width])(q[span], k[span], v[span], cache, scale))
        results.append(same("attention, bits", f"rows of a prompt and {kind}, {name}", torch.cat(rows), prompt))
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
    return [*results, same("attention, bits", f"rows of a tree and alone, {name}", together, torch.cat(alone))]


def timings(device: torch.device) -> list[dict[str, Any]]:
    results = []
    heads, kv_heads, dim = LLAMA if device.type == "cuda" else (4, 2, 64)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [(1, 1, 1024), (1, 16, 1024), (1, 64, 1024), (1, 16, 32768), (8, 1, 32768), (8, 16, 32768), (64, 1, 2048)]
    shapes += [(1, 512, 4096)]  # a prefill chunk
    for batch, rows, context in shapes if device.type == "cuda" else [(2, 3, 40)]:
        case = make([context] * batch, heads, kv_heads, dim, dtype, device)
        q, _, _, cache, _ = case
        starts, counts = [context - rows] * batch, [rows] * batch
        moved = cache[:, :, PAGE:].numel() * cache.element_size()
        tree_mask = random_tree(rows).ancestors[0].repeat(batch).to(device) if 1 < rows <= 64 else None
        for kind, mask in (("attention", None), ("attention, tree", tree_mask)):
            if kind == "attention, tree" and tree_mask is None:
                continue
            plan = planned(case, starts, counts, mask)
            assert isinstance(plan, TritonAttention)
            label = f"{batch} x {rows} rows, context {context}, {dtype}"
            for name, pool in ((kind, cache), (kind + ", fp8 cache", cache.to(torch.float8_e4m3fn))):
                moved_here = moved * pool.itemsize // cache.itemsize
                results.append(timed(name, label, device, moved_here, plan.read, q[: batch * rows], pool, dim**-0.5))
    return results
