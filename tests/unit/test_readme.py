"""README.md, docs/ and the manuals: commands parse, Python runs, tables, links, pictures, log and file tree are right.

Files, configuration keys and names of the code that they mention exist.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from infer import config as infer_config
from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.options.cli import compose
from infer.options.literal_text import literal_overrides
from models.heads.files import load_head
from models.targets import load_target
from scripts.benchmarks import config as benchmark_config
from scripts.benchmarks.train import divided
from scripts.faults import config as faults_config
from scripts.proof import config as proof_config
from tests.manual_tables import OURS, PAGES, best_peer, newest_programs, rewrite, speed
from train import config as train_config

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("conf", "models", "kernels", "train", "infer", "scripts", "tests", "docs")
LOG = sorted((ROOT / "docs" / "log").glob("*.md"), reverse=True)  # a file per month, the newest first
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder, *(ROOT / folder).rglob("*"))
    if path.suffix != ".pyc"
}
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
README = TEXTS["README.md"]
MANUALS = {
    path: (ROOT / path).read_text(encoding="utf-8")
    for path in (
        "README.md",
        "CONTRIBUTING.md",
        *sorted(path for path in FILES if path.endswith("/README.md") or re.fullmatch(r"docs/\w+\.md", path)),
    )
}
WORDS = ("yes", "no", "partly", "gain", "missed", "mixed", "found")  # verdicts of LOG.md
HOW_TO_ADD = ("infer/speculation/proposers", "kernels", "models/formats", "models/heads", "models/targets")
SCHEMAS = {
    "train/run.py": ("train", train_config.TrainConfig),
    "infer/serve.py": ("serve", infer_config.ServeConfig),
    "infer/chat.py": ("chat", infer_config.ChatConfig),
    "infer/generate.py": ("generate", infer_config.GenerateConfig),
    "scripts/prove.py": ("prove", proof_config.ProveConfig),
    "scripts/chaos.py": ("chaos", faults_config.ChaosConfig),
    "scripts/bench.py": ("bench", benchmark_config.CompareConfig),
    **{f"scripts/bench.py {name}": (name, schema) for name, schema in benchmark_config.COMMANDS.items()},
}
COMMAND = re.compile(r"^    ((?:python |\./scripts/)(?:.*\\\n)*.*)", re.MULTILINE)  # a line that ends in \ continues
INLINE = re.compile(r"`(python [\w/]+\.py [^`]+)`")
COMMANDS = [
    pytest.param(command.replace("\\\n", " "), id=f"{page}-{number}")
    for page, text in MANUALS.items()
    for number, command in enumerate([*COMMAND.findall(text), *INLINE.findall(text)])
    if not re.search(r"<|\.\.\.|=M ", command)  # placeholders
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line, comments=True)
    file, arguments = (words[1], words[2:]) if words[0] == "python" else (words[0], words[1:])
    if file == "-m":  # a module
        file, *arguments = arguments[0].replace(".", "/") + ".py", *arguments[1:]
    assert (ROOT / file).is_file()
    if [file, *arguments[:1]] == ["scripts/bench.py", "train"]:
        own, arguments = divided(arguments[1:])
        assert compose("bench_train", benchmark_config.TrainingConfig, own)
        file = "train/run.py"
    if file in SCHEMAS and "-m" not in arguments:
        command, schema = SCHEMAS.get(" ".join([file, *arguments[:1]]), SCHEMAS[file])
        overrides = literal_overrides([word for word in arguments if "=" in word], schema)
        assert isinstance(compose(command, schema, overrides), schema)
    elif words[0] == "python":
        source = (ROOT / file).read_text(encoding="utf-8")
        assert [word for word in arguments if word.startswith("--") and f'"{word}"' not in source] == []


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


def test_the_front_page_is_short_and_shows_three_pictures() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    first_commands = [number for number, line in enumerate(lines) if line.startswith("    ")][:2]
    assert max(first_commands) < 10
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert len(pictures) == 3
    for picture in pictures:
        assert (ROOT / picture).read_text(encoding="utf-8").startswith("<svg")
        assert (ROOT / picture).stat().st_size < 100_000


def test_the_chart_and_the_number_above_it_are_what_the_result_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "images"))
    draw = importlib.import_module("draw")
    results = newest_programs()["results"]
    assert draw.chart(results) == (ROOT / "docs/images/speed.svg").read_text(encoding="utf-8")
    cells = results["0"]["1"]
    best = best_peer(cells)
    sentence = f"**{speed(cells[OURS]):.0f} tokens/s** for one request on two CPU cores"
    sentence += f", where the fastest other program, {draw.program_of(best)}, has {speed(cells[best]):.0f}:"
    assert sentence in " ".join(README.split())


def test_the_index_of_the_log_agrees_with_its_entries() -> None:
    """Date and question of every entry, the newest first, with a link to its heading and its verdict in one word."""
    index = re.findall(r"^- (\S+) · \[(.+)\]\((\S+)\) · (\w+)$", (ROOT / "LOG.md").read_text(), re.MULTILINE)
    entries, verdicts = [], []
    for month in LOG:
        for entry in re.split(r"^## ", month.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            heading, _, body = entry.partition("\n\n")
            date, question = heading.split(" · ")
            assert body.startswith("**Verdict.** "), heading
            entries.append((date, question, f"{month.relative_to(ROOT).as_posix()}#{anchor_of(heading)}"))
            verdicts.append(re.match(r"\*\*Verdict\.\*\* (Yes|No)[:,.]", body))
    assert len(entries) > 70
    assert [entry for *entry, _ in index] == list(map(list, entries))
    for (_, question, _, word), verdict in zip(index, verdicts, strict=True):
        assert word in WORDS, question
        assert verdict is None or word in (verdict[1].lower(), "partly"), question
    assert [date for date, *_ in entries] == sorted((date for date, *_ in entries), reverse=True)


def test_paths_in_the_drawings_exist() -> None:
    page = MANUALS["docs/architecture.md"]
    drawings = re.findall(r"```mermaid\n(.*?)```", page, re.DOTALL)
    assert len(drawings) == 3
    paths = {path.rstrip("/") for path in re.findall(r"\b(?:infer|train|models|kernels)/[\w/.]+", "".join(drawings))}
    assert len(paths) > 8
    assert [path for path in sorted(paths) if path not in FILES] == []


def test_the_tree_exists() -> None:
    page = MANUALS["docs/architecture.md"]
    block = page[page.index("```\nconf/") + 4 :].split("```")[0]
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
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)}


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def test_links_lead_somewhere() -> None:
    pages = [ROOT / page for page in (*MANUALS, "LOG.md")] + LOG
    links = [
        (page, *link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 50
    for page, path, anchor in links:
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page}: {path}"
        assert not anchor or anchor in anchors(target), f"{page}: {path}#{anchor}"


def test_every_sentence_of_the_promises_has_a_link() -> None:
    """To what shows it; `test_links_lead_somewhere` follows them. A title in bold is a sentence too."""
    section = README[README.index("## What is promised") : README.index("## Limits")]
    promises = re.split(r"^\d\. ", section, flags=re.MULTILINE)[1:]
    assert len(promises) == 5
    for promise in promises:
        sentences = [sentence for sentence in re.split(r"\.(?:\*\*)?\s+", promise) if sentence]
        assert len(sentences) >= 2
        assert [sentence for sentence in sentences if "](" not in sentence] == []


@pytest.mark.parametrize("page", MANUALS)
def test_rows_of_a_table_have_the_cells_of_its_header(page: str) -> None:
    text = re.sub(r"```.*?```", "", MANUALS[page], flags=re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    assert [table for table in tables if not re.match(r".*\n\|[-| ]+\|\n", table)] == []  # a row that stands alone
    for table in tables:
        cells = {row: len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) for row in table.splitlines()}
        assert len(set(cells.values())) == 1, cells


PATH = re.compile(r"`([\w.<>*/-]*[\w>*]\.(?:py|c|h|sh|slurm|yaml)|(?:[\w<>-]+/)+)`")


@pytest.mark.parametrize("page", MANUALS)
def test_files_that_are_named_exist(page: str) -> None:
    """A path starts at the repository or at the page's folder, or is the end of one; `<name>` stands for any name."""
    for path in PATH.findall(MANUALS[page]):
        pattern = re.sub(r"<\w+>", "[^/]+", re.escape(path.rstrip("/")).replace(r"\*", "[^/]*"))
        exists = any(re.fullmatch(f"(.*/)?{pattern}", file) for file in FILES)
        assert exists or path.startswith("outputs/"), path


