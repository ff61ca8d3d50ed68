"""Load generators: they count the requests and tokens that the server counts. HEADWAY_CLIENT says which."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks import MODEL, URL, expect, run

NAME, TARGET = os.environ["HEADWAY_CLIENT"], os.environ["HEADWAY_TARGET"]
REQUESTS, TOKENS = 4, 16
COUNTERS = {"requests": "vllm:request_success_total", "output": "vllm:generation_tokens_total"}


def guidellm(folder: str) -> tuple[list[str], Callable[[], dict[str, Any]]]:
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={URL},model={MODEL}", "--disable-progress"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TARGET}", "--output", f"kind=json,path={folder}/out.json"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"]

    def counts() -> dict[str, Any]:
        (benchmark,) = read(folder, "out.json")["benchmarks"]
        metrics = benchmark["metrics"]
        output = metrics["output_token_count"]["successful"]["total_sum"]
        return {"requests": metrics["request_totals"]["successful"], "output": output}

    return command, counts


def aiperf(folder: str) -> tuple[list[str], Callable[[], dict[str, Any]]]:
    command = ["aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", TARGET, "--request-count", str(REQUESTS), "--concurrency", "2", "--ui", "simple"]
    command += ["--isl", "32", "--osl", str(TOKENS)]
    command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--artifact-dir", folder]

    def counts() -> dict[str, Any]:
        report = read(folder, "profile_export_aiperf.json")
        return {"requests": report["request_count"]["avg"], "output": report["total_output_tokens"]["avg"]}

    return command, counts


def inference_perf(folder: str) -> tuple[list[str], Callable[[], dict[str, Any]]]:
    def always(tokens: int) -> dict[str, int]:
        return {"min": tokens, "max": tokens, "mean": tokens, "std_dev": 0, "total_count": REQUESTS}

    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", "input_distribution": always(32), "output_distribution": always(TOKENS)},
        "load": {"type": "constant", "num_workers": 1, "stages": [{"rate": 2, "duration": REQUESTS // 2}]},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": URL, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": TARGET},
        "storage": {"local_storage": {"path": folder}},
    }
    path = Path(folder, "config.yml")
    path.write_text(json.dumps(config))

    def counts() -> dict[str, Any]:
        done = read(folder, "summary_lifecycle_metrics.json")["successes"]
        return {"requests": done["count"], "output": done["output_tokens"]["total"]}

    return ["inference-perf", "--config_file", str(path)], counts


def evalscope(folder: str) -> tuple[list[str], Callable[[], dict[str, Any]]]:
    command = ["evalscope", "perf", "--model", MODEL, "--url", f"{URL}/v1/chat/completions", "--api", "openai"]
    command += ["--dataset", "random", "--min-prompt-length", "32", "--max-prompt-length", "32", "--parallel", "2"]
    command += ["--number", str(REQUESTS), "--tokenizer-path", TARGET, "--outputs-dir", folder, "--no-timestamp"]
    command += ["--no-test-connection"]  # a request that it does not count
    command += ["--max-tokens", str(TOKENS), "--min-tokens", str(TOKENS)]

    def counts() -> dict[str, Any]:
        summary = read(folder, "benchmark_summary.json")
        requests = summary["Success Requests"]
        return {"requests": requests, "output": requests * summary["Avg Output Tokens"]}

    return command, counts


def read(folder: str, name: str) -> Any:
    (path,) = Path(folder).rglob(name)
    return json.loads(path.read_text())


def counted() -> dict[str, float]:
    with urllib.request.urlopen(f"{URL}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {
        name: sum(float(line.split()[-1]) for line in lines if line.startswith((f"{counter}{{", f"{counter} ")))
        for name, counter in COUNTERS.items()
    }


def counts() -> None:
    before = counted()
    with tempfile.TemporaryDirectory() as folder:
        command, reported = PROGRAMS[NAME](folder)
        # aiperf takes the path of a tokenizer for the id of a repository where HF_HUB_OFFLINE is set.
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        command[0] = str(Path(sys.executable).with_name(command[0]))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout).strip()[-800:])
        after = counted()
        expect(reported(), {name: after[name] - before[name] for name in COUNTERS})
    expect(after["requests"] - before["requests"], REQUESTS)


PROGRAMS = {"guidellm": guidellm, "aiperf": aiperf, "inference-perf": inference_perf, "evalscope": evalscope}
run(NAME, counts=counts)
