"""Features taken while the engine generates equal computed ones, and no store computes them again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infer.config import EngineConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.targets import load_target
from models.tokenizer import Tokenizer
from tests.train.running import SETTINGS, run
from train.config import OfflineFeaturesConfig
from train.data import alignment
from train.data.examples import Example
from train.data.regenerate import EngineGenerator, collect_parts, read_parts, regenerate
from train.data.sequences import Sequences
from train.features import recorded
from train.features.layout import Layout
from train.features.online import compute_features
from train.features.recorded import FeatureRecorder, RecordedFeatures
from train.features.store import FeatureStore
from train.signals import Interrupted

AUX = (2, 4, 5)
LONGEST = 90


def examples() -> dict[int, Example]:
    """Four plain texts, and three conversations of three turns with one beginning, which is longer than a page."""
    generator = torch.Generator().manual_seed(1)
    plain = [torch.randint(1, 384, (5 + 7 * number,), generator=generator).tolist() for number in range(4)]
    turns = [
        [
            {"role": role, "content": text}
            for text in (f"def f(x{number}):", "then?", "so?")
            for role in ("user", "assistant")
        ]
        for number in range(3)
    ]
    return dict(
        enumerate([*(Example(ids=tuple(ids)) for ids in plain), *(Example(messages=tuple(each)) for each in turns)])
    )


def params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=12 + number, temperature=number % 2, seed=number, ignore_eos=True)


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    folder: Path,
    settings: OfflineFeaturesConfig,
    check: Callable[[], None] = lambda: None,
) -> tuple[Layout, Sequences]:
    layout = Layout.of(engine.target, AUX, settings)
    generator = EngineGenerator(engine, FeatureRecorder(layout, folder / "recorded", LONGEST))
    assert regenerate(generator, examples(), params, folder, tokenizer, longest_prompt=200, check=check) == {}
    return layout, collect_parts(folder, examples(), {}).sequences.cut(LONGEST)


@pytest.fixture(params=["plain", "pre-empted", "suffix"])
def generating(request: pytest.FixtureRequest, tiny_target_folder: Path, tiny_tokenizer: Tokenizer) -> Engine:
    """An engine of short chunks; one whose pool is too small for its requests; one that drafts."""
    tokens = 176 if request.param == "pre-empted" else 4096
    config = EngineConfig(max_tokens_in_cache=tokens, max_batch=5, prefill_chunk=8, page_size=16, max_model_len=170)
    proposer = "suffix" if request.param == "suffix" else "none"
    engine = Engine(load_target(str(tiny_target_folder)), tokenizer=tiny_tokenizer, proposer=proposer, config=config)
    engine.name = request.param  # type: ignore[attr-defined]
    return engine


@pytest.mark.parametrize(("dtype", "top_k"), [("same", 8), ("fp8", None)])
def test_what_is_recorded_is_what_would_be_computed(
    dtype: str, top_k: int | None, generating: Engine, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    settings = OfflineFeaturesConfig(name="offline", dtype=dtype, top_k=top_k)
    layout, sequences = generate(generating, tiny_tokenizer, tmp_path, settings)
    assert generating.name != "pre-empted" or generating.stats.preemptions  # type: ignore[attr-defined]
    taken = RecordedFeatures(tmp_path / "recorded")
    assert len(sequences) == len(taken) >= 7
    for index in range(len(sequences)):
        ids, assistant = sequences.row(index)
        batch = sequences.batch([index])
        fresh = compute_features(generating.target, batch, layout.layers)
        states, hidden = torch.stack(fresh.aux, 2)[0], fresh.hidden[0]
        stored = taken.take(ids)
        assert stored is not None
        rows = alignment.teacher_rows(assistant[None])[0]
        expected = layout.encode(states, generating.target, hidden, rows)
        assert stored.keys() == expected.keys()
        actual, computed = layout.decode(stored)[:-1], layout.decode(expected)[:-1]
        largest = computed.abs().amax(-1, keepdim=True)
        allowed = computed.abs() / 8 + largest / 2e5 if dtype == "fp8" else largest * 2e-5
        assert ((actual - computed).abs() <= allowed + 1e-6).all()
        if top_k is not None:
            assert rows.any()
            torch.testing.assert_close(
                stored["top_log_probs"][rows], expected["top_log_probs"][rows], rtol=0, atol=4e-3
            )
            same = stored["top_ids"][rows] == expected["top_ids"][rows]
            assert same[:, 0].all()


def test_a_store_computes_only_what_is_missing_and_deletes_the_parts(
    generating: Engine, tiny_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption: what had been finished is there, each sequence once, and other parts are left alone."""
    steps = 0

    def stop() -> None:
        nonlocal steps
        steps += 1
        if len(read_parts(tmp_path)) == 3:
            raise Interrupted

    monkeypatch.setattr(recorded, "PART_MB", 0)  # a part for every conversation
    settings = OfflineFeaturesConfig(name="offline")
    with pytest.raises(Interrupted):
        generate(generating, tiny_tokenizer, tmp_path, settings, stop)
    before = len(RecordedFeatures(tmp_path / "recorded"))
    assert before >= 3
    layout, sequences = generate(generating, tiny_tokenizer, tmp_path, settings)
    folder = tmp_path / "recorded"
    assert len(RecordedFeatures(folder)) == len(sequences)
    for path in sorted(folder.iterdir())[:1]:  # one is damaged, one is of other sequences
        path.write_bytes(b"\0" * 100)
    other = FeatureRecorder(layout, folder, LONGEST)
    other._finished.append((b"\1" * 16, {"features": torch.zeros(3, 4, 64)}))
    other.flush()
    taken, computed = RecordedFeatures(folder), 0
    lost = len(sequences) + 1 - len(taken)
    assert 1 <= lost <= 3

    def compute(target, batch, layers):  # type: ignore[no-untyped-def]
        nonlocal computed
        computed += len(batch.rows)
        return compute_features(target, batch, layers)

    monkeypatch.setattr("train.features.store.compute_features", compute)
    (tmp_path / "store").mkdir()
    store = FeatureStore(tmp_path / "store", generating.target, AUX, sequences, layout)
    store.fill(2, (0, 1), lambda: None, show=False, recorded=taken)
    assert computed == lost
    assert store.missing == []
    taken.stored([], last=True)
    assert len(RecordedFeatures(folder)) == 1
    read = store(sequences.batch(range(len(sequences))))
    fresh = compute_features(generating.target, sequences.batch(range(len(sequences))), layout.layers)
    for index, length in enumerate(sequences.lengths.tolist()):
        torch.testing.assert_close(
            read.hidden[index, : length - 1], fresh.hidden[index, : length - 1], rtol=1e-4, atol=1e-4
        )


def test_a_run_trains_on_what_its_engine_recorded(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*SETTINGS, f"model.path={tiny_target_folder}", "features=offline", "steps=4", f"output_dir={tmp_path}"]

    def losses(name: str, *more: str) -> list[float]:
        run([*settings, f"run={name}", *more])
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [row["train/loss"] for row in rows if "train/loss" in row]

    def refuse(*arguments: object) -> None:
        raise AssertionError("features were computed a second time")

    needed: list[int] = []
    monkeypatch.setattr("train.preparation.prepare.refuse_small_disk", lambda folder, size: needed.append(size))
    with monkeypatch.context() as patch:
        patch.setattr("train.features.store.compute_features", refuse)
        taken = losses("taken", f"features.path={tmp_path / 'stores' / 'taken'}")
    assert re.search(r"those of 24 sequences were taken while they were generated", capsys.readouterr().err)
    assert [path.name for path in (tmp_path / "stores").iterdir()] == ["taken"]
    computed = losses("computed", "features.record=false", f"features.path={tmp_path / 'stores' / 'computed'}")
    assert taken == pytest.approx(computed, rel=1e-4)
    assert needed[0] == 0 < needed[1]  # the parts are deleted as the store is written
