"""Other programs' servers on this machine, as systems of a comparison. Prompts are sent as token ids.

`servers` of conf/bench.yaml holds the command that starts each. The command of a system is what stands there under
every beginning of its name: `llama.cpp:head:chain3` is started by the words of `llama.cpp`, `llama.cpp:head` and
`llama.cpp:head:chain`, as far as they are there. In them `$field` is one of FIELDS below, `$port` or `$depth`, so that
every program gets the same weights, threads, lengths and drafts; a word that is empty then is left out. Any program
that answers OpenAI's completions with token ids can be added there; only llama.cpp is asked in its own way.

A server is paused (SIGSTOP) unless it is measured: idle ones may spin and take a core from the others.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, ClassVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from infer.config import ModelConfig
from infer.console.compare import Run
from infer.devices import dtype_name
from infer.options.exported_heads import head_folder
from infer.request import SpeculationStats
from infer.settings.paths import REPO_ROOT, resolve_path
from kernels.cpu.level import SWITCH, chosen_level, machine_level
from models.checkpoint import fingerprint
from models.formats.conversion import FORMATS, detect, read_checkpoint, write_checkpoint
from models.gguf import is_gguf
from models.targets import resolve_checkpoint
from scripts.benchmarks.config import CompareConfig
from scripts.benchmarks.prompts import Task
from train.storage import atomic

START_S, GRACE_S = 300.0, 15.0
ROOM, ROUND = 64, 256
LLAMA_CPP = "llama.cpp"


def counters(text: str) -> dict[str, float]:
    """Return the values of the text of /metrics by name, added up over labels."""
    values = dict[str, float]()
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


@dataclass
class Server:
    """A server process on the loopback interface that speaks OpenAI's completions API.

    SIGTERM to this process stops it too only where that raises KeyboardInterrupt, as Ctrl-C does.
    """

    name: str
    model: str
    command: Sequence[str]
    port: int
    log: Path
    ignore_eos: bool = True

    endpoint: ClassVar[str] = "/v1/completions"

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"
        self._counted = [0, 0]  # verifies and accepted drafted tokens at the last look
        self._client = httpx.Client(base_url=self.url, timeout=600, limits=httpx.Limits(max_connections=None))

    @contextmanager
    def running(self) -> Iterator[Server]:
        """Start the process, wait until it is ready, and stop it after the `with` block.

        Raises ValueError with the end of its log if it does not become ready.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                cwd=REPO_ROOT,
                start_new_session=True,  # a process group, because vLLM's engine is a separate process
            )
        try:
            self._wait_until_ready()
            yield self
        finally:
            self._client.close()
            for numbers in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):  # SIGCONT: it may be paused
                try:
                    for number in numbers:
                        os.killpg(self.process.pid, number)
                    self.process.wait(GRACE_S)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
            self.process.wait()

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if self._client.get("/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        lines = self.log.read_text(errors="replace").splitlines()
        raise ValueError(f"systems: {self.name}: did not start; the end of {self.log}:\n" + "\n".join(lines[-20:]))

    def rest(self) -> None:
        """Pause its processes."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let a paused server run within the `with` block."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            self.rest()

    def body(self, task: Task, temperature: float, seed: int) -> dict[str, Any]:
        sampling = {"max_tokens": task.tokens, "temperature": temperature, "seed": seed, "ignore_eos": self.ignore_eos}
        return {"model": self.model, "prompt": task.prompt, "return_token_ids": True, **sampling}

    def ids(self, response: Mapping[str, Any]) -> list[int]:
        return [token for choice in response["choices"] for token in choice["token_ids"]]

    def run(self, tasks: Sequence[Task], temperature: float, max_concurrency: int, *, seed: int) -> Run:
        """Let a paused server answer, with up to `max_concurrency` requests in flight.

        Raises ValueError if a request is refused.
        """

        def ask(task: Task) -> dict[str, Any]:
            response = self._client.post(self.endpoint, json=self.body(task, temperature, seed))
            if response.status_code != 200:
                raise ValueError(f"systems: {self.name}: {response.status_code}: {response.text[:300]}")
            return response.json()

        with self.awake():
            begin = time.perf_counter()
            with ThreadPoolExecutor(max_concurrency) as pool:
                responses = list(pool.map(ask, tasks))
            seconds = time.perf_counter() - begin
            verifies, accepted = self._drafted(responses)
        stats = SpeculationStats(steps=verifies, emitted=verifies + accepted, accepted=accepted)
        return Run([self.ids(response) for response in responses], seconds, stats)

    def _drafted(self, responses: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        """Return the number of verifies with drafted tokens and of accepted drafted tokens for these responses."""
        before, now = self._counted, counters(self._client.get("/metrics").text)
        self._counted = [int(now.get(f"vllm:spec_decode_num_{key}_total", 0)) for key in ("drafts", "accepted_tokens")]
        return self._counted[0] - before[0], self._counted[1] - before[1]


class LlamaServer(Server):
    endpoint: ClassVar[str] = "/completion"

    def body(self, task: Task, temperature: float, seed: int) -> dict[str, Any]:
        # With top_k=1 it finds the largest logit only; temperature 0 alone takes a softmax over the whole vocabulary.
        off = {"top_k": 0 if temperature else 1, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        sampling = {"n_predict": task.tokens, "temperature": temperature, "seed": seed, "ignore_eos": self.ignore_eos}
        return {"prompt": task.prompt, "return_tokens": True, "cache_prompt": False, **sampling, **off}

    def ids(self, response: Mapping[str, Any]) -> list[int]:
        return response["tokens"]

    def _drafted(self, responses: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        """Return the same counts; llama.cpp does not report the number of verifies, so every step counts as one."""
        if ":" not in self.name:
            return 0, 0
        accepted = sum(response["timings"].get("draft_n_accepted", 0) for response in responses)
        return sum(len(self.ids(response)) for response in responses) - accepted, accepted


def make_server(name: str, config: CompareConfig) -> Server:
    """Return the server of that name. Raises ValueError if the program is not there, or has no such drafts."""
    port, log = free_port(), resolve_path(config.output_dir) / "bench" / f"{name.replace(':', '-')}.log"
    kind = LlamaServer if name.partition(":")[0] == LLAMA_CPP else Server
    return kind(name, config.model.name, command_of(name, config, port), port, log, ignore_eos=config.ignore_eos)


def command_of(name: str, config: CompareConfig, port: int) -> list[str]:
    """Return the words that start the server of that name. Raises ValueError as `make_server` does."""
    program, *rest = name.split(":")
    depth = config.proposer.draft_tokens
    if rest and (shape := re.fullmatch(r"chain(\d+)", rest[-1])):
        rest[-1], depth = "chain", int(shape[1])
    beginnings = [":".join((program, *rest[:size])) for size in range(len(rest) + 1)]
    if rest and beginnings[1] not in config.servers:
        drafts = [key for key in config.servers if key.startswith(f"{program}:") and key.count(":") == 1]
        raise ValueError(f"systems: {name}: {program} drafts with {' or '.join(drafts) or 'nothing'}")
    if len(rest) > 1 and (len(rest) > 2 or rest[1] != "chain"):
        raise ValueError(f"systems: {name}: {program} drafts chains; say {beginnings[1]}:chain<depth>")
    if program != LLAMA_CPP and chosen_level() not in (None, machine_level()):
        raise ValueError(f"systems: {name}: {SWITCH}={chosen_level()} does not lower its kernels; leave it out")
    words = [Template(word) for beginning in beginnings for word in shlex.split(config.servers.get(beginning, ""))]
    for word in words:
        if word.template.startswith("$peers"):
            check_built(Path(word.safe_substitute(peers=resolve_path(config.peers), level=build_suffix())), program)
    values = {**FIELDS, "port": lambda config: port, "depth": lambda config: depth}
    used = {field for word in words for field in word.get_identifiers()}
    if unknown := used - set(values):
        raise ValueError(f"servers: ${min(unknown)}: no such field; there are {', '.join(f'${key}' for key in values)}")
    texts = {field: values[field](config) for field in used}
    return [text for word in words if (text := word.substitute(texts))]


def build_suffix() -> str:
    """Return how the folder of llama.cpp's build ends: with the level of HEADWAY_CPU_LEVEL, if it is set."""
    return f"-{chosen_level()}" if chosen_level() else ""


def check_built(file: Path, program: str) -> Path:
    """Return a file of a program that scripts/peers.sh built. Raises ValueError if it is not there."""
    if not file.is_file():
        level = f"{SWITCH}={chosen_level()} " if chosen_level() and program == "llama.cpp" else ""
        raise ValueError(f"{file} is not there; build it with {level}scripts/peers.sh {program}, or give peers=")
    return file


def target_file(config: CompareConfig) -> Path:
    """Return the target's GGUF file, for llama.cpp and OpenVINO. Raises ValueError for a target that is none."""
    if not is_gguf(target := resolve_checkpoint(config.model.path_or_hub_id, config.model.revision)):
        raise ValueError(f"systems: llama.cpp and openvino read GGUF files, and {target} is none; convert it")
    return target


def target_folder(model: ModelConfig, peers: str) -> Path:
    """Return the target as a folder in Hugging Face's layout: a GGUF file is dequantized, once, under `peers`.

    Raises ValueError for a broken file.
    """
    import torch

    from models.targets import load_target
    from models.targets.writing import save_target

    target, dtype = resolve_checkpoint(model.path_or_hub_id, model.revision), dtype_name(model)
    if not is_gguf(target):
        return target
    folder = resolve_path(peers) / "folders" / f"{fingerprint(target)}-{dtype}"
    if not folder.is_dir():
        with atomic.replace_folder(folder) as staging:
            save_target(load_target(str(target), dtype=getattr(torch, dtype)), staging)
    return folder


def eagle3_folder(config: CompareConfig) -> Path:
    """Return the folder of our exported head, which is in speculators' layout.

    Raises ValueError if it is not an EAGLE-3 head or does not exist.
    """
    if config.head.name != "eagle3":
        raise ValueError(f"head={config.head.name}: vLLM and llama.cpp are measured with head=eagle3")
    folder = head_folder(config.head, config.output_dir, config.model)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no exported head; train one (python train/run.py), or give head.path=")
    return folder


def head_file(config: CompareConfig) -> Path:
    """Return our head as a GGUF file, written once under `peers`: in 8 bits unless `engine.head_weights` says other."""
    head, target = eagle3_folder(config), target_file(config)
    wide = "f32" if dtype_name(config.model) == "float32" else "bf16"
    dtype = "q8_0" if config.engine.head_weights in ("int8", "auto") else wide
    file = resolve_path(config.peers) / "gguf" / f"{fingerprint(head)}-{dtype}.gguf"
    if not file.is_file():
        from models.gguf.head import tokenizer_keys

        atomic.make_folder(file.parent)
        with atomic.replace_file(file) as staging:
            checkpoint = read_checkpoint(detect(head), head)
            write_checkpoint(FORMATS[LLAMA_CPP], checkpoint, staging, dtype=dtype, tokenizer=tokenizer_keys(target))
    return file


def context_of(config: CompareConfig) -> int:
    """Return how many tokens of a request a server needs room for."""
    return -(-(config.prompt_tokens + config.max_tokens + ROOM) // ROUND) * ROUND


FIELDS: dict[str, Callable[[CompareConfig], object]] = {
    "peers": lambda config: resolve_path(config.peers),
    "level": lambda config: build_suffix(),
    "name": lambda config: config.model.name,
    "folder": lambda config: target_folder(config.model, config.peers),
    "file": target_file,
    "head": eagle3_folder,
    "head_file": head_file,
    "dtype": lambda config: dtype_name(config.model),
    "eager": lambda config: "" if config.compile else "--enforce-eager",  # of vLLM
    "kv": lambda config: "f32" if dtype_name(config.model) == "float32" else "f16",  # of llama.cpp
    "cores": lambda config: os.cpu_count() or 1,
    "last_core": lambda config: (os.cpu_count() or 1) - 1,
    "slots": lambda config: max(config.concurrency),
    "context": context_of,
    "all_context": lambda config: context_of(config) * max(config.concurrency),
    "lookup_min": lambda config: config.proposer.lookup_sizes[0],
    "lookup_max": lambda config: config.proposer.lookup_sizes[1],
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
