"""Paged attention in Triton against the float64 oracle, and its row invariance."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from infer.batch.tree import DraftTree
from kernels.attention import LayerShape, plan_attention
from kernels.copies import read_slots
from kernels.rows import AttentionRows
from kernels.tiles import TiledAttention
from kernels.triton import device
from kernels.triton.attention import TritonAttention
from kernels.triton.attention_tiles import Blocking, row_blocks
from tests.device import BF16, DEVICE, FP16, FP32, served, sized
from tests.drafts import checked_tree
from tests.kernels.reference import attention as oracle
from tests.kernels.test_attention import BROKEN
from tests.pairwise import parametrize_pairs

SMALL = Blocking(lines=16, tile=16, split=32, warps=4, stages=2)  # so that short texts have many tiles and splits
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}


def make_case(committed, counts, *, heads=4, kv_heads=2, dim=64, dtype=torch.float32, page=16, seed=0, value_dim=None):
    """Return queries, keys and values of the rows, a cache of scattered, non-zero pages, and the page table.

    With `value_dim` values are the first numbers of keys.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-(start + count) // page) for start, count in zip(committed, counts, strict=True)]
    order = torch.randperm(sum(pages), generator=generator) + 1
    table = torch.zeros(len(counts), max(pages), dtype=torch.int64)
    for b, ids in enumerate(order.split(pages)):
        table[b, : len(ids)] = ids
    cache = torch.randn(2, kv_heads, (sum(pages) + 1) * page, dim, generator=generator).to(DEVICE, dtype)
    q = torch.randn(sum(counts), heads, dim, generator=generator).to(DEVICE, dtype)
    k, v = torch.randn(2, sum(counts), kv_heads, dim, generator=generator).to(DEVICE, dtype)
    if value_dim is not None:
        return q, k, k[..., :value_dim], cache[:1], table.to(DEVICE)
    return q, k, v, cache, table.to(DEVICE)


def run(
    case, committed, counts, *, tree_mask=None, page=16, first=0, window=None, sinks=None, shape=SMALL, whole=False
):
    q, k, v, cache, table = case
    rows = AttentionRows.blocks(table, committed, counts, page_size=page, tree_mask=tree_mask, first=first)
    heads, kv_heads, dim = q.shape[1], cache.shape[1], q.shape[2]
    value_dim = v.shape[-1] if len(cache) == 1 else None
    plan = TritonAttention(rows, heads, kv_heads, dim, q.dtype, value_dim, shape=shape, whole=whole)
    return plan(q, k, v, cache, dim**-0.5, window, sinks)


def error(actual, case, committed, counts, *, page=16, ancestors=None, first=0, window=None, sinks=None):
    q, _, v, cache, table = (x.cpu() for x in case)
    sizes = {"page_size": page, "scale": q.shape[-1] ** -0.5, "first": first, "window": window, "sinks": sinks}
    sizes |= {"value_dim": v.shape[-1]}
    expected = oracle.paged_attention(q, cache, table, committed, counts, ancestors=ancestors, **sizes)
    assert actual.dtype == q.dtype
    return (actual.cpu().double() - expected).abs().max().item()


# head size, query heads, KV heads, page size, dtype, whole: each with a prompt's chunk, a chain and a lone row
SIZES = [
    (64, 4, 2, 16, torch.float32, False),
    (80, 4, 4, 1, torch.float16, True),
    (96, 7, 1, 4, torch.float32, True),
    (128, 8, 2, 64, torch.float16, False),
    (256, 2, 1, 16, torch.bfloat16, True),
    (16, 16, 1, 8, torch.bfloat16, False),
]


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "page", "dtype", "whole"), SIZES)
@pytest.mark.parametrize("window", [None, 21])
def test_rows_match_the_oracle(dim, heads, kv_heads, page, dtype, whole, window):
    committed, counts = [0, 61, 33], [9, 5, 1]
    case = make_case(committed, counts, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, page=page)
    actual = run(case, committed, counts, page=page, window=window, whole=whole)
    assert error(actual, case, committed, counts, page=page, window=window) < TOLERANCE[dtype]


LATENTS = [(48, 32, 4, FP32, False), (96, 64, 24, BF16, True), (72, 56, 3, FP32, True), (576, 512, 6, FP16, False)]


