"""sweep.py as a user runs it: two trials on the tiny target, the second after a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from scripts.sweep import read_overrides, search, searched

ROOT = Path(__file__).resolve().parents[2]


class Low:
    """A trial that returns the last of the choices and the lowest of the numbers, and records the arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def suggest_categorical(self, key: str, choices: list[str]) -> str:
        return choices[-1]

    def suggest_int(self, key: str, low: int, high: int, step: int) -> int:
        self.calls.append((low, high, step))
        return low

    def suggest_float(self, key: str, low: float, high: float, log: bool) -> float:
        self.calls.append((low, high, log))
        return low


def test_hydras_sweeps_become_optunas() -> None:
    trial = Low()
    overrides = ["a.b=choice(kl,[1,2])", "c=range(3,8,2)", "d=interval(0.1,1)", "e=tag(log,interval(1e-4,1e-2))"]
    assert [searched(OverridesParser.create().parse_override(o))(trial) for o in overrides] == ["[1,2]", 3, 0.1, 1e-4]
    assert trial.calls == [(3, 7, 2), (0.1, 1.0, False), (1e-4, 1e-2, True)]
    fixed, free = read_overrides(["model=demo", "x=5", *overrides])
    assert (fixed, list(free)) == (["model=demo", "x=5"], ["a.b", "c", "d", "e"])
    for bad in (["x=5"], ["x=glob(*)"], ["x=range(0.5,2)"]):
        with pytest.raises(ValueError, match=r"choice\(a,b\), range\(1,5\) or interval"):
            read_overrides(bad)


@pytest.mark.slow
def test_a_study_and_its_continuation(tiny_target_folder: Path, tmp_path: Path) -> None:
    overrides = [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "head.draft_vocab_size=200",
        "data.num_sequences=8", "data.max_new_tokens=8", "data.prompt_tokens=8", "sequence_length=16", "batch_size=4",
        "steps=1", "minutes=null", "eval_prompts=2", "eval_max_tokens=6", "tracker=none", "precision=fp32",
        "engine.max_tokens_in_cache=512", "eval_draft_tokens=2", "objective.steps=range(1,3)",
        "optim.lr=tag(log,interval(1e-4,1e-2))",
    ]  # fmt: skip
    first = search("lr", 1, *read_overrides(overrides))
    command = [sys.executable, "scripts/sweep.py", *overrides, "study=lr", "trials=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr
    both = json.loads(ran.stdout.splitlines()[-1])
    assert [trial["number"] for trial in both["trials"]] == [0, 1]
    assert both["trials"][0] == first["trials"][0]
    assert both["best"]["tau"] == max(trial["tau"] for trial in both["trials"]) >= 1.0
    assert (Path(both["best"]["head"]) / "model.safetensors").is_file()
    settings = both["trials"][1]["settings"]
    assert settings["objective.steps"] in (1, 2)
    assert 1e-4 <= settings["optim.lr"] <= 1e-2
    card = json.loads((Path(both["best"]["head"]) / "provenance.json").read_text())
    assert card["acceptance_length"]["engine"] == pytest.approx(both["best"]["tau"], abs=1e-3)
    wrong = subprocess.run(
        [sys.executable, "scripts/sweep.py", "trials=0", "a=choice(1,2)"], cwd=ROOT, capture_output=True
    )
    assert (wrong.returncode, b"trials=0" in wrong.stderr) == (2, True)