def test_configuration_keys_that_are_named_exist() -> None:
    keys: dict[str, set[str]] = {}  # by group
    for line in (ROOT / "tests/unit/config_keys.txt").read_text(encoding="utf-8").splitlines():
        schema, key = line.split(": ")
        keys.setdefault(schema.split("/")[0], set()).add(key)
    named = {pair for text in MANUALS.values() for pair in re.findall(r"`([a-z]+)\.([a-z]\w*)(?:=[^`]*)?`", text)}
    named = {(group, key) for group, key in named if group in keys and key not in ("py", "slurm")}
    assert len(named) > 50
    assert {(group, key) for group, key in named if key not in keys[group]} == set()


@pytest.mark.parametrize("folder", HOW_TO_ADD)
def test_names_of_the_code_that_are_named_exist(folder: str) -> None:
    sources = [(ROOT / file).read_text(encoding="utf-8") for file in FILES if file.endswith((".py", ".c", ".h"))]
    words = {*re.findall(r"\w+", "\n".join(sources)), "name", "operation", "family"}
    names = re.findall(r"`([A-Za-z_]\w*)(?:\([^`]*)?`", MANUALS[f"{folder}/README.md"])
    assert len(names) > 10
    assert [name for name in names if name not in words] == []


@pytest.mark.parametrize("folder", ["infer/speculation/proposers", "kernels", "models/targets"])
def test_adding_one_needs_less_than_600_lines_of_reading(folder: str) -> None:
    """A file that is read in part stands after "in" or "of"; the others have as many lines as the manual says."""
    manual = MANUALS[f"{folder}/README.md"]
    (paragraph,) = (part for part in manual.split("\n\n") if part.startswith("Read first: "))
    entries = re.findall(r"(?:(in|of) )?`([\w./]+\.\w+)`\s\([^()\d]*(\d+)", paragraph)
    assert len(entries) >= 4
    for part, path, stated in entries:
        file = ROOT / path if (ROOT / path).exists() else ROOT / folder / path
        lines = len(file.read_text(encoding="utf-8").splitlines())
        assert int(stated) <= lines + 5 if part else abs(int(stated) - lines) <= 10, path
    assert len(manual.splitlines()) + sum(int(stated) for *_, stated in entries) < 600


