"""Other programs' servers in a comparison: how each is started, paused, asked and stopped; what prompts they get."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from infer.options.cli import compose
from models.tokenizer import Tokenizer
from scripts.benchmarks.comparison.rounds import count_matching
from scripts.benchmarks.comparison.servers import LlamaServer, Server, command_of, free_port
from scripts.benchmarks.config import CompareConfig
from scripts.benchmarks.prompts import Task, read_prompts
from tests.manual_tables import label

ROOT = Path(__file__).resolve().parents[2]
DRIVER = "tests/peers/openvino_server.py"
COUNTING = """
from enum import Enum
from types import SimpleNamespace

GenerationStatus = Enum("GenerationStatus", "RUNNING FINISHED")
SchedulerConfig = SimpleNamespace

class GenerationConfig(SimpleNamespace):
    def set_eos_token_id(self, token):
        self.end = token

class Handle:
    def __init__(self, prompt, config):
        self.last, self.left, self.config, self.ready = prompt[-1], config.max_new_tokens, config, []
        self.drafted = 0  # the prompt's step drafts nothing

    def step(self):
        ids = []
        while self.left and len(ids) <= self.drafted:
            self.last, self.left = self.last + 1, self.left - 1
            ids.append(self.last)
            if self.last == self.config.end and not self.config.ignore_eos:
                self.left = 0
        self.drafted = getattr(self.config, "num_assistant_tokens", 0)
        self.ready += [ids] if ids else []

    def can_read(self):
        return bool(self.ready)

    def read(self):
        return {0: SimpleNamespace(generated_ids=self.ready.pop(0))}

    def get_status(self):
        return GenerationStatus.RUNNING if self.left else GenerationStatus.FINISHED

class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, properties):
        assert (model, scheduler.max_num_seqs, scheduler.enable_prefix_caching) == ("small.gguf", 2, False)
        assert device == "CPU" and properties["INFERENCE_NUM_THREADS"] == 2
        self.handles, self.lookup = [], properties.get("prompt_lookup", False)

    def get_tokenizer(self):
        return SimpleNamespace(get_eos_token_id=lambda: 99)

    def get_config(self):
        return GenerationConfig()

    def add_request(self, number, tokens, config):
        (prompt,) = tokens
        if not prompt:
            raise RuntimeError("no prompt")
        assert self.lookup == hasattr(config, "max_ngram_size") and not config.do_sample
        self.handles.append(Handle(prompt, config))
        return self.handles[-1]

    def step(self):
        for handle in self.handles:
            handle.step()
"""


@pytest.fixture(autouse=True)
def _at_this_processors_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lower level has a llama.cpp of its own, and no vLLM."""
    monkeypatch.delenv("HEADWAY_CPU_LEVEL", raising=False)


def config_of(*words: str) -> CompareConfig:
    return compose("bench", CompareConfig, list(words))


def test_answers_agree_up_to_the_end_of_the_text() -> None:
    outputs = [[1, 2, 3], [1, 0, 9], [4, 5, 6]]
    assert count_matching(outputs, [[1, 2, 3], [1, 0, 7], [4, 5, 7]], ends=(0,)) == 2
    assert count_matching(outputs, [[1, 2, 3], [1, 0, 7], [4, 5, 7]], ends=()) == 1


