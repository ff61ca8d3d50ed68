"""The draft vocabulary: which tokens it holds, in which order, and that the offset map restores their ids."""

from __future__ import annotations

import pytest
import torch

from models.vocab import build_draft_vocab, coverage, target_ids


def test_the_most_frequent_ids_in_ascending_order() -> None:
    d2t, t2d = build_draft_vocab(torch.tensor([0, 5, 1, 9, 0, 7]), 3)
    assert target_ids(d2t).tolist() == [1, 3, 5]
    assert d2t.tolist() == [1, 2, 3]  # an offset, not the id
    assert t2d.tolist() == [False, True, False, True, False, True]
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)


def test_ties_and_unseen_ids_go_to_the_lowest() -> None:
    assert target_ids(build_draft_vocab(torch.tensor([3, 3, 3, 3]), 2)[0]).tolist() == [0, 1]
    assert target_ids(build_draft_vocab(torch.tensor([0, 0, 0, 0, 8]), 3)[0]).tolist() == [0, 1, 4]


def test_special_tokens_are_forced_in() -> None:
    d2t, t2d = build_draft_vocab(torch.tensor([9, 8, 7, 6, 0, 0]), 3, forced_ids=[5, 4])
    assert target_ids(d2t).tolist() == [0, 4, 5]
    assert t2d.nonzero().flatten().tolist() == [0, 4, 5]


def test_a_whole_vocabulary_has_no_offset() -> None:
    d2t, t2d = build_draft_vocab(torch.tensor([1, 0, 2]), 32000)
    assert d2t.tolist() == [0, 0, 0]
    assert t2d.all()


def test_round_trip_on_random_counts() -> None:
    counts = torch.randint(0, 50, (1000,), generator=torch.Generator().manual_seed(0))
    d2t, t2d = build_draft_vocab(counts, 300, forced_ids=[0, 999])
    ids = target_ids(d2t)
    assert torch.equal(ids, t2d.nonzero().flatten())
    rest = [token for token in range(1000) if not t2d[token]]
    included = [int(counts[token]) for token in ids.tolist() if token not in (0, 999)]
    assert min(included) >= max(int(counts[token]) for token in rest)


def test_counts_are_not_changed() -> None:
    counts = torch.tensor([1, 2, 3])
    build_draft_vocab(counts, 2, forced_ids=[0])
    assert counts.tolist() == [1, 2, 3]


def test_coverage() -> None:
    d2t, _ = build_draft_vocab(torch.tensor([4, 0, 3, 0]), 2)
    assert coverage(torch.tensor([0, 0, 1, 2]), target_ids(d2t)) == 0.75


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head.draft_vocab_size=1: cannot hold the 2 special tokens"):
        build_draft_vocab(torch.ones(4), 1, forced_ids=[0, 3])
    with pytest.raises(ValueError, match="outside the target's vocabulary of 4"):
        build_draft_vocab(torch.ones(4), 2, forced_ids=[4])
