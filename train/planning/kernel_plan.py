"""What a plan says of this machine's kernels: what computes the target's layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from infer.options.devices import resolve_device
from kernels.trials import Trial, try_dtypes
from train.config import TrainConfig


def kernel_lines(config: TrainConfig, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Yield topic and text of what a run on a CPU will compute with, `dtype` being the target's; nothing on a GPU."""
    if resolve_device(config.model.device).type != "cpu":
        return
    with torch.no_grad():
        for trial in try_dtypes((dtype,)):
            yield "kernels", describe_trial(trial)


def describe_trial(trial: Trial) -> str:
    text = f"the target's {trial.name}: {trial.detail}"
    if trial.fault:
        return f"{text}; python scripts/doctor.py says more"
    return f"{text}; slow, faster: {trial.slower}" if trial.slower else text
