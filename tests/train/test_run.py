"""Complete runs on the tiny target: what they leave behind, and what they refuse."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from infer.config import GenerateConfig
from infer.console.command_words import HEAD_FOLDER, TARGET_FOLDER, interpreter
from infer.engine import Engine
from infer.graphs.cuda_graph import Graph
from infer.options.cli import compose
from infer.request import SamplingParams
from models.heads.eagle3.config import Eagle3Options
from models.heads.files import load_head
from models.targets import load_target
from models.tokenizer import Tokenizer
from tests.train.launching import ROOT, on_two_processes
from tests.train.running import assert_equal, run, tensors
from train import loop, schedule
from train.config import TrainConfig
from train.data.sequences import Sequences
from train.distributed.collectives import refuse_other_launch
from train.distributed.strategies import Replicated
from train.loop import Run, train
from train.publishing import publish
from train.publishing.trackers import read_metrics
from train.schedule import LEAST_UPDATES
from train.signals import Interrupted
from train.storage.run_folder import name_run, open_run, read_budget, resume_command, run_of_head, write_budget


@pytest.mark.usefixtures("plots")
def test_what_a_run_leaves_behind(
    settings: list[str], tmp_path: Path, tiny_target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run=one", "eval_every=20", "log_every=10", "tracker=tensorboard"]
    result = run(settings, *words, "license=mit")
    assert set(result) == {"run", "export", "acceptance_length", "gap", "seconds", "note"}
    assert result["note"].startswith(
        f"τ {result['acceptance_length']['engine']:.2f} after 30 updates means nothing yet: "
    )
    assert (result["run"], result["export"]) == ("one", str(tmp_path / "heads" / "demo" / "eagle3"))
    assert result["acceptance_length"]["simulated"] == result["acceptance_length"]["engine"] >= 1.0
    assert result["gap"] == 0.0
    files = {path.name for path in (tmp_path / "one").iterdir()}
    assert files == {"config.yaml", "schedule.json", "metrics.jsonl", "data", "checkpoints", "tensorboard"} | {
        "loss.png", ".run", "acceptance.png", "acceptance_by_depth.png",
    }  # fmt: skip
    assert {path.name for path in (tmp_path / "one" / "checkpoints").iterdir()} == {
        "latest", "best", "step-000020", "step-000025", "step-000030",
    }  # fmt: skip
    assert (tmp_path / "one" / "checkpoints" / "best").read_text() == "step-000020\n"

    rows = read_metrics(tmp_path / "one")
    trained = [row for row in rows if "train/loss" in row]
    evaluated = [row for row in rows if "eval/tau_engine" in row]
    assert [row["step"] for row in trained] == [10, 20, 30]
    assert [row["step"] for row in evaluated] == [0, 20, 30]
    assert {f"train/{name}_{step}" for name in ("loss", "accuracy", "overlap") for step in range(5)} < set(trained[0])
    assert {"train/lr", "train/grad_norm", "train/tokens", "train/tokens_per_s"} < set(trained[0])
    assert {"time/data", "time/target", "time/head", "time/optimizer", "train/memory_bytes"} < set(trained[0])
    assert all(0 < row["train/head_flops_per_s"] < 1e13 for row in trained)
    assert {"eval/loss", "eval/accuracy_0", "eval/overlap_4", "eval/coverage", "eval/gap"} < set(evaluated[0])
    assert all(row["eval/tau_simulated"] == row["eval/tau_engine"] for row in evaluated)
    assert evaluated[-1]["eval/loss"] < evaluated[0]["eval/loss"]

    log = capsys.readouterr().err
    topics = [line.split(" ")[0] for line in log.splitlines()]
    assert (topics.count("memory"), topics.count("disk")) == (2, 1)

    target = load_target(str(tiny_target_folder))
    head = load_head(Path(result["export"]), target=target)
    assert head.config.draft_vocab_size == 200
    assert head.t2d[0]  # the token that ends a text

    record = json.loads((Path(result["export"]) / "provenance.json").read_text())
    card = (Path(result["export"]) / "README.md").read_text()
    logged, met = (next(row for row in part if row["step"] == record["steps"]) for part in (trained, evaluated))
    learnt = Sequences.load(tmp_path / "one" / "data" / "train.safetensors").cut(40)
    for line in (
        "---\nlicense: mit\nlibrary_name: headway\ntags: [speculative-decoding, eagle3]\n---\n",
        f"fingerprint `{target.fingerprint}`",
        f"| **in the engine** | {met['eval/tau_engine']:.3f} | {record['acceptance_length_sampled']['engine']:.3f} |\n",
        *(f"| {place + 1} | {met[f'eval/acceptance_{place}']:.3f} (" for place in range(5)),
        "Chains of up to 5 tokens on 4 held-out prompts with up to 24 tokens each",
        "Trained for drafts of up to 5 tokens, measured up to 5.\n",
        f"The draft vocabulary has 200 of the target's 384 tokens, and {100 * met['eval/coverage']:.1f} % of",
        "\nNo speed was measured for this card: ",
        "- `demo corpus ",
        "28 rows were read: 24 to train on, 4 held out",
        "at these temperatures in turn (`temperatures=[0.0, 1.0]`, `top_k=0`, `top_p=1.0`, `max_new_tokens=24`).",
        f"{record['steps']} updates over {logged['train/tokens']:,} tokens, "
        f"{logged['train/tokens'] / len(learnt.ids):.1f} passes over the\n"
        f"{int(learnt.assistant.sum()):,} answer tokens;",
    ):
        assert line in card, line

    # repeated, it does not compute features again, and logs nothing twice
    again = run(settings, *words)
    assert again["acceptance_length"] == result["acceptance_length"]
    assert "features:" in log  # the progress bar
    assert "features:" not in capsys.readouterr().err
    assert read_metrics(tmp_path / "one") == rows
    events = EventAccumulator(str(tmp_path / "one" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 20, 30]


EAGLE3_KEYS = ("head.draft_vocab_size", "objective.steps", "eval_draft_tokens")  # what SETTINGS say for eagle3
HEADS = {
    "eagle": ["objective.steps=2", "objective.reduction=sequence"],
    "mtp": ["head.num_modules=2"],
    "medusa": ["head.draft_vocab_size=200", "objective.labels=hard"],
    "mlp": ["head.tie_weights=true"],
    "lstm": ["head.n_predict=4"],
    "p-eagle": ["head.draft_vocab_size=200", "head.num_depths=5"],
    "dflash": ["head.num_layers=2", "head.block_size=6", "objective.num_anchors=40"],
    "dspark": ["head.num_layers=1", "head.block_size=5", "head.markov_rank=32", "objective.weighting=dpace"],
    "dflash2": ["head.num_layers=1", "head.block_size=6", "head.selector_rank=32", "objective.loss=label"],
    "draft-model": ["head.num_layers=2"],
}


@pytest.mark.parametrize("head", HEADS)
def test_every_head_trains_resumes_and_is_exported(
    head: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Randomness in an objective depends on seed and step alone, so that a resumed run gives the same bits."""
    base = [item for item in settings if not item.startswith(EAGLE3_KEYS)]
    args = [*base, f"head={head}", *HEADS[head], "steps=6", "checkpoint_every=3", "eval_every=3", "eval_draft_tokens=3"]
    result = run(args, "run=whole")
    assert result["gap"] == 0.0
    folder = Path(result["export"])
    assert folder == tmp_path / "heads" / "demo" / head
    assert load_head(folder, name=head).config.name == head
    (serve,) = re.findall("python infer/serve.py .*", (folder / "README.md").read_text())
    words = [f"head={head}", f"head.path={HEAD_FOLDER}"]
    if head == "draft-model":
        words = ["head=none", "proposer=draft_model", f"proposer.draft_model={HEAD_FOLDER}"]
    assert shlex.split(serve)[2:] == ["model=demo", f"model.path={TARGET_FOLDER}", *words]
    rows = read_metrics(tmp_path / "whole")
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]

    real = Run._between_steps

    def stop(self: Run) -> None:
        real(self)
        if self.step == 3:
            raise Interrupted

    torn = [*args, "run=torn", f"head.path={tmp_path / 'torn-head'}"]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_between_steps", stop)
        assert train(compose("train", TrainConfig, torn), torn) is None
    run(torn)
    straight, resumed = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "torn-head"))
    assert_equal(straight, resumed)


