"""Addresses of rows in Triton's interpreter against the torch implementation: equal integers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.rows import AttentionRows, repeated
from kernels.triton import SWITCH
from tests.operations import counted

PAGE, WIDTH = 4, 60  # of a table's rows; 240 places
FIELDS = ("request", "committed", "offset", "places", "slots")
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
masks = st.integers(-(2**63), 2**63 - 1)


def both(monkeypatch, make):
    """Return what `make` returns in torch and in Triton, and the launches of the latter."""
    monkeypatch.setenv(SWITCH, "torch")
    expected = make()
    monkeypatch.setenv(SWITCH, "triton")
    with counted() as launches:
        actual = make()
    return expected, actual, launches


def assert_same(expected, actual):
    for name in FIELDS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    for name, dtype in (("committed", torch.int32), ("ends", torch.int32)):
        column = getattr(actual.addresses, name)
        assert column.dtype is dtype
        assert torch.equal(column, getattr(expected.addresses, name)), name


@few
@given(data=st.data())
def test_a_grid_in_one_launch(monkeypatch, data):
    """Requests whose page lists begin anywhere in the table, as those of heads that began within a text."""
    batch, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 64))
    table = torch.randperm(6 * WIDTH, generator=torch.Generator().manual_seed(batch)).view(6, WIDTH)
    lists = table.flatten().unfold(0, WIDTH, 1)
    requests = torch.tensor(data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=batch, max_size=batch)))
    start = torch.tensor(data.draw(st.lists(st.integers(0, 100), min_size=batch, max_size=batch)))
    tree = data.draw(st.booleans())
    shift, offset = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 9)) if tree else 0
    words = data.draw(st.lists(masks, min_size=batch * width, max_size=batch * width)) if tree else None
    where = {"shift": shift, "offset": offset, "page_size": PAGE, "longest": 200}
    mask = None if words is None else torch.tensor(words).view(batch, width)

    def make():
        rows = AttentionRows.grid(lists, requests, start, width, **where, tree_mask=mask)
        return rows, rows.tails(8) if tree else None

    (expected, tails), (actual, actual_tails), launches = both(monkeypatch, make)
    assert_same(expected, actual)
    assert actual.counts == expected.counts == (width,) * batch
    assert launches.total == 1 + tree
    if tree:
        assert torch.equal(actual_tails, tails)


@few
@given(data=st.data())
def test_blocks_in_one_launch(monkeypatch, data):
    counts = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    starts = [data.draw(st.integers(0, 100)) for _ in counts]
    table = torch.randperm(6 * WIDTH, generator=torch.Generator().manual_seed(1)).view(6, WIDTH)
    rows = AttentionRows.blocks(table, starts, counts, page_size=PAGE, requests=[5, 0, 2, 1][: len(counts)])
    expected, actual, launches = both(monkeypatch, lambda: (fresh := replace(rows), fresh.addresses)[0])
    assert_same(expected, actual)
    assert launches.total == 1


def test_every_row_can_have_its_own_width():
    values = torch.tensor([7, 8, 9])
    assert repeated(values, (2, 2, 2)).tolist() == [7, 7, 8, 8, 9, 9]
    assert repeated(values, (1, 3, 2)).tolist() == [7, 8, 8, 8, 9, 9]


@pytest.mark.parametrize("tree", [False, True])
def test_rows_beyond_a_block(monkeypatch, tree):
    """More rows than one program plans."""
    table, start = torch.arange(3 * WIDTH).view(3, WIDTH), torch.tensor([0, 100, 30])
    mask = torch.full((3, 90), -1) if tree else None
    where = torch.tensor([2, 0, 1]), start, 90
    expected, actual, _ = both(
        monkeypatch, lambda: AttentionRows.grid(table, *where, page_size=PAGE, longest=200, tree_mask=mask)
    )
    assert_same(expected, actual)
