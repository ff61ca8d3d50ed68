"""The configuration: everything composes, every mistake is an error that names it, every key is recorded.

A new, renamed or removed key is a visible diff of config_keys.txt, which HEADWAY_UPDATE_GOLDEN=1 rewrites.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infer import config as infer_config
from infer.options.cli import CONF, compose, groups_of, help_text, load_config, save_config
from infer.options.exported_heads import export_folder
from infer.options.model_names import read_model
from models.heads import HEADS
from scripts.benchmarks import config as benchmark_config
from scripts.faults import config as faults_config
from scripts.proof import config as proof_config
from tests.forking import Run
from train import config as train_config

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("config_keys.txt")
SCHEMAS = {**infer_config.SCHEMAS, **train_config.SCHEMAS}
SCRIPTS = {**benchmark_config.COMMANDS, **faults_config.COMMANDS, **proof_config.COMMANDS}
COMMANDS = {**infer_config.COMMANDS, **SCRIPTS, **train_config.COMMANDS}
FILES = sorted(path.relative_to(CONF).as_posix() for path in Path(CONF).rglob("*.yaml"))
REQUIRED_OVERRIDES = {  # what the user must set along with an option
    "data/files": ["data.path=x.jsonl"],
    "data/hub": ["data.path=owner/name"],
    **{f"objective/{one}": [f"head={head}"] for head, keys in HEADS.items() for one in keys.objectives if one != "ttt"},
    "proposer/draft_model": ["proposer.draft_model=models/demo"],
    "proposer/synthetic": ["proposer.acceptance=[0.8,0.6]"],
}
ENTRY_POINTS = {
    "train": "train/run.py",
    "serve": "infer/serve.py",
    "generate": "infer/generate.py",
    "bench": "scripts/bench.py",
}


PAIRED = ("head", "model")
REFUSED = (
    ("train", "head", "none"),
    ("evaluate", "head", "none"),
    ("train", "head", "auto"),
    ("train", "head", "published"),
)


def options() -> list[tuple[str, str, str]]:
    """Return (command, group, option) for every option that a command line can name."""
    return [(c, group, option) for c in sorted(COMMANDS) for group, names in groups_of(c).items() for option in names]


def composed() -> list[tuple[str, dict[str, str]]]:
    """Return (command, option by group): every option of a command once, each model together with a head."""
    cases = []
    for command in sorted(COMMANDS):
        groups = groups_of(command)
        paired = {group: groups[group] for group in PAIRED if group in groups}
        paired = {g: [name for name in names if (command, g, name) not in REFUSED] for g, names in paired.items()}
        for index in range(max(map(len, paired.values()), default=0)):
            cases.append((command, {group: names[index % len(names)] for group, names in paired.items()}))
        cases += [(command, {group: name}) for group, names in groups.items() if group not in PAIRED for name in names]
    return cases


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command: str) -> None:
    assert type(compose(command, COMMANDS[command])) is COMMANDS[command]


@pytest.mark.parametrize("command", infer_config.COMMANDS)
def test_defaults_are_the_same_from_python(command: str) -> None:
    """The schemas state every default once; tests/conftest.py changes some for tests, but not what fields state."""
    config = compose(command, COMMANDS[command])
    for part in (
        config.proposer,
        config.engine,
        config.head,
        *(getattr(config, "server", ()), getattr(config, "learning", ())),
    ):
        for field in dataclasses.fields(part) if part else ():
            stated = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            differs = field.name in ("name", *(["max_batch"] if command == "chat" else ()))  # one conversation
            assert differs or getattr(part, field.name) == stated, field.name
    assert config.model == read_model("smollm2-135m")


@pytest.mark.parametrize("option", ["proposer", "engine", "server", "learning"])
def test_options_only_name_themselves(option: str) -> None:
    """So that `ProposerConfig(name="suffix")` is `proposer=suffix`."""
    for file in Path(CONF, option).glob("*.yaml"):
        assert set(yaml.safe_load(file.read_text())) <= {"defaults", "name"}, file.name


def once() -> list[tuple[str, dict[str, str]]]:
    """Return of `composed()` the first case of every group of a command, and the first of every option."""
    of_commands, of_options, cases = set[tuple[str, str]](), set[tuple[str, str]](), []
    for command, chosen in composed():
        if not (chosen.items() <= of_options and {(command, group) for group in chosen} <= of_commands):
            cases.append((command, chosen))
        of_options |= set(chosen.items())
        of_commands |= {(command, group) for group in chosen}
    return cases


def name_of(value: Any) -> str | None:
    return ", ".join(value.values()) if isinstance(value, dict) else None


@pytest.mark.parametrize(("command", "chosen"), once(), ids=name_of)
def test_options_compose_under_their_own_name_and_read_back_equal(
    command: str, chosen: dict[str, str], tmp_path: Path
) -> None:
    overrides = [f"{group}={option}" for group, option in chosen.items()]
    overrides += [more for item in chosen.items() for more in REQUIRED_OVERRIDES.get("/".join(item), [])]
    groups = groups_of(command)
    overrides += ["engine.threads=1"] if "engine" in groups else []
    overrides += ["head.path=x"] if "head" in groups and chosen.get("head") != "none" else []
    config: Any = compose(command, COMMANDS[command], overrides)
    for group, option in chosen.items():
        if group != "experiment" and hasattr(getattr(config, group), "name"):
            assert getattr(config, group).name == option
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", COMMANDS[command], SCHEMAS) == config


@pytest.mark.parametrize(("command", "group", "option"), REFUSED)
def test_where_a_head_is_needed(command: str, group: str, option: str) -> None:
    with pytest.raises(ValueError, match=rf"head={option}: (training|an evaluation) needs a head"):
        compose(command, COMMANDS[command], [f"{group}={option}"])


def test_every_file_is_reachable() -> None:
    reached = {f"{command}.yaml" for command in COMMANDS} | {f"{group}/{option}.yaml" for _, group, option in options()}
    reached.add("hydra/default.yaml")
    assert set(FILES) - reached == set()


def test_every_group_file_is_held_to_a_schema() -> None:
    """Without `base_x` among its defaults an unknown key in the file would be accepted silently."""
    for file in FILES:
        group = file.partition("/")[0]
        if group in SCHEMAS:
            base = yaml.safe_load((Path(CONF) / file).read_text())["defaults"]
            assert len(base) == 1, file
            assert base[0].removeprefix("base_") in SCHEMAS[group], file


def golden_keys() -> str:
    keys = [f"{command}: {field.name}" for command, schema in COMMANDS.items() for field in dataclasses.fields(schema)]
    for group, schemas in SCHEMAS.items():
        for option, schema in schemas.items():
            keys += [f"{group}/{option}: {field.name}" for field in dataclasses.fields(schema)]
    return "\n".join(sorted(keys)) + "\n"


def test_no_key_comes_or_goes_unseen() -> None:
    if os.environ.get("HEADWAY_UPDATE_GOLDEN"):
        GOLDEN.write_text(golden_keys())
    assert GOLDEN.read_text() == golden_keys()


@pytest.mark.parametrize(
    ("command", "overrides", "message"),
    [
        # what Hydra and the schemas refuse
        ("train", ["optim.lrr=1"], "optim.lrr: unknown key; did you mean lr? known: betas, clip, decay, final_lr,"),
        ("train", ["heda=eagle3"], "heda: unknown key; did you mean head? known:"),
        ("train", ["+optim.foo=1"], "optim.foo: unknown key; known: betas, clip, decay, final_lr,"),
        ("serve", ["++model.foo=1"], "model.foo: unknown key; known: device, dtype, name, path, revision"),
        ("serve", ["+proposer.dspark_draft_topk=3"], "proposer.dspark_draft_topk: unknown key; here proposer.cand"),
        ("train", ["optim.lr=fast"], "optim.lr: Value 'fast' of type 'str' could not be converted to Float"),
        ("train", ["batch_size=2.5"], "batch_size: Value '2.5' of type 'float' could not be converted to Integer"),
        ("train", ["head.aux_layers=[1,x]"], "head.aux_layers[1]: Value 'x' of type 'str' could not be converted"),
        ("serve", ["engine.exact=7.5"], "engine.exact: Value '7.5' is not a valid bool"),
        (
            "generate",
            ["head=eagel3"],
            "head=eagel3: no such option; did you mean eagle3? known: auto, dflash, dflash2, draft-model,",
        ),
        ("train", ["experiment=x"], "experiment=x: no such option; known: demo-eagle3-hour, demo-heads"),
        ("train", ["data=files", "data.path=x", "data.columns={a: b}"], "data.columns=a: must be one of input_ids"),
        ("train", ["data=files", "data.path=x", "data.columns=5"], "data.columns=5: must be our names"),
        ("train", ["data=files"], "data.path: must be given, as data.path=..."),
        ("train", ["seed"], "Error parsing override 'seed'"),
        ("train", ["license=Apache 2"], "license=Apache 2: must be a name of the model hub's list, such as apache-2.0"),
        # what __post_init__ refuses
        ("serve", ["engine.page_size=24"], "engine.page_size=24: must be a power of two (16, 32, ...)"),
        ("serve", ["engine.max_rows=8"], "engine.max_rows=8: must hold a row for each of engine.max_batch=32"),
        ("serve", ["engine.activations=int8", "engine.weights=fp8"], "engine.activations=int8: multiplies integers"),
        ("train", ["engine.activations=int8"], "engine.activations=int8: is for serving"),
        ("serve", ["server.port=70000"], "server.port=70000: must be 0 to 65535"),
        ("serve", ["model.dtype=fp8"], "model.dtype=fp8: must be one of float32, bfloat16, float16"),
        ("serve", ["model.device=gpu"], "model.device=gpu: must be auto, cpu, cuda or cuda:<number>"),
        ("serve", ["head=none", "proposer=head"], "proposer=head: needs a head; say head=eagle3"),
        ("serve", ["head=none", "head.path=x"], "head.path=x: head=none reads no head"),
        ("serve", ["head=eagle3", "head.num_layers=2"], "head.num_layers: only shapes a new head (train/run.py)"),
        ("serve", ["proposer.max_draft_tokens=64"], "proposer.max_draft_tokens=64: must be 0 to 63"),
        (
            "serve",
            ["proposer.tree=beam"],
            "proposer.tree=beam: must be none, beam:<width>x<depth>, beam:<width>x<depth>:",
        ),
        (
            "serve",
            ["proposer.tree=beam:1x5"],
            "proposer.tree=beam:1x5: its numbers must be 1 to 63, and a beam's width",
        ),
        ("serve", ["proposer.tree=measured:64"], "proposer.tree=measured:64: its numbers must be 1 to 63"),
        ("serve", ["proposer.tree=beam:9x9"], "proposer.tree=beam:9x9: the head would grow more than 64 nodes"),
        ("serve", ["proposer.tree=[0,1]"], "proposer.tree=[0, 1]: must be a list of paths, each a list of ranks"),
        ("generate", ["temperature=-1"], "temperature=-1.0: must be at least 0"),
        ("generate", ["temperature=nan"], "temperature=nan: must be at least 0"),
        ("generate", ["top_p=0"], "top_p=0.0: must be above 0 and at most 1"),
        ("generate", ["color=red"], "color=red: must be one of auto, always, never"),
        ("generate", ["prompt=a", "prompts_file=b"], "prompts_file: excludes prompt"),
        ("generate", ["compare=true", "proposer=none"], "compare=true: compares speculation off and on"),
        ("bench", ["systems=[off,sglang]"], "systems=sglang: must be one of off, head, ngram"),
        ("bench", ["save=../x"], "save=../x: becomes part of a file name"),
        ("bench", ["concurrency=[]"], "concurrency=[]: name at least one"),
        ("train", ["steps=null", "minutes=null"], "steps=null and minutes=null: the run would not end"),
        ("train", ["run=../x"], "run=../x: becomes a folder name"),
        ("train", ["run=heads"], "run=heads: outputs/heads holds the exported heads"),
        ("train", ["precision=fp16"], "precision=fp16: must be one of auto, fp32, bf16"),
        ("train", ["head.fc_norm=true", "head.norm_before_fc=true"], "head.fc_norm=true: excludes head.norm_before_fc"),
        ("train", ["head.aux_layers=[2,2]"], "head.aux_layers=[2, 2]: must be distinct layer ids"),
        ("train", ["objective.step_weight=0"], "objective.step_weight=0.0: must be above 0"),
        (
            "train",
            ["objective=medusa"],
            "objective=medusa: is for head=medusa, not for head=eagle3; without",
        ),
        ("train", ["head=mlp", "objective.steps=5"], "objective.steps=5: this mlp head drafts 4 tokens at most"),
        (
            "train",
            ["head=medusa", "objective.steps=2"],
            "objective.steps=2: leaves some of this medusa head's 4 depths",
        ),
        ("train", ["head=medusa", "eval_draft_tokens=5"], "eval_draft_tokens=5: this medusa head drafts 4 tokens at"),
        ("train", ["head=p-eagle", "objective.ratio=0"], "objective.ratio=0.0: must be above 0 and at most 1"),
        ("train", ["head=lstm", "head.tie_weights=false"], "head.tie_weights=False: head.method=sum_lstm has one cell"),
        ("train", ["head=lstm", "head.inner_dim=[8,9]"], "head.inner_dim=[8, 9]: head.method=sum_lstm has one cell of"),
        ("train", ["head=lstm", "head.method=gru"], "head.method=gru: must be one of sum_lstm, sum_rnn"),
        ("train", ["head=medusa", "objective.labels=any"], "objective.labels=any: must be one of soft, hard"),
        ("train", ["objective.loss=mse"], "objective.loss=mse: must be one of kl, ce, label, tv, lk, lk_hybrid"),
        ("train", ["objective.reduction=mean"], "objective.reduction=mean: must be one of token, sequence"),
        ("train", ["optim.betas=[0.9]"], "optim.betas=[0.9]: must be two numbers"),
        ("train", ["optim=muon", "optim.momentum=1"], "optim.momentum=1.0: must be 0 to below 1"),
        *(
            (
                "train",
                ["optim=muon", f"parallel={mode}"],
                f"optim=muon: orthogonalises whole matrices, and parallel={mode} divides them among processes; use "
                "parallel=single or ddp, or optim=adamw",
            )
            for mode in ("fsdp", "zero2", "zero3")
        ),
        ("train", ["data.temperatures=[]"], "data.temperatures=[]: give at least one"),
    ],
)
def test_mistakes_are_errors_that_name_them(command: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is compared below, as it stands
        compose(command, COMMANDS[command], overrides)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("head", HEADS)
def test_a_head_chooses_its_objective_unless_one_is_given(head: str) -> None:
    def chosen(*overrides: str) -> str:
        return compose("train", train_config.TrainConfig, overrides).objective.name

    assert chosen(f"head={head}") == next(iter(HEADS[head].objectives))
    for other in HEADS[head].objectives:
        steps = ["objective.steps=4"] if (head, other) == ("mlp", "ttt") else []
        assert chosen(f"head={head}", f"objective={other}", *steps) == other


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("foo: 1", "conf/head/none.yaml: head.foo: Key 'foo' not in 'NoHeadConfig'"),
        (
            "allow_mismatch: 1.5",
            "conf/head/none.yaml: head.allow_mismatch: Value '1.5' is not a valid bool (type float)",
        ),
    ],
)
def test_mistakes_in_a_file_name_the_file(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).write_text((Path(CONF) / file).read_text())
    with (tmp_path / "head" / "none.yaml").open("a") as file:
        file.write(line + "\n")
    monkeypatch.setattr("infer.options.cli.CONF", str(tmp_path))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        compose("serve", infer_config.ServeConfig, ["head=none"])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("command", "argument", "message"),
    [
        ("train", "optim.lrr=1", "error: optim.lrr: unknown key; did you mean lr? known: betas,"),
        (
            "serve",
            "server.port=http",
            "error: server.port: Value 'http' of type 'str' could not be converted to Integer",
        ),
        (
            "generate",
            "head=eagel3",
            "error: head=eagel3: no such option; did you mean eagle3? known: auto, dflash, dflash2, draft-model,",
        ),
        ("bench", "rounds=0", "error: rounds=0: must be at least 1"),
    ],
)
def test_the_command_line_shows_one_message(
    command: str, argument: str, message: str, tmp_path: Path, forked: Run
) -> None:
    result = forked([ROOT / ENTRY_POINTS[command], argument], cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_traceback_is_there_when_asked_for(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / ENTRY_POINTS["train"]), "precision=fp16"],
        cwd=tmp_path, env={**os.environ, "HYDRA_FULL_ERROR": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error: precision=fp16: must be one of auto, fp32, bf16\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_groups_with_their_options_and_keys(command: str) -> None:
    text = help_text(command, COMMANDS[command])
    for group, names in groups_of(command).items():
        assert re.search(rf"^  {group} +{re.escape(' | '.join(names))}$", text, re.MULTILINE)
    for field in dataclasses.fields(COMMANDS[command]):
        assert field.name in groups_of(command) or f"\n  {field.name}:" in text
    assert "base_" not in text


def test_a_written_config_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save_config(compose("serve", infer_config.ServeConfig, ["head=eagle3"]), path)
    path.write_text(path.read_text().replace("num_layers:", "num_lairs:"))
    with pytest.raises(ValueError, match=r"config\.yaml: head\.num_lairs: unknown key; did you mean num_layers\?"):
        load_config(path, infer_config.ServeConfig, SCHEMAS)


def test_relative_paths_count_from_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose("serve", infer_config.ServeConfig, ["model=demo", "head=eagle3"])
    assert config.model.path_or_hub_id == str(ROOT / "models" / "demo")
    assert export_folder(config.head, config.output_dir, "demo") == ROOT / "outputs" / "heads" / "demo" / "eagle3"
    hub = compose("serve", infer_config.ServeConfig, ["model=llama3-8b"])
    assert hub.model.path_or_hub_id == "meta-llama/Meta-Llama-3-8B-Instruct"
    local = compose("serve", infer_config.ServeConfig, [f"head.path={tmp_path}", f"model.path={tmp_path}"])
    assert export_folder(local.head, local.output_dir, "demo") == tmp_path
    assert local.model.path_or_hub_id == str(tmp_path)