def test_prompts_come_from_the_files_in_turn(
    tiny_target_folder: Path, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Conversations are used whole or not at all; texts are truncated."""
    for name, rows in {
        "asked": [{"question": "x" * 400}, *({"question": f"x{number}"} for number in range(2))],
        "texts": [{"text": f"{number} " + "y " * 400} for number in range(2)],
    }.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chats = [tiny_tokenizer.apply_chat_template([{"role": "user", "content": f"x{number}"}]) for number in range(2)]
    longest = max(map(len, chats))
    files = f"files=[{tmp_path / 'asked.jsonl'},{tmp_path / 'texts.jsonl'}]"
    options = [f"model.path={tiny_target_folder}", files, "columns={prompt: question}", f"prompt_tokens={longest}"]
    prompts = read_prompts(config_of(*options, "num_prompts=3"))
    assert sorted(prompts[::2]) == sorted(chats)
    assert [len(prompts), len(prompts[1])] == [3, longest]
    with pytest.raises(ValueError, match=r"asked\.jsonl\]: holds 2 prompts of up to \d+ tokens; num_prompts=5 needs 3"):
        read_prompts(config_of(*options, "num_prompts=5"))


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ("vllm", r"nowhere/vllm/bin/python is not there; build it with scripts/peers.sh vllm, or give peers="),
        ("llama.cpp:head", r"llama-server is not there; build it with scripts/peers.sh llama.cpp"),
        (
            "openvino",
            r"openvino/bin/python is not there; build it with scripts/peers.sh openvino, or give peers=",
        ),
        ("vllm:suffix", "vllm drafts with vllm:ngram or vllm:head"),
        ("openvino:head", "openvino drafts with openvino:ngram"),
        ("vllm:head:tree16", "vllm drafts chains; say vllm:head:chain<depth>"),
        ("mine", r"servers: \$prt: no such field; there are \$peers, "),
    ],
)
def test_a_server_that_cannot_run_is_named(system: str, message: str) -> None:
    config = config_of("peers=nowhere", '+servers.mine="server --port $prt"')
    with pytest.raises(ValueError, match=message):
        command_of(system, config, 8000)


def built(folder: Path, *files: str) -> str:
    for file in files:
        (folder / "peers" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "peers" / file).touch()
    return f"peers={folder / 'peers'}"


@pytest.mark.parametrize("level", ["", "baseline"])
def test_llama_cpp_of_the_level_reads_the_file_itself(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CPU_LEVEL", level)
    (tmp_path / "small.Q4_1.gguf").touch()
    build = f"llama.cpp/build-{level}" if level else "llama.cpp/build"
    peers = built(tmp_path, f"{build}/bin/llama-server")
    config = config_of(f"model.path={tmp_path}/small.Q4_1.gguf", peers, "concurrency=[1,4]", "max_tokens=100")
    command = command_of("llama.cpp:ngram:chain3", config, 8000)
    assert command[0] == str(tmp_path / "peers" / build / "bin/llama-server")
    settings = dict(itertools.pairwise(command))
    assert settings["-m"] == str(tmp_path / "small.Q4_1.gguf")
    assert (settings["-t"], settings["-np"], settings["-c"]) == (str(os.cpu_count()), "4", "1024")
    assert (settings["--spec-type"], settings["--spec-ngram-simple-size-m"]) == ("ngram-simple", "3")
    assert "--spec-ngram-simple-size-m" not in command_of("llama.cpp:ngram", config, 8000)


def test_vllm_reads_a_folder_and_our_head(tiny_target_folder: Path, tiny_head_folder: Path, tmp_path: Path) -> None:
    words = [built(tmp_path, "vllm/bin/python"), f"model.path={tiny_target_folder}", f"head.path={tiny_head_folder}"]
    command = command_of("vllm:head:chain2", config_of(*words, "compile=false"), 8000)
    settings = dict(itertools.pairwise(command))
    assert (settings["--model"], settings["--port"]) == (str(tiny_target_folder), "8000")
    drafts = {"method": "eagle3", "model": str(tiny_head_folder), "num_speculative_tokens": 2}
    assert json.loads(settings["--speculative-config"]) == drafts
    assert "--enforce-eager" in command
    assert "--enforce-eager" not in command_of("vllm", config_of(*words), 8000)


def test_openvino_reads_the_file_and_looks_n_grams_up(tmp_path: Path) -> None:
    (tmp_path / "small.Q4_1.gguf").touch()
    words = [built(tmp_path, "openvino/bin/python"), f"model.path={tmp_path}/small.Q4_1.gguf", "concurrency=[1,4]"]
    command = command_of("openvino:ngram:chain3", config_of(*words, "proposer.prompt_lookup_max=4"), 8000)
    assert command[:2] == [f"{tmp_path}/peers/openvino/bin/python", DRIVER]
    assert command[2:] == shlex.split(
        f"--model {tmp_path}/small.Q4_1.gguf --port 8000 --threads {os.cpu_count()} --slots 4 --ngram 4 --drafts 3"
    )
    assert "--ngram" not in command_of("openvino", config_of(*words), 8000)


def test_openvino_answers_requests_that_are_in_flight_together(tmp_path: Path) -> None:
    """A module of the same names stands for OpenVINO: it counts up from the prompt, and drafts one token, if at all."""
    (tmp_path / "openvino.py").write_text("Tensor = list\n")
    (tmp_path / "openvino_genai.py").write_text(COUNTING)
    for options, steps, accepted in (([], 0, 0), (["--ngram", "4", "--drafts", "1"], 6, 4)):
        port = free_port()
        command = ["env", f"PYTHONPATH={tmp_path}", sys.executable, DRIVER, "--model", "small.gguf"]
        command += ["--port", str(port), "--threads", "2", "--slots", "2", *options]
        with Server("openvino", "small", command, port, tmp_path / "log").running() as server:
            server.rest()
            run = server.run([Task([5, 6], 4), Task([8], 7), Task([1], 2)], 0.0, 3, seed=0)
            with pytest.raises(ValueError, match="openvino: 400: RuntimeError: no prompt"):
                server.run([Task([], 4)], 0.0, 1, seed=0)
            server.ignore_eos = False
            ended = server.run([Task([97], 9)], 0.0, 1, seed=0)
        assert run.token_ids == [[7, 8, 9, 10], [9, 10, 11, 12, 13, 14, 15], [2, 3]]
        assert (run.speculation.steps, run.speculation.accepted) == (steps, accepted)
        assert ended.token_ids == [[98, 99]]


def test_llama_cpp_is_asked_in_its_own_way() -> None:
    server = LlamaServer("llama.cpp", "tiny", [], 1, Path("log"))
    assert [server.body(Task([1], 2), temperature, 0)["top_k"] for temperature in (0.0, 0.7)] == [1, 0]
    assert label("llama.cpp:threads1:ngram") == "llama.cpp, threads 1, n-gram lookup"  # of older results


def test_a_server_at_rest_stands_still_and_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.benchmarks.comparison.servers.GRACE_S", 300.0)
    (tmp_path / "health").write_text("well")
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with Server("files", "files", command, port, tmp_path / "log").running() as server:
        server.rest()
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{server.url}/health", timeout=0.5)
        with server.awake():
            assert httpx.get(f"{server.url}/health", timeout=30).text == "well"
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{server.url}/health", timeout=0.5)
        process = server.process
    assert process.returncode == -signal.SIGTERM
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", timeout=5)


@pytest.mark.slow
def test_a_comparison_with_a_server_of_the_users_command(
    tiny_target_folder: Path, tiny_head_folder: Path, tmp_path: Path
) -> None:
    """Our own server stands for another program: it answers with the ids that the engine in the process has."""
    words = [sys.executable, "infer/serve.py", f"model={tiny_target_folder}", "model.name=demo", "model.device=cpu"]
    serve = shlex.join(words) + " model.dtype=$dtype server.port=$port engine.max_batch=$slots"
    draft = f"{serve} head=eagle3 head.path={tiny_head_folder} proposer=head proposer.max_draft_tokens=$depth"
    draft += " proposer.adaptive=false"
    command = [sys.executable, "scripts/bench.py", f"model.path={tiny_target_folder}", "head=none", "rounds=1"]
    command += ["systems=[off,plain,drafting]", "num_prompts=2", "prompt_tokens=16", "max_tokens=8"]
    command += ["concurrency=[2]", f"output_dir={tmp_path}"]
    command += [f'+servers.plain="{serve} head=none proposer=none"', f'+servers.drafting="{draft}"']
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    cells = json.loads(ran.stdout.splitlines()[-1])["results"]["0"]["2"]
    assert [cells[name]["agreement"] for name in ("plain", "drafting")] == [[2, 2], [2, 2]]
    assert cells["plain"]["acceptance_length"] is None
    assert cells["drafting"]["acceptance_length"] >= 1
