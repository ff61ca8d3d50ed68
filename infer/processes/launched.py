"""Detects whether torchrun started this process as one of several. Light imports: entry points check this first."""

from __future__ import annotations

import os

from infer.config import EngineConfig


def launched_rank(engine: EngineConfig) -> int | None:
    """Return this process's rank, or None if it was started alone.

    Raises ValueError if the processes are not as many as `engine` asks for, or are on several machines.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or "RANK" not in os.environ:
        return None
    if count != engine.tensor_parallel:
        raise ValueError(
            f"engine.tensor_parallel={engine.tensor_parallel}: started as {count} processes; say "
            f"engine.tensor_parallel={count}, or start one process"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", count)) != count:
        raise ValueError(f"engine.tensor_parallel={count}: ranks on several machines are not supported")
    return int(os.environ["RANK"])
