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
        command, reported = {"guidellm": guidellm, "aiperf": aiperf}[NAME](folder)
        # aiperf takes the path of a tokenizer for the id of a repository where HF_HUB_OFFLINE is set.
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        command[0] = str(Path(sys.executable).with_name(command[0]))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout).strip()[-800:])
        after = counted()
        expect(reported(), {name: after[name] - before[name] for name in COUNTERS})
    expect(after["requests"] - before["requests"], REQUESTS)


run(NAME, counts=counts)
