"""generate.py as a user runs it: texts, colors, the comparison, mistakes, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer.config import GenerateConfig
from infer.console.display import use_color
from infer.generate import run
from infer.options.cli import compose
from infer.options.exported_heads import with_head

ROOT = Path(__file__).resolve().parents[2]
GREEN, RESET = "\x1b[32m", "\x1b[0m"
Generate = Callable[..., str]


@pytest.fixture
def overrides(tiny_target_folder: Path, tiny_head_folder: Path) -> list[str]:
    """Return overrides that replace the demo by the tiny random target and its head; tokenizer and corpus match."""
    return [
        "model=demo",
        f"model.path={tiny_target_folder}",
        f"head.path={tiny_head_folder}",
        "model.device=cpu",
        "engine.max_batch=4",
        "max_tokens=24",
        "num_prompts=3",
        "prompt_tokens=16",
        "ignore_eos=true",
        "chat=false",  # the tiny target has a template
    ]


@pytest.fixture
def generate(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> Generate:
    def call(*extra: str) -> str:
        run(with_head(compose("generate", GenerateConfig, [*overrides, *extra])))
        return capsys.readouterr().out

    return call


def expected_text(folder: Path, prompt: str, **sampling: Any) -> str:
    from infer.config import ModelConfig, ProposerConfig
    from infer.engine import Engine
    from infer.request import SamplingParams

    engine = Engine.load(ModelConfig(name="tiny", path=str(folder)), proposer=ProposerConfig(name="none"))
    params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)
    return engine.generate([prompt], params)[0].text or ""


def test_a_prompt_is_continued_and_a_card_follows(generate: Generate, tiny_target_folder: Path) -> None:
    text = expected_text(tiny_target_folder, "def wrap(")
    out = generate("prompt='def wrap('")
    assert out.startswith("def wrap(" + text + "\n")
    card = out.removeprefix("def wrap(" + text)
    assert "\x1b" not in out
    assert re.search(r"speculation +head eagle3 from", card)
    assert re.search(r"end tokens +0 <\|endoftext\|>", card)
    assert re.search(r"tokens +24 in", card)
    for row in ("tokens/s", "acceptance length τ", "acceptance by position", "greedy"):
        assert row in card


def test_a_prompt_goes_into_the_template_of_a_model_that_has_one(
    generate: Generate, tiny_target_folder: Path, tiny_tokenizer: Any
) -> None:
    rendered = tiny_tokenizer.render_chat([{"role": "user", "content": "def wrap("}])
    text = expected_text(tiny_target_folder, rendered)
    out = generate("prompt='def wrap('", "chat=null")
    assert out.startswith(rendered + text + "\n")
    assert re.search(r"prompt +a user's message, in the model's chat template", out)
    assert re.search(r"memory +weights", out)
    assert re.search(r"prompt +a plain text\n", generate("prompt='def wrap('"))


def test_color_marks_accepted_tokens_and_changes_nothing_else(generate: Generate) -> None:
    arguments = (
        "prompt='x = 1; x = 1; x = 1; x = 1; x = 1;'",
        "proposer=ngram",
        "proposer.adaptive=false",
        "max_tokens=60",
    )
    plain, color = generate(*arguments), generate(*arguments, "color=always")
    assert GREEN in color
    body = color[: color.index("demo, float32")]
    uncolored = re.sub(r"\x1b\[\d+m", "", body)
    original = plain[: plain.index("demo, float32")]
    unsafe = str.maketrans({code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"})
    assert uncolored == original.translate(unsafe)
    assert "green: accepted draft tokens" in color


def test_seeded_sampling_repeats(generate: Generate) -> None:
    first, again, reseeded = (generate("prompt=a", "temperature=1", f"seed={seed}") for seed in (4, 4, 5))
    texts = [out[: out.index("demo, float32")] for out in (first, again, reseeded)]
    assert texts[0] == texts[1] != texts[2]
    assert "seed 4" in first


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_several_prompts_come_in_order(generate: Generate, tmp_path: Path, batch: int) -> None:
    prompts = ["def first(", "class Second", "import third"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(prompts) + "\n")
    out = generate(f"prompts_file={file}", f"batch={batch}")
    assert re.findall(r"^\[(\d)/3\]$", out, re.M) == ["1", "2", "3"]
    indices = [out.index(prompt) for prompt in prompts]
    assert indices == sorted(indices)
    alone = [generate(f"prompt='{prompt}'") for prompt in prompts]
    for text in alone:
        assert text[: text.index("\n\ndemo, float32")].strip("\n") in out


def test_without_a_prompt_the_demo_s_held_out_files_are_used(generate: Generate, tiny_tokenizer: Any) -> None:
    from models.demo.corpus import held_out_prompts

    out = generate("proposer=none")
    for ids in held_out_prompts(tiny_tokenizer, 3, 16):
        assert tiny_tokenizer.decode(ids) in out
    assert "acceptance" not in out


@pytest.mark.parametrize("sampling", [[], ["temperature=0.8", "seed=3", "batch=2"]])
def test_compare_ends_with_one_json_line(generate: Generate, sampling: list[str]) -> None:
    out = generate("compare=true", *sampling)
    *card, line = out.splitlines()
    document = json.loads(line)
    assert list(document) == [
        "identical",
        "acceptance_length",
        "acceptance_by_position",
        "tokens_per_s",
        "ratio",
        "prompts",
        "tokens",
    ]
    assert document["identical"] is True
    assert card[-1] == "identical token ids: yes"
    assert document["acceptance_length"] >= 1
    assert document["prompts"] == 3
    assert document["tokens"] == 3 * 24
    assert set(document["tokens_per_s"]) == {"off", "on"}
    assert document["ratio"]["low"] <= document["ratio"]["median"] <= document["ratio"]["high"]
    checks = next(row for row in card if "compared" in row)
    assert "greedy: yes" in checks
    assert re.search(r"temperature [\d.]+, seed \d+: yes", checks)


def test_a_difference_is_reported_and_fails(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One wrong token is put into the plain run of the second prompt."""
    from infer.engine import Engine

    real = Engine.generate
    calls = 0

    def faulty(self: Engine, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        completions = real(self, *arguments, **options)
        if self.proposer_name == "none" and len(completions[0].token_ids) == 24:
            calls += 1
            if calls == 3:
                ids = completions[0].token_ids
                completions[0] = replace(completions[0], token_ids=[*ids[:-1], (ids[-1] + 1) % 384])
        return completions

    monkeypatch.setattr(Engine, "generate", faulty)
    with pytest.raises(SystemExit) as caught:
        generate("compare=true")
    assert caught.value.code == 1
    *_, verdict, document = capsys.readouterr().out.splitlines()
    assert verdict == "identical token ids: no"
    assert json.loads(document)["identical"] is False


def test_spread_is_median_and_quartiles() -> None:
    from infer.console.compare import Spread

    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 10.0]) == Spread(3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["model.name=other"], "prompt: model=other brings no prompts"),
        (["prompts_file=no/such/file"], "prompts_file=no/such/file: cannot be read"),
        (["prompt=a", "head.path=no/such/head"], "no/such/head"),
        (["prompt=a", "model.path=no/such/model"], "no/such/model"),
        (["prompt=a", "proposer=suffix", "proposer.memory=/proc/answers"], "/proc/answers: cannot be written"),
        (["prompt=a", "proposer=suffix", "proposer.memory=README.md"], "README.md: is no file of responses"),
    ],
)
def test_mistakes_name_what_is_wrong(generate: Generate, extra: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(*extra)


def test_earlier_answers_are_drafted_after_a_restart(generate: Generate, tmp_path: Path) -> None:
    """The text repeats nothing itself; said once more by another process, it is a copy of the first answer."""

    def tau(answers: str) -> float:
        out = generate(
            "prompt='def wrap('", "proposer=suffix", "proposer.adaptive=false", f"proposer.memory={tmp_path / answers}"
        )
        match = re.search(r"acceptance length τ +([0-9.]+)", out)
        return float(match[1]) if match else 1.0

    first, again, other = tau("answers.jsonl"), tau("answers.jsonl"), tau("others.jsonl")
    assert other == first
    assert again > first + 2
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3  # a header and two answers


def command(*arguments: str) -> list[str]:
    return [sys.executable, "infer/generate.py", *arguments]


def environment(**extra: str) -> dict[str, str]:
    # Users set no TRITON_INTERPRET; with it, Triton 3.9 reports leaks at exit.
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TRITON_INTERPRET")}
    return {**inherited, "OMP_NUM_THREADS": "1", "TERM": "xterm", **extra}


def on_a_terminal(arguments: list[str], **extra: str) -> str:
    parent_fd, child_fd = pty.openpty()
    with subprocess.Popen(arguments, cwd=ROOT, env=environment(**extra), stdout=child_fd, stderr=child_fd) as child:
        os.close(child_fd)
        pieces = []
        while True:
            try:
                piece = os.read(parent_fd, 65536)
            except OSError:  # Linux raises it when the other end is closed
                break
            if not piece:
                break
            pieces.append(piece)
    os.close(parent_fd)
    assert child.returncode == 0, b"".join(pieces)
    return b"".join(pieces).decode(errors="replace")


def test_a_terminal_gets_color(overrides: list[str]) -> None:
    repeated = ["prompt='x = 1; x = 1; x = 1; x = 1; x = 1;'", "max_tokens=60"]
    assert GREEN in on_a_terminal(command(*overrides, *repeated, "proposer=ngram", "proposer.adaptive=false"))


@pytest.mark.parametrize(
    ("setting", "variables", "color"),
    [
        ("auto", {}, True),
        ("auto", {"NO_COLOR": "1"}, False),
        ("auto", {"TERM": "dumb"}, False),
        ("never", {}, False),
        ("always", {"NO_COLOR": "1"}, True),
    ],
)
def test_color_is_a_matter_of_the_terminal_and_its_user(
    monkeypatch: pytest.MonkeyPatch, setting: str, variables: dict[str, str], color: bool
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "w") as stream:
        assert use_color(setting, stream) is color
    with open(os.devnull, "w") as stream:
        assert use_color(setting, stream) is (setting == "always")


def test_ctrl_c_ends_with_a_clean_terminal(overrides: list[str]) -> None:
    arguments = command(*overrides, "color=always", "num_prompts=500", "max_tokens=400", "proposer.adaptive=false")
    with subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background tests ignore it
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline()  # generation has begun
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=300)
    assert child.returncode == 130
    assert errors.strip().endswith("interrupted")
    assert "Traceback" not in errors
    assert out.endswith(RESET + "\n")


def test_a_mistake_is_one_line(overrides: list[str]) -> None:
    result = subprocess.run(
        command(*overrides, "colour=red"), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 2
    assert result.stderr.splitlines()[0].startswith("error: colour: unknown key; did you mean color?")
    assert result.stdout == ""
