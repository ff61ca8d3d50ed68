"""The heads shipped with the repository: their targets, what they state about themselves, and their size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infer.engine import Engine
from infer.options.exported_heads import SHIPPED
from infer.request import SamplingParams
from models.fetching import MODELS, place_of
from models.heads.files import read_head

FOLDERS = sorted(path.parent for path in SHIPPED.glob("*/heads/*/config.json"))
BYTES = 40e6  # maximum for all heads of a target together


def test_there_is_one_for_every_target_that_is_fetched() -> None:
    assert {folder.parents[1].name for folder in FOLDERS} == set(MODELS)
    for name in MODELS:
        files = (SHIPPED / name / "heads").rglob("*.safetensors")
        assert 0 < sum(file.stat().st_size for file in files) < BYTES


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parents[1].name}-{folder.name}")
def test_it_says_what_it_is(folder: Path) -> None:
    checkpoint = read_head(folder)
    assert checkpoint.head == folder.name
    record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    assert record["target_fingerprint"] in (folder / "README.md").read_text(encoding="utf-8")
    assert record["config"]["model"]["path"] == f"package:{folder.parents[1].name}"
    assert record["git"]["dirty"] is False
    lengths = [record[key]["engine"] for key in ("acceptance_length", "acceptance_length_sampled")]
    stated = (folder.parents[1] / "README.md").read_text(encoding="utf-8")
    assert "{:.2f} at temperature 0, {:.2f} at temperature 1".format(*lengths) in " ".join(stated.split())


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_takes_it_and_drafts(name: str, tmp_path: Path) -> None:
    if not place_of(name).is_file():
        pytest.skip(f"python scripts/fetch_model.py {name} brings the target")
    prompts = ["def add(a, b):", "The capital of France is"]
    params = [SamplingParams(temperature=temperature, seed=1, max_tokens=24) for temperature in (0.0, 1.0)]
    completions = []
    for head in ("none", "auto"):
        engine = Engine.load(name, head=head, output_dir=str(tmp_path), proposer="auto" if head == "auto" else "none")
        try:
            completions.append(engine.generate(prompts, params))
        finally:
            engine.close()
    plain, drafted = completions
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in plain]
    assert sum(completion.stats.drafted for completion in drafted) > 0
