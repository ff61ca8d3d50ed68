"""Several processes: what they send each other, and that two machines, each with a launcher, train what one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infer.options.cli import compose
from tests.train.launching import ROOT, on_two_processes
from tests.train.test_parallel_modes import SETTINGS, last
from train.config import TrainConfig
from train.loop import train


def test_processes_exchange_values_of_jsons_types() -> None:
    on_two_processes(Path(__file__).with_name("gather_worker.py"))


@pytest.mark.slow
def test_two_machines_learn_what_one_process_learns(tiny_target_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = [*SETTINGS, f"model.path={tiny_target_folder}", f"output_dir={tmp_path}"]
    assert train(compose("train", TrainConfig, [*common, "run=single", "batch_size=8"])) is not None
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launchers = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(rank),
                "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}",
                "train/run.py", *common, "parallel=ddp", "run=machines", "batch_size=4",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for launcher in launchers:
            _, errors = launcher.communicate(timeout=900)
            assert launcher.returncode == 0, errors[-4000:]
    finally:
        for launcher in launchers:
            launcher.kill()
    expected, actual = (last(tmp_path / name, "module") for name in ("single", "machines"))
    for name, value in expected.items():
        assert value.float().sub(actual[name].float()).abs().max() < 1e-4, name
