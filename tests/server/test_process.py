"""The server's command in a process: start, signals, exit codes, what it prints and what it logs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from infer.config import ModelConfig, ProposerConfig
from infer.engine.loading import load_parts
from infer.server.address import bind
from models.heads.config import HeadConfig
from tests.server import patient
from tests.server.dying_server import DYING_SEED

ROOT = Path(__file__).resolve().parents[2]
CANARY = "zebra crossing at midnight"


def command(folder: Path | str, *extra: str) -> list[str]:
    overrides = [f"model={folder}", "model.name=tiny", "head=none", "engine.max_batch=4", "server.port=0"]
    return [sys.executable, "infer/serve.py", *overrides, *extra]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Process:
    def __init__(self, arguments: list[str], folder: Path = ROOT) -> None:
        self.child = subprocess.Popen(
            arguments, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = 300) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.output)):
            assert self.child.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
        return match

    def end(self, number: int, seconds: float = 300) -> int:
        self.child.send_signal(number)
        return self.ended(seconds)

    def ended(self, seconds: float = 300) -> int:
        """Wait for its end, and return its exit code."""
        code = self.child.wait(seconds)
        self._reader.join()
        return code


@contextmanager
def start(*arguments: str, folder: Path = ROOT) -> Iterator[Process]:
    process = Process(list(arguments), folder)
    try:
        yield process
    finally:
        if process.child.poll() is None:
            process.child.kill()
        process.child.wait()


def test_start_serve_and_ctrl_c(tiny_target_folder: Path) -> None:
    with start(*command(tiny_target_folder)) as process:
        url = process.wait_for(r"(http://127\.0\.0\.1:\d+): loading tiny")[1]
        process.wait_for("try: curl")
        steps = ("loading tiny", "reading weights: file 1 of 1, 0 of", "Headway serves")
        indices = [process.output.index(step) for step in steps]
        assert indices == sorted(indices)
        assert "suffix decoding, up to" in process.output
        assert "512 tokens" in process.output
        assert re.search(r"end tokens +0 <\|endoftext\|>", process.output)
        assert f"{url}/v1/completions" in process.output
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        completion = client.completions.create(
            model="tiny", prompt=CANARY, max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 5
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt=CANARY, max_tokens=5000)
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": CANARY}], max_tokens=2)
        assert process.end(signal.SIGINT) == 0
    assert "Traceback" not in process.output
    assert "POST /v1/completions" in process.output
    assert "zebra" not in process.output


def test_sigterm_lets_a_stream_finish(tiny_target_folder: Path) -> None:
    with start(*command(tiny_target_folder, "server.drain_s=600")) as process:
        url = process.wait_for(r"(http://127\.0\.0\.1:\d+): loading")[1]
        process.wait_for("try: curl")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=150, stream=True, seed=1, extra_body={"ignore_eos": True}
        )
        chunks = [next(iter(stream))]
        process.child.send_signal(signal.SIGTERM)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert process.child.wait(300) == 0
    assert "Traceback" not in process.output


def test_the_image_s_command(tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Dockerfile's entry point on the files that the Dockerfile copies; the image itself is not built here."""
    lines = (ROOT / "scripts" / "deploy" / "Dockerfile").read_text().splitlines()
    image = tmp_path / "app"
    for paths in (line.split()[1:] for line in lines if line.startswith("COPY ")):
        for name in paths[:-1]:
            into = image / paths[-1]
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, into)
    entry, default = (
        json.loads(next(line for line in lines if line.startswith(word)).removeprefix(word))
        for word in ("ENTRYPOINT ", "CMD ")
    )
    assert entry[0] == "python"
    overrides = [*command(tiny_target_folder)[2:], f"hydra.run.dir={tmp_path}/hydra", f"output_dir={tmp_path}/outputs"]
    refused = subprocess.run(
        [sys.executable, *entry[1:], *default],
        cwd=image,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (refused.returncode, "HEADWAY_API_KEY" in refused.stderr) == (2, True)  # a host beyond loopback needs a key
    monkeypatch.setenv("HEADWAY_API_KEY", "a-key-of-mine")
    with start(sys.executable, *entry[1:], *default, *overrides, folder=image) as process:
        url = process.wait_for(r"(http://127\.0\.0\.1:\d+): loading")[1]
        process.wait_for("try: curl")
        assert patient.get(f"{url}/health").status_code == 200
        assert patient.get(f"{url}/v1/models").status_code == 401
        assert process.end(signal.SIGTERM) == 0


def test_a_dead_engine_ends_the_process(tiny_target_folder: Path) -> None:
    """It exits by itself, so that a supervisor restarts it. Streams end with an error; /health is 503 until then."""
    (program, _, *rest) = command(tiny_target_folder, "proposer=none")
    script = str(ROOT / "tests" / "server" / "dying_server.py")
    with start(program, script, *rest) as process:
        url = process.wait_for(r"(http://127\.0\.0\.1:\d+): loading")[1]
        process.wait_for("try: curl")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=480, stream=True, seed=1, extra_body={"ignore_eos": True}
        )
        pieces = iter(stream)
        next(pieces)
        with pytest.raises(openai.APIError, match="the engine has stopped"):
            client.completions.create(model="tiny", prompt="x", seed=DYING_SEED)
        try:
            health = patient.get(f"{url}/health").status_code
        except httpx.TransportError:
            health = 0  # the process has exited already
        assert health in (503, 0)
        with pytest.raises(openai.APIError, match="the engine has stopped"):
            list(pieces)
        assert process.child.wait(300) == 1
        assert "RuntimeError: the device is gone" in process.output
        assert "the engine is dead: the server exits with code 1" in process.output