@pytest.mark.parametrize(("dim", "value_dim", "heads", "dtype", "whole"), LATENTS)
def test_values_may_be_the_first_numbers_of_their_keys(dim, value_dim, heads, dtype, whole):
    committed, counts = [0, 61], [5, 7]
    case = make_case(committed, counts, heads=heads, kv_heads=1, dim=dim, dtype=dtype, value_dim=value_dim)
    actual = run(case, committed, counts, whole=whole)
    assert error(actual, case, committed, counts) < TOLERANCE[dtype]
    chain = torch.tensor([(1 << (j + 1)) - 1 for count in counts for j in range(count)], device=DEVICE)
    assert torch.equal(run(case, committed, counts, tree_mask=chain, whole=whole), actual)
    alone = tuple(x[-1:] for x in case[:3])
    assert torch.equal(run((*alone, case[3], case[4][1:]), [67], [1]), actual[-1:])
    sinks = torch.linspace(-1, 1, heads)
    actual = run(case, committed, counts, whole=whole, sinks=sinks.to(DEVICE))
    assert error(actual, case, committed, counts, sinks=sinks) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:All-NaN")
@parametrize_pairs(
    {
        "broken": list(BROKEN)[1:4],
        "dtype, cache_dtype": [(FP32, None), (FP16, None), (BF16, None), (FP16, torch.float8_e4m3fn)],
        "value_dim": [None, 16],
        "whole": [False, True],
        "window": [None, 2],
    }
)
def test_numbers_that_are_not_finite_do_not_reach_rows_that_do_not_see_them(
    in_triton, broken, dtype, cache_dtype, value_dim, whole, window
):
    """Of later rows of a draft, of keys before a row's window, and of other branches of a tree."""
    committed, counts = [0, 29], [5, 3]
    words = torch.tensor([1, 3, 5, 13, 29, 1, 3, 5], device=DEVICE)  # node 1 has no child
    for tree_mask, wrong, unseen in ((None, [2, 6], [0, 1, 5]), (words, [1, 6], [0, 2, 3, 4, 5, 7])):
        sizes = {"heads": 2, "kv_heads": 1, "dim": 32, "dtype": dtype, "value_dim": value_dim}
        q, k, v, cache, table = make_case(committed, counts, **sizes)
        cache, options = cache.to(cache_dtype or dtype), {"tree_mask": tree_mask, "whole": whole, "window": window}
        expected = run((q, k, v, cache.clone(), table), committed, counts, **options)
        for row in wrong:
            BROKEN[broken](k[row], v[row])
        actual = run((q, k, v, cache, table), committed, counts, **options)
        unseen = [*unseen, 4] if window else unseen
        assert torch.equal(actual[unseen], expected[unseen])
        assert all(not row.isfinite().all() for row in actual[wrong].unflatten(1, (2, -1)).flatten(0, 1))


TREE = checked_tree(
    torch.arange(14).view(2, 7),
    torch.tensor([[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 0, 0, 0, 0]]),
    torch.tensor([7, 3]),
)


def tree_mask_of(tree):
    return tree.ancestors[torch.arange(tree.token.shape[1]) < tree.length[:, None]].to(DEVICE)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("first", "window"), [(0, None), (1, None), (0, 12)])
def test_trees_match_the_oracle(whole, first, window):
    committed, counts = [62, 30], [7, 3]
    case = make_case(committed, counts)
    options = {"first": first, "window": window}
    actual = run(case, committed, counts, tree_mask=tree_mask_of(TREE), whole=whole, **options)
    assert error(actual, case, committed, counts, ancestors=TREE.ancestors, **options) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 21])
def test_sinks_take_their_share(window):
    """Below, among and far above the scores; the same bits whichever kernel merges them."""
    sinks = torch.tensor([-3.0, 0.5, 4.0, 90.0], device=DEVICE)
    committed, counts, options = [62, 30], [7, 3], {"window": window, "sinks": sinks}
    case = make_case(committed, counts)
    chain = run(case, committed, counts, whole=True, **options)
    assert error(chain, case, committed, counts, window=window, sinks=sinks.cpu()) < TOLERANCE[torch.float32]
    assert torch.equal(run(case, committed, counts, **options), chain)
    words = torch.tensor([*((2 << node) - 1 for node in range(7)), 1, 3, 7], device=DEVICE)
    for whole in (False, True):
        assert torch.equal(run(case, committed, counts, tree_mask=words, whole=whole, **options), chain)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.float16, 37)])
