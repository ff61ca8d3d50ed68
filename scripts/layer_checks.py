"""doctor.py's checks of layers: one of each kind is tried, and said what computes it, how fast, and what is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from kernels.cpu.level import level
from kernels.cpu.library import library
from kernels.trials import IN_C, Trial, try_all

Row = tuple[str, str, str, str]  # name, status, detail and fix of a check
FAULT = "HEADWAY_CPU_KERNELS=torch serves without it; report this processor"


def check_layers(trials: Callable[[], Iterable[Trial]] = try_all) -> list[Row]:
    """Try every kind of layer. A wrong one is broken; a slow one is a warning where C kernels should serve it.

    Without C kernels all are slow for the one reason that another check names. fp16 has none anywhere.
    """
    with torch.no_grad():
        return [row_of(trial, has_kernels=library() is not None) for trial in trials()]


def row_of(trial: Trial, *, has_kernels: bool) -> Row:
    name = f"layer: {trial.name}"
    if trial.fault:
        return name, "broken", f"{trial.kernel or 'nothing'}: {trial.fault}", FAULT
    detail = trial.detail.replace(IN_C, f"C, {level()}", 1)
    if not trial.slower:
        return name, "ok", detail, ""
    if has_kernels and "float16" not in trial.name.split():
        return name, "warning", f"{detail}, slow", trial.slower
    return name, "ok", f"{detail}, slow ({trial.slower})", ""
