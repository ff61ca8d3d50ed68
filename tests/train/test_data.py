"""Sequences, and the order in which a run trains on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from train.data.sequences import Sequences, epoch_order, rows_at

ROWS = [([1, 2, 3, 4], [0, 0, 1, 1]), ([5, 6, 7, 8, 9, 10], [0, 1, 1, 1, 1, 1]), ([11, 12, 13], [0, 1, 1])]


def sequences() -> Sequences:
    return Sequences.of([(ids, [bool(flag) for flag in mask]) for ids, mask in ROWS])


def test_rows_come_back_as_they_were() -> None:
    data = sequences()
    assert len(data) == 3
    assert [data.row(index)[0].tolist() for index in range(3)] == [ids for ids, _ in ROWS]
    assert data.lengths.tolist() == [4, 6, 3]


def test_a_batch_is_padded_on_the_right_and_padding_is_nobodys() -> None:
    batch = sequences().batch([2, 0])
    assert batch.ids.tolist() == [[11, 12, 13, 0], [1, 2, 3, 4]]
    assert batch.assistant.int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert batch.rows == (2, 0)


def test_cut_drops_what_serves_no_slot() -> None:
    cut = sequences().cut(3)
    assert [cut.row(index)[0].tolist() for index in range(len(cut))] == [[5, 6, 7], [11, 12, 13]]
    assert len(sequences().cut(2)) == 0


def test_counts_are_of_the_targets_own_tokens() -> None:
    assert sequences().counts(16).nonzero().flatten().tolist() == [3, 4, 6, 7, 8, 9, 10, 12, 13]


def test_files_round_trip_and_the_hash_sees_every_part(tmp_path: Path) -> None:
    data = sequences()
    data.save(tmp_path / "x.safetensors")
    again = Sequences.load(tmp_path / "x.safetensors")
    assert again.content_hash() == data.content_hash()
    assert torch.equal(again.assistant, data.assistant)
    inverted = Sequences.of([(ids, [not flag for flag in mask]) for ids, mask in ROWS])
    assert inverted.content_hash() != data.content_hash()
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"x\.safetensors: cannot be read"):
        Sequences.load(tmp_path / "x.safetensors")


def test_every_epoch_takes_every_row_once_in_its_own_order() -> None:
    epochs = [rows_at(10, 10 * epoch, 10, seed=3) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert rows_at(10, 0, 10, seed=4) != epochs[0]
    assert epoch_order(10, 3, 1).tolist() == epochs[1]


@pytest.mark.parametrize("size", [1, 3, 7, 10, 25])
def test_a_position_is_all_a_resumed_run_needs(size: int) -> None:
    full = rows_at(10, 0, 100, seed=0)
    pieces = [rows_at(10, start, size, seed=0) for start in range(0, 100 - size + 1, size)]
    assert [row for piece in pieces for row in piece] == full[: len(pieces) * size]
