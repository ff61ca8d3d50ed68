"""Commands that a run prints and publishes work when pasted, and what it publishes does not reveal its machine."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from infer import generate
from infer.config import ModelConfig, ProposerConfig, ServeConfig
from infer.console.command_words import HEAD_FOLDER, TARGET_FOLDER, interpreter, model_overrides, python_command
from infer.engine import Engine
from infer.options.cli import compose
from infer.options.exported_heads import export_folder
from infer.options.literal_text import literal_overrides
from infer.settings.paths import REPO_ROOT
from tests.train.running import SETTINGS, run
from train.storage.provenance import hub_id, portable

SMALL = ["data.num_sequences=8", "steps=2", "eval_prompts=2", "eval_max_tokens=8", "data.max_new_tokens=12"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return (
        tmp_path_factory.mktemp("a place") / "it's ${here}"
    )  # a shell, Hydra and OmegaConf would each interpret it differently


@pytest.fixture(scope="module")
def trained(root: Path, tiny_target_folder: Path) -> tuple[Path, Path]:
    """Return the target and the export of a run whose target no file of conf/model names."""
    target = root / "target"
    shutil.copytree(tiny_target_folder, target)
    rows = root / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "say {number}"}}\n' for number in range(20)))
    options = ["model=demo", "model.name=mine", f"model.path={target}", f"output_dir={root / 'outputs'}", "run=first"]
    options += ["data=files", f"data.path={rows}", "data.held_out_share=0.3", "features=offline"]
    settings = [override for override in SETTINGS if not override.startswith("data.prompt_tokens")]
    with (root / "said").open("w") as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", log)
        result = run(literal_overrides([*settings, *SMALL, *options], train_schema()))
    return target, Path(result["export"])


def train_schema() -> Any:
    from train.config import TrainConfig

    return TrainConfig


def serve_config(command: str) -> Any:
    python, script, *overrides = shlex.split(command)
    assert python == interpreter() or python == "python"
    assert (Path.cwd() / script).resolve() == REPO_ROOT / "infer" / "serve.py"
    return compose("serve", ServeConfig, literal_overrides(overrides, ServeConfig))


def test_the_last_line_serves_the_head(trained: tuple[Path, Path], root: Path) -> None:
    target, export = trained
    line = (root / "said").read_text().strip().splitlines()[-1]
    config = serve_config(line.removeprefix("serve it: "))
    assert (config.model.name, config.model.path) == ("mine", str(target))
    assert export_folder(config.head, config.output_dir, config.model.name) == export
    engine = Engine.load(
        config.model, config.head, config.engine, ProposerConfig(name="head"), output_dir=config.output_dir
    )
    engine.close()


def test_the_cards_commands_serve_it_once_they_are_filled_in(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, export = trained
    card = (export / "README.md").read_text()
    serve, compare = (line.strip() for line in card.splitlines() if line.startswith("    python infer/"))
    assert (
        f"with `{TARGET_FOLDER}` (where the target lies) and `{HEAD_FOLDER}` (where this card lies) filled in" in card
    )
    filled = [word.replace(TARGET_FOLDER, str(target)).replace(HEAD_FOLDER, str(export)) for word in shlex.split(serve)]
    config = serve_config(shlex.join(filled))
    assert export_folder(config.head, config.output_dir, config.model.name) == export
    _, script, *options = shlex.split(compare.replace(TARGET_FOLDER, "X").replace(HEAD_FOLDER, "Y"))
    options = [{"model=X": f"model={target}", "head.path=Y": f"head.path={export}"}.get(word, word) for word in options]
    monkeypatch.setattr(sys, "argv", [script, *options, "prompt=a b", "max_tokens=4", "proposer.adaptive=false"])
    generate.main()
    assert "acceptance" in capsys.readouterr().out


def test_what_is_published_names_no_place_of_this_machine(trained: tuple[Path, Path], root: Path) -> None:
    _, export = trained
    texts = {path.name: path.read_bytes().decode(errors="replace") for path in export.iterdir()}
    assert set(texts) == {"config.json", "provenance.json", "README.md", "model.safetensors"}
    for name, text in texts.items():
        for private in (str(root), str(root.parent.parent), str(REPO_ROOT), str(Path.home()) + "/"):
            assert private not in text, (name, private)
    for name in ("config.json", "provenance.json", "README.md"):
        assert re.findall(r"(?<![\w./<>:-])/[\w.-]+/[\w./-]+", texts[name]) == [], name
    assert "`mine`" in texts["README.md"]
    assert '"name_or_path": "mine"' in texts["config.json"]
    assert ".../rows.jsonl" in texts["provenance.json"]


def test_places_in_any_text_of_a_record_are_renamed() -> None:
    record = {
        "config": {"data": {"path": ["/data/a.jsonl", "/data"]}, "model": {"path": f"{REPO_ROOT}/models/demo"}},
        "data_source": f"/data/a.jsonl and /data/b.jsonl of {REPO_ROOT}/x",
        "server": "http://host/data/v1",
        "steps": 3,
    }
    assert portable(record) == {
        "config": {"data": {"path": [".../a.jsonl", ".../data"]}, "model": {"path": "models/demo"}},
        "data_source": ".../a.jsonl and .../data/b.jsonl of x",
        "server": "http://host/data/v1",
        "steps": 3,
    }


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("package:smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("models/demo", None),
        ("/somewhere/demo.gguf", None),
    ],
)
def test_only_a_target_of_the_hub_is_a_base_model(path: str, base: str | None) -> None:
    assert hub_id(ModelConfig("name", path)) == base


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (ModelConfig("demo", "models/demo", dtype="float32"), ["model=demo"]),
        (
            ModelConfig("qwen3-8b", "Qwen/Qwen3-8B", dtype="float32", revision="v1"),
            ["model=qwen3-8b", "model.revision=v1", "model.dtype=float32"],
        ),
        (
            ModelConfig("mine", "owner/name", dtype="float32", device="cpu"),
            ["model=owner/name", "model.name=mine", "model.dtype=float32", "model.device=cpu"],
        ),
        (ModelConfig("name", "owner/name"), ["model=owner/name"]),
    ],
)
def test_the_words_of_a_model_give_it_again(model: ModelConfig, overrides: list[str]) -> None:
    assert model_overrides(model) == overrides
    assert compose("serve", ServeConfig, literal_overrides(overrides, ServeConfig)).model == model


def test_a_command_runs_from_the_folder_it_was_printed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python, script, word = shlex.split(python_command("infer/serve.py", "a=b c"))
    assert (tmp_path / script).resolve() == REPO_ROOT / "infer" / "serve.py"
    assert shutil.which(python)
    assert word == "a=b c"
