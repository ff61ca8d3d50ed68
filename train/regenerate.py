"""On-policy responses: the target continues every prompt through our engine, and ids and mask are kept as they came.

What is generated depends on prompts, seeds and target alone, so it is made once per run: finished responses are
written down in parts as they come, and an interrupted run goes on with the missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from infer.engine import Engine
from infer.request import SamplingParams, StepOutput
from train import atomic
from train.config import DataConfig
from train.data import Sequences
from train.prompts import Row

PART = 64  # responses per part file: what an interruption can lose


def sampling_params(index: int, data: DataConfig, seed: int) -> SamplingParams:
    """For prompt number `index`: temperatures in turn, a seed of its own."""
    temperature = data.temperatures[index % len(data.temperatures)]
    own_seed = ((seed % 2**31) << 32) + index
    return SamplingParams(
        temperature=temperature, top_k=data.top_k, top_p=data.top_p, seed=own_seed, max_tokens=data.max_new_tokens
    )


def continue_rows(
    engine: Engine,
    rows: Sequence[Row],
    params: Callable[[int], SamplingParams],
    folder: Path,
    *,
    share: tuple[int, int] = (0, 1),
    check: Callable[[], None] = lambda: None,
    show: bool = False,
) -> None:
    """Continues the rows of this process's share that no part in `folder` holds yet, and writes parts.

    `check` is called at every step and may raise to stop; what is finished by then is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank, world = share
    done = read_parts(folder)
    missing = [index for index in range(rank, len(rows), world) if index not in done]
    finished = {index: whole for index in missing if (whole := rows[index]).loss_mask is not None}
    missing = [index for index in missing if index not in finished]
    outputs: dict[int, list[int]] = {index: [] for index in missing}

    def keep(place: int, output: StepOutput) -> None:
        index = missing[place]
        outputs[index] += output.token_ids
        if output.finish_reason is not None:
            prompt, response = rows[index].ids, outputs.pop(index)
            finished[index] = Row(prompt + response, [False] * len(prompt) + [True] * len(response))
            if len(finished) >= PART:
                write_part(folder, finished)
                finished.clear()
        check()

    try:
        if missing:
            engine.generate(
                [rows[index].ids for index in missing],
                [params(index) for index in missing],
                on_output=keep,
                progress=show,
            )
    finally:
        if finished:
            write_part(folder, finished)


def write_part(folder: Path, rows: dict[int, Row]) -> None:
    """One file, named by its first row: no two parts hold the same one."""
    indices = sorted(rows)
    sequences = Sequences.of([(rows[index].ids, rows[index].loss_mask or []) for index in indices])
    path = folder / f"part-{indices[0]:07d}.safetensors"
    atomic.write_tensors(path, {"rows": torch.tensor(indices), **sequences.tensors()})


def read_parts(folder: Path) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    for path in sorted(folder.glob("part-*.safetensors")):
        tensors = load_file(path)
        sequences = Sequences.from_tensors(tensors)
        for place, index in enumerate(tensors["rows"].tolist()):
            ids, assistant = sequences.row(place)
            rows[index] = Row(ids.tolist(), assistant.tolist())
    return rows


def collect_parts(folder: Path, count: int) -> Sequences:
    """All rows in their order, once every process has written its parts."""
    rows = read_parts(folder)
    missing = [index for index in range(count) if index not in rows]
    assert not missing, f"{len(missing)} responses were never written, the first is number {missing[0]}"
    return Sequences.of([(rows[index].ids, rows[index].loss_mask or []) for index in range(count)])
