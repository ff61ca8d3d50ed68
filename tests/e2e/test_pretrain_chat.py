"""The script that trains a target on conversations: it learns, resumes bit for bit, and exports a loadable target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infer.config import ModelConfig
from infer.engine import Engine
from infer.request import SamplingParams
from scripts import inflate_demo, pretrain_chat
from train.data.dialogue import provided_rows
from train.data.examples import Example
from train.data.sequences import Sequences

TINY = ["batch_tokens=256", "sequence_length=64", "warmup=1", "cooldown=0", "eval_every=4", "held_out_conversations=4"]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files that use different column names for the same things."""
    folder = tmp_path_factory.mktemp("conversations")
    sums = [{"question": f"{a}+{b}", "answer": f"{a + b}"} for a in range(12) for b in range(10)]
    turns = (("user", "say"), ("assistant", "no"))
    talks = [{"messages": [{"role": r, "content": f"{word} {n}"} for r, word in turns]} for n in range(40)]
    for name, rows in (("sums.jsonl", sums), ("talks.jsonl", talks)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [folder / "sums.jsonl", folder / "talks.jsonl"]


def run(folder: Path, model: Path, files: list[Path], *more: str) -> None:
    paths = f"path=[{','.join(map(str, files))}]"
    columns = "columns={prompt: question, response: [answer, output]}"
    overrides = [f"model={model}", paths, columns, f"folder={folder}/run", f"export={folder}/target"]
    pretrain_chat.main([*overrides, *TINY, *more])


def test_a_grown_target_learns_to_answer_and_resumes_bit_for_bit(tiny_target_folder, conversations, tmp_path, capsys):
    grown = tmp_path / "grown"
    command = ["--shape", "intermediate_size=160", "--model", str(tiny_target_folder), "--dtype", "float32"]
    assert inflate_demo.main([*command, str(grown)]) == 0
    run(tmp_path / "straight", grown, conversations, "steps=8")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    before, after = (result["nats"][moment] for moment in ("before", "after"))
    assert after["held_out"] < before["held_out"] - 1
    assert after["held_out_answers"] < before["held_out_answers"] - 1
    for steps in (4, 8):
        run(tmp_path / "resumed", grown, conversations, f"steps={steps}")
    first, second = (load_file(tmp_path / name / "target/model.safetensors") for name in ("straight", "resumed"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["model.layers.0.mlp.gate_proj.weight"].shape == (160, 64)

    folder = tmp_path / "straight/target"
    engine = Engine.load(ModelConfig(name="chat", path=str(folder), dtype="float32"))
    assert engine.tokenizer.render_chat([{"role": "user", "content": " 1+1\n"}]) == "# user: 1+1# assistant:"
    (completion,) = engine.generate(["1+1"], SamplingParams(max_tokens=4))
    assert completion.token_ids


def test_a_conversation_goes_on_from_its_own_ids(tiny_target_folder):
    """The template ends every response, so that the next prompt continues the last one's ids: both fit into one row."""
    tokenizer = pretrain_chat.with_template(tiny_target_folder)
    turns = [("user", "hi"), ("assistant", " yes "), ("user", "more?"), ("assistant", "no")]
    messages = tuple({"role": role, "content": content} for role, content in turns)
    (row,) = provided_rows(Example(messages=messages), tokenizer, 200)
    response_ids = [token for token, learned in zip(row.ids, row.loss_mask, strict=True) if learned]
    assert tokenizer.decode(response_ids, with_special=True) == " yes<|endoftext|> no<|endoftext|>"


def test_what_is_predicted_stays_in_its_document(tiny_target_folder):
    rows = [([1, 2, 3], [False, True, True]), ([4, 5], [False, True]), ([6, 7, 8, 9], [False, False, True, True])]
    sequences = Sequences.of(rows)
    batch = sequences.packed([[0, 1], [2]])
    labels = pretrain_chat.labels_of(batch, torch.tensor([5, 4]))
    nothing = pretrain_chat.NOT_PREDICTED
    assert labels.tolist() == [[2, 3, nothing, 5, nothing], [7, 8, 9, nothing, nothing]]
    response_labels = labels.masked_fill(~pretrain_chat.answered(batch), nothing)
    assert response_labels.tolist() == [[2, 3, nothing, 5, nothing], [nothing, 8, 9, nothing, nothing]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learn=prompts"], "learn=prompts"),
        (["batch_tokens=32"], "batch_tokens=32"),
        (["sequence_length=4096", "batch_tokens=4096"], "context of 512"),
        (["model=/nowhere"], "no such folder"),
        (["path=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["stepz=1"], "stepz"),
    ],
)
def test_a_mistake_names_the_key(overrides, message, tiny_target_folder, conversations, tmp_path):
    defaults = {"model": str(tiny_target_folder), "path": str(conversations[0]), "folder": str(tmp_path)}
    settings = defaults | {"columns": "{prompt: question, response: answer}"} | dict(o.split("=") for o in overrides)
    with pytest.raises(SystemExit, match=message):
        pretrain_chat.main([f"{key}={value}" for key, value in settings.items()])


def test_conversations_must_be_given(tiny_target_folder):
    with pytest.raises(SystemExit, match="path must be given"):
        pretrain_chat.main([f"model={tiny_target_folder}"])
