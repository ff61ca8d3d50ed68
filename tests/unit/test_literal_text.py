"""Text typed on a command line reaches the schema unchanged, whatever Hydra and OmegaConf would make of it."""

from __future__ import annotations

import functools
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from infer import config as infer_config
from infer.config import GenerateConfig, ServeConfig
from infer.options.cli import compose, load_config, save_config, to_config
from infer.options.literal_text import literal_overrides
from scripts.config import EvalConfig
from train import config as train_config
from train.config import TrainConfig

TEXTS = [
    "def main():", "Hello, world!", "x = {1: [2]}", "it's", "a\\", "\\'", '"""doc"""', "${x}", "a\nb", "τ", "", "null ",
    # as a shell passes them on
    "echo \\${HOME}", "x\\${seed}y", "a \\\\${b}", "echo ${HOME}", "$HOME $(ls) `ls`", "  both ends\t", "a=b,c=d",
    "[1,2]", "{a: b}", "true", "007", "1e3", "None", "???", "~", "*", "%s", "choice(a,b)", "#x", "\\", "\\\\${", "${",
    "${oc.env:HOME}", "${text:x61}", "NULL", "a\\nb", "\x00\x1b", "\udcff",
]  # fmt: skip
ODD = st.text(alphabet="\\${}'\",:=[]() ax1?\n", max_size=12)
SCHEMAS = {**infer_config.SCHEMAS, **train_config.SCHEMAS}


def typed(command: str, schema: type[Any], *words: str) -> Any:
    return compose(command, schema, literal_overrides(words, schema))


@pytest.mark.parametrize("texts", [TEXTS[start : start + 7] for start in range(0, len(TEXTS), 7)])
def test_a_text_is_taken_as_typed(texts: list[str]) -> None:
    keys = ["prompt", "head.path", "output_dir", "model.path", "model.revision", "proposer.draft_model", "model.name"]
    words = [f"{key}={text}" for key, text in zip(keys, texts, strict=False)]
    assert values(typed("generate", GenerateConfig, *words), keys[: len(texts)]) == texts


def values(config: Any, keys: list[str]) -> list[Any]:
    return [functools.reduce(getattr, key.split("."), config) for key in keys]


def test_every_text_of_every_group_is() -> None:
    words = ["data=hub", "features=offline", "tracker=wandb"]
    keys = ["model.path", "model.revision", "model.name", "head.path", "head.start_from", "features.path"]
    keys += ["data.path", "data.subset", "data.server_model", "tracker.project", "tracker.entity"]
    text = "a \\${b},{c}='d'"
    config = typed("train", TrainConfig, *words, *(f"{key}={text}" for key in keys), "data.server=http://h/${v}")
    assert values(config, keys) == [text] * len(keys)
    assert config.data.server == "http://h/${v}"
    assert typed("serve", ServeConfig, f"server.api_keys_file={text}").server.api_keys_file == text
    assert typed("train", TrainConfig, "data=files", f"data.path={text}").data.path == text  # a field of any type


@dataclass
class Texts:
    one: str = ""
    several: list[str] = field(default_factory=list)
    any: Any = None


@settings(max_examples=150, deadline=None)
@given(text=ODD)
def test_any_text_is(text: str) -> None:
    """Checked with Hydra's parser, and with a config as it is saved for ranks and resumed runs."""
    if text == "null":
        return
    (word,) = literal_overrides([f"++one={text}"], Texts)
    parsed = OverridesParser.create().parse_override(word)
    composed = OmegaConf.merge(OmegaConf.structured(Texts), {parsed.key_or_group: parsed.value()})
    assert to_config(cast(DictConfig, composed), Texts).one == text
    config = Texts(text, [text, "a"], {"key": [text]})
    with tempfile.TemporaryDirectory() as folder:
        save_config(config, Path(folder) / "config.yaml")
        assert load_config(Path(folder) / "config.yaml", Texts, {}) == config


def test_items_of_lists_are() -> None:
    words = ["files=[a${b}.jsonl, 'c, d.jsonl',\"e'f\",g=h]", "systems=[off]"]
    assert typed("eval", EvalConfig, words[0]).files == ["a${b}.jsonl", "c, d.jsonl", "e'f", "g=h"]
    assert typed("eval", EvalConfig, "files=[]").files == []
    config = typed("train", TrainConfig, "data=files", "data.path=[a${b}.jsonl,c d.jsonl]")
    assert config.data.path == ["a${b}.jsonl", "c d.jsonl"]
    config = replace(config, data=replace(config.data, columns={"prompt": "a ${b}"}))
    with tempfile.TemporaryDirectory() as folder:
        save_config(config, Path(folder) / "config.yaml")
        assert load_config(Path(folder) / "config.yaml", TrainConfig, SCHEMAS) == config


def test_all_else_is_hydra_s() -> None:
    for word in ("prompt=null", "seed=1", "--cfg", "job", "model=demo", "proposer.tree=[[0],[1]]", "columns={a: b}"):
        assert literal_overrides([word], EvalConfig if "columns" in word else GenerateConfig) == [word]
    sweep = ["-m", "precision=fp32,bf16", "run=a", "output_dir=x y"]
    assert literal_overrides(sweep, TrainConfig) == ["-m", "precision=fp32,bf16", "run='a'", "output_dir='x y'"]
    place = ["-m", "objective.steps=3,5", "head.path=outputs/heads/${objective.steps}"]  # one folder for each run
    assert literal_overrides(place, TrainConfig) == place
    assert literal_overrides(["-m", "prompt=a,b"], GenerateConfig) == ["-m", "prompt='a,b'"]


@pytest.mark.parametrize("text", ["echo \\${HOME}", "x\\${seed}y", "a \\\\${b}", "  'quoted', = {1} "])
def test_the_command_generates_from_what_was_typed(
    text: str, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from infer import generate

    words = [f"model={tiny_target_folder}", "model.device=cpu", "head=none", "proposer=none", "max_tokens=2"]
    words.append("chat=false")
    monkeypatch.setattr(sys, "argv", ["infer/generate.py", *words, f"prompt={text}"])
    generate.main()
    assert capsys.readouterr().out.startswith(text)


def test_a_prompts_file_holds_one_prompt_per_line(tmp_path: Path) -> None:
    from infer.generate import user_prompts

    prompts = ["echo \\${HOME}", "  blanks ", "form\x0cfeed", "line\u2028separator"]
    file = tmp_path / "a=${b}, c.txt"
    file.write_text("\ufeff" + "\n\n".join(prompts) + "\r\n", encoding="utf-8")
    assert user_prompts(typed("generate", GenerateConfig, f"prompts_file={file}")) == prompts
