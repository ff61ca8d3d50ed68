"""Recurrent layers in C and in torch: their oracles, and equal bits however the tokens of a text are divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import recurrence
from kernels.cpu.library import library
from kernels.recurrent_rows import RecurrentRows
from tests.kernels.recurrent_tokens import SLOTS, equal, make_tokens, picked
from tests.kernels.reference.recurrence import path
from tests.pairwise import parametrize_pairs

BF16, FP32 = torch.bfloat16, torch.float32
BOUND = {FP32: 1e-5, BF16: 2**-8}
ODD = {"channels": 90, "keys": 20, "values": 12}  # which torch computes
SMALL = {"heads": 6, "groups": 3, "keys": 16, "values": 48, "bias": True}
FORMS = {
    "delta-fp32": partial(make_tokens, dtype=FP32, delta=True),
    "delta-bf16": partial(make_tokens, dtype=BF16, delta=True, **SMALL),
    "mamba-fp32": partial(make_tokens, dtype=FP32, delta=False, groups=1, taps=3, silu=False),
    "mamba-bf16": partial(make_tokens, dtype=BF16, delta=False, channels=528, keys=48, values=16),
    "delta-torch": partial(make_tokens, dtype=FP32, delta=True, **ODD),
    "mamba-torch": partial(make_tokens, dtype=BF16, delta=False, **ODD),
}
each_form = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
in_c = pytest.mark.parametrize("make", list(FORMS.values())[:4], ids=list(FORMS)[:4])
trees = st.integers(1, 64).flatmap(lambda count: st.tuples(*(st.integers(max(i - 9, -1), i - 1) for i in range(count))))


def tree_rows(parents: Sequence[Sequence[int]], slots: Sequence[int], advance: Sequence[bool] = ()) -> RecurrentRows:
    """Rows of trees, or of whatever has these parents, of which requests may be certain."""
    return RecurrentRows(
        tuple(map(len, parents)),
        torch.tensor(slots),
        torch.tensor(advance or [False] * len(slots)),
        torch.tensor([node for request in parents for node in request], dtype=torch.int32),
    )


def test_c_computes_whole_vectors_and_torch_the_rest(monkeypatch):
    calls = []
    for name in ("_convolve_in_torch", "_scan_in_torch"):
        original = getattr(recurrence, name)
        monkeypatch.setattr(recurrence, name, lambda *a, _f=original, **b: calls.append(_f) or _f(*a, **b))
    assert library() is not None
    for name, make in FORMS.items():
        make(2).chains([[0, 1]], [1])
        assert len(calls) == (2 if name.endswith("torch") else 0)
        calls.clear()


@parametrize_pairs(
    {
        "dtype": [FP32, BF16],
        "delta": [True, False],
        "silu, bias, taps": [(True, False, 4), (False, True, 3), (True, True, 2), (False, False, 8)],
        "heads, groups": [(4, 2), (3, 3), (4, 1)],
        "channels, keys, values": [(96, 32, 80), (528, 16, 16), (16, 48, 128), (90, 20, 12)],
        "parents": [[-1], list(range(-1, 40)), [-1, 0, 0, 2, 1, 1, 4, 0, -1, 8]],
    }
)
def test_it_is_its_formula(dtype, delta, silu, bias, taps, heads, groups, channels, keys, values, parents):
    case = make_tokens(
        len(parents), dtype, delta=delta, silu=silu, bias=bias, taps=taps, heads=heads, groups=groups,
        channels=channels, keys=keys, values=values,
    )  # fmt: skip
    tokens, chain = range(len(parents)), parents == list(range(-1, len(parents) - 1))
    convolved, out, states = case.true(tokens, 2, parents)
    inputs = torch.cat([case.windows[2], case.x(slice(None))])
    rows = tree_rows([parents], [2], [True]) if chain else tree_rows([parents], [2])
    results = case.run(tokens, rows)
    assert results[0].dtype is dtype
    assert results[1].dtype is FP32
    torch.testing.assert_close(results[0].double(), convolved, atol=BOUND[dtype], rtol=2 * BOUND[dtype])
    torch.testing.assert_close(results[1].double(), out, atol=1e-5, rtol=1e-4)
    if chain:
        torch.testing.assert_close(case.states[2].double(), states[-1], atol=1e-5, rtol=1e-4)
        assert torch.equal(case.windows[2], inputs[len(inputs) - taps + 1 :])


@each_form
def test_a_text_has_the_same_bits_however_it_is_cut(make):
    length = 150
    case = make(length)
    expected, before = case.copy(), case.copy()
    outputs = expected.plain(range(length), 3)
    for cuts in ([length], [1, 149], [3, 147], [16, 134], [63, 87], [64, 86], [65, 1, 1, 83], [1, 2, 3, 16, 64, 64]):
        part, taken = case.copy(), list[tuple[torch.Tensor, torch.Tensor]]()
        for first, size in zip([sum(cuts[:i]) for i in range(len(cuts))], cuts, strict=True):
            taken.append(part.chains([range(first, first + size)], [3]))
        assert equal([torch.cat(each) for each in zip(*taken, strict=True)], outputs), cuts
        assert torch.equal(part.states, expected.states)
        assert torch.equal(part.windows, expected.windows)
    others = [slot for slot in range(SLOTS) if slot != 3]
    assert torch.equal(expected.states[others], before.states[others])
    assert torch.equal(expected.windows[others], before.windows[others])


@each_form
def test_a_request_has_the_same_bits_in_any_company(make):
    case = make(40)
    texts = [range(0, 1), range(1, 18), range(0), range(18, 20), range(20, 40)]
    slots = [4, 0, 3, 5, 1]
    together = case.copy()
    outputs = together.chains(texts, slots)
    first = 0
    for text, slot in zip(texts, slots, strict=True):
        alone = case.copy()
        if len(text):
            assert equal(alone.chains([text], [slot]), picked(outputs, slice(first, first + len(text))))
        first += len(text)
        assert torch.equal(alone.states[slot], together.states[slot])
        assert torch.equal(alone.windows[slot], together.windows[slot])
    assert torch.equal(together.states[[2, 3]], case.states[[2, 3]]), "slots that no request with rows has"
    assert torch.equal(together.windows[[2, 3]], case.windows[[2, 3]])


@each_form
@settings(max_examples=12)
@given(data=st.data())
def test_a_tree_has_the_bits_of_plain_decoding_along_each_path(make, data):
    """Requests of a call: a tree, a prompt, and a second tree over the same state as the first."""
    parents, others = data.draw(trees, label="parents"), data.draw(trees, label="others")
    prompt = range(64, 67)
    case = make(67)
    before = case.copy()
    rows = tree_rows([parents, range(-1, 2), others], [2, 1, 2], [False, True, False])
    tokens = [*range(len(parents)), *prompt, *range(len(others))]
    outputs = case.run(tokens, rows)
    assert torch.equal(case.states[[0, *range(2, SLOTS)]], before.states[[0, *range(2, SLOTS)]])
    assert torch.equal(case.windows[[0, *range(2, SLOTS)]], before.windows[[0, *range(2, SLOTS)]])
    nodes = {data.draw(st.integers(0, len(parents) - 1), label="node") for _ in range(4)}
    for node in nodes:
        taken = path(parents, node)
        plain = before.copy()
        assert equal(plain.plain(taken, 2), picked(outputs, taken))
        index, committed = rows.along([taken, [], []])
        replayed = case.copy()
        assert equal(replayed.run([tokens[row] for row in index], committed), picked(outputs, taken))
        assert torch.equal(replayed.states[2], plain.states[2])
        assert torch.equal(replayed.windows[2], plain.windows[2])
    last = path(others, len(others) - 1)
    assert equal(before.copy().plain(last, 2), picked(outputs, [len(parents) + 3 + node for node in last]))
    plain = before.copy()
    assert equal(plain.plain(prompt, 1), picked(outputs, slice(len(parents), len(parents) + 3)))
    assert torch.equal(case.states[1], plain.states[1])
    assert torch.equal(case.windows[1], plain.windows[1])


@in_c
def test_rounds_of_drafts_leave_the_state_of_plain_decoding(make):
    """Trees, chains and single tokens in turn, of which none, some or all are accepted, for two requests."""
    case, generator = make(60), torch.Generator().manual_seed(3)
    plain = case.copy()
    slots, taken = [5, 0], [list[int](), list[int]()]
    for turn in range(12):
        sizes = [1 + (turn * 7 + b * 3) % 11 for b in range(2)]
        branching = turn % 3 == 0
        parents = [
            [-1, *(int(torch.randint(0, i, (), generator=generator)) if branching else i - 1 for i in range(1, size))]
            for size in sizes
        ]
        tokens = torch.randint(60, (sum(sizes),), generator=generator).tolist()
        rows = tree_rows(parents, slots)
        case.run(tokens, rows)
        paths = [path(parents[b], (turn * 5 + b) % (sizes[b] + 1) - 1) for b in range(2)]
        index, committed = rows.along(paths)
        if len(index):
            case.run([tokens[row] for row in index], committed)
        for b in range(2):
            taken[b] += [tokens[sizes[0] * b + node] for node in paths[b]]
    for b, slot in enumerate(slots):
        assert len(taken[b]) > 20
        plain.plain(taken[b], slot)
    assert torch.equal(case.states, plain.states)
    assert torch.equal(case.windows, plain.windows)


@in_c
@pytest.mark.parametrize("team", [2, 3])
def test_threads_change_nothing(make, team, monkeypatch):
    case, parents = make(70), [[-1, 0, 0, 1, 1, 2, 3], range(-1, 39), [-1], range(-1, 1)]
    slots, advance = [3, 1, 2, 5], [False, True, True, False]
    single = case.copy()
    expected = single.run(range(50), tree_rows(parents, slots, advance))
    monkeypatch.setattr(recurrence, "threads", lambda work: team)
    assert equal(case.run(range(50), tree_rows(parents, slots, advance)), expected)
    assert torch.equal(case.states, single.states)
    assert torch.equal(case.windows, single.windows)


@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("flush", [False, True])
def test_states_that_decay_away_are_the_same_in_every_thread(team, flush, monkeypatch):
    """Products below the smallest normal number are zero, whatever a thread's own mode, which stays."""
    case = make_tokens(24, FP32, delta=True)
    case.decay[:] = 1e-7
    case.qkv[:] *= 1e-16
    expected = case.copy()
    outputs = expected.plain(range(24), 1)
    monkeypatch.setattr(recurrence, "threads", lambda work: team)
    tiny = torch.tensor(1e-30)
    torch.set_flush_denormal(flush)
    try:
        assert equal(case.chains([range(24)], [1]), outputs)
        assert bool(tiny * tiny * 1e20 == 0) or not flush
        assert bool((tiny * torch.tensor(1e-9)) == 0) == flush, "of the thread that called"
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(case.states, expected.states)
    assert ((case.states[1] == 0) | (case.states[1].abs() >= torch.finfo(FP32).tiny)).all()


