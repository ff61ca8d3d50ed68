"""scripts/step_time.py as users run it: where a step's time goes, and the costs that decide how far to draft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from infer.options.paths import REPO_ROOT
from infer.speculation.control.cost_model import CostTable, Curve
from scripts.step_time import plot_costs


def step_time(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "scripts/step_time.py",
        "model=demo",
        "head=none",
        "num_prompts=1",
        "max_tokens=8",
        *overrides,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=REPO_ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def test_a_step_is_divided_and_its_costs_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "costs.png"
    ran = step_time("proposer=ngram", "proposer.adaptive=true", "engine.max_batch=2", f"plot={file}")
    if ran.returncode == 2:  # beside other processes
        assert "the machine was too busy or too slow to measure costs (proposer=ngram)" in ran.stderr
        ran = step_time("proposer=ngram")
    else:
        assert file.stat().st_size > 10_000
    assert ran.returncode == 0, ran.stderr[-2000:]
    parts = json.loads(ran.stdout.splitlines()[-1])["ms"]
    assert 0 < parts["target"] < parts["step"]


def test_costs_are_drawn_as_they_were_measured(tmp_path: Path) -> None:
    curve = Curve((1.0, 2.0, 8.0), (0.001, 0.0012, 0.003))
    plot_costs(CostTable((1, 4), (curve, curve), {"ngram": (curve, curve)}), str(tmp_path / "costs.png"))
    assert (tmp_path / "costs.png").stat().st_size > 10_000


def test_a_plot_needs_what_it_shows(tmp_path: Path) -> None:
    ran = step_time("proposer=ngram", "plot=costs.png")
    assert ran.returncode == 2
    assert "plot=costs.png: costs are measured with proposer.adaptive=true only" in ran.stderr
    ran = step_time("proposer=none", "proposer.adaptive=true", "plot=costs.png")
    assert ran.returncode == 2
    assert "nothing drafts" in ran.stderr
