"""infer/options/environment.py sets variables before libraries read them, as OpenMP's report of its settings shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
OURS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(("module", "spins"), [("infer.options.environment", "10000"), ("train.run", "1000")])
@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, None), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_threads_spin_shortly_unless_the_user_says_how(
    module: str, spins: str, chosen: dict[str, str], expected: str | None
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    process = subprocess.run(
        [sys.executable, "-c", f"import {module}, torch; torch.ones(1)"],
        cwd=ROOT,
        env={**environment, **chosen, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    match = re.search(r"GOMP_SPINCOUNT = '(\d+)'", process.stderr)
    if match is None:
        pytest.skip("this torch has another OpenMP than GNU's")
    assert match[1] == (expected or spins)


def test_constraints_hold_an_allowed_version_of_every_dependency() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}
    assert all(re.fullmatch(r"==[^,*]+", str(requirement.specifier)) for requirement in pinned.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.name != "headway" and (requirement.marker is None or requirement.marker.evaluate()):
            version = str(pinned[canonicalize_name(requirement.name)].specifier).removeprefix("==")
            assert requirement.specifier.contains(version, prereleases=True), requirement
