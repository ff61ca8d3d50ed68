"""On-policy responses: the target generates every turn on its own history, and token ids are kept as generated.

Responses depend on prompts, seeds and target alone, so they are generated once: finished conversations are written to
part files, by key, and an interrupted run resumes with the missing ones. Implementations of the `Answerer` protocol:
Headway's engine here, or an OpenAI-compatible server (train/data/answer_server.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm

from infer.engine import Engine
from infer.request import SamplingParams
from models.tokenizer import Tokenizer
from train.config import DataConfig
from train.data.dialogue import Dialogue, Row
from train.data.examples import Example
from train.data.sequences import Sequences
from train.storage import atomic

PART = 64  # conversations per part file: as many can be lost when a process is killed


class Job(NamedTuple):
    key: int
    dialogue: Dialogue
    params: SamplingParams


Finished = Callable[[Job, str | None], None]  # with the error message, None on success


class Answerer(Protocol):
    """Contract: takes jobs from the iterator, completes all turns of each and reports it once, in any order.

    `check` is called often and may raise to stop; unreported jobs are then dropped.
    """

    def answer(self, jobs: Iterator[Job], finished: Finished, check: Callable[[], None]) -> None: ...


class Outcome(NamedTuple):
    """The result for a set of conversations, each of which is done, skipped or failed."""

    sequences: Sequences  # in the order of their conversations
    failed: dict[int, str]  # reason by key
    counts: dict[str, int]  # conversations, done, skipped (without a served slot), failed
    shortened: dict[int, str]  # by key: why a conversation lacks its last turns


def sampling_params(index: int, data: DataConfig, seed: int) -> SamplingParams:
    """Return the parameters of prompt `index`: the configured temperatures in rotation, and a seed per prompt."""
    temperature = data.temperatures[index % len(data.temperatures)]
    prompt_seed = ((seed % 2**31) << 32) + index
    return SamplingParams(
        temperature=temperature, top_k=data.top_k, top_p=data.top_p, seed=prompt_seed, max_tokens=data.max_new_tokens
    )


def regenerate(
    answerer: Answerer,
    examples: Mapping[int, Example],
    params: Callable[[int], SamplingParams],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    longest_prompt: int,
    share: tuple[int, int] = (0, 1),
    check: Callable[[], None] = lambda: None,
    show: bool = False,
) -> dict[int, str]:
    """Generate the conversations of this process's share that no part in `folder` holds yet, and write parts.

    `examples` is by key, `share` is (rank, world size), and `params(n)` is for the n-th example. Finished conversations
    are kept if `check` raises. Returns the reasons of those that failed, by key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank, world = share
    assigned = list(enumerate(examples.items()))[rank::world]
    done = read_parts(folder)
    missing = [(number, key, example) for number, (key, example) in assigned if key not in done]
    finished: dict[int, list[Row]] = {}
    shortened: dict[int, str] = {}
    failed: dict[int, str] = {}

    def jobs() -> Iterator[Job]:
        for number, key, example in missing:
            yield Job(key, Dialogue(example, tokenizer, longest_prompt=longest_prompt), params(number))

    with tqdm(
        total=len(assigned), initial=len(assigned) - len(missing), unit="row", disable=not show, dynamic_ncols=True
    ) as bar:

        def finish(job: Job, error: str | None) -> None:
            place = job.dialogue.example.place
            prefix = f"{place}: " if place else ""
            if error is None:
                finished[job.key] = job.dialogue.rows
                if job.dialogue.cut is not None:
                    shortened[job.key] = prefix + job.dialogue.cut
                if len(finished) >= PART:
                    write_part(folder, finished, shortened)
                    finished.clear()
                    shortened.clear()
            else:
                failed[job.key] = prefix + error
                bar.set_postfix(failed=len(failed), refresh=False)
            bar.update()

        try:
            answerer.answer(jobs(), finish, check)
        finally:
            if finished:
                write_part(folder, finished, shortened)
    return failed


