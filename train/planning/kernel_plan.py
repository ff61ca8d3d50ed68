"""What a plan says of this machine's kernels: what computes the target's layers, and which precision trains faster."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from infer.options.devices import resolve_device
from kernels.capabilities import multiplies_faster, product_rate
from kernels.slower import name_of
from kernels.trials import Trial, try_dtypes
from train.config import TrainConfig

BUSY = 1e9  # operations a second: no machine that is free does fewer


def kernel_lines(config: TrainConfig, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Yield topic and text of what a run on a CPU will compute with, `dtype` being the target's; nothing on a GPU."""
    if resolve_device(config.model.device).type != "cpu":
        return
    with torch.no_grad():
        for trial in try_dtypes((dtype,)):
            yield "kernels", describe_trial(trial)
    yield "kernels", describe_precision(config.precision)


def describe_trial(trial: Trial) -> str:
    text = f"the target's {trial.name}: {trial.detail}"
    if trial.fault:
        return f"{text}; python scripts/doctor.py says more"
    return f"{text}; slow, faster: {trial.slower}" if trial.slower else text


def describe_precision(precision: str) -> str:
    """Return how fast torch multiplies for the head's training, and the faster precision if it is the other one."""
    chosen, other = (torch.float32, torch.bfloat16) if precision == "fp32" else (torch.bfloat16, torch.float32)
    text = f"training multiplies {name_of(chosen)} at {2 * product_rate(chosen) / 1e9:.0f} GFLOP/s"
    if multiplies_faster(other, chosen):
        word = "bf16" if other is torch.bfloat16 else "fp32"
        return f"{text}, {name_of(other)} at {2 * product_rate(other) / 1e9:.0f}: precision={word} may be faster"
    return text


def describe_flops(flops: float) -> str:
    """Return the measured speed, and that it is no property of the machine if it is next to nothing."""
    text = f"at {flops / 1e9:.0f} GFLOP/s, estimated"
    if flops < BUSY:
        return f"{text}: the machine is busy, and these times are far too long; check again when it is idle"
    return text
