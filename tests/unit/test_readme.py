"""The README's commands parse, its Python runs and its file tree is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from infer import config as infer_config
from infer.cli import compose, quote_free_text
from scripts.make_tables import rewrite
from train import config as train_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCHEMAS = {
    "train/run.py": ("train", train_config.TrainConfig),
    "infer/serve.py": ("serve", infer_config.ServeConfig),
    "infer/generate.py": ("generate", infer_config.GenerateConfig),
    "scripts/bench.py": ("bench", infer_config.BenchConfig),
    "scripts/served.py": ("served", infer_config.ServedConfig),
    "scripts/evaluate.py": ("eval", infer_config.EvalConfig),
}
COMMANDS = re.findall(r"^    (python .*|\./scripts/\S+)", README, re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line, comments=True)
    file, arguments = (words[1], words[2:]) if words[0] == "python" else (words[0], words[1:])
    assert (ROOT / file).is_file()
    if file in SCHEMAS and "-m" not in arguments:
        command, schema = SCHEMAS[file]
        overrides = [quote_free_text(word, schema) for word in arguments if "=" in word]
        assert isinstance(compose(command, schema, overrides), schema)


def test_commands_were_found() -> None:
    assert len(COMMANDS) >= 10
    assert "./scripts/quickstart.sh" in COMMANDS


def test_the_engine_can_be_used_from_python_as_shown() -> None:
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Engine.load" in block)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    *text, acceptance_length = ran.stdout.split()
    assert text
    assert float(acceptance_length) >= 1


def test_the_tree_exists() -> None:
    block = README[README.index("```\nconf/") + 4 :].split("```")[0]
    folder, paths = "", []
    for line in block.splitlines():
        names = re.match(r"\s*((?:[\w.]+[./]\S*\s)+)", line + " ")  # one or two names, before the role
        assert names, line
        for name in names[1].split():
            paths.append((folder if line.startswith(" ") else "") + name)
            if not line.startswith(" ") and name.endswith("/"):
                folder = name
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_tables_are_what_the_result_files_say() -> None:
    assert rewrite(README) == README


def test_links_lead_somewhere() -> None:
    files = [ROOT / "README.md", *(ROOT / p for p in ("models", "infer", "kernels"))]
    pages = [page for file in files for page in ([file] if file.is_file() else sorted(file.rglob("README.md")))]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))]
    assert links
    assert [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()] == []
