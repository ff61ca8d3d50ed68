"""scripts/quickstart.sh: in which order it shows what, and what it says of a head that is no use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.running import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
# An interpreter that notes which commands it runs. It trains in earnest, if told to, and decodes nothing.
PYTHON = """\
#!{python}
import os, subprocess, sys
words = sys.argv[1:]
if words[0] == "-c":
    os.execv({python!r}, [{python!r}, *words])
with open({log!r}, "a") as log:
    log.write(" ".join(words) + "\\n")
if words[0] == "train/run.py":
    sys.exit(subprocess.call({train!r} + words[1:]))
print("decoded by", words[0])
sys.exit({status} if words[0] == "infer/generate.py" else 0)
"""


def quickstart(folder: Path, train: list[str], *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the script in a tree of its own whose .venv is installed; `train` is the training command."""
    for name in ("quickstart.sh", "setup_env.sh"):
        (folder / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, folder / "scripts" / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    log = str(folder / "log")
    python.write_text(PYTHON.format(python=sys.executable, log=log, train=train, status=status))
    python.chmod(0o755)
    digest = hashlib.sha256((folder / "pyproject.toml").read_bytes()).hexdigest()
    (folder / ".venv" / ".headway-installed").write_text(f"{digest} dev\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(folder / "scripts" / "quickstart.sh"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


def saying(result: object) -> list[str]:
    return [sys.executable, "-c", f"print('progress'); print({json.dumps(result)!r})"]


def commands(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_the_real_model_comes_first(tmp_path: Path) -> None:
    result = quickstart(tmp_path, saying({"acceptance_length": {"engine": 2.3}}), "minutes=2")
    assert result.returncode == 0, result.stderr
    real, train, demo = commands(tmp_path)
    assert real.startswith("infer/generate.py model=smollm2-135m compare=true prompt=")
    assert train == "train/run.py model=demo head=eagle3 overwrite=true minutes=6 batch_size=4 minutes=2"
    assert demo == "infer/generate.py model=demo head=eagle3 compare=true"
    shown = result.stdout
    assert shown.index("A real model") < shown.index("A head of your own") < shown.index("Next: ")
    assert "infer/serve.py" in shown[shown.index("Next: ") :]
    assert "progress" in shown, "what training prints"
    assert result.stderr == ""


def test_a_head_that_is_no_use_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    note = "τ 1.03 after 1 update means nothing yet: this machine made 89 tokens/s; minutes=30 would ..."
    result = quickstart(tmp_path, saying({"note": note}))
    assert result.returncode == 3
    assert len(commands(tmp_path)) == 3
    assert result.stderr.splitlines()[-1] == f"The head that was trained for the demo target is no use yet. {note}"


@pytest.mark.parametrize("stopped", [True, False])
def test_it_ends_with_the_first_command_that_fails(stopped: bool, tmp_path: Path) -> None:
    if stopped:
        result = quickstart(tmp_path, saying({}), status=5)
        assert (result.returncode, len(commands(tmp_path))) == (5, 1)
    else:
        result = quickstart(tmp_path, [sys.executable, "-c", "raise SystemExit(2)"])
        assert (result.returncode, len(commands(tmp_path))) == (2, 2)


def test_in_miniature_it_trains_a_head_and_says_that_it_is_no_use(tiny_target_folder: Path, tmp_path: Path) -> None:
    """With a tiny random target, which no head learns in three updates; minutes= are so few that the least is done."""
    kept = [word for word in SETTINGS if not word.startswith(("steps=", "minutes=", "overwrite="))]
    words = [*kept, f"model.path={tiny_target_folder}", f"output_dir={tmp_path / 'outputs'}", "steps=3"]
    result = quickstart(tmp_path, [sys.executable, str(ROOT / "train" / "run.py")], *words, "minutes=0.001")
    assert result.returncode == 3, result.stderr
    summary = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert (tmp_path / "outputs" / "heads" / "demo" / "eagle3" / "model.safetensors").is_file()
    assert "after 3 updates means nothing yet: this machine made" in summary["note"]
    assert summary["note"] in result.stderr.splitlines()[-1]
