"""What the start of a command must not import: packages that take a second to load and that nothing of it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys
from infer.config import EngineConfig
from infer.engine import Engine

engine = Engine.load(sys.argv[1], head=sys.argv[2], engine=EngineConfig(max_tokens_in_cache=512), proposer="head")
print(engine.proposer_config.adaptive, type(engine.speculator.planner).__name__, engine.config.head_weights)
print([name for name in ("accelerate", "sympy", "torch._dynamo", "transformers") if name in sys.modules])
"""


def test_schemas_of_heads_load_no_torch() -> None:
    """A command line is checked, and --help printed, before anything needs it."""
    code = "import sys, infer.options.cli, train.config, models.heads; print('torch' in sys.modules)"
    started = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert started.stdout == "False\n"


def test_an_engine_with_a_head_loads_no_compiler(tiny_target_folder: Path, tiny_head_folder: Path) -> None:
    command = [sys.executable, "-c", CODE, str(tiny_target_folder), str(tiny_head_folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert started.returncode == 0, started.stderr
    assert started.stdout.splitlines()[-2:] == ["True Controller auto", "[]"], "what the commands draft by, too"