@each_form
def test_a_text_that_begins_has_a_state_of_zeros(make):
    """Prompts shorter than the window too; without slots nothing is kept."""
    case = make(9)
    case.windows[4] = 0
    case.states[4] = 0
    for length in (1, 2, 3, 9):
        with_slot, without = case.copy(), case.copy()
        rows = RecurrentRows.chains([length], None, torch.device("cpu"))
        assert equal(without.run(range(length), rows), with_slot.chains([range(length)], [4]))
        assert equal([without.states, without.windows], [case.states, case.windows])
        tree = RecurrentRows((9,), None, torch.tensor([False]), torch.tensor([-1, 0, 0, 1, 1, 3, 0, 6, 7]).int())
        assert equal(picked(case.run(range(9), tree), [0, 1, 3, 5]), case.copy().plain([0, 1, 3, 5], 4))


@given(trees)
def test_few_states_of_a_tree_are_kept_at_a_time(parents):
    """Each row comes once, after its parent, whose state is still in its place."""
    requests = [parents, range(-1, 20), parents]
    visits, places = tree_rows(requests, [0, 1, 2]).visits
    assert visits is not None
    assert places <= 1 + math.log2(max(len(parents), 1))
    first = 0
    for request in requests:
        order, before, after = visits[:, first : first + len(request)].tolist()
        assert sorted(order) == list(range(len(request)))
        held = {-1: -1}
        for row, source, place in zip(order, before, after, strict=True):
            assert held[source] == request[row]
            assert 0 <= place < places
            held[place] = row
        first += len(request)


def test_the_rows_of_a_call(monkeypatch):
    rows = tree_rows([[-1, 0, 0, 2], [-1], [], [-1, -1, 1]], [4, 2, 0, 1])
    assert rows.owner.tolist() == [0, 0, 0, 0, 1, 3, 3, 3]
    assert rows.above.tolist() == [-1, 0, 0, 2, -1, -1, -1, 6]
    assert rows.ancestors(2).tolist() == [[-2, -1], [-1, 0], [-1, 0], [0, 2], [-2, -1], [-2, -1], [-2, -1], [-1, 6]]
    index, path_rows = rows.along([[0, 2, 3], [], [], [1, 2]])
    assert index.tolist() == [0, 2, 3, 6, 7]
    assert path_rows.counts == (3, 2)
    assert path_rows.slots is not None
    assert path_rows.slots.tolist() == [4, 1]
    assert path_rows.advance.tolist() == [True, True]
