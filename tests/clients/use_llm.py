"""The command-line program `llm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import ARGUMENTS, ASKED, ASKED_JSON, MODEL, SAID, URL, expect, run

MODELS = f"""\
- model_id: {MODEL}
  model_name: {MODEL}
  api_base: "{URL}/v1"
  supports_tools: true
  supports_schema: true
"""
ADD = 'def add(a: int, b: int) -> int:\n    "Adds two numbers."\n    return a + b\n'


def llm(*arguments: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "extra-openai-models.yaml").write_text(MODELS)
        environment = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "llm", "-m", MODEL, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    return done.stdout.strip()


def plain() -> None:
    expect(llm(ASKED, "--no-stream"), SAID)


def stream() -> None:
    expect(llm(ASKED), SAID)


def tools() -> None:
    expect(llm(ASKED, "--functions", ADD), SAID)


def structured() -> None:
    expect(json.loads(llm(ASKED_JSON, "--schema", "a int, b int")), ARGUMENTS)


run("llm", plain=plain, stream=stream, tools=tools, structured=structured)
