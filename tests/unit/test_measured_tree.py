"""The tree of the best nodes, compared with all trees of its size."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.config import ProposerConfig
from infer.options.exported_heads import resolve_tree
from infer.settings.draft_tree import parse_tree
from infer.speculation.proposers.draft_loops.tree_shapes import tree_shape
from models.heads.measured_tree import best_paths


def test_a_chain_where_only_first_ranks_are_right() -> None:
    paths, expected = best_paths([[0.5, 0.0], [0.5, 0.0], [0.5, 0.0]], 8)
    assert paths == [(0,), (0, 0), (0, 0, 0)]
    assert expected == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_siblings_before_long_paths_where_depth_is_poor() -> None:
    paths, _ = best_paths([[0.4, 0.3, 0.2], [0.1, 0.05]], 4)
    assert paths == [(0,), (1,), (2,), (0, 0)]


def test_ties_go_to_the_shorter_path_and_the_lower_rank() -> None:
    assert best_paths([[1.0, 1.0], [1.0]], 4)[0] == [(0,), (1,), (0, 0), (1, 0)]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1).map(lambda share: round(share, 2)), min_size=1, max_size=3), max_size=3),
    st.integers(1, 4),
)
def test_no_tree_of_this_size_is_worth_more(accuracy: list[list[float]], nodes: int) -> None:
    paths, expected = best_paths(accuracy, nodes)
    all_paths = [
        path
        for depth in range(1, len(accuracy) + 1)
        for path in itertools.product(*map(range, map(len, accuracy[:depth])))
    ]

    def value(path: tuple[int, ...]) -> float:
        return math.prod(accuracy[depth][rank] for depth, rank in enumerate(path))

    trees = (
        tree
        for size in range(nodes + 1)
        for tree in itertools.combinations(all_paths, size)
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    )
    assert expected == pytest.approx(1 + max(sum(map(value, tree)) for tree in trees))
    assert expected == pytest.approx(1 + sum(map(value, paths)))
    if paths:
        parse_tree([list(path) for path in paths])  # raises if a parent is missing or a path occurs twice


def exported(folder: Path, **provenance: object) -> Path:
    (folder / "provenance.json").write_text(json.dumps(provenance))
    return folder


def test_a_measured_tree_is_written_out(tmp_path: Path) -> None:
    folder = exported(tmp_path, rank_accuracy=[[0.6, 0.2], [0.5, 0.1], [0.4, 0.1]])
    config = ProposerConfig(name="head", tree="measured:3")
    assert resolve_tree(config, folder).tree == [[0], [0, 0], [1]]
    shallow = ProposerConfig(name="head", tree="measured", max_draft_tokens=1)
    assert resolve_tree(shallow, folder).tree == [[0], [1]]
    beam = ProposerConfig(name="head", tree="beam:4x5")
    assert resolve_tree(beam, folder) is beam


def test_a_head_that_was_never_measured_or_never_right_is_named(tmp_path: Path) -> None:
    config = ProposerConfig(name="head", tree="measured")
    with pytest.raises(ValueError, match=r"proposer.tree=measured: .*provenance.json holds no rank_accuracy"):
        resolve_tree(config, tmp_path)
    with pytest.raises(ValueError, match=r"holds no rank_accuracy"):
        resolve_tree(config, exported(tmp_path, target_fingerprint="x"))
    with pytest.raises(ValueError, match=r"was never right"):
        resolve_tree(config, exported(tmp_path, rank_accuracy=[[0.0, 0.0]]))
    with pytest.raises(ValueError, match=r"proposer.tree=measured: is read from a head's folder"):
        tree_shape(config)
