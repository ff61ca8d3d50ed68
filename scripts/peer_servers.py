"""Servers on this machine that are measured against each other, with prompts sent as token ids. By name:

    server  server:head  server:head:auto3  ...   our own, infer/serve.py: plain, or with a proposer and a draft shape
    vllm  vllm:ngram  vllm:head  ...              vLLM's CPU build: plain, with prompt lookup, with the exported head
    llama.cpp  llama.cpp:ngram  llama.cpp:head    llama-server, with both converted (scripts/gguf_files.py)
    llama.cpp:threads1  llama.cpp:threads1:head   the same with that many threads for decoding; prompts use every core

All use the same weights in `model.dtype`, have no prefix cache, and use every core unless the name says otherwise. They
draft `proposer.max_draft_tokens` tokens unless the name has a shape; llama.cpp:ngram without one does what its own
defaults say. llama.cpp reads a GGUF target as it is, and a head in 8 bits unless `engine.head_weights` is another.
`scripts/peers.sh` builds the last two into `peers`. With HEADWAY_CPU_LEVEL llama.cpp is the one built for that level.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import httpx

from infer.config import EngineConfig, ProposerConfig
from infer.console.command_words import model_overrides
from infer.console.compare import Run
from infer.options.devices import dtype_name
from infer.options.exported_heads import head_folder
from infer.options.paths import REPO_ROOT, resolve_path
from infer.request import SpeculationStats
from kernels.cpu.level import SWITCH, chosen_level, machine_level
from models.targets import resolve_checkpoint
from scripts.config import SystemsConfig
from scripts.gguf_files import OUT_TYPES, folder_of_target, gguf_of_head, gguf_of_target
from scripts.peer_folders import built, llama_cpp
from scripts.systems import Task, shaped

SOURCES = {  # by program: the proposers that a name may have after its colon, and the program's name for them
    "vllm": {"ngram": "ngram", "head": "eagle3"},
    "llama.cpp": {"ngram": "ngram-simple", "head": "draft-eagle3"},
}
START_S, GRACE_S = 300.0, 15.0
ROOM, ROUND = 64, 256


class Variant(NamedTuple):
    """What the name of a server says after the program's."""

    program: str
    threads: int | None  # of llama.cpp's decoding; None: every core
    source: str  # the proposer, or nothing
    shape: str


def variant_of(name: str) -> Variant:
    """`llama.cpp:threads1:head:chain3` -> ("llama.cpp", 1, "head", "chain3")"""
    program, *words = name.split(":")
    match = re.fullmatch(r"threads(\d+)", words[0]) if program == "llama.cpp" and words else None
    source, shape, *_ = *words[match is not None :], "", ""
    return Variant(program, None if match is None else int(match[1]), source, shape)


