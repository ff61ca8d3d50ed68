"""Servers on this machine that are asked by token ids, to be measured beside each other. By name:

    server  server:head  server:head:auto3  ...   our own, infer/serve.py: plain, or with a proposer and a draft shape
    vllm  vllm:ngram  vllm:head  ...              vLLM's CPU build: plain, with prompt lookup, with the exported head
    llama.cpp  llama.cpp:ngram  llama.cpp:head    llama-server, with both converted (scripts/gguf_files.py)

All read the same weights in `model.dtype`, run on every core, keep no prefix of one request for the next, and draft
`proposer.max_draft_tokens` tokens unless the name has a shape. `scripts/peers.sh` builds the last two into `peers`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from infer.config import BenchConfig, EngineConfig, ProposerConfig, ServedConfig
from infer.config_checks import REPO_ROOT, resolve_path
from infer.engine.loading import dtype_name
from infer.options.command_words import model_overrides
from infer.options.exported_heads import head_folder
from infer.options.head_config import HeadConfig
from models.targets import resolve_checkpoint
from scripts.bench_prompts import Task
from scripts.bench_systems import shaped
from scripts.gguf_files import folder_of_target, gguf_of_head, gguf_of_target

SOURCES = {  # what a name may have after its colon
    "vllm": {"ngram": "ngram", "head": "eagle3"},
    "llama.cpp": {"ngram": "ngram-simple", "head": "draft-eagle3"},
}
START_S, GRACE_S = 300.0, 15.0
ROOM, ROUND = 64, 256
Settings = BenchConfig | ServedConfig


class Server:
    """A process that answers on the loopback, from `with` to the end of it. It speaks OpenAI's completions.

    So that it ends with whoever started it, SIGTERM is to be one's Ctrl-C (`end_as_interrupted`).
    """

    endpoint = "/v1/completions"

    def __init__(
        self,
        name: str,
        model: str,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str],
        log: Path,
        *,
        ignore_eos: bool = True,
    ) -> None:
        self.name, self.model, self.command, self.log = name, model, list(command), log
        self.ignore_eos = ignore_eos
        self.environment = dict(environment)
        self.drafts = ":" in name
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._counted = 0.0, 0.0
        self._client = httpx.Client(base_url=self.url, timeout=600, limits=httpx.Limits(max_connections=None))

    def __enter__(self) -> Server:
        """Raises ValueError with the end of its log if it does not come up."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPO_ROOT,
                start_new_session=True,  # vLLM's engine is a process of its own
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
        """Its processes stand still: a server without work may spin, which takes a core from whoever is measured."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within, a server at rest runs."""
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
        for numbers in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):  # one that stands still hears no SIGTERM
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
        """Of a whole answer, or of one event of a stream."""
        return [token for choice in piece.get("choices", ()) for token in choice.get("token_ids") or ()]

    def complete(
        self, tasks: Sequence[Task], temperature: float, seed: int, max_concurrency: int
    ) -> tuple[list[list[int]], float | None]:
        """Ids that follow the prompts, so many of them in flight, and τ if it drafts. Raises ValueError if one is
        refused.
        """

        def ask(task: Task) -> dict[str, Any]:
            response = self._client.post(self.endpoint, json=self.body(*task, temperature, seed))
            if response.status_code != 200:
                raise ValueError(f"systems: {self.name}: {response.status_code}: {response.text[:300]}")
            return response.json()

        with ThreadPoolExecutor(max_concurrency) as pool:
            responses = list(pool.map(ask, tasks))
        drafts, accepted = self._drafted(responses)
        return [self.ids(response) for response in responses], 1 + accepted / drafts if drafts else None

    def _drafted(self, responses: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """Verifies that had drafted tokens and the drafted tokens that were accepted, of these answers."""
        if not self.drafts:
            return 0.0, 0.0
        now = {"drafts": 0.0, "accepted_tokens": 0.0}  # since the start of the process
        for line in self._client.get("/metrics").text.splitlines():
            for key in now:
                if line.startswith(f"vllm:spec_decode_num_{key}_total"):
                    now[key] += float(line.rpartition(" ")[2])
        before, self._counted = self._counted, (now["drafts"], now["accepted_tokens"])
        return self._counted[0] - before[0], self._counted[1] - before[1]


class LlamaServer(Server):
    endpoint = "/completion"

    def body(self, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": False}
        sampling = {"n_predict": max_tokens, "temperature": temperature, "seed": seed, "ignore_eos": self.ignore_eos}
        return {"prompt": list(prompt), "return_tokens": True, **sampling, **off}

    def ids(self, piece: Mapping[str, Any]) -> list[int]:
        return list(piece.get("tokens", ()))

    def _drafted(self, responses: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """How many verifies there were it does not say: every step is taken for one."""
        accepted = sum(response["timings"].get("draft_n_accepted", 0) for response in responses)
        return (sum(len(self.ids(response)) for response in responses) - accepted if self.drafts else 0.0), accepted


def make_server(name: str, config: Settings, *, slots: int, context: int, ignore_eos: bool = True) -> Server:
    """For `slots` requests at once, of up to `context` tokens each. Raises ValueError for one that is not there.

    `ignore_eos`: every answer has as many tokens as it is asked for.
    """
    program, _, rest = name.partition(":")
    source, _, shape = rest.partition(":")
    proposer = shaped(config.proposer, shape) if shape else config.proposer
    port = free_port()
    if program == "server":
        command, environment = our_command(config, source or "none", proposer, port, slots), dict[str, str]()
    else:
        if source not in ("", *SOURCES[program]):
            raise ValueError(f"systems: {name}: {program} drafts with {' or '.join(SOURCES[program])}")
        if proposer.tree_width > 1 or proposer.adaptive or proposer.tree is not None:
            raise ValueError(f"systems: {name}: {program} drafts chains; say {program}:{source}:chain<depth>")
        make = vllm_command if program == "vllm" else llama_command
        command, environment = make(config, source, proposer.max_draft_tokens, port, slots, context)
    log = resolve_path(config.output_dir) / "bench" / f"{name.replace(':', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    kind = LlamaServer if program == "llama.cpp" else Server
    return kind(name, config.model.name, command, port, environment, log, ignore_eos=ignore_eos)


def our_command(config: Settings, proposer: str, shape: ProposerConfig, port: int, slots: int) -> list[str]:
    model, head = config.model, config.head
    keys = ("adaptive", "max_draft_tokens", "tree_width", "tree_nodes")
    settings = {f"proposer.{key}": getattr(shape, key) for key in keys}
    settings |= {f"engine.{field.name}": getattr(config.engine, field.name) for field in fields(EngineConfig)}
    settings |= {"head.path": head.path, "output_dir": resolve_path(config.output_dir), "server.port": port}
    settings |= {"engine.prefix_cache": False, "engine.max_batch": slots, "server.max_waiting": 4096}
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
    config: Settings, source: str, depth: int, port: int, slots: int, context: int
) -> tuple[list[str], dict[str, str]]:
    python = built(config.peers, "vllm", "bin/python")
    target = folder_of_target(resolve_path(config.peers), checkpoint_of(config), dtype_name(config.model))
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--served-model-name", config.model.name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype_name(config.model), "--max-model-len", str(context), "--max-num-seqs", str(slots)]
    command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    if not config.compile:
        command += ["--enforce-eager"]
    if source == "ngram":
        lookup = f'"prompt_lookup_min": {config.proposer.ngram_min}, "prompt_lookup_max": {config.proposer.ngram_max}'
        command += ["--speculative-config", f'{{"method": "ngram", "num_speculative_tokens": {depth}, {lookup}}}']
    elif source:
        head = f'"method": "eagle3", "model": "{eagle3_folder(config)}", "num_speculative_tokens": {depth}'
        command += ["--speculative-config", f"{{{head}}}"]
    cores = f"0-{(os.cpu_count() or 1) - 1}"  # without this it keeps one of them free
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # Intel's OpenMP, which comes with it; it warns of a significant loss, drafting, without.
    openmp = {"LD_PRELOAD": str(built(config.peers, "vllm", "lib/libiomp5.so"))}
    return command, {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, **openmp, **offline}


def llama_command(
    config: Settings, source: str, depth: int, port: int, slots: int, context: int
) -> tuple[list[str], dict[str, str]]:
    program = built(config.peers, "llama.cpp", "build/bin/llama-server")
    folder, dtype = resolve_path(config.peers), dtype_name(config.model)
    target = gguf_of_target(folder, checkpoint_of(config), dtype)
    threads = str(os.cpu_count() or 1)
    command = [str(program), "-m", str(target), "--host", "127.0.0.1", "--port", str(port), "-t", threads]
    command += ["-c", str(context * slots), "-np", str(slots), "--cache-ram", "0"]
    if dtype == "float32":  # else its default, fp16
        command += ["-ctk", "f32", "-ctv", "f32"]
    if source:
        command += ["--spec-type", SOURCES["llama.cpp"][source]]
    if source == "head":
        head = gguf_of_head(folder, eagle3_folder(config), checkpoint_of(config), dtype)
        command += ["--spec-draft-model", str(head), "--spec-draft-n-max", str(depth)]
    return command, {}


def checkpoint_of(config: Settings) -> Path:
    return resolve_checkpoint(config.model.path_or_hub_id, config.model.revision)


def eagle3_folder(config: Settings) -> Path:
    """Our export, which is in speculators' layout. Raises ValueError when it is no EAGLE-3 head or not there."""
    head: HeadConfig = config.head
    if head.name != "eagle3":
        raise ValueError(f"head={head.name}: vLLM and llama.cpp are measured with head=eagle3")
    folder = head_folder(head, config.output_dir, config.model.name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no exported head; train one (python train/run.py), or give head.path=")
    return folder


def built(peers: str, peer: str, file: str) -> Path:
    path = resolve_path(peers) / peer / file
    if not path.is_file():
        raise ValueError(f"peers={peers}: {path} is not there; build it with scripts/peers.sh {peer}")
    return path


def end_as_interrupted() -> None:
    """SIGTERM to this process unwinds it, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def context_of(prompt_tokens: int, max_tokens: int) -> int:
    """Room for a request and its drafts, in steps, so that what a server compiled for one serves the next too."""
    return -(-(prompt_tokens + max_tokens + ROOM) // ROUND) * ROUND


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