def test_a_row_has_the_same_bits_alone_among_few_among_many_in_a_prompt_and_in_a_tree(dtype, window):
    """At positions on both sides of the edges of a tile and of a split."""
    length = 70
    case = make_case([0, 0], [length, 20], dtype=dtype)
    q, k, v, cache, table = case
    prompt = run(case, [0, 0], [length, 20], window=window, whole=True)[:length]

    def rows(start, count, *, beside=0, **options):
        index = torch.cat([torch.arange(start, start + count), torch.arange(beside) + length])
        subcase = (q[index], k[index], v[index], cache, table)
        blocks = ([start, 3], [count, beside]) if beside else ([start], [count])
        return run(subcase, *blocks, window=window, **options)[:count]

    for start in (15, 31, 32, 63, 69):
        assert torch.equal(rows(start, 1), prompt[start : start + 1])
    assert torch.equal(rows(28, 3, beside=4), prompt[28:31])
    assert torch.equal(rows(30, 40, whole=True), prompt[30:])
    assert torch.equal(rows(60, 10, whole=False), prompt[60:])
    # nodes 2, 5 and 6 under the root are the text; the nodes between them hold other tokens
    tree_mask = torch.tensor([1, 0b11, 0b101, 0b1011, 0b10101, 0b100101, 0b1100101], device=DEVICE)
    for start in (14, 29, 61, 64):
        positions = torch.tensor([start, 0, start + 1, 1, 2, start + 2, start + 3])
        for whole in (False, True):
            subcase = (q[positions], k[positions], v[positions], cache.clone(), table)
            tree = run(subcase, [start], [7], tree_mask=tree_mask, window=window, whole=whole)
            assert torch.equal(tree[[0, 2, 5, 6]], prompt[start : start + 4]), (start, whole, window)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to have another device")
@pytest.mark.parametrize("multiprocessors", [2, 6, 132])
def test_bits_do_not_depend_on_how_splits_are_divided_among_programs(monkeypatch, multiprocessors):
    """All ten splits of a row in one program, every third one, and each in its own."""
    monkeypatch.setattr(device, "without_gpu", device.HOPPER._replace(multiprocessors=multiprocessors))
    committed, counts = [300, 40], [3, 2]
    case = make_case(committed, counts)
    merged = run(case, committed, counts, whole=True)
    assert torch.equal(run(case, committed, counts, whole=False), merged)
    window = run(case, committed, counts, whole=True, window=290)
    assert torch.equal(run(case, committed, counts, whole=False, window=290), window)


def test_a_head_that_grows_a_level_sees_earlier_levels(in_triton):
    """Rows whose offsets do not begin at 0, like those of a tree's later levels (`KVPool.level`)."""
    case = make_case([20], [6])
    q, k, v, cache, table = case
    chain = run(case, [20], [6])
    tree_mask = torch.tensor([0b11111, 0b100111], device=DEVICE)
    offset = torch.tensor([4, 5], device=DEVICE)
    request, committed = torch.zeros_like(offset), torch.full_like(offset, 20)
    rows = AttentionRows(table, request, committed, offset, tree_mask, 16, 26, (2,))
    plan = plan_attention(rows, 4, LayerShape(2, 64), torch.float32)
    assert isinstance(plan, TritonAttention)
    actual = plan(q[4:], k[4:], v[4:], cache, 64**-0.5)
    assert (actual[0] - chain[4]).abs().max() < 1e-6  # the whole chain; the other row does not see two of its nodes
    assert not torch.allclose(actual[1], chain[5])


def test_keys_and_values_of_8_bits_are_widened():
    committed, counts = [40], [3]
    q, k, v, cache, table = make_case(committed, counts, dtype=torch.float16)
    narrow = cache.to(torch.float8_e4m3fn)
    slots = AttentionRows.blocks(table, committed, counts, page_size=16).slots
    for index, new in enumerate((k, v)):
        narrow.view(torch.uint8)[index][:, slots] = new.transpose(0, 1).to(torch.float8_e4m3fn).view(torch.uint8)
    rows = AttentionRows.blocks(table, committed, counts, page_size=16)
    actual = TritonAttention(rows, 4, 2, 64, torch.float16, shape=SMALL).read(q, narrow, 64**-0.5)
    assert error(actual, (q, k, v, narrow.half(), table), committed, counts) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("tree", [False, True])
