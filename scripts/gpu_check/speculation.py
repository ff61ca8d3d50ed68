"""Measures speculation end to end on the inflated target and head: real acceptance at a large model's cost."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from infer.config import EngineConfig, ProposerConfig
from infer.config_checks import REPO_ROOT
from infer.engine import Engine
from infer.request import Request, SamplingParams
from models.heads.eagle3.head import Eagle3Head
from models.heads.files import load_head
from models.targets import load_target
from models.tokenizer import Tokenizer
from scripts.gpu_check import targets
from scripts.gpu_check.exactness import TEXTS, use_graphs
from scripts.inflation import SHAPES, inflate_head, inflate_target

CHAIN = ProposerConfig(name="auto", max_draft_tokens=5)
SYSTEMS = {
    "plain": ("none", CHAIN),
    "head, chain 5": ("head", CHAIN),
    "head, tree 16": ("head", replace(CHAIN, tree="beam:4x5:16")),
    "synthetic, chain 5": ("synthetic", replace(CHAIN, acceptance=[0.88] * 5)),  # τ 4.46, and drafts that cost nothing
}
SHORT = ProposerConfig(name="auto", max_draft_tokens=2, acceptance=[0.9, 0.8])  # for the interpreter
SHORT_SYSTEMS = {
    "plain": ("none", SHORT),
    "head, chain 2": ("head", SHORT),
    "synthetic, chain 2": ("synthetic", SHORT),
}
INTERPRETED = (("none", "off"), ("none", "on"), ("head", "on"), ("synthetic", "off"))
PROFILED = 8  # rounds; a request emits at most six tokens in each
TAU = 4.5  # the acceptance length for which tokens/s with the head are also reported
TRAIN_SECONDS = 150


def bench(device: torch.device, copy_gb_s: float, deadline: float, head: Path | None, minutes: float) -> dict[str, Any]:
    """Measure every system at every batch size until `deadline`. Raises ValueError for a head that is not EAGLE-3."""
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as work:
        document: dict[str, Any] = {"runs": []}
        source, shape, dtype = targets.DEMO, SHAPES["llama3.1-8b"], torch.bfloat16
        if not on_gpu:
            source, shape, dtype = Path(work) / "tiny", targets.WIDE, torch.float32
            targets.write_tiny(source)
        small = load_target(str(source))
        document["head"] = str(head or "not trained")
        if head is None and on_gpu:
            try:
                head = train_head(Path(work), minutes)
                document["head"] = f"trained here for {minutes} minutes"
            except (ValueError, subprocess.TimeoutExpired) as error:  # an untrained head will do
                document["training_failed"] = str(error)
        drafter = targets.taught_head(small) if head is None else load_head(head, target=small)
        if not isinstance(drafter, Eagle3Head):
            raise ValueError(f"--head {head}: a head of kind {drafter.name}; give an EAGLE-3 head of the demo target")
        layers = small.config.num_layers
        wide = inflate_head(drafter, shape, target_layers=layers, dtype=dtype, device=device)
        target = inflate_target(source, shape, dtype=dtype, device=device)
    weights = sum(p.numel() * p.element_size() for name, p in target.named_parameters() if "embed_tokens" not in name)
    limit = copy_gb_s * 1e9 / weights
    document |= {"target": f"{source.name} inflated", "weight_bytes": weights}
    document["plain_limit_tokens_per_s"] = round(limit, 1)
    batches = (1, 8, 64) if on_gpu else (2,)
    systems = SYSTEMS if on_gpu else SHORT_SYSTEMS
    pool = 32768 if on_gpu else 128
    config = EngineConfig(max_batch=max(batches), max_tokens_in_cache=pool, graphs="off")
    engine = Engine(target, head=wide, config=config, probe=on_gpu)
    prompts = [[5, 6, 7], [9, 8]]
    if on_gpu:
        tokenizer = Tokenizer.load(targets.DEMO)
        prompts = [tokenizer.encode(text) for text in TEXTS]
    for batch in batches:
        batch_prompts = [prompts[index % len(prompts)] for index in range(batch)]
        plain: list[list[int]] = []
        runs = [(name, *drafter, graphs) for name, drafter in systems.items() for graphs in ("off", "on")]
        runs = [run for run in runs if run[1] != "synthetic" or run[3] == "off"]
        if not on_gpu:  # each mode of `use_graphs` once or twice
            runs = [run for run in runs if (run[1], run[3]) in INTERPRETED]
        for name, proposer, shape_of, graphs in runs:
            line: dict[str, Any] = {"system": name, "batch": batch, "graphs": graphs}
            if time.monotonic() > deadline:
                document["runs"].append(line | {"left_out": "no time"})
                continue
            use_graphs(engine, graphs)
            engine.set_proposer(proposer, config=shape_of)
            if engine.graphs is not None:
                line |= {"recorded": engine.graphs.count, "recorded_bytes": engine.graphs.bytes}
            ids, numbers = measure(engine, batch_prompts, 96 if on_gpu else 3)
            if on_gpu or proposer == "none":  # on a CPU the result has no meaning, but the code must work
                numbers |= idle_time(engine, batch_prompts, numbers["round_ms"])
            plain = plain or ids
            if proposer != "synthetic":
                numbers["ok"] = ids == plain
            if proposer == "none":
                numbers["of_limit"] = round(numbers["tokens_per_s"] / batch / limit, 4)
            if proposer == "head":
                numbers["tokens_per_s_at_tau"] = {TAU: round(1000 * batch * TAU / numbers["round_ms"], 1)}
            document["runs"].append(line | numbers)
    return document


def prefilled(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[Request]:
    """Add the prompts and run the engine until each has its first token; return their requests."""
    requests = [engine.request(engine.add(prompt, params)) for prompt in prompts]
    while any(request.output_length == 0 for request in requests):
        engine.step()
    return requests


def measure(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the token ids, and median time, tokens/s and τ of the rounds after the prefill of all prompts."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    if engine.device.type == "cuda":
        engine.generate([prompts[0]], replace(params, max_tokens=8))  # compile kernels and warm caches
    requests, rounds, emitted = prefilled(engine, prompts, params), [], 0
    while engine.has_work:
        full = all(request.finish_reason is None for request in requests)
        begin = time.perf_counter()
        outputs = engine.step()  # token ids have reached the host
        if full:
            rounds.append(time.perf_counter() - begin)
            emitted += sum(len(output.token_ids) for output in outputs)
    steps, all_emitted = (sum(getattr(request.stats, key) for request in requests) for key in ("steps", "emitted"))
    return [request.output_ids for request in requests], {
        "round_ms": round(1000 * statistics.median(rounds), 3),
        "rounds_per_s": round(1 / statistics.median(rounds), 1),
        "tokens_per_s": round(emitted / sum(rounds), 1),
        "tau": round(all_emitted / steps, 3),
    }


def idle_time(engine: Engine, prompts: Sequence[list[int]], round_ms: float) -> dict[str, float]:
    """Return the GPU's busy time in a round by the profiler, and so its idle time in a round of `round_ms`.

    The last rounds, in which requests finish, are not profiled. On a CPU the result has no meaning.
    """
    requests = prefilled(engine, prompts, SamplingParams(max_tokens=64, ignore_eos=True))
    on_gpu = engine.device.type == "cuda"
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    if on_gpu:
        torch.cuda.synchronize(engine.device)  # a round already in flight is not profiled
    with profile(activities=[kind]) as profiler:
        for _ in range(PROFILED if on_gpu else 1):
            engine.step()
        if on_gpu:
            torch.cuda.synchronize(engine.device)
    for request in requests:
        engine.abort(request.request_id)
    busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1000 / (PROFILED if on_gpu else 1)
    return {"gpu_ms": round(busy, 3), "gap_us": round(1000 * (round_ms - busy), 1)}


def train_head(work: Path, minutes: float) -> Path:
    """Train a head for the demo target and return its folder. Raises ValueError with the end of the log if it fails."""
    command = [sys.executable, "train/run.py", "model=demo", "head=eagle3", "tracker=none", f"minutes={minutes}"]
    log = work / "train.log"
    with log.open("w") as stream:
        done = subprocess.run(
            [*command, f"output_dir={work}"],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=REPO_ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            timeout=60 * minutes + TRAIN_SECONDS,
            check=False,
        )
    if done.returncode:
        raise ValueError(f"training a head failed: {log.read_text(errors='replace')[-2000:]}")
    return work / "heads" / "demo" / "eagle3"
