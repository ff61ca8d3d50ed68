"""Paged attention against the float64 oracle, and its row invariance; in C and in torch."""

from __future__ import annotations

import pytest
import torch

from infer.batch.tree import DraftTree
from kernels.attention import LayerShape, NativeAttention, assert_rows_independent, plan_attention, runs_in_c
from kernels.copies import write_kv
from kernels.cpu.library import library
from kernels.rows import AttentionRows, set_bit_positions
from kernels.tiles import KV_TILE, TiledAttention
from tests.drafts import checked_tree
from tests.kernels.reference import attention as oracle
from tests.pairwise import parametrize_pairs

PAGE = 16
CPU = torch.device("cpu")


@pytest.fixture(params=["c", "torch"])
def form(request, monkeypatch):
    """Both implementations that run on a CPU; `plan_attention` dispatches to this one."""
    if request.param == "c" and library() is None:
        pytest.skip("no C compiler on this machine")
    monkeypatch.setattr("kernels.attention.runs_in_c", lambda *sizes: request.param == "c")
    return request.param


def make_case(committed, counts, *, heads, kv_heads, dim, dtype, value_dim=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-(start + count) // PAGE) for start, count in zip(committed, counts, strict=True)]
    order = torch.randperm(sum(pages), generator=generator) + 1  # pages lie scattered in the pool
    table = torch.zeros(len(counts), max(pages), dtype=torch.int64)
    for b, ids in enumerate(order.split(pages)):
        table[b, : len(ids)] = ids
    cache = torch.randn(2, kv_heads, (sum(pages) + 1) * PAGE, dim, generator=generator).to(dtype)
    q = torch.randn(sum(counts), heads, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, sum(counts), kv_heads, dim, generator=generator).to(dtype)
    return (q, k, v, cache, table) if value_dim is None else (q, k, k[..., :value_dim], cache[:1], table)


def run(case, committed, counts, tree_mask=None, first=0, **options):
    q, k, v, cache, table = case
    rows = AttentionRows.blocks(table, committed, counts, page_size=PAGE, tree_mask=tree_mask, first=first)
    value_dim = v.shape[-1] if len(cache) == 1 else None
    plan = plan_attention(rows, q.shape[1], LayerShape(cache.shape[1], q.shape[2], value_dim), cache.dtype)
    return plan(q, k, v, cache, q.shape[-1] ** -0.5, **options)


def expect(case, committed, counts, ancestors=None, first=0, **options):
    """Return the oracle's output. Call it after `run`, which writes the rows' keys and values into the cache."""
    q, _, v, cache, table = case
    scale = q.shape[-1] ** -0.5
    sizes = {"page_size": PAGE, "scale": scale, "value_dim": v.shape[-1], **options}
    return oracle.paged_attention(q, cache, table, committed, counts, **sizes, ancestors=ancestors, first=first)


@parametrize_pairs(
    {
        "dtype, tolerance": [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
        "dim": [16, 64, 80, 128, 256],
        "heads, kv_heads": [(4, 2), (4, 4), (8, 1), (9, 3), (20, 1)],
        "committed, counts": [
            ([0], [1]),
            ([5], [7]),
            ([KV_TILE - 1, KV_TILE, 3], [1, 1, 1]),
            ([KV_TILE - 3, 2 * KV_TILE + 5, 0], [8, 2, 40]),
        ],
    }
)
def test_causal_rows_match_the_oracle(form, dtype, tolerance, dim, heads, kv_heads, committed, counts):
    case = make_case(committed, counts, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    actual = run(case, committed, counts)
    assert actual.dtype == dtype
    assert (actual.double() - expect(case, committed, counts)).abs().max() < tolerance


def make_tree():
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 0, 0, 0, 0]])
    return checked_tree(torch.arange(14).view(2, 7), parents, torch.tensor([7, 3]))


def tree_mask_of(tree):
    return tree.ancestors[torch.arange(tree.token.shape[1]) < tree.length[:, None]]