def test_a_draft_model_is_served_as_the_last_line_says(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [item for item in settings if not item.startswith(EAGLE3_KEYS)]
    overrides = [*base, "head=draft-model", "steps=30", "eval_draft_tokens=3", "eval_prompts=8", "optim.lr=0.005"]
    result = run(overrides, "run=distilled")
    (serve,) = re.findall("serve it: .*infer/serve.py (.*)", "".join(capsys.readouterr()))
    words = [word for word in shlex.split(serve) if not word.startswith("model.dtype")]
    assert words[-2:] == ["proposer=draft_model", f"proposer.draft_model={result['export']}"]
    config = compose("generate", GenerateConfig, [*words, "proposer.adaptive=false", "engine.draft_weights=same"])
    engine = Engine.load(config.model, None, config.engine, config.proposer)
    assert engine.draft_model is not None
    assert engine.draft_model.config.model.num_layers == 2, "a quarter of the target's layers"
    prompts = [[5, 6, 7, index] for index in range(1, 9)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    drafted = engine.generate(prompts, params)
    engine.set_proposer("none")
    assert [one.token_ids for one in drafted] == [one.token_ids for one in engine.generate(prompts, params)]
    stats = engine.stats.speculation
    assert stats.accepted_by_position[0] > stats.drafted_by_position[0] / 20, "chance gives one of 384"
    kept, target = (load_file(Path(place) / "model.safetensors") for place in (result["export"], config.model.path))
    assert kept.keys() < target.keys()
    frozen = {name for name, tensor in kept.items() if torch.equal(tensor, target[name])}
    assert frozen == {"model.embed_tokens.weight", "lm_head.weight"}
    assert Tokenizer.load(result["export"]).backend.get_vocab() == engine.tokenizer.backend.get_vocab()


@pytest.mark.parametrize(("head", "other"), [("mlp", "tie_weights=true"), ("lstm", "tie_lstm_embs=false")])
def test_a_speculator_is_trained_in_two_stages(head: str, other: str, settings: list[str], tmp_path: Path) -> None:
    """IBM's recipe: first on text, then on the target's own output, starting from the head of the first stage."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"{chr(97 + index)} = lambda x: x + {index}"}) + "\n" for index in range(20))
    )
    base = [item for item in settings if not item.startswith((*EAGLE3_KEYS, "data."))]
    overrides = [*base, f"head={head}", "head.n_predict=3", "eval_draft_tokens=3", "steps=4", "optim.lr=0.002"]
    first = run([*overrides, "data=files", f"data.path={texts}", "data.responses=given"], "run=text")
    stage_1 = load_file(Path(first["export"]) / "model.safetensors")
    elsewhere = f"head.path={tmp_path / 'second'}"
    more = [*overrides, "data.num_sequences=8", "data.max_new_tokens=12", "data.prompt_tokens=8", elsewhere]
    run([*more, f"head.start_from={first['export']}"], "run=own", "optim.lr=1e-12")
    for name, value in load_file(tmp_path / "second" / "model.safetensors").items():
        torch.testing.assert_close(value, stage_1[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"head.start_from=.*give the keys of head= that it was trained with"):
        run([*more, f"head.start_from={first['export']}", f"head.{other}"], "run=other")


def test_updates_that_are_not_finite_are_left_out_and_end_the_run(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MOST_SKIPPED", 3)
    with pytest.raises(
        ValueError, match=r"step \d+: the (loss|gradient norm) is (nan|inf), the 3\. time in a row"
    ) as error:
        run(settings, "run=hot", "optim.lr=1e30", "checkpoint_every=1")
    step = int(str(error.value).split(":")[0].removeprefix("step "))
    checkpoint = tmp_path / "hot" / "checkpoints" / f"step-{step - 3:06d}"
    assert f"Last good checkpoint: {checkpoint}" in str(error.value)
    assert re.search(r"here in sequences (\d+, ){8}\.\.\.", str(error.value))
    assert all(value.isfinite().all() for value in load_file(checkpoint / "module.safetensors").values())
    assert not (tmp_path / "heads").exists()
    rows = read_metrics(tmp_path / "hot")
    assert [row["train/skipped_steps"] for row in rows if "train/skipped_steps" in row] == [1, 2]


def test_one_bad_update_changes_nothing(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Replicated._clip
    norms = []

    def clip(self: Replicated) -> float:
        norms.append(real(self))
        if len(norms) == 3:
            before.update({name: value.clone() for name, value in self.state().module.items()})
            return math.inf
        if len(norms) == 4:
            assert_equal(before, self.state().module)
        return norms[-1]

    before: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(Replicated, "_clip", clip)
    run(settings, "run=one", "steps=5", "eval_every=3")
    assert (tmp_path / "one" / "checkpoints" / "best").read_text() == "step-000003\n"
    assert "step 3 skipped: the gradient norm is not finite" in capsys.readouterr().err
    rows = read_metrics(tmp_path / "one")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 4, 5]
    assert [row["step"] for row in rows if "train/skipped_steps" in row] == [3]
    state = json.loads((tmp_path / "one" / "checkpoints" / "step-000005" / "state.json").read_text())
    assert state["skipped"] == 1


def test_the_head_that_drafted_best_is_exported(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learning rate ruins the head after it was good."""
    real = schedule.learning_rate
    monkeypatch.setattr(schedule, "learning_rate", lambda step, *rest: real(step, *rest) * (1 if step < 24 else 3000))
    overrides = [*settings, "eval_every=12", "checkpoint_every=100", "keep_checkpoints=1"]
    result = run(overrides, "run=one")
    taus = {row["step"]: row["eval/tau_engine"] for row in read_metrics(tmp_path / "one") if "eval/tau_engine" in row}
    assert taus[30] < taus[24]
    best = max((12, 24), key=lambda step: (taus[step], -step))
    assert f"exporting the head of step {best}, τ {taus[best]:.3f} in the engine" in capsys.readouterr().err
    assert result["acceptance_length"]["engine"] == pytest.approx(taus[best], abs=1e-4)
    provenance = json.loads((tmp_path / "heads" / "demo" / "eagle3" / "provenance.json").read_text())
    assert provenance["steps"] == best


def test_graphs_are_captured_for_the_first_evaluation_only(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures, counts, capture, evaluate = [0], [], Graph.__init__, Run._evaluate

    def counted(graph: Graph, *parts: Any) -> None:
        captures[0] += 1
        capture(graph, *parts)

    def evaluated(training_run: Run) -> float:
        tau = evaluate(training_run)
        counts.append(captures[0])
        return tau

    monkeypatch.setattr(Graph, "__init__", counted)
    monkeypatch.setattr(Run, "_evaluate", evaluated)
    run([*settings, "engine.graphs=on", "steps=6", "eval_every=2"])
    assert len(counts) == 3
    assert {*counts, captures[0]} == {counts[0]}, "publishing measures with the same graphs"
    assert counts[0] > 0


def test_minutes_become_steps_once(settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(settings, "run=one", "minutes=0.5", "steps=3", "accumulate=2", "batch_size=3")
    assert decided(tmp_path / "one") == 3
    run(settings, "run=short", "minutes=0.001", "steps=null")
    assert decided(tmp_path / "short") == LEAST_UPDATES
    assert f"there is time for 1 updates; up to {LEAST_UPDATES} are made" in capsys.readouterr().err
    budget = read_budget(tmp_path / "short")
    assert budget is not None
    more = LEAST_UPDATES + 2
    write_budget(tmp_path / "short", replace(budget, decided=more))  # as if it had been measured then
    run(settings, "run=short", "minutes=0.001", "steps=null")
    assert max(row["step"] for row in read_metrics(tmp_path / "short")) == more


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_to_measure_an_update_changes_nothing(optim: str, settings: list[str], tmp_path: Path) -> None:
    words = [*settings, f"optim={optim}", "steps=3", "overwrite=true"]
    heads = []
    for budget in ("minutes=null", "minutes=60"):
        run(words, budget, f"run={budget[8:]}")
        heads.append(tensors(tmp_path))
    for name, value in heads[0].items():
        assert torch.equal(value, heads[1][name]), name


def decided(folder: Path) -> int:
    budget = read_budget(folder)
    assert budget is not None
    return budget.decided


def write_rows(folder: Path) -> Path:
    rows: list[Any] = [{"prompt": f"def f{index}(x):"} for index in range(6)]
    turns = ["user", "assistant", "user", "assistant"]
    rows += [{"messages": [{"role": role, "content": f"say {n}"} for role in turns]} for n in range(6)]
    rows += [{"input_ids": list(range(5, 20)), "loss_mask": [0] * 5 + [1] * 10}, {"title": "no"}]
    rows += [{"question": "which?"}]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "data.jsonl"


def test_data_of_ones_own(settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [item for item in settings if not item.startswith("data.prompt_tokens")]
    overrides += ["data=files", f"data.path={write_rows(tmp_path)}", "data.held_out_share=0.2", "run=own", "steps=2"]
    overrides += ["data.columns={prompt: question}"]
    result = run(overrides, "stage=regenerate")
    err = capsys.readouterr().err
    assert f"left out: {tmp_path / 'data.jsonl'}, line 14: must hold one of input_ids, messages" in err
    assert "15 rows read (7 prompt, 6 messages, 1 input_ids): " in err
    counts = result["counts"]
    num_train, held_out, dropped = (counts["rows"][key] for key in ("train", "held_out", "dropped"))
    assert counts["rows"]["read"] == 15 == num_train + held_out + sum(dropped.values())
    assert dropped["bad"] == 1
    assert counts["answers"] == {"conversations": num_train, "done": num_train, "skipped": 0, "failed": 0}
    assert not (tmp_path / "own" / "checkpoints").exists()
    assert run(overrides)["gap"] == 0.0
    assert "the target continues" not in capsys.readouterr().err
    trained = run([word for word in overrides if "max_new_tokens" not in word], "data.responses=given", "run=given")
    assert trained["gap"] == 0.0


def test_a_loss_over_no_slot_is_undefined(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft vocabulary of the end token alone, which no held-out response reaches."""
    run(settings, "run=one", "steps=2", "head.draft_vocab_size=1")
    for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert row.get("eval/loss", row.get("train/loss")) is None
        assert row.get("eval/coverage", 0) == 0
        assert {row[name] for name in row if "accuracy" in name} == {0.0}
    rows = read_metrics(tmp_path / "one")
    assert all(math.isnan(row["eval/loss"]) for row in rows if "eval/loss" in row)
    log = capsys.readouterr().err
    assert "held-out loss undefined (coverage 0.0 %, no slot lies inside the draft vocabulary)" in log
    assert "loss undefined, " in log
    assert "0.000 (coverage" not in log


def test_losses_of_draft_vocabularies_are_means_over_what_they_cover(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that gives all its tokens the same probability has log(size), however few slots it covers."""
    monkeypatch.setattr(Eagle3Options, "starts_from_target", False)
    for size in (20, 100, 384):
        run(
            settings,
            f"run=v{size}",
            "steps=1",
            f"head.draft_vocab_size={size}",
            "objective.loss=ce",
        )
    rows = {size: read_metrics(tmp_path / f"v{size}")[0] for size in (20, 100, 384)}
    assert rows[20]["eval/coverage"] < rows[100]["eval/coverage"] < rows[384]["eval/coverage"] == 1
    for size, row in rows.items():
        assert row["eval/loss_0"] == pytest.approx(math.log(size), rel=0.1)


def test_sequences_must_hold_a_response(settings: list[str]) -> None:
    with pytest.raises(ValueError, match=r"sequence_length=13: cuts every sequence before its second generated token"):
        run(settings, "run=one", "sequence_length=13")


def test_bf16_autocast_trains(settings: list[str], tmp_path: Path) -> None:
    run(settings, "run=one", "precision=bf16", "steps=10")
    losses = [row["eval/loss"] for row in read_metrics(tmp_path / "one") if "eval/loss" in row]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        ["head=p-eagle", *HEADS["p-eagle"], "objective.ratio=1.0"],  # no sample, which each process would draw anew
    ],
    ids=lambda value: value[0],
)
def test_two_processes_train_a_head_like_one(head: list[str], settings: list[str], tmp_path: Path) -> None:
    """As tests/train/test_parallel_modes.py, for a head with an extra parameter."""
    args = [*(item for item in settings if not item.startswith(EAGLE3_KEYS)), "steps=4", "eval_draft_tokens=3", *head]
    run(args, "run=single", "batch_size=8", f"output_dir={tmp_path / 'elsewhere'}")
    double = [*args, "parallel=ddp", "run=double", "batch_size=4"]
    summary = json.loads(on_two_processes(ROOT / "train" / "run.py", *double).splitlines()[-1])
    assert (summary["run"], summary["gap"]) == ("double", 0.0)
    single, double = (read_metrics(folder) for folder in (tmp_path / "elsewhere" / "single", tmp_path / "double"))
    for key in ("train/loss", "train/loss_3", "train/accuracy_0", "train/grad_norm", "train/tokens"):
        values = [[row[key] for row in rows if key in row] for rows in (single, double)]
        assert len(values[0]) == 4
        assert values[1] == pytest.approx(values[0], rel=2e-3), key


def test_launches_that_only_look_distributed_are_refused(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ddp", "fsdp", "zero2", "zero3"):
        with pytest.raises(ValueError, match=f"parallel={name}: started as a single process; start it with torchrun"):
            run(settings, f"parallel={name}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="parallel=single: started as 2 processes; say parallel=ddp"):
        run(settings)


@pytest.mark.parametrize(
    ("name", "kind", "world", "error"),
    [
        ("ddp", "FSDP", 2, "parallel=ddp: accelerate was told to use FSDP, and not MULTI; start it with torchrun"),
        ("fsdp", "DEEPSPEED", 2, "parallel=fsdp: accelerate was told to use DEEPSPEED, and not MULTI;"),
        ("ddp", "NO", 2, "parallel=ddp: accelerate was told to use NO"),
        ("zero2", "MULTI_GPU", 2, "parallel=zero2: accelerate was told to use MULTI_GPU, and not DEEPSPEED"),
        ("single", "MULTI_CPU", 1, "parallel=single: accelerate was told to use MULTI_CPU"),
        ("ddp", "MULTI_CPU", 4, "parallel=ddp: WORLD_SIZE says 4 processes, accelerate found 2"),
        ("ddp", "MULTI_CPU", 2, None),
        ("fsdp", "MULTI_GPU", 2, None),
        ("zero3", "DEEPSPEED", 2, None),
    ],
)
def test_what_accelerate_was_told_elsewhere_is_refused(name: str, kind: str, world: int, error: str | None) -> None:
    accelerator: Any = types.SimpleNamespace(
        distributed_type=DistributedType(kind), num_processes=min(world, 2), gradient_accumulation_steps=1
    )
    with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
        refuse_other_launch(accelerator, name, world)


def test_accelerates_own_accumulation_is_refused(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would divide every loss once more."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(ValueError, match="accelerate was told to accumulate over 4 steps; say accumulate=4 instead"):
        run(settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there(settings: list[str]) -> None:
    with pytest.raises(ValueError, match=r"model.device=cuda: torch sees no CUDA device here; say model.device=cpu"):
        run(settings, "model.device=cuda")


def test_runs_without_a_name_get_one(settings: list[str], tmp_path: Path) -> None:
    config = compose("train", TrainConfig, settings)
    first = name_run(config).run
    assert first is not None
    assert first.startswith("demo-eagle3-20")
    (tmp_path / first).mkdir()
    assert name_run(config).run != first


def test_the_command_to_resume_can_be_pasted() -> None:
    config = compose("train", TrainConfig, ["run=x"])
    command = resume_command(config, ["head=eagle3", "run=x", "data.temperatures=[0.0, 1.0]"])
    assert command == f"{interpreter()} train/run.py head=eagle3 'data.temperatures=[0.0, 1.0]' run=x"
    launcher, arguments = resume_command(config, [], 2).split(" --nproc_per_node ")
    assert launcher in ("torchrun", f"{interpreter()} -m torch.distributed.run")
    assert arguments == "2 train/run.py run=x"


def test_missing_weights_and_unknown_models_are_named(settings: list[str], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"model=.*empty: the folder has no config.json"):
        run(settings, f"model.path={empty}")
    with pytest.raises(ValueError, match=r"model=no-such-folder: no such folder"):
        run(settings, "model.path=no-such-folder")


def test_another_runs_head_is_replaced_only_where_one_says_so(settings: list[str], tmp_path: Path) -> None:
    overrides = [*settings, "overwrite=false", "steps=1"]
    first = run(overrides, "run=first")
    again = run(overrides, "run=first")
    assert again["export"] == first["export"]
    refusal = r"heads.demo.eagle3: holds the head of run first, .* head\.path=.* overwrite=true .* run= "
    for more in (["run=second"], ["run=second", "check=true"]):
        with pytest.raises(ValueError, match=refusal):
            run(overrides, *more)
    assert not (tmp_path / "second").exists()
    run(overrides, "run=second", "stage=regenerate")
    run(overrides, "run=second", f"head.path={tmp_path / 'elsewhere'}")
    run(overrides, "run=third", "overwrite=true")
    with pytest.raises(ValueError, match="holds the head of run third"):
        run(overrides, "run=first")
    (tmp_path / "heads" / "demo" / "eagle3" / "provenance.json").unlink()
    with pytest.raises(ValueError, match="holds a head that no run of ours exported"):
        run(overrides, "run=third")


def test_two_runs_that_begin_together_replace_no_head_of_each_other(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, export = [*settings, "overwrite=false", "steps=1"], publish.export_head
    place = tmp_path / "heads" / "demo" / "eagle3"
    run(overrides, "run=first")
    other = place.rename(tmp_path / "other")

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        if not place.exists():
            other.rename(place)  # by the other run, which ends a little earlier
        return export(*arguments, **options)

    monkeypatch.setattr(publish, "export_head", meanwhile)
    place = tmp_path / "heads" / "demo" / "eagle3"
    with pytest.raises(
        ValueError, match=rf"eagle3: holds the head of run first, .* is in {place}-second; .* run=second"
    ):
        run(overrides, "run=second")
    assert run_of_head(place) == "first"
    assert run_of_head(tmp_path / "heads" / "demo" / "eagle3-second") == "second"
    assert (tmp_path / "second" / "metrics.jsonl").is_file()
    assert run(overrides, "run=second", "overwrite=true")["export"] == str(place)
    assert run_of_head(place) == "second"


def test_two_runs_in_one_folder_are_refused(settings: list[str], tmp_path: Path) -> None:
    config = compose("train", TrainConfig, [*settings, "run=one"])
    with open_run(config), pytest.raises(ValueError, match=r"run=one: another process is training in"):
        run(settings, "run=one", "steps=1")
    run(settings, "run=one", "steps=1")


def test_a_head_may_lie_in_the_folder_of_its_run(settings: list[str], tmp_path: Path) -> None:
    """An export locks the folder around the head, which must not be what the run itself has locked."""
    place = tmp_path / "one" / "head"
    assert run(settings, "run=one", "steps=1", f"head.path={place}")["export"] == str(place)
