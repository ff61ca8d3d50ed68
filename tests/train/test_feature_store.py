"""features=offline: the target's features are stored once, completed after an interruption, refused for another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.engine import Engine
from infer.options.cli import compose
from models.config import LAST
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from tests.conftest import MakeTarget
from tests.train.launching import ROOT
from tests.train.running import SETTINGS, assert_equal, run, tensors
from train.config import OfflineFeaturesConfig, TrainConfig
from train.data.sequences import Batch, Sequences
from train.features import store as module
from train.features.layout import WHOLE, Layout
from train.features.online import Features, TopTokens, compute_features
from train.features.store import SHARD_MB, FeatureStore, cut_shards, manifest, open_store, refuse_small_disk
from train.features.teacher import recall, teach
from train.loop import train
from train.signals import Interrupted
from train.storage import atomic
from train.storage.provenance import git_state, versions

AUX = (2, 4, 5)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a shard per two or three sequences of the tiny target, whatever SHARD_MB says."""
    real = cut_shards
    monkeypatch.setattr(module, "LEAST_SHARDS", 1)
    monkeypatch.setattr(module, "cut_shards", lambda sequences, size: real(sequences, SHARD_MB * 2**20 // 110))


def make_store(folder: Path, target: LlamaTarget, sequences: Sequences) -> FeatureStore:
    return FeatureStore(folder, target, AUX, sequences, Layout.of(target, AUX))


def fill(store: FeatureStore, rank: int = 0, world: int = 1, check=lambda: None) -> None:
    store.folder.mkdir(exist_ok=True)
    store.fill(2, (rank, world), check, show=False)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("shard-*")}


def test_what_is_read_is_what_the_target_computed(
    engine: Engine, responses: Sequences, tmp_path: Path, small_shards: None
) -> None:
    store = make_store(tmp_path, engine.target, responses)
    fill(store)
    assert len(content(tmp_path)) == 3
    for rows in ((0, 1), (5, 2, 0), (3,)):
        batch = responses.batch(rows)
        read = store(batch)
        assert len(read.aux) == 3
        fresh = compute_features(engine.target, batch, (*AUX, LAST))
        for index, row in enumerate(rows):
            length = int(responses.lengths[row])
            for actual, expected in zip((*read.aux, read.hidden), (*fresh.aux[:3], fresh.hidden), strict=True):
                torch.testing.assert_close(actual[index, :length], expected[index, :length], rtol=1e-5, atol=1e-5)
                assert not actual[index, length:].any()


def test_an_interrupted_store_is_completed_to_the_same_files(
    engine: Engine, responses: Sequences, tmp_path: Path, small_shards: None
) -> None:
    complete = make_store(tmp_path / "whole", engine.target, responses)
    assert complete.missing_bytes == 4 * int(responses.offsets[-1]) * 64 * 4
    fill(complete)
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Interrupted

    torn = make_store(tmp_path / "torn", engine.target, responses)
    with pytest.raises(Interrupted):
        fill(torn, check=stop)
    assert 0 < len(torn.missing) < 3
    for rank in range(2):
        fill(torn, rank, 2)
    assert content(tmp_path / "torn") == content(tmp_path / "whole")
    assert torn.missing_bytes == 0
    assert not list((tmp_path / "torn").glob(".*"))


def test_shards_hold_every_sequence_once(responses: Sequences) -> None:
    for size in (1, 60, 100, 10**6):
        shards = cut_shards(responses, SHARD_MB * 2**20 // size)
        rows = [row for shard in shards for row in range(shard.first, shard.last)]
        assert rows == list(range(len(responses)))
        assert len({shard.file for shard in shards}) == len(shards)
    assert len(cut_shards(responses, SHARD_MB * 2**20)) == len(responses)
    sequences = Sequences.of([([1, 2, 3], [False, True, True])] * 320)
    assert [shard.last - shard.first for shard in cut_shards(sequences, 1)] == [10] * 32  # however small the store


def test_a_store_of_anything_else_is_refused_and_the_difference_named(
    engine: Engine, responses: Sequences, tiny_tokenizer: Tokenizer, make_target_folder: MakeTarget, tmp_path: Path
) -> None:
    layout = Layout.of(engine.target, AUX)
    record = manifest(engine.target, tiny_tokenizer, responses, layout)
    open_store(tmp_path / "store", record)
    (tmp_path / "store" / ".shard-00002.safetensors.0123abcd.tmp").write_bytes(b"half a shard")
    with atomic.replace_file(tmp_path / "store" / "shard-00003.safetensors") as being_written:
        open_store(tmp_path / "store", record)
        assert list((tmp_path / "store").glob(".*")) == [being_written.parent]
        being_written.touch()
    changed = load_target(str(make_target_folder(seed=1)), dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"dtype is float32, this run has bfloat16; target is \w+, this run has \w+\. Give"
    ):
        open_store(tmp_path / "store", manifest(changed, tiny_tokenizer, responses, Layout.of(changed, AUX)))
    fewer = Layout.of(engine.target, (1,))
    with pytest.raises(ValueError, match=r"layers is \[-1, 2, 4, 5\], this run has \[-1, 1\]"):
        open_store(tmp_path / "store", manifest(engine.target, tiny_tokenizer, responses, fewer))
    with pytest.raises(ValueError, match=r"else: weights is same, this run has int8\. Give"):
        open_store(tmp_path / "store", manifest(engine.target, tiny_tokenizer, responses, layout, "int8"))
    plain = Tokenizer(tiny_tokenizer.backend, eos_ids=tiny_tokenizer.eos_ids)
    with pytest.raises(ValueError, match=r"else: chat_template is \w+, this run has \w+\. Give"):
        open_store(tmp_path / "store", manifest(engine.target, plain, responses, layout))
    shorter = manifest(engine.target, tiny_tokenizer, responses.cut(20), layout)
    with pytest.raises(ValueError, match=r"else: data is \w+, .* tokens is \d+, this run has \d+"):
        open_store(tmp_path / "store", shorter)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"features\.path=.*mine: holds something else than a store of features"):
        open_store(tmp_path / "mine", record)
    with pytest.raises(
        ValueError, match=r"the store in .* needs 1000000\.00 GB more, .* GB are free; give features\.path="
    ):
        refuse_small_disk(tmp_path / "not" / "there", 10**15)


def load_header(content: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def test_a_shard_that_vanished_or_is_damaged_is_named(
    engine: Engine, responses: Sequences, tmp_path: Path, small_shards: None
) -> None:
    fill(make_store(tmp_path, engine.target, responses))
    store = make_store(tmp_path, engine.target, responses)
    (tmp_path / "shard-00001.safetensors").write_bytes(b"\0" * 100)
    (tmp_path / "shard-00002.safetensors").unlink()
    store(responses.batch([0]))
    changed = tmp_path / "shard-00000.safetensors"
    content = bytearray(changed.read_bytes())
    (low, _), length = load_header(content)["features"]["data_offsets"], int.from_bytes(content[:8], "little")
    content[8 + length + low] ^= 1  # a bit of the first sequence
    changed.write_bytes(content)
    store = make_store(tmp_path, engine.target, responses)
    for row, name in ((0, "00000"), (3, "00001"), (5, "00002")):
        with pytest.raises(
            ValueError, match=rf"shard-{name}\.safetensors: cannot be read .* run the same command again"
        ):
            store(responses.batch([row]))


def test_a_run_learns_the_same_from_a_store(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "head.draft_vocab_size=200", "overwrite=true",
        "data.num_sequences=12", "data.max_new_tokens=16", "data.prompt_tokens=12", "sequence_length=28",
        "batch_size=4", "steps=4", "minutes=null", "eval_prompts=2", "eval_max_tokens=8", "tracker=none",
        "precision=fp32", "engine.max_tokens_in_cache=1024", "objective.steps=2", "eval_draft_tokens=2",
    ]  # fmt: skip

    def losses(*more: str) -> list[float]:
        assert train(compose("train", TrainConfig, [*settings, *more])) is not None
        name = next(item for item in more if item.startswith("run="))[4:]
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [row["train/loss"] for row in rows if "train/loss" in row]

    online = losses("run=online")
    assert losses("run=offline", "features=offline") == pytest.approx(online, rel=1e-4)
    (store,) = (tmp_path / "features" / "demo").iterdir()
    record = json.loads((store / "manifest.json").read_text())
    assert record["code"] == {"version": versions()["headway"], **git_state()}
    (store / "manifest.json").write_text(json.dumps({**record, "code": {"commit": "0ther"}}))
    small = losses("run=small", "features=offline", "features.dtype=fp8", "features.top_k=384", "objective.fused=true")
    assert small == pytest.approx(online, rel=0.1)
    assert small != pytest.approx(online, rel=1e-4)
    capsys.readouterr()
    fewer = losses("run=fewer", "features=online", "head.aux_layers=[2,5]")
    assert losses("run=found", "features=offline", "head.aux_layers=[2,5]") == pytest.approx(fewer, rel=1e-4)
    assert f"features in {store}: 0.00 GB to be stored" in capsys.readouterr().err
    by_path = losses("run=by-path", "features=offline", "head.aux_layers=[2,5]", f"features.path={store}")
    assert by_path == pytest.approx(fewer, rel=1e-4)
    older = {key: value for key, value in record.items() if key != WHOLE}
    assert older != record
    (store / "manifest.json").write_text(json.dumps(older))  # of a version that stored no log_z and choice
    by_path = losses("run=older", "features=offline", "head.aux_layers=[2,5]", f"features.path={store}")
    assert by_path == pytest.approx(fewer, rel=1e-4)
    with pytest.raises(ValueError, match=r"layers is \[-1, 2, 4, 5\], this run has \[-1, 1, 2\]"):
        losses("run=other", "features=offline", f"features.path={store}", "head.aux_layers=[1,2]")


SMALL = ["data.num_sequences=6", "data.max_new_tokens=8", "eval_prompts=2", "eval_max_tokens=6", "objective.steps=2"]
INTERRUPTED = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test was started with
sys.path.insert(0, {root!r})
from train.storage import atomic
write = atomic.write_tensors
def write_and_interrupt(path, tensors):
    write(path, tensors)
    if path.name.startswith("shard-"):
        atomic.write_tensors = write
        os.kill(os.getpid(), signal.SIGINT)
atomic.write_tensors = write_and_interrupt
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def test_ctrl_c_while_features_are_computed_loses_no_finished_shard(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command receives Ctrl-C as soon as its first shard is written; then the same command is run again."""
    overrides = [*SETTINGS, f"model.path={tiny_target_folder}", "features=offline", "steps=1", *SMALL]
    torn = [*overrides, f"output_dir={tmp_path / 'torn'}"]
    code = INTERRUPTED.format(root=str(ROOT), script=str(ROOT / "train" / "run.py"))
    ran = subprocess.run([sys.executable, "-c", code, *torn], capture_output=True, text=True, check=False, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert "stopped; resume with: " in ran.stderr
    (record,) = (tmp_path / "torn" / "features" / "demo").glob("*/manifest.json")
    store = record.parent
    (shard,) = store.glob("shard-*")
    before = shard.stat()
    run(torn)
    assert "; 1 of 6 shards are there" in capsys.readouterr().err
    after = shard.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    run([*overrides, f"output_dir={tmp_path / 'whole'}"])
    (complete,) = (tmp_path / "whole" / "features" / "demo").iterdir()
    assert len(content(complete)) == 6
    assert content(store) == content(complete)


def test_ctrl_c_keeps_what_was_computed_for_memory_too(
    tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """features=online: features computed before the first step are kept, and the resumed run gives the same head."""
    batches: list[tuple[int, ...]] = []
    real = compute_features

    def compute(target: LlamaTarget, batch: Batch, layers: Sequence[int]) -> Features:
        batches.append(tuple(batch.rows))
        if len(batches) == 3 and interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        return real(target, batch, layers)

    monkeypatch.setattr("train.features.store.compute_features", compute)
    base = [*SETTINGS, f"model.path={tiny_target_folder}", "steps=1", *SMALL, "batch_size=1", "eval_prompts=1"]
    heads = []
    for name, interrupt in (("torn", True), ("torn", False), ("whole", False)):
        batches.clear()
        overrides = [*base, f"output_dir={tmp_path / name}"]
        if interrupt:
            assert train(compose("train", TrainConfig, overrides), overrides) is None
            assert len(batches) == 3
            assert len(list((tmp_path / "torn" / "features" / "demo").iterdir())) == 1
            continue
        run(overrides)
        computed = [rows for rows in batches if len(rows) == 1][:6]
        assert computed[:3] == ([(3,), (4,), (5,)] if name == "torn" else [(0,), (1,), (2,)])
        heads.append(tensors(tmp_path / name))
    assert_equal(*heads)
    assert not list((tmp_path / "torn" / "features" / "demo").iterdir())  # no longer needed


@pytest.mark.parametrize(("dtype", "top_k"), [("same", 384), ("same", 8), ("fp8", None), ("fp8", 8)])
def test_smaller_stores_say_nearly_the_same(
    dtype: str, top_k: int | None, engine: Engine, responses: Sequences, tmp_path: Path, small_shards: None
) -> None:
    settings = OfflineFeaturesConfig(name="offline", dtype=dtype, top_k=top_k)
    layout = Layout.of(engine.target, AUX, settings)
    store = FeatureStore(tmp_path, engine.target, AUX, responses, layout)
    store.fill(2, (0, 1), lambda: None, room=60, show=False)
    stored_bytes = sum(len(value) for value in content(tmp_path).values())
    tokens = int(responses.offsets[-1])
    assert layout.token_bytes * tokens <= stored_bytes <= layout.token_bytes * tokens + 3000
    layers = 3 if top_k else 4
    assert layout.token_bytes == layers * (64 + 4 if dtype == "fp8" else 4 * 64) + 6 * (top_k or 0)
    batch = responses.packed([[4, 0], [2]])
    read, fresh = store(batch), compute_features(engine.target, batch, AUX)
    for index, place in zip(batch.rows, batch.places, strict=True):
        span = place.row, slice(place.first, place.first + int(responses.lengths[index]))
        for actual, expected in zip(read.aux, fresh.aux, strict=True):
            # e4m3 has three bits after the leading one: half a step is 1/16 of a value, and 1/448 / 2^10 of the largest
            error, largest = (actual[span] - expected[span]).abs(), expected[span].abs().amax(-1, keepdim=True)
            allowed = expected[span].abs() / 16 + largest / 4e5 if dtype == "fp8" else largest * 1e-5
            assert (error <= allowed + 1e-6).all()
            assert (error.max() > 1e-4) == (dtype == "fp8")
    if top_k is None:
        return
    assert read.top is not None
    ids = torch.arange(0, 384, 3)  # some draft vocabulary
    actual, expected = recall(read.top, batch, ids, 384).whole(), teach(engine.target, fresh.hidden, batch, ids)
    assert torch.equal(actual.choice, expected.choice)
    assert torch.equal(actual.label, expected.label)
    assert (actual.mass <= expected.mass + 1e-2).all()
    torch.testing.assert_close(actual.probs.sum(-1), torch.ones(len(actual.mass)))
    if top_k == 384:
        torch.testing.assert_close(actual.probs, expected.probs, rtol=2e-2, atol=1e-4)
        torch.testing.assert_close(actual.negentropy, expected.negentropy, rtol=1e-2, atol=1e-2)
        assert torch.equal(actual.in_vocab, expected.in_vocab)
    else:
        assert (actual.in_vocab <= expected.in_vocab).all()
        assert 0 < actual.in_vocab.sum() < len(actual.in_vocab)


def test_where_no_likely_token_can_be_drafted_the_texts_own_stands_in() -> None:
    log_probs = torch.tensor([[[0.7, 0.2]] * 4]).log()
    top = TopTokens(log_probs, torch.tensor([[[8, 9], [8, 3], [5, 9], [5, 9]]]))
    batch = Batch(torch.tensor([[1, 3, 5, 3]]), torch.tensor([[False, True, True, True]]), (0,))
    teacher = recall(top, batch, torch.tensor([3, 5]), 10).whole()
    # rows 1 and 2 are teacher rows; token 8 is not in the draft vocabulary
    assert teacher.probs.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert teacher.mass.tolist() == pytest.approx([0.2, 0.7])
    assert teacher.in_vocab.tolist() == [False, True]
    fallback = recall(top._replace(ids=torch.full_like(top.ids, 8)), batch, torch.tensor([3, 5]), 10).whole()
    assert fallback.probs.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert fallback.label.tolist() == [1, 0]
    assert fallback.mass.tolist() == [0, 0]
    assert not fallback.in_vocab.any()


def test_the_teachers_tokens_are_no_use_to_a_head_that_reads_the_last_layer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"features\.top_k=4: saves the last hidden state, which head=medusa reads"):
        compose("train", TrainConfig, ["head=medusa", "features=offline", "features.top_k=4"])