class EngineGenerator:
    """Headway's engine, kept at full batch size: a conversation's next turn is queued as soon as the last one ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def answer(self, jobs: Iterator[Job], finished: Finished, check: Callable[[], None]) -> None:
        engine, running = self._engine, dict[str, Job]()
        responses: dict[str, list[int]] = {}

        def submit(job: Job) -> None:
            try:
                prompt = job.dialogue.next_prompt()
                if prompt is None:
                    finished(job, None)
                    return
                name = engine.add(prompt, job.params)
            except ValueError as error:
                finished(job, str(error))
                return
            running[name], responses[name] = job, []

        try:
            while True:
                while len(running) < 2 * engine.config.max_batch and (job := next(jobs, None)) is not None:
                    submit(job)
                if not running:
                    return
                check()
                for output in engine.step():
                    responses[output.request_id] += output.token_ids
                    if output.finish_reason is not None:
                        job = running.pop(output.request_id)
                        job.dialogue.take(responses.pop(output.request_id))
                        submit(job)
        finally:
            for name in running:
                engine.abort(name)


def write_part(folder: Path, rows: Mapping[int, Sequence[Row]], shortened: Mapping[int, str]) -> None:
    """Write a part file, named by its first key, which no other part holds. A conversation has any number of rows.

    The reasons for shortened conversations are in a .json file beside it, which is written first and read only if the
    part exists.
    """
    keys = list(rows)
    flat = [row for key in keys for row in rows[key]]
    counts = torch.tensor([len(rows[key]) for key in keys])
    path = folder / f"part-{keys[0]:016x}.safetensors"
    if shortened:
        atomic.write_text(path.with_suffix(".json"), json.dumps({str(key): why for key, why in shortened.items()}))
    atomic.write_tensors(path, {"keys": torch.tensor(keys), "counts": counts, **Sequences.of(flat).tensors()})


def read_parts(folder: Path) -> dict[int, list[Row]]:
    rows: dict[int, list[Row]] = {}
    for path in sorted(folder.glob("part-*.safetensors")):
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); delete it to have it made again") from error
        sequences, place = Sequences.from_tensors(tensors), 0
        for key, count in zip(tensors["keys"].tolist(), tensors["counts"].tolist(), strict=True):
            parts = [sequences.row(index) for index in range(place, place + count)]
            rows[key] = [Row(ids.tolist(), assistant.tolist()) for ids, assistant in parts]
            place += count
    return rows


def read_shortened(folder: Path) -> dict[int, str]:
    paths = [path.with_suffix(".json") for path in sorted(folder.glob("part-*.safetensors"))]
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    return {int(key): why for file in files for key, why in file.items()}


def collect_parts(folder: Path, keys: Collection[int], failed: Mapping[int, str]) -> Outcome:
    """Return the outcome, once every process has written its parts. Raises ValueError if conversations are missing."""
    try:
        return collect(keys, read_parts(folder), failed, read_shortened(folder))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; run the same command again to have them answered") from error


def collect(
    keys: Collection[int],
    rows: Mapping[int, Sequence[Row]],
    failed: Mapping[int, str],
    shortened: Mapping[int, str] | None = None,
) -> Outcome:
    """Return the outcome for `keys`. Raises ValueError unless each is in exactly one of `rows` and `failed`."""
    lost = sum((key in rows) == (key in failed) for key in keys)
    done, skipped = (sum(bool(rows[key]) == some for key in keys if key in rows) for some in (True, False))
    counts = {"conversations": len(keys), "done": done, "skipped": skipped, "failed": len(failed)}
    if lost or done + skipped + len(failed) != len(keys):
        raise ValueError(
            f"of {len(keys)} conversations {done} were answered, {skipped} skipped and {len(failed)} failed: "
            f"{lost} are in none of these or in two"
        )
    sequences = Sequences.of([row for key in keys for row in rows.get(key, ())])
    return Outcome(sequences, dict(failed), counts, {key: why for key, why in (shortened or {}).items() if key in keys})
