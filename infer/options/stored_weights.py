"""Whether a target's weights are served in the blocks or groups in which its checkpoint stores them."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from infer.config import EngineConfig, ModelConfig
from kernels.linear import reads_narrow
from kernels.triton.device import limits
from kernels.weights.ggml import FORMATS, IN_GROUPS, reads_ggml
from kernels.weights.quantize import WeightFormat
from models.checkpoint import ggml_formats, read_config, stored_formats
from models.gguf import is_gguf
from models.quantized import read_scheme
from models.quantized.tensors import why_unread
from models.targets import resolve_checkpoint
from models.targets.llama import LlamaTarget

FP8_FROM = 89  # compute capability: the first GPUs that convert e4m3


def reads_native(
    model: ModelConfig, engine: EngineConfig, dtype: torch.dtype, device: torch.device, *, divided: bool = False
) -> bool:
    """Return whether the target's weights stay as published (`engine.weights`); `divided`: among ranks.

    Raises ValueError if they must, which activations of 8 bits demand too, and cannot.
    """
    if engine.weights not in ("same", "native"):
        return False
    reason = why_widened(resolve_checkpoint(model.path_or_hub_id, model.revision), dtype, device, divided=divided)
    if engine.weights == "native" and reason is not None:
        raise ValueError(f"engine.weights=native: {reason}; engine.weights=same serves what is there")
    if engine.activations == "int8" and reason is not None:
        raise ValueError(
            f"engine.activations=int8: multiplies weights that are integers, and {reason}; use "
            "engine.activations=same, or on a CPU quantize the weights too: engine.weights=int8"
        )
    return reason is None


def check_weights(engine: EngineConfig, target: LlamaTarget) -> None:
    """Raise ValueError for weights that a loaded target does not have, or that its GPU cannot compute with."""
    if engine.weights == "native" and not target.ggml_formats:
        raise ValueError(
            "engine.weights=native: this target was loaded without its blocks or groups; Engine.load, or load_target("
            "..., native=True), keeps them, and engine.weights=same serves what is there"
        )
    device = cast(Tensor, target.norm.weight).device
    for key in ("weights", "head_weights", "draft_weights", "kv_dtype"):
        if getattr(engine, key) == "fp8" and device.type == "cuda" and limits(device).capability < FP8_FROM:
            raise ValueError(
                f"engine.{key}=fp8: this GPU has no 8-bit floats (compute capability {limits(device).capability / 10}, "
                f"{FP8_FROM / 10} is needed); use engine.{key}={'same' if key == 'kv_dtype' else 'int8'}"
            )


def drafter_format(choice: str, dtype: torch.dtype, device: torch.device) -> WeightFormat:
    """Return in which format a drafter's linear layers are packed (`engine.head_weights`, `engine.draft_weights`)."""
    if choice != "auto":
        return cast("WeightFormat", choice)
    return "int8" if device.type == "cpu" and reads_narrow(8, dtype, device) else "same"


def why_widened(checkpoint: Path, dtype: torch.dtype, device: torch.device, *, divided: bool) -> str | None:
    """Return why a checkpoint's weights cannot stay in blocks or groups, None if they can."""
    if not stored_formats(checkpoint):
        return f"{checkpoint} holds no weights in blocks, as GGUF files do, nor in groups, as GPTQ and AWQ do"
    if divided:
        return "weights in blocks or groups are not divided among ranks"
    if not is_gguf(checkpoint):
        scheme = read_scheme(read_config(checkpoint))
        assert scheme is not None
        return why_unread(checkpoint, scheme, dtype, device)
    formats = ggml_formats(checkpoint)
    unread = {name: tensor for name, tensor in formats.items() if not reads_ggml(name, dtype, device)}
    if not unread:
        return None
    name, tensor = next(iter(unread.items()))
    kernels = f"no kernel reads {name} ({tensor}) for {str(dtype).removeprefix('torch.')} on {device.type}"
    readable = (*FORMATS, *IN_GROUPS)
    return kernels if name in readable else f"{kernels}; only {', '.join(readable)} can stay"
