from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import convert

Convert = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Convert:
    """Return `run("--from", ...)`, which runs the command and returns its report. A refusal fails the test."""

    def call(*words: str | Path) -> str:
        status = convert.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out

    return call


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    """Return `refusal(IN, "--from", ...)`, which returns the error of a conversion that must fail and write nothing."""

    def call(folder: Path, *words: str | Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        out = tmp_path / "not there" / "out"
        options = [str(word) for word in words]
        if "--from" not in options:
            options += ["--from", "auto"]
        if "--to" not in options:
            options += ["--to", "headway"]
        assert convert.main([*options, str(folder), str(out)]) == 2
        text, err = capsys.readouterr()
        assert text == ""
        assert err.startswith("error: ")
        assert "Traceback" not in err
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return call
