"""Targets and heads by hub id, as a user names them on a command line, from a local mirror of the hub's interface."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.config import ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from tests import forking
from tests.formats.sources import SOURCES
from tests.hub_mirror import MAIN, Mirror, mirror

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TARGET, HEAD, EAGLE3 = "tiny/target", "tiny/EAGLE-head", "tiny/eagle3"
WEIGHTS, PICKLE = f"{TARGET}/model.safetensors", f"{HEAD}/pytorch_model.bin"
PROMPT = "def wrap("
SIZE = 24 * 2**20  # bytes
SETTINGS = ["chat=false", f"prompt={PROMPT}", "max_tokens=16", "ignore_eos=true", "model.device=cpu"]
SETTINGS += ["proposer.adaptive=false", "color=never"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def branches(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Write an EAGLE head as a pickle, as yuhuili's are, and one of EAGLE-3 that only the branch v1 holds."""
    folder = tmp_path_factory.mktemp("repositories")
    eagle, eagle3 = SOURCES["safeailab-eagle"], SOURCES["safeailab-eagle3"]
    head = eagle.write(folder / "eagle")
    (head / "model.safetensors").unlink()
    torch.save(eagle.tensors(), head / "pytorch_model.bin")
    (head / "training_state.pt").write_bytes(b"never fetched")
    shards = eagle.write(folder / "shards")
    (shards / "model.safetensors").unlink()
    weight_map = dict[str, str]()
    for number, (name, value) in enumerate(eagle.tensors().items()):
        weight_map[name] = file = f"pytorch_model-{number:05}.bin"
        torch.save({name: value}, shards / file)
    (shards / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    empty = folder / "empty"
    empty.mkdir()
    (empty / "README.md").write_text("to come")
    return {
        (TARGET, MAIN): tiny_target_folder,
        (HEAD, MAIN): head,
        (HEAD, "shards"): shards,
        (EAGLE3, MAIN): empty,
        (EAGLE3, "v1"): eagle3.write(folder / "eagle3"),
    }


@pytest.fixture
def hub(branches: dict[tuple[str, str], Path]) -> Iterator[Mirror]:
    with mirror(branches) as server:
        yield server


@pytest.fixture(scope="module")
def text(tiny_target_folder: Path) -> str:
    """Return what the target alone says after PROMPT."""
    model = ModelConfig(name="tiny", path=str(tiny_target_folder), dtype="auto", device="cpu")
    engine = Engine.load(model, proposer=ProposerConfig(name="none"))
    return engine.generate([PROMPT], SamplingParams(max_tokens=16, ignore_eos=True))[0].text or ""


@pytest.fixture
def run(hub: Mirror, tmp_path: Path, forked: forking.Run) -> Run:
    """Return `run(script, *words)`, which runs a command to its end with an empty cache that its calls share."""

    def call(script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = SETTINGS if script == "infer/generate.py" else []
        variables = os.environ | hub.environment(tmp_path / "cache") | environment
        return forked([ROOT / script, *words, *settings], env=variables)

    return call


def test_target_and_head_are_fetched_once_and_draft(hub: Mirror, run: Run, tmp_path: Path, text: str) -> None:
    first = run("infer/generate.py", f"model={TARGET}", f"head.path={HEAD}")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(PROMPT + text + "\n")
    assert f"head eagle from {HEAD}, up to 3 draft tokens per step" in first.stdout
    assert first.stderr.count("pytorch_model.bin: a pickle, of which tensors are read and nothing is run") == 1
    assert hub.downloads[WEIGHTS] == hub.downloads[PICKLE] == hub.downloads[f"{HEAD}/config.json"] == 1
    assert not any("training_state" in name for name in hub.downloads)
    again = run("infer/generate.py", f"model={TARGET}", f"head={HEAD}")  # the other way to say it
    assert again.returncode == 0, again.stderr
    assert max(hub.downloads.values()) == 1
    asked = hub.requests
    offline = run("infer/generate.py", f"model={TARGET}", f"head={HEAD}", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert hub.requests == asked
    for later in (again, offline):
        assert later.stdout.startswith(PROMPT + text + "\n")
        assert f"head eagle from {HEAD}" in later.stdout


def test_a_pickle_in_shards_is_read(hub: Mirror, run: Run, text: str) -> None:
    result = run("infer/generate.py", f"model={TARGET}", f"head={HEAD}", "head.revision=shards")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(PROMPT + text + "\n")
    assert f"head eagle from {HEAD}, revision shards" in result.stdout
    assert result.stderr.count("a pickle, of which tensors are read and nothing is run") == 1


def padded(branches: dict[tuple[str, str], Path], folder: Path) -> dict[tuple[str, str], Path]:
    """Return copies whose weights are of 24 MB, as huggingface_hub writes what arrives by 10 MB. No tensor differs."""
    copies = {
        name: Path(shutil.copytree(place, folder / name[0])) for name, place in branches.items() if name[1] == MAIN
    }
    weights, pickle = copies[TARGET, MAIN] / "model.safetensors", copies[HEAD, MAIN] / "pytorch_model.bin"
    save_file(load_file(weights), weights, metadata={"format": "pt", "padding": "0" * SIZE})
    with zipfile.ZipFile(pickle, "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/padding", bytes(SIZE))
    return copies


def test_a_connection_that_breaks_is_resumed_where_it_broke(hub: Mirror, run: Run, tmp_path: Path, text: str) -> None:
    hub.branches = padded(hub.branches, tmp_path / "padded")
    hub.faults = {WEIGHTS: "cut", PICKLE: "cut"}
    result = run("infer/generate.py", f"model={TARGET}", f"head.path={HEAD}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(PROMPT + text + "\n")
    assert len(hub.ranges) == 2
    assert all(int(range_.removeprefix("bytes=").removesuffix("-")) > 0 for range_ in hub.ranges)
    assert (hub.downloads[WEIGHTS], hub.downloads[PICKLE]) == (2, 2)


def test_a_killed_run_keeps_what_arrived_whole(hub: Mirror, run: Run, tmp_path: Path, text: str) -> None:
    words = [f"model={TARGET}", f"head.path={HEAD}"]
    hub.faults[WEIGHTS] = "held"
    command = [sys.executable, str(ROOT / "infer" / "generate.py"), *words, *SETTINGS]
    environment = os.environ | hub.environment(tmp_path / "cache")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert hub.is_held.wait(600)
    process.kill()
    process.wait()
    hub.release.set()
    result = run("infer/generate.py", *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(PROMPT + text + "\n")
    assert (hub.downloads[WEIGHTS], hub.downloads[PICKLE], hub.downloads[f"{TARGET}/config.json"]) == (2, 1, 1)


def test_a_damaged_file_is_named_removed_and_fetched_anew(hub: Mirror, run: Run, tmp_path: Path, text: str) -> None:
    words, files = [f"model={TARGET}", f"head.path={HEAD}"], (f"{HEAD}/config.json", PICKLE, WEIGHTS)
    faults = {"changed": "arrived damaged", "short": "Consistency check failed: file should be of size"}
    for file, (fault, reason) in zip(files, itertools.cycle(faults.items())):
        repository, _, name = file.rpartition("/")
        hub.faults[file] = fault
        result = run("infer/generate.py", *words)
        assert result.returncode == 2
        option = "model=" if repository == TARGET else "head.path="
        assert result.stderr.splitlines()[-1].startswith(f"error: {option}{repository}: ")
        assert reason in result.stderr
        assert name in result.stderr
        assert "Traceback" not in result.stderr
        snapshots = f"models--{repository.replace('/', '--')}/snapshots/*/{name}"
        assert list((tmp_path / "cache" / "hub").glob(snapshots)) == []
    result = run("infer/generate.py", *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(PROMPT + text + "\n")
    assert [hub.downloads[file] for file in files] == [2, 2, 2]


def test_a_revision_says_which_commit(hub: Mirror, run: Run, text: str) -> None:
    words = [f"model={TARGET}", f"head={EAGLE3}"]
    result = run("infer/generate.py", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert "no exported head (no config.json)" in result.stderr
    result = run("infer/generate.py", *words, "head.revision=v1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(PROMPT + text + "\n")
    assert f"head eagle3 from {EAGLE3}, revision v1" in result.stdout
    for option, named in ((f"head={EAGLE3}", "head"), (f"head.path={HEAD}", "model")):
        result = run("infer/generate.py", f"model={TARGET}", option, f"{named}.revision=v9")
        assert result.returncode == 2
        assert (
            f"{TARGET if named == 'model' else EAGLE3} (revision v9): neither a local folder nor reachable"
            in result.stderr
        )
        assert "RevisionNotFoundError" in result.stderr


def test_a_wrong_id_is_named(run: Run) -> None:
    result = run("infer/generate.py", f"model={TARGET}", "head.path=tiny/no-such-head")
    assert result.returncode == 2
    assert "error: head.path=tiny/no-such-head: neither a local folder nor reachable on the model hub" in result.stderr
    assert "RepositoryNotFoundError" in result.stderr


def test_other_commands_take_a_hub_id_too(hub: Mirror, run: Run, tmp_path: Path) -> None:
    result = run(
        "scripts/convert.py", "--from", "auto", "--to", "headway", "--verifier", TARGET, HEAD, str(tmp_path / "ours")
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "ours" / "provenance.json").read_text())["converted_from"]["folder"] == HEAD
    outputs = ["check=true", f"output_dir={tmp_path / 'outputs'}", "minutes=null", "steps=2", "model.device=cpu"]
    layer = ["head.bias=true", f"head.start_from={HEAD}"]
    result = run("train/run.py", f"model={TARGET}", "head=eagle", *layer, "data=demo", *outputs)
    assert f"head.start_from={ROOT}" not in result.stderr
    assert "this run's head a EagleConfig" in result.stderr  # it was fetched and read: of another shape
    result = run("train/run.py", f"model={TARGET}", f"head={HEAD}", *outputs)
    assert f"head={HEAD}: training needs a head; say head=eagle3, with head.start_from={HEAD}" in result.stderr
