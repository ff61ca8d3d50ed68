"""docs/vllm.md: every row of its tables and its Python are run, as the column beside it says.

The hub ids of the page are those of tiny random models in a cache that tests/hub_cache.py writes. A table of a kind
that this module does not know is an error, as is a word of the last column that the page does not explain.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infer.config import EngineConfig, ProposerConfig, ServeConfig
from infer.engine import Engine
from infer.options.cli import compose
from infer.options.exported_heads import with_head
from infer.request import SamplingParams
from infer.settings.other_names import elsewhere, full_keys
from models.hub import fetch_snapshot
from tests.hub_cache import COMMIT, write_hub
from tests.server.harness import Server
from train.config import TrainConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]*)`")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS, PYTHON = ("vLLM", "Headway", "verified"), ("`LLM(...)`", "Headway", "verified")
WRITTEN = "written as in vLLM"
KEYS = ("`speculative_config`", "Headway", WRITTEN)
OPTIONS = ("option of `vllm serve` or `LLM`", "Headway", WRITTEN)
ANSWERS, WORDS = ("vLLM", "Headway"), ("word", "what ran")
SERVE_KEYS = [field.name for field in fields(ServeConfig)]
PROMPTS = ["The future of AI is", "def wrap(text):\n    return text\n"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
REQUESTS = (PARAMS, replace(PARAMS, temperature=0.8, top_p=0.95, seed=7), replace(PARAMS, allowed_token_ids=(9, 10)))
PLAN = ["check=true", "data.num_sequences=8", "data.max_new_tokens=24", "data.prompt_tokens=12", "sequence_length=40"]
PLAN += ["steps=4", "eval_prompts=4", "head.draft_vocab_size=200", "engine.max_tokens_in_cache=8192", "precision=fp32"]


Row = tuple[str, ...]


def tables() -> dict[Row, list[Row]]:
    """Return the rows of the page by the first row of their table."""
    result: dict[Row, list[Row]] = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE):
        header, _, *rows = (tuple(cell.strip() for cell in line[1:-1].split("|")) for line in block.splitlines())
        result.setdefault(header, []).extend(rows)
    return result


TABLES = tables()


def rows(*headers: Row) -> list[Any]:
    return [pytest.param(*row, id=row[0]) for header in headers for row in TABLES[header]]


def code(cell: str) -> str:
    """Return the first code of a cell; the empty string if there is none."""
    return next(iter(CODE.findall(cell)), "")


class Responses(NamedTuple):
    ids: list[list[int]]  # of each request and prompt
    drafted: list[int]  # of each request, tokens


def responses(engine: Engine, **changes: Any) -> Responses:
    completions = [engine.generate(PROMPTS, replace(params, **changes)) for params in REQUESTS]
    return Responses(
        [completion.token_ids for each in completions for completion in each],
        [sum(completion.stats.drafted for completion in each) for each in completions],
    )


class Hub:
    """The cache, and what was computed from it: plain decoding's ids by target, and which engines have run."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.plain: dict[Path, list[list[int]]] = {}
        self.compared: set[str] = set()

    def place(self, name: str) -> Path:
        return (self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT).resolve()

    def compare(self, engine: Engine, target: str) -> None:
        """Assert that the engine drafts, and answers what the target of this hub id does without drafts."""
        place = self.place(target)
        if place not in self.plain:
            self.plain[place] = responses(engine, speculate=False).ids
        with_drafts = responses(engine)
        assert with_drafts.ids == self.plain[place]
        assert sum(with_drafts.drafted) > 0


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    cache = folder / "cache"
    write_hub(cache, folder / "content")
    fetch_snapshot.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        yield Hub(cache)
    fetch_snapshot.cache_clear()


def serving(words: list[str]) -> ServeConfig:
    """Return the configuration with which `infer/serve.py` starts an engine."""
    return with_head(compose("serve", ServeConfig, words))


def start(config: ServeConfig, **engine: Any) -> Engine:
    """Load the engine of a command, but for what depends on time and the size of the KV pool."""
    settings = replace(config.engine, max_tokens_in_cache=8192, **engine)
    drafts = replace(config.proposer, adaptive=False)
    return Engine.load(config.model, config.head, settings, drafts, output_dir=config.output_dir, profile=False)


