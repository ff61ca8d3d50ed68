"""The tests that face the CPU, again at every level of processor below this one's (kernels/cpu/level.py).

Each level runs in a pytest of its own: torch, oneDNN and the C compiler are restricted before they start. Whole models,
with kernels that passed, run at the lowest level.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.level import LEVELS, SWITCH, level
from kernels.cpu.library import library

ROOT = Path(__file__).resolve().parents[2]
LOWER = LEVELS[: LEVELS.index(level())]
KERNELS = tuple(
    f"tests/{name}.py"
    for name in (
        "kernels/test_linear", "kernels/test_logits", "kernels/test_elementwise", "kernels/test_groups",
        "kernels/test_vocabulary", "kernels/test_blocks", "kernels/test_integer_linear", "kernels/test_attention",
        "kernels/test_decoder", "kernels/test_walk", "kernels/test_recurrence", "kernels/test_recurrent_gates",
        "kernels/test_ttt_attention", "kernels/test_block_attention", "kernels/test_row_gradients",
        "unit/test_native_weights", "unit/test_native_groups",
    )
)  # fmt: skip
MODELS = (
    "tests/kernels/test_declarations.py", "tests/unit/test_eagle3_head.py", "tests/unit/test_layer_checks.py",
    "tests/lossless/test_demo_target.py",
)  # fmt: skip
# what differs between levels: kernels, and the layouts of weights that models choose
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sources("kernels", "models", "tests/kernels", "tests/heads.py", "tests/drafts.py", *KERNELS, *MODELS),
    pytest.mark.skipif(SWITCH in os.environ, reason="this is the run at a lower level"),
    pytest.mark.skipif(library() is None, reason="no C compiler on this machine"),
]


def run(command: list[str], chosen: str, **environment: str) -> None:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        command,
        env={**outer, SWITCH: chosen, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-20_000:]


@pytest.mark.parametrize("chosen", LOWER)
def test_the_tests_pass(chosen: str) -> None:
    files = KERNELS + MODELS if chosen == LOWER[0] else KERNELS
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not other_processors and not tiles"]
    run([sys.executable, "-m", "pytest", *options, *files], chosen)


@pytest.mark.parametrize("chosen", LOWER[:1])
def test_quickstart_in_miniature(chosen: str, tmp_path: Path) -> None:
    """Train a head for the demo for two updates, publish it, and generate with it."""
    folder = f"output_dir={tmp_path}"
    few = [
        "data.num_sequences=16",
        "data.max_new_tokens=16",
        "data.prompt_tokens=16",
        "sequence_length=48",
        "eval_prompts=2",
        "batch_size=4",
    ]
    train = [sys.executable, "train/run.py", "model=demo", "head=eagle3", "minutes=null", "steps=2", folder, *few]
    run(train, chosen)
    prompt = ["prompt=def main(", "chat=false", "max_tokens=8"]
    run([sys.executable, "infer/generate.py", "model=demo", "head=eagle3", "proposer=head", folder, *prompt], chosen)


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="no qemu-x86_64 (scripts/setup_env.sh dev)")
@pytest.mark.skipif("avx2" not in LOWER, reason="this processor is no better than the emulated one")
def test_the_demo_generates_on_an_emulated_haswell() -> None:
    """Here instructions beyond AVX2 end the process. The emulator shows this machine's /proc/cpuinfo, hence the switch.

    The C kernels are built before, by the machine itself.
    """
    build = "from kernels.cpu.library import library; assert library() is not None"
    run([sys.executable, "-c", build], "avx2")
    command = [sys.executable, "infer/generate.py", "model=demo", "head=none", "prompt=hello", "max_tokens=2"]
    run(["qemu-x86_64", "-cpu", "Haswell", *command, "engine.max_tokens_in_cache=512"], "avx2")
