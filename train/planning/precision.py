"""Resolves precision=auto: the dtype of a run's matrix products; parameters are in fp32 either way.

A processor without bf16 instructions multiplies in bf16 too, several times slower than in fp32. A run keeps the dtype
with which it was begun.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from infer.devices import resolve_device
from kernels.cpu.level import chosen_level, processor_flags
from train.config import TrainConfig
from train.storage.run_folder import stored_config

BF16 = {"avx512_bf16", "bf16"}  # flags of processors with products in bf16, on x86 and on Arm


class Precision(NamedTuple):
    name: str  # "fp32" or "bf16"
    reason: str = ""  # empty if the configuration names it


def faster_on_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Precision:
    """Return the dtype of faster products on the processor that `cpuinfo` describes, at the level in use."""
    flags = processor_flags(cpuinfo.read_text()) if cpuinfo.exists() else set[str]()
    if flags & BF16 and chosen_level() not in ("baseline", "avx2"):
        return Precision("bf16", "this processor has it")
    return Precision("fp32", "this processor has no products in bf16")


def choose_precision(config: TrainConfig) -> Precision:
    """Return the precision of a run: configured, or that with which the run was begun, or the faster one.

    Several processes, which must agree, compute in fp32 on CPUs.
    """
    if config.precision != "auto":
        return Precision(config.precision)
    if resolve_device(config.model.device).type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", "this GPU has it")
        return Precision("fp32", "this GPU has no bf16")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Precision("fp32", "several processes on CPUs may be on different ones; precision=bf16 is the other")
    stored = stored_config(config)
    if stored is not None and stored.precision != "auto":
        return Precision(stored.precision, "the run was begun with it")
    return faster_on_cpu()


def compute_dtype(config: TrainConfig) -> torch.dtype:
    return torch.bfloat16 if choose_precision(config).name == "bf16" else torch.float32
