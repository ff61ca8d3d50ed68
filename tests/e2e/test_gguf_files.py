"""A GGUF file end to end: texts with and without speculation, and a head trained for it and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.checkpoint import fingerprint
from tests.gguf_writing import write_gguf
from tests.train.running import SETTINGS, run


@pytest.fixture(scope="module")
def file(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(tiny_target_folder, path, tokenizer=True)
    return path


def engine_of(file: Path, proposer: str, requests: int, **more: Any) -> Engine:
    drafts = ProposerConfig(name=proposer, adaptive=False)
    config = EngineConfig(max_batch=requests, max_tokens_in_cache=2048)
    model = ModelConfig(name="tiny", path=str(file), dtype="float32")
    return Engine.load(model, proposer=drafts, engine=config, **more)


def test_drafts_change_no_token_of_a_file(file):
    prompts = ["def wrap(text", "import re\nimport re\nimport re\n", "self.width = self", "class"]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    plain = [completion.token_ids for completion in engine_of(file, "none", 1).generate(prompts, params)]
    drafted = 0
    for proposer in ("none", "ngram", "suffix"):
        for requests in (1, 4) if proposer != "none" else (4,):
            completions = engine_of(file, proposer, requests).generate(prompts, params)
            assert [completion.token_ids for completion in completions] == plain, (proposer, requests)
            drafted += sum(completion.stats.drafted for completion in completions)
    assert drafted > 0


def test_a_head_is_trained_for_a_file_and_served(file, tmp_path):
    settings = [*SETTINGS, f"model.path={file}", f"output_dir={tmp_path}", "steps=6", "head=eagle3", "run=one"]
    result = run(settings, "model=demo")
    head = Path(result["export"])
    record = json.loads((head / "provenance.json").read_text(encoding="utf-8"))
    assert record["target_fingerprint"] == fingerprint(file)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = ["def wrap(text", "class"]
    plain = [completion.token_ids for completion in engine_of(file, "none", 2).generate(prompts, params)]
    completions = engine_of(file, "head", 2, head=str(head)).generate(prompts, params)
    assert [completion.token_ids for completion in completions] == plain
    assert sum(completion.stats.drafted for completion in completions) > 0