def test_every_table_is_of_a_kind_that_is_tested() -> None:
    assert set(TABLES) == {COMMANDS, PYTHON, KEYS, OPTIONS, ANSWERS, WORDS}
    assert len(TABLES[COMMANDS]) > 60
    words = {row[0] for row in TABLES[WORDS]}
    used = {row[2].partition(":")[0] for row in (*TABLES[COMMANDS], *TABLES[PYTHON])}
    assert used == words


@pytest.mark.parametrize(("there", "here", "verified"), rows(COMMANDS))
def test_a_command(hub: Hub, tmp_path: Path, there: str, here: str, verified: str) -> None:
    words = code(here).split()
    assert words
    if verified.startswith("refused: "):
        with pytest.raises(ValueError, match=re.escape(code(verified))):
            start(serving(words))
    elif verified == "plans":
        from train.loop import train

        result = train(compose("train", TrainConfig, [*words, *PLAN, f"output_dir={tmp_path}"]))
        assert result is not None
        assert result["check"]["tokens"] > 0
    else:
        config = serving(words)
        divided = {"tensor_parallel": 1} if verified == "runs, one process" else {}
        assert config.engine.tensor_parallel == 1 or divided
        head, drafts = config.head, config.proposer
        names = (config.model.path, head.path or head.name, drafts.draft_model or "")
        same = repr((head.name, *(hub.place(name) for name in names), replace(drafts, draft_model="x")))
        if same not in hub.compared:
            hub.compare(start(config, **divided), config.model.path)
            hub.compared.add(same)


@pytest.mark.parametrize(("there", "here", "verified"), rows(PYTHON))
def test_a_python_call(hub: Hub, there: str, here: str, verified: str) -> None:
    names = {"Engine": Engine, "EngineConfig": EngineConfig, "ProposerConfig": ProposerConfig}
    if verified.startswith("refused: "):
        with pytest.raises((TypeError, ValueError), match=re.escape(code(verified))):
            eval(code(here), names)
    else:
        target = re.search(r'Engine.load\("([^"]*)"', here)
        assert target
        hub.compare(eval(code(here), names), target[1])


@pytest.fixture(scope="module")
def default() -> ServeConfig:
    return compose("serve", ServeConfig)


@pytest.mark.parametrize(("there", "here", "answer"), rows(KEYS, OPTIONS))
def test_an_option(default: ServeConfig, there: str, here: str, answer: str) -> None:
    words = code(here).split()
    assert not words or compose("serve", ServeConfig, words) != default
    first, *others = CODE.findall(there)
    if answer.startswith("taken"):
        assert (words, others) == ([f"{first}={words[0].partition('=')[2]}"], [])
        return
    if answer == "no such key":
        with pytest.raises(ValueError, match=f"^{first}: unknown key(?!; here)"):
            compose("serve", ServeConfig, [f"{first}=1"])
        assert [key for key in (first, *others) if elsewhere(key)] == []
        return
    for key in (first, *others):
        for word, message in (
            (f"{key}=1", f"{key}: unknown key; here {code(answer)}"),
            (f"--{key.replace('_', '-')}", f"without dashes; here {code(answer)}"),
        ):
            with pytest.raises(ValueError, match=re.escape(message) + "$"):
                full_keys([word], SERVE_KEYS)


def test_the_python_of_the_page(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(BLOCKS[0])
    completion = runpy.run_path(str(program))["completion"]
    assert capsys.readouterr().out.startswith("'The future of AI is': ")
    assert len(completion.token_ids) <= 128
    assert completion.stats.drafted > 0


def test_the_client_of_the_page(server: Server, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BLOCKS[1].replace("http://localhost:8000", server.url))
    assert server.url in program.read_text()
    completion = runpy.run_path(str(program))["completion"]
    assert completion.object == "text_completion"
    assert len(BLOCKS) == 2


@pytest.fixture(scope="module")
def reported(server: Server) -> set[str]:
    """Return the names that an answer's report and /metrics have."""
    report = server.complete(max_tokens=8).json()["metrics"]["speculative_decoding"]
    return {*report, *(name.partition("{")[0] for name in server.metrics())}


@pytest.mark.parametrize(("there", "here"), rows(ANSWERS))
def test_a_name_of_the_report(reported: set[str], there: str, here: str) -> None:
    names = set(CODE.findall(there))
    assert here.partition(";")[0] in ("same", "absent")
    assert names & reported == (names if here.startswith("same") else set())