def test_one_page_has_the_phases_of_a_step() -> None:
    """Its table and its drawing have the same phases, in one order; no other manual lists them again."""
    page = MANUALS["docs/architecture.md"]
    table = page[page.index("## One step") : page.index("### What a request holds")]
    phases = re.findall(r"^\| (\w+) \| `", table, re.MULTILINE)
    drawing = page[page.index("subgraph step") : page.index("observe -.->")]
    assert re.findall(r"^ +(\w+)\[\1: ", drawing.replace(" prefill[", "-"), re.MULTILINE) == phases
    assert len(phases) == 11
    row = re.compile(rf"^(?:\d+\.|\|) ({'|'.join(phases)})(?:: | \|)", re.MULTILINE)
    assert [path for path, text in MANUALS.items() if len(row.findall(text)) > 2] == ["docs/architecture.md"]


def test_the_manual_says_how_many_graphs_are_captured(tiny_target_folder: Path, tiny_head_folder: Path) -> None:
    (stated,) = re.findall(r"With a head and `engine\.max_batch=32` these are (\d+) graphs", MANUALS["infer/README.md"])
    target = load_target(str(tiny_target_folder))
    engine = Engine(
        target,
        head=load_head(tiny_head_folder, target=target),
        proposer="head",
        config=EngineConfig(threads=1, graphs="on"),
        proposer_config=ProposerConfig(name="auto", adaptive=True),
        probe=False,
    )
    assert engine.graphs is not None
    assert engine.graphs[0] == int(stated)