def test_the_torch_form_reads_and_writes_8_bits_too(tree):
    """The output matches float64 on the stored values; values too large for e4m3 are stored as its largest."""
    committed, counts = [40], [3]
    q, k, v, cache, table = make_case(committed, counts, dtype=torch.float16)
    narrow = cache.to(torch.float8_e4m3fn)
    k[0, 0, 0], v[1, 1, 1] = 3000.0, -3000.0
    tree_mask = torch.tensor([1, 3, 5], device=DEVICE) if tree else None
    rows = AttentionRows.blocks(table, committed, counts, page_size=16, tree_mask=tree_mask)
    actual = TiledAttention(rows, 4, 2)(q, k, v, narrow, 64**-0.5)
    assert actual.dtype is torch.float16
    stored = read_slots(narrow, rows.slots).float()
    assert stored[0, 0, 0, 0] == 448
    assert stored[1, 1, 1, 1] == -448
    wide = torch.stack([k, v]).transpose(1, 2).float().clamp(-448, 448)
    assert ((stored - wide).abs() <= wide.abs() / 16 + 2.0**-10).all()
    ancestors = None if tree_mask is None else tree_mask[None]
    expected = oracle.paged_attention(
        q, narrow.double(), table, committed, counts, page_size=16, scale=64**-0.5, ancestors=ancestors
    )
    assert (actual.double() - expected).abs().max() < 2e-3 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("counts", [(5, 5), (7,), (1, 1, 1), (5, 2, 9)])
def test_blocks_hold_rows_of_one_request_each(counts):
    blocks = row_blocks(counts, 3, torch.device("cpu")).tolist()
    rows = [range(first, first + count) for first, count in blocks]
    assert [row for block in rows for row in block] == list(range(sum(counts)))
    ends = set(itertools.accumulate(counts))
    assert all(1 <= len(block) <= 3 and not ends & set(block[1:]) for block in rows)
    assert len(blocks) == sum(-(-count // 3) for count in counts)


PAGE = 16
BOUND = {FP32: 1e-5, FP16: 5e-3, BF16: 2e-2}
LLAMA = sized((4, 2, 64), (32, 8, 128))  # query heads, KV heads, head size of Llama-3.1-8B
OTHERS = ((7, 1, 64), (8, 4, 80), (8, 2, 96), (4, 1, 256))
NODES, START = sized((5, 29), (24, 1019))  # of a draft, close to the end of a split
STEPS = sized([(2, 3)], [(16, 5), (16, 8), (64, 4)])  # requests and rows of each: 80, 128 and 256 rows together
HEADS = sized(
    [(LLAMA, FP32)],
    [
        (served if (sizes, dtype) == (LLAMA, BF16) else pytest.param)(sizes, dtype)
        for dtype in (BF16, FP16, FP32)
        for sizes in (LLAMA, *OTHERS)
    ],
)
STEP_DTYPE = sized(FP32, BF16)


def filled(lengths, heads, kv_heads, dim, dtype):
    """Return q, k and v of every position, a full KV cache pool and a page table with scattered pages."""
    generator = torch.Generator(DEVICE).manual_seed(sum(lengths))
    pages = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)) + 1
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int64)
    for b, row_pages in enumerate(order.split(pages)):
        table[b, : len(row_pages)] = row_pages

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    cache = random(2, kv_heads, (sum(pages) + 1) * PAGE, dim)
    return *(random(sum(lengths), count, dim) for count in (heads, kv_heads, kv_heads)), cache, table.to(DEVICE)


def planned(case, starts, counts, tree_mask=None):
    q, _, _, cache, table = case
    rows = AttentionRows.blocks(table, starts, counts, page_size=PAGE, tree_mask=tree_mask)
    return plan_attention(rows, q.shape[1], LayerShape(cache.shape[1], q.shape[2]), q.dtype, cache.dtype)


def random_tree(nodes):
    generator = torch.Generator().manual_seed(nodes)
    parents = [-1, *(int(torch.randint(max(0, n - 4), n, (), generator=generator)) for n in range(1, nodes))]
    return DraftTree.assemble(torch.arange(nodes)[None], torch.tensor([parents]), torch.tensor([nodes]))


