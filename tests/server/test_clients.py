"""The programs of tests/clients that need no more packages than the tests do; scripts/clients.sh runs all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.programs import CHECKS, PROGRAMS, Outcome, read, table
from tests.clients.setting import HERE, PINS
from tests.clients.target import make_target
from tests.server.harness import MODEL, MakeServer, Server


@pytest.fixture(scope="module")
def taught(make_server: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_target(tmp_path_factory.mktemp("clients") / "target")
    with make_server(target=folder, proposer="ngram") as running:
        yield running


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_client_works_as_it_comes(taught: Server, name: str, tmp_path: Path) -> None:
    environment = os.environ | {"HEADWAY_URL": taught.url, "HEADWAY_MODEL": MODEL, "HOME": str(tmp_path)}
    command = [sys.executable, str(HERE / PROGRAMS[name].file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    outcome = Outcome(name)
    read(done.stdout.splitlines(), outcome)
    assert outcome.errors == {}, done.stderr
    assert outcome.checked == list(CHECKS[:4])


def test_what_fails_is_told() -> None:
    lines = ['{"version": "1.2"}', "{a client's own words", "5", '{"check": "plain", "error": null}']
    outcome = Outcome("x")
    read([*lines, '{"check": "tools", "error": "no"}'], outcome)
    assert outcome.errors == {"tools": "no"}
    last = table([outcome]).splitlines()[-1]
    assert [cell.strip() for cell in last.strip("|").split("|")] == ["x", "1.2", "ok", "", "fails", "", ""]


def test_every_program_is_there_and_every_version_pinned() -> None:
    files = {path.name for path in HERE.iterdir() if path.name.startswith("use_")}
    assert {program.file for program in PROGRAMS.values()} == files
    for name in (name for names in PINS.values() for name in names if name.endswith(".txt")):
        lines = [line for line in (HERE / name).read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[a-z_\[\],0-9-]+==[0-9.]+", line) for line in lines), name
