"""Columns that travel in one copy, and rows that the host selects without one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.copies import select_rows, upload_columns, upload_lists

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 3, 4, 9])
@pytest.mark.parametrize("fractions", [0, 1, 3])
def test_columns_keep_their_values(size, fractions):
    wide = [[2**40 + row * column for row in range(size)] for column in range(3)]
    narrow = [[0.1 * row - column for row in range(size)] for column in range(fractions)]
    columns = upload_columns(wide, narrow, CPU)
    assert [column.tolist() for column in columns[:3]] == wide
    for column, values in zip(columns[3:], narrow, strict=True):
        assert torch.equal(column, torch.tensor(values))
    first = columns[0].data_ptr()
    assert all((column.data_ptr() - first) % 16 == 0 for column in columns)


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), min_size=1, max_size=6))
def test_lists_of_any_lengths_travel_in_one_copy(lists):
    parts = upload_lists(lists, CPU)
    assert [part.tolist() for part in parts] == lists
    first = parts[0].untyped_storage().data_ptr()
    assert all(part.untyped_storage().data_ptr() == first for part in parts)
    assert all(8 * part.storage_offset() % 16 == 0 for part in parts)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_selected_rows_lie_beside_each_other(case):
    count, chosen = case
    parts, rows = [torch.randn(count, 2), torch.randn(count, 3)], sorted(chosen)
    expected = torch.cat([part[rows] for part in parts], dim=-1)
    assert torch.equal(select_rows(parts, rows), expected)
