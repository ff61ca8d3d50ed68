"""Digests of emitted and drafted tokens: equal for equal runs; a change of either is reported."""

from __future__ import annotations

import json

import pytest

from tests import ids_digest


@pytest.fixture(scope="module")
def words(tiny_target_folder, tiny_head_folder):
    return ["--model", str(tiny_target_folder), "--head", str(tiny_head_folder), "--tokens", "8"]


def test_a_change_of_tokens_or_drafts_is_named(words, tmp_path, capsys):
    file = tmp_path / "before.json"
    assert ids_digest.main([*words, "--save", str(file)]) == 0
    totals = json.loads(capsys.readouterr().out.splitlines()[-1])
    cells = json.loads(file.read_text())
    assert len(cells) == 7 * 2 * 2 * 2
    assert len({cell["drafts"] for cell in cells.values()}) > 8  # kinds of drafts differ

    words = [*words, "--dtypes", "bfloat16"]
    cells = {name: cell for name, cell in cells.items() if name.endswith("bfloat16")}
    cells["ngram, T = 0, 8 at a time, bfloat16"]["drafts"] = "other"
    cells["gone, T = 0, 8 at a time, bfloat16"] = {"ids": "other", "drafts": ""}
    file.write_text(json.dumps(cells))
    assert ids_digest.main([*words, "--compare", str(file)]) == 1
    *wrong, last = capsys.readouterr().out.splitlines()
    assert wrong == [
        "ngram, T = 0, 8 at a time, bfloat16: drafts differ",
        "gone, T = 0, 8 at a time, bfloat16: ids differ",
        "gone, T = 0, 8 at a time, bfloat16: drafts differ",
    ]
    assert json.loads(last)["ids"] != totals["ids"]


def test_tokens_that_speculation_changed_are_named():
    cells = {
        "none, T = 0, 1 at a time, float32": {"ids": "a"},
        "none, T = 1, 1 at a time, float32": {"ids": "b"},
        "head tree, T = 0, 1 at a time, float32": {"ids": "b"},
        "head tree, T = 1, 1 at a time, float32": {"ids": "b"},
    }
    assert ids_digest.unequal(cells) == ["head tree, T = 0, 1 at a time, float32: other token ids than plain decoding"]


def test_a_mistake_is_one_clear_line(words, tmp_path, capsys):
    (tmp_path / "list.json").write_text("[]")
    assert ids_digest.main([*words, "--compare", str(tmp_path / "list.json")]) == 2
    assert "list.json: not a file of --save" in capsys.readouterr().err
    assert ids_digest.main(["--model", "no/such/folder"]) == 2
    assert "no/such/folder" in capsys.readouterr().err
