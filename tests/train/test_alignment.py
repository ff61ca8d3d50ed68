"""Golden tables of shifts and masks: the part of training in which an off-by-one error shows nowhere else."""

from __future__ import annotations

import pytest
import torch

from models.heads.p_eagle.config import PEagleObjectiveConfig
from train.data import alignment

# position         0  1  2  3  4  5  6  7
IDS = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17])
# prompt 0..2, response 3..6 (6 ends the text), 7 is padding
ASSISTANT = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0]).bool()


def test_shift_left() -> None:
    assert alignment.shift_left(IDS, 2).tolist() == [12, 13, 14, 15, 16, 17, 0, 0]
    assert alignment.shift_left(IDS, 0).tolist() == IDS.tolist()
    assert alignment.shift_left(IDS, 99, -1).tolist() == [-1] * 8
    assert alignment.shift_left(IDS.view(2, 4), 1).tolist() == [[11, 12, 13, 0], [15, 16, 17, 0]]


@pytest.mark.parametrize(
    ("step", "tokens", "positions", "predicted"),
    [
        (0, [11, 12, 13, 14, 15, 16, 17, 0], [0, 1, 2, 3, 4, 5, 6, 7], [12, 13, 14, 15, 16, 17, 0, 0]),
        (1, [12, 13, 14, 15, 16, 17, 0, 0], [1, 2, 3, 4, 5, 6, 7, 7], [13, 14, 15, 16, 17, 0, 0, 0]),
        (3, [14, 15, 16, 17, 0, 0, 0, 0], [3, 4, 5, 6, 7, 7, 7, 7], [15, 16, 17, 0, 0, 0, 0, 0]),
    ],
)
def test_what_a_slot_reads_and_predicts(
    step: int, tokens: list[int], positions: list[int], predicted: list[int]
) -> None:
    assert alignment.draft_tokens(IDS, step).tolist() == tokens
    assert alignment.draft_positions(torch.arange(8), step).tolist() == positions
    assert alignment.predicted_tokens(IDS, step).tolist() == predicted


def test_medusa_head_k_is_taught_the_token_k_after_the_next() -> None:
    """From f[i] the LM head predicts t[i+1]; Medusa's head 0 predicts t[i+2], head 1 t[i+3], ..."""
    assert [alignment.predicted_tokens(IDS, head)[2].item() for head in range(4)] == [14, 15, 16, 17]


def test_mlp_head_k_reads_the_token_before_the_one_it_is_taught() -> None:
    """From f[i]: head 0 reads t[i+1] and predicts t[i+2], head 1 reads t[i+2] and predicts t[i+3], ..."""
    for head in range(4):
        read, taught = alignment.draft_tokens(IDS, head), alignment.predicted_tokens(IDS, head)
        assert (read[2].item(), taught[2].item()) == (13 + head, 14 + head)
        assert torch.equal(read[1:], taught[:-1])


def test_p_eagle_depth_k_stands_k_positions_after_its_slot() -> None:
    assert [alignment.draft_positions(torch.arange(8), depth)[2].item() for depth in range(4)] == [2, 3, 4, 5]
    assert [alignment.predicted_tokens(IDS, depth)[2].item() for depth in range(4)] == [14, 15, 16, 17]


@pytest.mark.parametrize(
    ("slots", "ratio", "min_ratio", "sizes"),
    [
        (100, 0.7, 0.2, [100, 70, 49, 34, 24, 20, 20, 20]),
        (100, 0.5, 0.01, [100, 50, 25, 12, 6, 3, 2, 1]),
        (3, 0.1, 0.1, [3, 1, 1, 1, 1, 1, 1, 1]),
        (0, 0.7, 0.2, [0] * 8),
    ],
)
def test_deeper_depths_are_trained_on_fewer_slots(slots: int, ratio: float, min_ratio: float, sizes: list[int]) -> None:
    config = PEagleObjectiveConfig(ratio=ratio, min_ratio=min_ratio)
    assert alignment.sample_sizes(slots, map(config.slot_share, range(8))) == sizes


def test_served_slots() -> None:
    """Slots are served from the one before the first response token, the first draft, to two before the last token."""
    assert alignment.served(ASSISTANT).int().tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_no_slot_without_two_response_tokens() -> None:
    assert not alignment.served(torch.tensor([0, 0, 1, 0]).bool()).any()
    assert not alignment.served(torch.tensor([0, 0, 0, 1]).bool()).any()


def test_a_response_that_fills_the_sequence_ends_two_slots_early() -> None:
    assert alignment.served(torch.ones(5).bool()).int().tolist() == [1, 1, 1, 0, 0]


def test_step_masks_shrink_from_the_end() -> None:
    masks = alignment.step_masks(ASSISTANT, 4).int().tolist()
    assert masks == [
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_no_draft_crosses_a_turn() -> None:
    """Two responses, 2..4 and 7..9: at step 3 slot 2 would reach the second one, across the user's turn."""
    assistant = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 1]).bool()
    assert alignment.served(assistant).int().tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 0, 0]
    assert alignment.step_masks(assistant, 5).flatten(1).sum(1).tolist() == [4, 2, 0, 0, 0]


def test_the_teacher_of_a_slot_is_the_position_after_it() -> None:
    """p[j] teaches slot j - 1; the teacher of every slot and step is one of these rows."""
    rows = alignment.teacher_rows(ASSISTANT)
    assert rows.int().tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    masks = alignment.step_masks(ASSISTANT, 4)
    for step, mask in enumerate(masks):
        for slot in mask.nonzero().flatten().tolist():
            assert rows[slot + 1 + step]


def test_batches_are_rows_side_by_side() -> None:
    both = torch.stack([ASSISTANT, ASSISTANT.roll(1)])
    assert torch.equal(alignment.served(both)[0], alignment.served(ASSISTANT))
    assert torch.equal(alignment.step_masks(both, 3)[:, 1], alignment.step_masks(ASSISTANT.roll(1), 3))


def test_only_served_slots_are_drafted_from() -> None:
    start = torch.tensor([[0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()
    slots = alignment.served_slots(start)
    assert slots.tolist() == [[1, 3, 4], [4, 0, 1], [0, 1, 2]]
    x = torch.arange(36).view(3, 6, 2)
    assert alignment.at(x, slots)[1, :, 0].tolist() == [20, 12, 14]
    assert torch.equal(alignment.at(x, torch.tensor([2, 4])), x[:, [2, 4]])
    assert alignment.served_slots(torch.zeros(2, 4).bool()).shape == (2, 1)
