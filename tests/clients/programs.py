"""The client programs, and how one is run: in an environment from which it can reach the server and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmarks.document import markdown
from tests.clients.setting import FOLDER, HERE, MODEL, NODE

CHECKS = ("plain", "stream", "tools", "structured", "counts")
LIMIT_S = 600
# Requests to any other host go to a port on which nothing listens.
OFFLINE = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
}


@dataclass(frozen=True)
class Program:
    name: str
    environment: str  # one of setting.PINS
    file: str


@dataclass
class Outcome:
    name: str
    version: str = "?"
    checked: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def result(self, check: str) -> str:
        if check not in self.checked:
            return ""
        return "fails" if check in self.errors else "ok"


PROGRAMS = {
    name: Program(name, environment, file)
    for name, environment, file in (
        ("openai", "python", "use_openai.py"),
        ("openai-node", "node", "use_openai.mjs"),
        ("anthropic", "python", "use_anthropic.py"),
        ("anthropic-node", "node", "use_anthropic.mjs"),
        ("ai", "node", "use_ai.mjs"),
        ("langchain", "python", "use_langchain.py"),
        ("litellm", "python", "use_litellm.py"),
        ("pydantic-ai", "python", "use_pydantic_ai.py"),
        ("openai-agents", "python", "use_openai_agents.py"),
        ("llama-index", "llama-index", "use_llama_index.py"),
        ("instructor", "instructor", "use_instructor.py"),
        ("llm", "python", "use_llm.py"),
        *((name, "node", "use_agents.mjs") for name in ("claude-code", "codex", "opencode", "pi", "qwen-code")),
        ("lm_eval", "python", "use_lm_eval.py"),
        *((name, name, "use_load.py") for name in ("guidellm", "aiperf", "inference-perf", "evalscope")),
    )
}


def run_program(program: Program, url: str) -> Outcome:
    """Run a client program against the server at `url`. Its output is saved in .clients/<name>.log."""
    home = FOLDER / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(home), **OFFLINE}
    environment |= {"HEADWAY_URL": url, "HEADWAY_MODEL": MODEL, "HEADWAY_CLIENT": program.name}
    environment |= {"HEADWAY_TARGET": str(FOLDER / "target")}
    command, folder = command_of(program)
    outcome = Outcome(program.name)
    log = FOLDER / f"{program.name}.log"
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        outcome.errors["all"] = f"not finished within {LIMIT_S} s"
        return outcome
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    read(done.stdout.splitlines(), outcome)
    if done.returncode or not outcome.checked:
        outcome.errors["all"] = f"exit code {done.returncode}; see {log}"
    return outcome


def command_of(program: Program) -> tuple[list[str], Path]:
    if program.environment != "node":
        return [str(FOLDER / program.environment / "bin" / "python"), str(HERE / program.file)], FOLDER
    folder = FOLDER / "node"
    for file in HERE.glob("*.mjs"):  # node looks for packages next to the importing file
        shutil.copy(file, folder)
    return [str(NODE / "node"), program.file], folder


def read(lines: Sequence[str], outcome: Outcome) -> None:
    """Add the results in the lines that checks.py and checks.mjs print; any other output of the client is ignored."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict):
            continue
        if "check" in record:
            outcome.checked.append(record["check"])
            if record["error"] is not None:
                outcome.errors[record["check"]] = record["error"]
        else:
            outcome.version = record.get("version", outcome.version)


def table(outcomes: list[Outcome]) -> str:
    """Return a Markdown table of the results, readable as it is and for the manual."""
    rows = [(outcome.name, outcome.version, *(outcome.result(check) for check in CHECKS)) for outcome in outcomes]
    return markdown(("client", "version", *CHECKS), rows, pad=True).rstrip()
