"""Paged attention against the float64 oracle, and the promise that a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from infer.tree import DraftTree
from kernels.attention import KV_TILE, assert_rows_independent, paged_attention, plan_attention, write_cache
from kernels.reference import attention as oracle

PAGE = 16


def make_case(committed, counts, *, heads, kv_heads, dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-(start + count) // PAGE) for start, count in zip(committed, counts, strict=True)]
    order = torch.randperm(sum(pages), generator=generator) + 1  # pages lie scattered in the pool
    table = torch.zeros(len(counts), max(pages), dtype=torch.int64)
    for b, ids in enumerate(order.split(pages)):
        table[b, : len(ids)] = ids
    cache = torch.randn(2, kv_heads, (sum(pages) + 1) * PAGE, dim, generator=generator).to(dtype)
    q = torch.randn(sum(counts), heads, dim, generator=generator).to(dtype)
    return q, cache, table


def run(q, cache, table, committed, counts, ancestors=None):
    kv_heads = cache.shape[1]
    plan = plan_attention(
        table,
        torch.tensor(committed),
        torch.tensor(counts),
        page_size=PAGE,
        num_kv_heads=kv_heads,
        group=q.shape[1] // kv_heads,
        ancestors=ancestors,
    )
    return paged_attention(q, cache, plan, q.shape[-1] ** -0.5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize(
    ("committed", "counts"),
    [
        ([0], [1]),
        ([5], [7]),
        ([KV_TILE - 1, KV_TILE, 3], [1, 1, 1]),
        ([KV_TILE - 3, 2 * KV_TILE + 5, 0], [8, 2, 40]),
    ],
)
def test_causal_rows_match_the_oracle(dtype, tolerance, dim, heads, kv_heads, committed, counts):
    q, cache, table = make_case(committed, counts, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    expected = oracle.paged_attention(q, cache, table, committed, counts, page_size=PAGE, scale=dim**-0.5)
    assert (run(q, cache, table, committed, counts).double() - expected).abs().max() < tolerance


def test_tree_rows_match_the_oracle():
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 0, 0, 0, 0]])
    tree = DraftTree.from_parents(torch.arange(14).view(2, 7), parents, torch.tensor([7, 3]))
    committed, counts = [KV_TILE - 2, 30], [7, 3]
    q, cache, table = make_case(committed, counts, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    expected = oracle.paged_attention(
        q, cache, table, committed, counts, page_size=PAGE, scale=1 / 8, ancestors=tree.ancestors
    )
    actual = run(q, cache, table, committed, counts, tree.ancestors)
    assert (actual.double() - expected).abs().max() < 1e-5


def test_a_chain_given_as_ancestor_words_has_the_bits_of_the_causal_path():
    tree = DraftTree.chains([1, 2], [[3] * 63, [4] * 5])  # bit 63 included
    committed, counts = [KV_TILE - 30, 17], [64, 6]
    q, cache, table = make_case(committed, counts, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    causal = run(q, cache, table, committed, counts)
    assert torch.equal(run(q, cache, table, committed, counts, tree.ancestors), causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (4, 4, 16), (8, 1, 128)])
def test_rows_are_independent_of_width_and_batch(dtype, heads, kv_heads, dim):
    assert_rows_independent(heads, kv_heads, dim, dtype, torch.device("cpu"))


def test_the_probe_notices_a_kernel_whose_bits_depend_on_width(monkeypatch):
    import kernels.attention as module

    exact = module.paged_attention
    monkeypatch.setattr(module, "paged_attention", lambda q, *rest: exact(q, *rest) * (1 + 1e-6 * (q.shape[0] > 4)))
    with pytest.raises(ValueError, match="engine.exact"):
        assert_rows_independent(4, 2, 64, torch.float32, torch.device("cpu"))


def test_write_cache_puts_rows_at_their_slots():
    cache = torch.zeros(2, 2, 64, 8)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    write_cache(cache, torch.tensor([5, 40, 6]), k, v)
    assert torch.equal(cache[0][:, [5, 40, 6]], k.transpose(0, 1))
    assert torch.equal(cache[1][:, [5, 40, 6]], v.transpose(0, 1))
    assert cache.count_nonzero() == k.count_nonzero() + v.count_nonzero()