def test_tree_rows_match_the_oracle(form):
    tree = make_tree()
    committed, counts = [KV_TILE - 2, 30], [7, 3]
    case = make_case(committed, counts, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    actual = run(case, committed, counts, tree_mask_of(tree))
    assert (actual.double() - expect(case, committed, counts, tree.ancestors)).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [1, 5, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_values_may_be_the_first_numbers_of_their_keys(form, dtype, tolerance, heads):
    tree, counts = make_tree(), [7, 3]
    for committed, mask, ancestors, options in (
        ([KV_TILE - 2, 30], tree_mask_of(tree), tree.ancestors, {}),
        ([KV_TILE - 3, 0], None, None, {"window": 20, "sinks": torch.linspace(-1, 1, heads)}),
    ):
        case = make_case(committed, counts, heads=heads, kv_heads=1, dim=576, value_dim=512, dtype=dtype)
        actual = run(case, committed, counts, mask, **options)
        assert actual.shape == (10, heads * 512)
        assert (actual.double() - expect(case, committed, counts, ancestors, **options)).abs().max() < tolerance
        stored = case[3].clone()
        run(case, committed, counts, mask)
        assert torch.equal(case[3], stored), "keys are written, and nothing else"


def test_nobody_sees_the_places_before_the_first(form):
    tree = make_tree()
    committed, counts = [KV_TILE + 1, 30], [7, 3]
    case = make_case(committed, counts, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    for tree_mask, ancestors in ((None, None), (tree_mask_of(tree), tree.ancestors)):
        actual = run(case, committed, counts, tree_mask, first=1)
        assert (actual.double() - expect(case, committed, counts, ancestors, first=1)).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 21])
def test_sinks_take_their_share(form, window):
    """Below, among and far above the scores, beside one tile of keys and beside several, and as bits of a lone row."""
    sinks = torch.tensor([-3.0, 0.5, 4.0, 90.0])
    committed, counts, options = [KV_TILE - 2, 30], [7, 3], {"window": window, "sinks": sinks}
    case = make_case(committed, counts, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    tree = make_tree()
    for tree_mask, ancestors in ((None, None), (tree_mask_of(tree), tree.ancestors)):
        actual = run(case, committed, counts, tree_mask, **options)
        assert (actual.double() - expect(case, committed, counts, ancestors, **options)).abs().max() < 1e-5
    q, k, v, cache, table = case
    together = run(case, committed, counts, **options)
    alone = run((q[6, None], k[6, None], v[6, None], cache, table), [committed[0] + 6], [1], **options)
    assert torch.equal(together[6], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tree_row_has_the_bits_of_its_path_decoded_alone(form, dtype):
    """For every node of a random tree that crosses the edges of a tile and of a page."""
    generator = torch.Generator().manual_seed(3)
    parent = [-1] + [int(torch.randint(max(0, n - 5), n, (), generator=generator)) for n in range(1, 40)]
    tree = checked_tree(torch.arange(40)[None], torch.tensor([parent]), torch.tensor([40]))
    committed = KV_TILE - 3
    case = make_case([committed], [40], heads=4, kv_heads=2, dim=64, dtype=dtype)
    q, k, v, cache, table = case
    together = run(case, [committed], [40], tree_mask_of(tree))
    for node in range(40):
        path = tree.path(0, node)
        plain = cache.clone()
        for depth, step in enumerate(path):
            step_case = (q[step, None], k[step, None], v[step, None], plain, table)
            alone = run(step_case, [committed + depth], [1])
        assert torch.equal(together[node], alone[0]), f"node {node}, path {path}"


def test_a_chain_given_as_ancestor_words_has_the_bits_of_the_causal_path(form):
    tree = DraftTree.chains([1, 2], [[3] * 63, [4] * 5])  # bit 63 included
    committed, counts = [KV_TILE - 30, 17], [64, 6]
    case = make_case(committed, counts, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    assert torch.equal(run(case, committed, counts, tree_mask_of(tree)), run(case, committed, counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"), [(4, 2, 64, None), (4, 4, 16, None), (8, 1, 128, None), (3, 1, 576, 512)]
)
def test_rows_are_independent_of_width_and_batch(form, dtype, heads, kv_heads, dim, value_dim):
    assert_rows_independent(heads, kv_heads, dim, dtype, CPU, value_dim=value_dim)


@pytest.mark.parametrize(("committed", "counts"), [([700], [300]), ([1500], [6]), ([300, 900, 20], [1, 5, 2])])
def test_threads_do_not_show_in_the_bits(committed, counts):
    if library() is None:
        pytest.skip("no C compiler on this machine")
    case = make_case(committed, counts, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(run(case, committed, counts))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("tree_mask", [None, torch.tensor([1, 3])])
def test_the_probe_notices_a_kernel_whose_bits_depend_on_company(form, monkeypatch, tree_mask):
    """The patched kernel depends on the number of rows, or only on the draft being a tree."""
    exact = {"c": NativeAttention, "torch": TiledAttention}[form]

    class Drifting(exact):
        def __init__(self, rows, *sizes):
            super().__init__(rows, *sizes)
            self.drift = rows.request.shape[0] > 4 if tree_mask is None else rows.tree_mask is not None

        def __call__(self, *tensors):
            return super().__call__(*tensors) * (1 + 1e-6 * self.drift)

    name = "kernels.attention.NativeAttention" if form == "c" else "kernels.attention.TiledAttention"
    monkeypatch.setattr(name, Drifting)
    with pytest.raises(ValueError, match="engine.exact"):
        assert_rows_independent(4, 2, 64, torch.float32, CPU)


def test_rows_are_written_at_their_slots_and_nowhere_else(form):
    committed, counts = [3, 20], [2, 1]
    q, k, v, cache, table = make_case(committed, counts, heads=2, kv_heads=2, dim=16, dtype=torch.float32)
    cache.zero_()
    run((q, k, v, cache, table), committed, counts)
    slots = [int(table[0, 0]) * PAGE + 3, int(table[0, 0]) * PAGE + 4, int(table[1, 1]) * PAGE + 4]
    assert torch.equal(cache[0][:, slots], k.transpose(0, 1))
    assert torch.equal(cache[1][:, slots], v.transpose(0, 1))
    assert cache.count_nonzero() == k.count_nonzero() + v.count_nonzero()


def test_queries_keys_and_values_may_be_slices_of_one_tensor(form):
    committed, counts = [9], [4]
    q, k, v, cache, table = make_case(committed, counts, heads=4, kv_heads=2, dim=32, dtype=torch.float32)
    merged = torch.cat([q, k, v], dim=1)
    sliced = (merged[:, :4], merged[:, 4:6], merged[:, 6:], cache.clone(), table)
    assert torch.equal(run(sliced, committed, counts), run((q, k, v, cache, table), committed, counts))


def test_odd_sizes_and_other_dtypes_go_to_the_torch_form():
    assert not runs_in_c(24, torch.float32, CPU)
    assert not runs_in_c(576, torch.float32, CPU)
    assert not runs_in_c(64, torch.float32, CPU, 32)
    assert not runs_in_c(48, torch.float32, CPU, 32)
    assert not runs_in_c(64, torch.float16, CPU)
    assert not runs_in_c(64, torch.float32, torch.device("meta"))


def test_places_of_bits_lists_set_bits_in_order():
    nth, count = set_bit_positions(torch.tensor([0b10110, -(2**63) | 1]))
    assert count.tolist() == [3, 2]
    assert nth[0, :3].tolist() == [1, 2, 4]
    assert nth[1, :2].tolist() == [0, 63]


BROKEN = {  # numbers of a key and its value
    "all are NaN": lambda k, v: (k.fill_(torch.nan), v.fill_(torch.nan)),
    "a key's are NaN": lambda k, v: k.fill_(torch.nan),
    "a value's are infinite": lambda k, v: v.fill_(torch.inf),
    "one of a value is": lambda k, v: v[..., 3].fill_(-torch.inf),
    "one of a value is NaN": lambda k, v: v[..., 3].fill_(torch.nan),
}


@pytest.mark.parametrize("value_dim", [None, 512])
@pytest.mark.parametrize("broken", BROKEN)
def test_numbers_that_are_not_finite_do_not_reach_rows_that_do_not_see_them(form, broken, value_dim):
    """Of later rows of a draft, and of what another request left in the page."""
    committed, counts = [5, 40], [3, 4]
    heads, dim = ((4, 2), 16) if value_dim is None else ((4, 1), 576)
    sizes = dict(zip(("heads", "kv_heads"), heads, strict=True)) | {"dim": dim, "value_dim": value_dim}
    expected = run(make_case(committed, counts, dtype=torch.float32, **sizes), committed, counts)
    q, k, v, cache, table = make_case(committed, counts, dtype=torch.float32, **sizes)
    last = [sum(counts[: b + 1]) - 1 for b in range(len(counts))]
    for row in last:
        BROKEN[broken](k[row], v[row])
    left = [
        ids[place // PAGE] * PAGE + place % PAGE
        for b, ids in enumerate(table)
        for place in range(committed[b] + counts[b], PAGE * int((ids > 0).sum()))
    ]
    others = k[last[:1]].expand(len(left), -1, -1)
    write_kv(cache, torch.stack(left), others, v[last[:1]].expand(len(left), -1, -1))
    actual = run((q, k, v, cache, table), committed, counts)
    seen = [row for row in range(sum(counts)) if row not in last]
    assert torch.equal(actual[seen], expected[seen])
    assert all(not row.isfinite().all() for row in actual[last].unflatten(1, (4, -1)).flatten(0, 1))
