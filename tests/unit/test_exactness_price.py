"""python -m tests.exactness_price as a user runs it, on a small target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import exactness_price


def test_its_table(tiny_target_folder: Path, monkeypatch, capsys) -> None:
    words = [str(tiny_target_folder), "--dtype", "float32", "--rounds", "2", "--rows", "1", "65"]
    monkeypatch.setattr("sys.argv", ["exactness_price", *words])
    exactness_price.main()
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \(", capsys.readouterr().out, re.MULTILINE
    )
    assert [count for count, *_ in rows] == ["1", "65"]
    assert all(float(ratio) > 0 for *_, ratio in rows)


def test_a_spread_needs_two_rounds(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["exactness_price", "demo", "--rounds", "1"])
    with pytest.raises(SystemExit):
        exactness_price.main()
    assert "--rounds 1: a spread needs at least 2" in capsys.readouterr().err