@pytest.mark.slow
@pytest.mark.parametrize("end", ["drained", "lost", "lost while idle"])
def test_a_divided_target_is_served(tiny_target_folder: Path, started_here: Callable[[], list[int]], end: str) -> None:
    with start(*command(tiny_target_folder, "engine.tensor_parallel=2", "server.drain_s=600")) as process:
        url = process.wait_for(r"(http://127\.0\.0\.1:\d+): loading")[1]
        process.wait_for("try: curl")
        assert "2, each with a part of the target" in process.output
        assert "(rank 0 of 2)" in process.output
        (other_pid,) = set(started_here()) - {process.child.pid}
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=60, stream=True, seed=1, extra_body={"ignore_eos": True}
        )
        chunks = [next(iter(stream))]
        if end == "drained":
            for pid in (process.child.pid, other_pid):  # as a supervisor would
                os.kill(pid, signal.SIGTERM)
            chunks += list(stream)
            assert chunks[-1].choices[0].finish_reason == "length"
            assert process.child.wait(300) == 0
        else:
            if end == "lost while idle":
                list(stream)
            os.kill(other_pid, signal.SIGKILL)
            if end == "lost":
                with pytest.raises(openai.APIError, match="the engine has stopped"):
                    list(stream)
            process.wait_for(r"RankLost: engine\.tensor_parallel=2: rank 1 has ended \(signal 9\)")
            assert process.child.wait(300) == 1  # by itself
        assert started_here() == []


def test_ctrl_c_while_loading(tiny_target_folder: Path) -> None:
    with start(*command(tiny_target_folder)) as process:
        url = process.wait_for(r"(http://127\.0\.0\.1:\d+): loading")[1]
        patient.get(f"{url}/health")  # HTTP is up, the model need not be
        assert process.end(signal.SIGINT) == 0
    assert "Traceback" not in process.output


@pytest.mark.parametrize(
    ("proposer", "message"),
    [
        (ProposerConfig(name="head"), "/no/such/head: no exported head"),
        (ProposerConfig(name="draft_model", draft_model="/no/such/draft"), "/no/such/draft: no such folder"),
    ],
)
def test_what_is_not_there_is_found_before_the_target_is_loaded(
    tiny_target_folder: Path, caplog: pytest.LogCaptureFixture, proposer: ProposerConfig, message: str
) -> None:
    caplog.set_level(logging.INFO)
    model, head = (
        ModelConfig(name="tiny", path=str(tiny_target_folder)),
        HeadConfig(name="eagle3", path="/no/such/head"),
    )
    with pytest.raises(ValueError, match=message):
        load_parts(model, head, proposer, output_dir="outputs")
    assert "reading weights" not in caplog.text
    load_parts(model, None, ProposerConfig(name="ngram"), output_dir="outputs")
    assert "reading weights" in caplog.text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)


def test_a_port_in_use_is_one_line_before_anything_loads(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        result = run(*command(tmp_path, f"server.port={port}"))  # a folder without a model
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert f"127.0.0.1:{port}" in line
    assert "server.port=" in line
    assert "loading" not in result.stdout


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["model.path=no/such/folder"], "no/such/folder"),
        (["server.host=0.0.0.0"], "server.insecure=true"),
        (["server.color=red"], "server.color: unknown key"),
        (["proposer=head"], "proposer=head: needs a head"),
    ],
)
def test_a_mistake_is_one_clear_line(tiny_target_folder: Path, extra: list[str], message: str) -> None:
    result = run(*command(tiny_target_folder, *extra))
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert "reading weights" not in result.stderr