def in_float64(q, cache, table, ancestors=None):
    wide = cache.cpu().float() if cache.dtype == torch.float8_e4m3fn else cache.cpu()
    options = {"page_size": PAGE, "scale": q.shape[-1] ** -0.5, "ancestors": ancestors}
    return oracle.paged_attention(q.cpu(), wide, table.cpu(), [START], [len(q)], **options)


def named(sizes, dtype):
    heads, kv_heads, dim = sizes
    return f"{heads} and {kv_heads} heads of {dim}, {dtype}"


@pytest.mark.gpu(seconds=2)
@pytest.mark.parametrize(("sizes", "dtype"), HEADS)
def test_a_draft_of_a_model(in_triton, compare, sizes, dtype):
    """A chain, a tree, and a chain over an fp8 KV cache, which is compared with float64 on the stored values."""
    tree, scale = random_tree(NODES), sizes[2] ** -0.5
    q, k, v, cache, table = filled([START + NODES], *sizes, dtype)
    new, narrow = (q[:NODES], k[:NODES], v[:NODES]), cache.to(torch.float8_e4m3fn)
    kinds = {
        "chain": (cache, None, None),
        "tree": (cache, tree.ancestors[0].to(DEVICE), tree.ancestors),
        "chain, fp8 cache": (narrow, None, None),
    }
    for kind, (pool, tree_mask, ancestors) in kinds.items():
        actual = planned((*new, pool, table), [START], [NODES], tree_mask)(*new, pool, scale)
        true = partial(in_float64, new[0], pool, table, ancestors)
        compare.close("attention", f"{kind} of {NODES} at {START}, {named(sizes, dtype)}", actual, true, BOUND[dtype])


@pytest.mark.gpu(seconds=2)
@pytest.mark.parametrize(("requests", "rows"), [served(*step) for step in STEPS])
def test_rows_of_a_step_have_the_bits_of_each_request_alone(in_triton, compare, requests, rows):
    q, k, v, cache, table = filled([START + rows] * requests, *LLAMA, STEP_DTYPE)
    q, k, v = (x[: requests * rows] for x in (q, k, v))
    scale = LLAMA[2] ** -0.5
    together = planned((q, k, v, cache, table), [START] * requests, [rows] * requests)(q, k, v, cache.clone(), scale)
    alone = []
    for request, part in enumerate(zip(q.split(rows), k.split(rows), v.split(rows), strict=True)):
        case = (*part, cache, table[request : request + 1])
        alone.append(planned(case, [START], [rows])(*part, cache.clone(), scale))
    label = f"{requests} x {rows} rows together and alone, {named(LLAMA, STEP_DTYPE)}"
    compare.same("attention, bits", label, together, torch.cat(alone))


@pytest.mark.gpu(seconds=2)
@pytest.mark.parametrize(("sizes", "dtype"), HEADS)
def test_rows_have_the_same_bits_in_a_prompt_in_chains_and_in_a_tree(in_triton, compare, sizes, dtype):
    name, tree, scale = named(sizes, dtype), random_tree(NODES), sizes[2] ** -0.5
    q, k, v, cache, _ = case = filled([START + NODES], *sizes, dtype)
    end = START + NODES
    whole = planned(case, [0], [end])(q, k, v, cache, scale)
    for width in [1, *(width for width in (NODES, 80, 128, 256) if width <= end)]:
        first_row, rows = min(START, end - width), []
        for first in range(first_row, end, width):
            span = slice(first, first + width)
            rows.append(planned(case, [first], [width])(q[span], k[span], v[span], cache, scale))
        label = f"rows of a prompt and in chains of {width}, {name}"
        compare.same("attention, bits", label, torch.cat(rows), whole[first_row:])
    span = slice(START, end)
    tree_mask = tree.ancestors[0].to(DEVICE)
    together = planned(case, [START], [NODES], tree_mask)(q[span], k[span], v[span], cache.clone(), scale)
    alone = []
    for node in range(NODES):
        plain = cache.clone()
        for depth, step in enumerate(START + ancestor for ancestor in tree.path(0, node)):
            row = slice(step, step + 1)
            output = planned(case, [START + depth], [1])(q[row], k[row], v[row], plain, scale)
        alone.append(output)
    compare.same("attention, bits", f"rows of a tree and alone, {name}", together, torch.cat(alone))