@dataclass
class Server:
    """A server process on the loopback interface, alive within a `with` block, that speaks OpenAI's completions API.

    Call `end_as_interrupted` before starting it, so that SIGTERM to this process also stops the server.
    """

    name: str
    model: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str]
    log: Path
    ignore_eos: bool = True

    endpoint: ClassVar[str] = "/v1/completions"

    def __post_init__(self) -> None:
        self.drafts = bool(variant_of(self.name).source)
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._counted = [0, 0]  # verifies and accepted drafted tokens at the last look
        self._client = httpx.Client(base_url=self.url, timeout=600, limits=httpx.Limits(max_connections=None))

    def __enter__(self) -> Server:
        """Start the process and wait until it is ready. Raises ValueError with the end of its log if it fails."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPO_ROOT,
                start_new_session=True,  # a process group, because vLLM's engine is a separate process
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if self._client.get("/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        lines = self.log.read_text(errors="replace").splitlines()
        raise ValueError(f"systems: {self.name}: did not start; the end of {self.log}:\n" + "\n".join(lines[-20:]))

    def rest(self) -> None:
        """Pause its processes (SIGSTOP): an idle server may spin and take a core from the one that is measured."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let a paused server run within the `with` block."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            self.rest()

    def stop(self) -> None:
        self._client.close()
        if self._process is None:
            return
        for numbers in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):  # SIGCONT: it may be paused
            try:
                for number in numbers:
                    os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()

    def body(self, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": self.ignore_eos,
            "return_token_ids": True,
        }

    def ids(self, piece: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a whole response, or of one event of a stream."""
        return [token for choice in piece.get("choices", ()) for token in choice.get("token_ids") or ()]

    def complete(self, tasks: Sequence[Task], temperature: float, seed: int, max_concurrency: int) -> Run:
        """Return the responses, with up to `max_concurrency` requests in flight.

        Raises ValueError if a request is refused.
        """

        def ask(task: Task) -> dict[str, Any]:
            response = self._client.post(self.endpoint, json=self.body(*task, temperature, seed))
            if response.status_code != 200:
                raise ValueError(f"systems: {self.name}: {response.status_code}: {response.text[:300]}")
            return response.json()

        begin = time.perf_counter()
        with ThreadPoolExecutor(max_concurrency) as pool:
            responses = list(pool.map(ask, tasks))
        seconds = time.perf_counter() - begin
        verifies, accepted = self._drafted(responses)
        stats = SpeculationStats(steps=verifies, emitted=verifies + accepted, accepted=accepted)
        return Run([self.ids(response) for response in responses], seconds, stats)

    def _drafted(self, responses: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        """Return the number of verifies with drafted tokens and of accepted drafted tokens for these responses."""
        if not self.drafts:
            return 0, 0
        before, self._counted = self._counted, [0, 0]  # since the start of the process
        for line in self._client.get("/metrics").text.splitlines():
            for index, key in enumerate(("drafts", "accepted_tokens")):
                if line.startswith(f"vllm:spec_decode_num_{key}_total"):
                    self._counted[index] += int(float(line.rpartition(" ")[2]))
        return self._counted[0] - before[0], self._counted[1] - before[1]


class LlamaServer(Server):
    endpoint: ClassVar[str] = "/completion"

    def body(self, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        # With top_k=1 it finds the largest logit only; temperature 0 alone takes a softmax over the whole vocabulary.
        top_k = 0 if temperature else 1
        off = {"top_k": top_k, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": False}
        sampling = {"n_predict": max_tokens, "temperature": temperature, "seed": seed, "ignore_eos": self.ignore_eos}
        return {"prompt": list(prompt), "return_tokens": True, **sampling, **off}

    def ids(self, piece: Mapping[str, Any]) -> list[int]:
        return list(piece.get("tokens", ()))

    def _drafted(self, responses: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        """Return the same counts; llama.cpp does not report the number of verifies, so every step counts as one."""
        accepted = sum(response["timings"].get("draft_n_accepted", 0) for response in responses)
        return (sum(len(self.ids(response)) for response in responses) - accepted if self.drafts else 0), accepted


def make_server(name: str, config: SystemsConfig, *, slots: int, context: int, ignore_eos: bool = True) -> Server:
    """Return the server of that name, for up to `slots` concurrent requests of up to `context` tokens each.

    With `ignore_eos` every response has exactly max_tokens tokens. Raises ValueError for a server that is not built, or
    that does not support the proposer or the draft shape.
    """
    variant = variant_of(name)
    program, source = variant.program, variant.source
    proposer = shaped(config.proposer, variant.shape) if variant.shape else config.proposer
    port = free_port()
    if program == "server":
        command, environment = our_command(config, source or "none", proposer, port, slots), dict[str, str]()
    else:
        if source not in ("", *SOURCES[program]):
            raise ValueError(f"systems: {name}: {program} drafts with {' or '.join(SOURCES[program])}")
        if proposer.adaptive or proposer.shape is not None:
            raise ValueError(f"systems: {name}: {program} drafts chains; say {program}:{source}:chain<depth>")
        make = vllm_command if program == "vllm" else llama_command
        command, environment = make(config, variant, proposer.max_draft_tokens, port, slots, context)
    log = resolve_path(config.output_dir) / "bench" / f"{name.replace(':', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    kind = LlamaServer if program == "llama.cpp" else Server
    return kind(name, config.model.name, command, port, environment, log, ignore_eos=ignore_eos)


def our_command(config: SystemsConfig, proposer: str, shape: ProposerConfig, port: int, slots: int) -> list[str]:
    model, head = config.model, config.head
    keys = ("adaptive", "max_draft_tokens", "tree")
    settings = {f"proposer.{key}": getattr(shape, key) for key in keys}
    settings |= {f"engine.{field.name}": getattr(config.engine, field.name) for field in fields(EngineConfig)}
    settings |= {"head.path": head.path, "output_dir": resolve_path(config.output_dir), "server.port": port}
    settings |= {"engine.prefix_cache": False, "engine.max_batch": slots}
    settings |= {"server.max_waiting": 4096, "server.profile_first": True}
    if head.name == "none":
        del settings["head.path"]
    overrides = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    return [
        sys.executable,
        "infer/serve.py",
        *model_overrides(replace(model, path=model.path_or_hub_id)),
        f"head={head.name}",
        f"proposer={proposer}",
        *overrides,
    ]


def vllm_command(
    config: SystemsConfig, variant: Variant, depth: int, port: int, slots: int, context: int
) -> tuple[list[str], dict[str, str]]:
    if chosen_level() not in (None, machine_level()):
        raise ValueError(f"systems: vllm: {SWITCH}={chosen_level()} does not lower its kernels; leave it out")
    python = built(config.peers, "vllm", "bin/python")
    target = folder_of_target(resolve_path(config.peers), checkpoint_of(config), dtype_name(config.model))
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--served-model-name", config.model.name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype_name(config.model), "--max-model-len", str(context), "--max-num-seqs", str(slots)]
    command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    if not config.compile:
        command += ["--enforce-eager"]
    if variant.source == "ngram":
        shortest, longest = config.proposer.lookup_sizes
        lookup = f'"prompt_lookup_min": {shortest}, "prompt_lookup_max": {longest}'
        command += ["--speculative-config", f'{{"method": "ngram", "num_speculative_tokens": {depth}, {lookup}}}']
    elif variant.source:
        head = f'"method": "eagle3", "model": "{eagle3_folder(config)}", "num_speculative_tokens": {depth}'
        command += ["--speculative-config", f"{{{head}}}"]
    cores = f"0-{(os.cpu_count() or 1) - 1}"  # by default vLLM leaves one core free
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # Intel's OpenMP, which is installed with vLLM; without it vLLM warns of a significant slowdown when it drafts.
    openmp = {"LD_PRELOAD": str(built(config.peers, "vllm", "lib/libiomp5.so"))}
    return command, {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, **openmp, **offline}


def llama_command(
    config: SystemsConfig, variant: Variant, depth: int, port: int, slots: int, context: int
) -> tuple[list[str], dict[str, str]]:
    program = llama_cpp(config.peers, "llama-server")
    folder, dtype = resolve_path(config.peers), dtype_name(config.model)
    target = gguf_of_target(folder, checkpoint_of(config), dtype)
    cores = os.cpu_count() or 1
    command = [str(program), "-m", str(target), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", str(variant.threads or cores), "-tb", str(cores)]
    command += ["-c", str(context * slots), "-np", str(slots), "--cache-ram", "0"]
    if dtype == "float32":  # else its default, fp16
        command += ["-ctk", "f32", "-ctv", "f32"]
    if variant.source:
        command += ["--spec-type", SOURCES["llama.cpp"][variant.source]]
    if variant.source == "ngram" and variant.shape:
        _, longest = config.proposer.lookup_sizes
        command += ["--spec-ngram-simple-size-n", str(longest), "--spec-ngram-simple-size-m", str(depth)]
    if variant.source == "head":
        out_type = "q8_0" if config.engine.head_weights in ("int8", "auto") else OUT_TYPES[dtype]
        head = gguf_of_head(folder, eagle3_folder(config), checkpoint_of(config), out_type)
        command += ["--spec-draft-model", str(head), "--spec-draft-n-max", str(depth)]
    return command, {}


def checkpoint_of(config: SystemsConfig) -> Path:
    return resolve_checkpoint(config.model.path_or_hub_id, config.model.revision)


def eagle3_folder(config: SystemsConfig) -> Path:
    """Return the folder of our exported head, which is in speculators' layout.

    Raises ValueError if it is not an EAGLE-3 head or does not exist.
    """
    head = config.head
    if head.name != "eagle3":
        raise ValueError(f"head={head.name}: vLLM and llama.cpp are measured with head=eagle3")
    folder = head_folder(head, config.output_dir, config.model.name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no exported head; train one (python train/run.py), or give head.path=")
    return folder


def end_as_interrupted() -> None:
    """Make SIGTERM raise KeyboardInterrupt in this process, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def context_of(prompt_tokens: int, max_tokens: int) -> int:
    """Return the context length for a request and its drafts, rounded up so that similar sizes share compiled code."""
    return -(-(prompt_tokens + max_tokens + ROOM) // ROUND) * ROUND


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
