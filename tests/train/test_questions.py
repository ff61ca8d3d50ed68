"""Rows of a user's turns alone, as MT-Bench's, Spec-Bench's and EAGLE's question files have: every turn is answered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas
import pytest

from infer.engine import Engine
from infer.options.cli import compose
from infer.request import SamplingParams
from models.tokenizer import Tokenizer
from scripts.benchmarks.config import EvaluateConfig
from scripts.benchmarks.evaluate import prompt_sets
from train.config import FilesDataConfig, TrainConfig
from train.data.examples import Example, parse_row
from train.data.sequences import Sequences
from train.data.sources import read_items
from train.loop import train
from train.publishing.trackers import read_metrics

# raises where roles do not alternate, as Gemma's and Llama 2's do
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFERENCE = ["the answer", "the other"]


def questions(number: int) -> list[str]:
    return [f"say {number}", f"and {number} more"]


FILES = {
    "question.jsonl": lambda n: {"question_id": 81 + n, "category": "writing", "turns": questions(n)},
    "spec.jsonl": lambda n: {"question_id": n, "category": "math", "turns": questions(n), "reference": REFERENCE},
    "mt_bench_prompts.parquet": lambda n: {"prompt_id": n, "prompt": questions(n), "reference": REFERENCE},
    "turns.parquet": lambda n: {"turns": questions(n), "category": "qa", "reference": None},
}


@pytest.fixture
def folder(tiny_target_folder: Path, tmp_path: Path) -> Path:
    """The tiny target with a template of alternating roles."""
    folder = Path(shutil.copytree(tiny_target_folder, tmp_path / "target"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(ALTERNATES)
    return folder


def write(path: Path, count: int = 8) -> Path:
    rows = [FILES[path.name](number) for number in range(count)]
    if path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


def dialogue(tokenizer: Tokenizer, first: str, answer: list[int], second: str) -> list[int]:
    """Return the second prompt of a dialogue, in which the answer stands as a client reads it."""
    text = tokenizer.decode(answer[:-1] if answer[-1] in tokenizer.eos_ids else answer)
    turns = [("user", first), ("assistant", text), ("user", second)]
    return tokenizer.apply_chat_template([{"role": role, "content": content} for role, content in turns])


def check_dialogues(sequences: Sequences, tokenizer: Tokenizer) -> None:
    """Assert that each two rows are the turns of one dialogue."""
    rows = [sequences.row(number) for number in range(len(sequences))]
    parts = [(ids[~mask].tolist(), ids[mask].tolist()) for ids, mask in rows]
    for (first, answer), (second, _) in zip(parts[::2], parts[1::2], strict=True):
        number = tokenizer.decode(first).split("say ")[1].split("\n")[0]
        assert second == dialogue(tokenizer, f"say {number}", answer, f"and {number} more")


@pytest.mark.parametrize("name", FILES)
def test_published_files_are_questions(name: str, tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = FilesDataConfig(name="files", path=str(write(tmp_path / name, 3)))
    items = read_items(data, held_out=False)
    assert items is not None
    examples = [parse_row(item.row, data, tiny_tokenizer)[1] for item in items]
    turns = [tuple({"role": "user", "content": text} for text in questions(number)) for number in range(3)]
    assert examples == [Example(messages=messages, questions=True) for messages in turns]


@pytest.mark.usefixtures("plots")
@pytest.mark.parametrize("name", ["question.jsonl", "mt_bench_prompts.parquet"])
def test_every_turn_is_planned_answered_and_measured(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"model.path={folder}", f"output_dir={tmp_path}", "run=one", "data=files",
        f"data.path={write(tmp_path / name)}",
        "data.held_out_share=0.2", "data.max_new_tokens=6", "eval_prompts=2", "eval_max_tokens=5", "steps=1",
        "minutes=null", "sequence_length=80", "objective.steps=2", "eval_draft_tokens=2", "tracker=none",
        "engine.max_tokens_in_cache=2048", "head.draft_vocab_size=200", "precision=fp32", "data.temperatures=[0.0]",
    ]  # fmt: skip
    planned = train(compose("train", TrainConfig, [*words, "check=true"]))
    assert planned is not None
    result = train(compose("train", TrainConfig, words), words)
    assert result is not None
    assert result["gap"] == 0.0
    assert "left out" not in capsys.readouterr().err.replace("left out: none", "").replace("held-out side", "")
    learnt, held_out = (Sequences.load(tmp_path / "one" / "data" / f"{s}.safetensors") for s in ("train", "held_out"))
    rows = planned["check"]["rows"]
    assert planned["check"]["answers"] == len(learnt.by_turn()) == 2 * rows["train"]
    tokenizer = Tokenizer.load(folder)
    check_dialogues(learnt.by_turn(), tokenizer)
    assert len(held_out) == 2 * rows["held_out"]
    check_dialogues(held_out, tokenizer)
    (evaluated,) = [row for row in read_metrics(tmp_path / "one") if row["step"] == 1 and "eval/tau_engine" in row]
    assert evaluated["eval/tau_engine"] == evaluated["eval/tau_simulated"]
    assert json.loads((Path(result["export"]) / "provenance.json").read_text())["held_out_prompts"] == len(held_out)


def test_evaluate_asks_every_question_behind_the_answers(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "question.jsonl", 3)
    with path.open("a") as file:
        file.write("\n" + json.dumps({"turns": ["alone"]}))
    words = [f"model.path={folder}", f"files=[{path}]", "num_prompts=4", "max_tokens=5", "head=eagle3"]
    config = compose("evaluate", EvaluateConfig, words)
    engine = Engine.load(config.model, "none", config.engine, "none", profile=False)
    ((_, _, prompts),) = prompt_sets(config, engine)
    assert len(prompts) == 2 * 3 + 1
    assert engine.tokenizer is not None
    for number, (one, two) in enumerate(zip(prompts[:6:2], prompts[1:6:2], strict=True)):
        messages = [{"role": "user", "content": f"say {number}"}]
        assert one == engine.tokenizer.apply_chat_template(messages)
        (answer,) = engine.generate([one], SamplingParams(max_tokens=config.max_tokens))
        assert two == dialogue(engine.tokenizer, f"say {number}", answer.token_ids, f"and {number} more")


@pytest.mark.parametrize(
    ("row", "message"),
    [({"turns": ["a", 5]}, "turns must be a text"), ({"prompt": ["a", {"x": 1}]}, "prompt must be a text")],
)
def test_a_question_that_is_no_text_ends_the_row(row: dict, message: str, tiny_tokenizer: Tokenizer) -> None:
    _, example = parse_row(row, FilesDataConfig(name="files", path="x"), tiny_tokenizer)
    assert example.cut is not None
    assert example.cut.startswith(message)
    assert len(example.messages) == 1
