"""README.md and the manuals: their commands parse, their Python runs, their tables, links and file tree are right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from infer import config as infer_config
from infer.cli import compose
from infer.options.literal_text import literal_overrides
from scripts import config as scripts_config
from scripts.make_tables import PAGES, rewrite
from train import config as train_config

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
README = TEXTS["README.md"]
SCHEMAS = {
    "train/run.py": ("train", train_config.TrainConfig),
    "infer/serve.py": ("serve", infer_config.ServeConfig),
    "infer/chat.py": ("chat", infer_config.ChatConfig),
    "infer/generate.py": ("generate", infer_config.GenerateConfig),
    "scripts/bench.py": ("bench", scripts_config.BenchConfig),
    "scripts/served.py": ("served", scripts_config.ServedConfig),
    "scripts/evaluate.py": ("eval", scripts_config.EvalConfig),
    "scripts/step_time.py": ("step_time", scripts_config.StepTimeConfig),
}
COMMAND = re.compile(r"^    ((?:python |\./scripts/)(?:.*\\\n)*.*)", re.MULTILINE)  # a line that ends in \ continues
COMMANDS = [
    pytest.param(command.replace("\\\n", " "), id=f"{page}-{number}")
    for page, text in TEXTS.items()
    for number, command in enumerate(COMMAND.findall(text))
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line, comments=True)
    file, arguments = (words[1], words[2:]) if words[0] == "python" else (words[0], words[1:])
    assert (ROOT / file).is_file()
    if file in SCHEMAS and "-m" not in arguments:
        command, schema = SCHEMAS[file]
        overrides = literal_overrides([word for word in arguments if "=" in word], schema)
        assert isinstance(compose(command, schema, overrides), schema)


@pytest.mark.parametrize("page", TEXTS)
def test_every_page_shows_commands(page: str) -> None:
    assert COMMAND.search(TEXTS[page])


def test_the_engine_can_be_used_from_python_as_shown() -> None:
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Engine.load" in block)
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    *text, acceptance_length = process.stdout.split()
    assert text
    assert float(acceptance_length) >= 1


def test_the_tree_exists() -> None:
    block = README[README.index("```\nconf/") + 4 :].split("```")[0]
    folders: list[str] = []  # that contain the current line, one per two spaces of indentation
    paths: list[str] = []
    for line in block.splitlines():
        names = re.match(r"(\s*)((?:[\w.]+[./]\S*\s)+)", line + " ")  # one or two names, before the role
        assert names, line
        del folders[len(names[1]) // 2 :]
        later = re.findall(r"([\w./]+\.py|[\w./]+/):", line)  # `; name.py: its role`
        paths += ["".join(folders) + name for name in names[2].split()]
        if names[2].strip().endswith("/"):
            folders.append(names[2].strip())
        paths += ["".join(folders) + name for name in later]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=TEXTS)
def test_tables_are_what_the_result_files_say(page: Path) -> None:
    assert rewrite(page) == page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of the page's headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    folders = ("models", "infer", "kernels")
    pages = {*PAGES, *(page for folder in folders for page in (ROOT / folder).rglob("README.md"))}
    links = [
        (page, *link)
        for page in sorted(pages)
        for link in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 50
    for page, path, anchor in links:
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page}: {path}"
        assert not anchor or anchor in anchors(target), f"{page}: {path}#{anchor}"
