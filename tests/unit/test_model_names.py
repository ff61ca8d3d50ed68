"""`model=` takes names, hub ids, folders and files, on command lines and in Python; `head=` finds existing heads."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from infer import config as infer_config
from infer.config import GenerateConfig, ModelConfig, ServeConfig
from infer.devices import resolve_dtype
from infer.engine import Engine
from infer.options import cli
from infer.options.cli import compose, entry_point, groups_of
from infer.options.exported_heads import choose_head, head_folder, with_head
from infer.options.model_choices import named_choices
from infer.options.model_names import find_model, model_name, no_model, read_model
from infer.settings.paths import REPO_ROOT
from models.checkpoint import stated_dtype
from models.heads.config import HeadConfig
from scripts.benchmarks import config as benchmark_config
from scripts.proof import config as proof_config
from train import config as train_config
from train.config import TrainConfig

EVERY = {**infer_config.COMMANDS, **benchmark_config.COMMANDS, **proof_config.COMMANDS, **train_config.COMMANDS}
COMMANDS = {name: schema for name, schema in EVERY.items() if "model" in groups_of(name)}
ODD = ["it's ${here}, a=b", "with space", "{a: b}", "[x]", 'say "q"', "a\\b", "choice(a,b)"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Mine").mkdir()
    (tmp_path / "Small.Q4_1.gguf").write_bytes(b"GGUF")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_hub_id(command: str) -> None:
    config: Any = compose(command, COMMANDS[command], ["model=owner/Some-Model", "model.device=cpu"])
    assert config.model == ModelConfig("some-model", "owner/Some-Model", dtype="auto", device="cpu")


def test_folders_and_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    for text in ("Mine", "./Mine", "../" + place.name + "/Mine", str(place / "Mine") + "/", "~/Mine"):
        assert read_model(text) == ModelConfig("mine", str(place / "Mine"), dtype="auto")
    file = read_model("Small.Q4_1.gguf")
    assert (file.name, file.path_or_hub_id) == ("small.q4_1", str(place / "Small.Q4_1.gguf"))
    assert find_model("models/demo") == "models/demo"  # relative to the repository, from any folder
    assert find_model(str(REPO_ROOT / "models" / "demo")) == "models/demo"
    (place / "demo").mkdir()
    assert read_model("demo").path == "models/demo"  # a name of conf/model comes first
    assert read_model("./demo").path == str(place / "demo")


def test_names_follow_from_the_last_part() -> None:
    texts = ["Qwen/Qwen3-8B", "/a/My Model (v2)/", "/x/SmolLM2.Q4_1.gguf", "/"]
    assert [model_name(text) for text in texts] == ["qwen3-8b", "my-model-v2", "smollm2.q4_1", "target"]


@pytest.mark.parametrize("name", ODD)
def test_any_folder_is_taken_as_typed(name: str, place: Path) -> None:
    (place / name).mkdir()
    for words in ([f"model={name}"], [f"model={name}", "experiment=demo-eagle3-hour"]):
        assert compose("train", TrainConfig, words).model.path == str(place / name)


def test_what_is_typed_wins_over_a_recipe(place: Path) -> None:
    def model(*words: str) -> ModelConfig:
        return compose("train", TrainConfig, ["experiment=llama3.2-1b-eagle3-24gb", *words]).model

    assert model().path == "meta-llama/Llama-3.2-1B-Instruct"
    assert (model("model=Mine").path, model("model=Mine").name) == (str(place / "Mine"), "mine")
    assert model("model=smollm2-135m").path == "package:smollm2-135m"
    assert model("model=Mine", "model.path=other", "model.name=x") == ModelConfig("x", "other", dtype="auto")


def test_a_sweep_goes_over_models(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[ModelConfig]()

    @entry_point("generate", GenerateConfig)
    def main(config: GenerateConfig) -> None:
        seen.append(config.model)

    for words in (["-m", "model=demo,owner/name,Mine"], ["-m", "model=choice(demo, owner/name,'Mine')"]):
        monkeypatch.setattr(sys, "argv", ["generate.py", *words, f"hydra.sweep.dir={place / 'sweep'}"])
        seen.clear()
        main()
        assert [model.path for model in seen] == ["models/demo", "owner/name", str(place / "Mine")]
        assert [model.name for model in seen] == ["demo", "name", "mine"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [("lama3-8b", "did you mean llama3-8b?"), ("/no/such", "known: deepseek-v3, demo, "), ("a/b/c", "known: "),
     ("missing.gguf", "known: "), ("owner/missing.gguf", "known: "), ("", "known: "), ("a=b, c", "known: ")],
)  # fmt: skip
def test_a_mistake_says_what_was_tried(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match="no name of conf/model/") as error:
        compose("serve", ServeConfig, [f"model={text}"])
    assert str(error.value) == no_model(text)
    assert f"model={text}: no name of conf/model/ ({meant}" in str(error.value)
    assert str(error.value).endswith("no folder, no .gguf file, no hub id (owner/name)")


def test_the_command_line_says_so_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from infer import generate

    monkeypatch.setattr(sys, "argv", ["generate.py", "model=lama3-8b", "prompt=a"])
    with pytest.raises(SystemExit) as ended:
        generate.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {no_model('lama3-8b')}\n"


def test_options_of_other_folders_are_hydra_s() -> None:
    assert named_choices(["model=theirs", "--config-dir=x"]) == ["model=theirs", "--config-dir=x"]
    assert named_choices(["model=demo", "prompt=model=x"]) == ["model=demo", "prompt=model=x"]


def test_help_says_what_else_a_model_may_be() -> None:
    places = "a folder, a .gguf file or a hub id (owner/name)"
    assert f"\nmodel= and head= also take {places}" in cli.help_text("serve", ServeConfig)
    assert f"\nmodel= also takes {places}" in cli.help_text("train", TrainConfig)


def test_a_dtype_is_the_checkpoint_s(tmp_path: Path) -> None:
    def stated(text: str) -> str:
        (tmp_path / "config.json").write_text(text)
        return str(stated_dtype(tmp_path))

    assert stated('{"torch_dtype": "float16"}') == "torch.float16"
    assert stated('{"dtype": "bfloat16", "torch_dtype": "float16"}') == "torch.bfloat16"
    assert stated("{}") == "torch.float32"
    with pytest.raises(ValueError, match=r"dtype='float64': say model\.dtype=float32 or"):
        stated('{"dtype": "float64"}')
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert str(stated_dtype(tmp_path / "x.gguf")) == "torch.bfloat16"
    assert str(resolve_dtype(read_model(str(tmp_path), dtype="float16"))) == "torch.float16"


def test_an_engine_loads_by_names(tiny_target_folder: Path, tiny_head_folder: Path, tmp_path: Path) -> None:
    folder = str(tiny_target_folder)
    engine = Engine.load(folder, head=str(tiny_head_folder), proposer="head")
    assert (engine.proposer_name, str(engine.dtype)) == ("head", "torch.float32")
    name = read_model(folder).name
    shutil.copytree(tiny_head_folder, tmp_path / "heads" / name / "eagle3")
    for head in ("eagle3", "auto", HeadConfig(name="eagle3")):
        assert Engine.load(folder, head=head, output_dir=str(tmp_path)).proposer_name == "head"
    assert Engine.load(folder, head="none", proposer="suffix").proposer_config.draft_tokens == 16
    for mistake, message in (
        ({"model": "lama3-8b"}, "did you mean llama3-8b"),
        ({"head": "eagel"}, "head=eagel: no head"),
        ({"proposer": "magic"}, "proposer=magic: no such option"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine.load(**({"model": folder} | mistake))


def test_a_head_is_looked_up_among_exports_and_then_among_shipped_ones(
    tiny_target_folder: Path, tiny_head_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, exports = tmp_path / "models" / "tiny" / "heads", tmp_path / "outputs" / "heads" / "tiny"
    monkeypatch.setattr("infer.options.exported_heads.SHIPPED", tmp_path / "models")
    output_dir, auto = str(tmp_path / "outputs"), HeadConfig(name="auto")

    def chosen() -> tuple[str, Path]:
        head = choose_head(auto, output_dir, ModelConfig("tiny", "x"))
        return head.name, head_folder(head, output_dir, ModelConfig("tiny", "x"))

    assert chosen() == ("eagle3", exports / "eagle3")  # there is no head: the folder that training would export to
    shutil.copytree(tiny_head_folder, shipped / "mlp")
    assert chosen() == ("mlp", shipped / "mlp")
    shutil.copytree(tiny_head_folder, shipped / "eagle3")
    assert chosen() == ("eagle3", shipped / "eagle3")
    shutil.copytree(tiny_head_folder, exports / "mlp")
    os.utime(exports / "mlp" / "config.json", (1, 1))
    assert chosen() == ("mlp", exports / "mlp")
    shutil.copytree(tiny_head_folder, exports / "eagle3")
    assert chosen() == ("eagle3", exports / "eagle3")
    shutil.rmtree(exports)
    overrides = ["head=auto", f"head.path={tiny_head_folder}", f"output_dir={output_dir}"]
    assert with_head(compose("serve", ServeConfig, overrides)).head == HeadConfig("eagle3", str(tiny_head_folder))
    engine = Engine.load(ModelConfig("tiny", str(tiny_target_folder)), head="auto", output_dir=output_dir)
    assert engine.proposer_name == "head"


def test_a_shipped_head_of_another_target_is_refused(
    make_target_folder: Any, tiny_head_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.options.exported_heads.SHIPPED", tmp_path)
    shutil.copytree(tiny_head_folder, tmp_path / "tiny" / "heads" / "eagle3")
    (tmp_path / "tiny" / "heads" / "eagle3" / "provenance.json").write_text('{"target_fingerprint": "other"}')
    model = ModelConfig("tiny", str(make_target_folder()))
    with pytest.raises(ValueError, match="trained for another target"):
        Engine.load(model, head="eagle3", output_dir=str(tmp_path))


def test_the_defaults_are_the_real_model_with_the_head_that_is_there() -> None:
    for command in ("serve", "generate"):
        config: Any = compose(command, COMMANDS[command])
        assert (config.model.name, config.head.name, config.proposer.name) == ("smollm2-135m", "auto", "auto")
    assert compose("train", TrainConfig).model.name == "demo"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train" and "head" in groups_of(name)])
def test_every_command_that_reads_a_head_takes_a_place_for_its_name(command: str, place: Path) -> None:
    words = ["model=owner/target", "head.revision=v1"]
    for text, path in (
        ("owner/Some-Head", "owner/Some-Head"),
        ("Mine", str(place / "Mine")),
        ("Small.Q4_1.gguf", str(place / "Small.Q4_1.gguf")),
        ("models/demo", "models/demo"),
    ):
        config: Any = compose(command, COMMANDS[command], [*words, f"head={text}"])
        assert config.head == HeadConfig("auto", path, "v1")
    with pytest.raises(ValueError, match=r"head=eagel3: no such option; did you mean eagle3\?"):
        compose(command, COMMANDS[command], [*words, "head=eagel3"])


@pytest.mark.parametrize("name", ODD)
def test_a_head_s_folder_may_have_any_name(name: str, place: Path) -> None:
    (place / name).mkdir()
    assert compose("serve", ServeConfig, [f"head={name}"]).head.path == str(place / name)


def test_training_makes_its_head(place: Path) -> None:
    for text, path in (("owner/Some-Head", "owner/Some-Head"), ("Mine", str(place / "Mine"))):
        message = (
            rf"head={path}: training needs a head; say head=eagle3, with head\.start_from={path} to begin with its"
        )
        with pytest.raises(ValueError, match=message):
            compose("train", TrainConfig, ["model=demo", f"head={text}"])
