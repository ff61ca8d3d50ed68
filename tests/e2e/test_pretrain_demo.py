"""The script that made the demo target, on a few files: it resumes bit for bit, and transformers loads the result."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.demo import corpus
from models.demo.corpus import Document

ROOT = Path(__file__).resolve().parents[2]
TINY = ["layers=8", "hidden_size=32", "intermediate_size=64", "heads=2", "kv_heads=1", "vocab_size=512", "context=64"]
TINY += ["short_context=32", "batch_tokens=256", "warmup=1", "cooldown=0", "eval_every=2", "eval_tokens=256"]


@pytest.fixture
def pretrain(monkeypatch):
    spec = importlib.util.spec_from_file_location("pretrain_demo", ROOT / "scripts" / "pretrain_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    splits = {split: corpus.read_split(split)[:6] for split in ("train", "held_out")}
    monkeypatch.setattr(module, "read_split", splits.__getitem__)
    return module


def test_resuming_changes_no_bit_and_transformers_loads_the_export(pretrain, tmp_path, capsys):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    pretrain.main([*TINY, "steps=4", f"folder={straight}", f"export={tmp_path / 'demo'}"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["steps"] == 4
    assert 0 < document["bits_per_byte"] < 9
    for steps in (2, 4):
        pretrain.main([*TINY, f"steps={steps}", f"folder={resumed}", f"export={tmp_path / 'again'}"])
    first, second = load_file(tmp_path / "demo/model.safetensors"), load_file(tmp_path / "again/model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "demo")
    assert model.dtype == torch.bfloat16
    text = "def main():\n    return 1\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "bits per byte" in (tmp_path / "demo/README.md").read_text()


def test_a_mistake_names_the_key(pretrain, tmp_path):
    with pytest.raises(SystemExit, match="stepz"):
        pretrain.main(["stepz=3"])
    with pytest.raises(SystemExit, match="steps"):
        pretrain.main(["steps=many"])
    pretrain.main([*TINY, "steps=1", f"folder={tmp_path}", f"export={tmp_path / 'demo'}"])
    with pytest.raises(SystemExit, match="seed=1"):
        pretrain.main([*TINY, "steps=2", "seed=1", f"folder={tmp_path}", f"export={tmp_path / 'demo'}"])


def test_the_split_is_by_file():
    train, held_out = corpus.read_split("train"), corpus.read_split("held_out")
    assert all(isinstance(document, Document) for document in (*train, *held_out))
    names = [document.name for document in (*train, *held_out)]
    assert len(names) == len(set(names))
    assert 0.02 < len(held_out) / len(names) < 0.1
    assert all(corpus.is_held_out(document.name) for document in held_out)
    assert corpus.is_held_out("typing.py"), "the split must be the same everywhere"
