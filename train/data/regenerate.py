"""On-policy responses: the target generates every turn on its own history, and token ids are kept as generated.

Responses depend on prompts, seeds and target alone, so they are generated once: each finished conversation is a line of
a part file, by key, and an interrupted run resumes with the missing ones. Implementations of the `Answerer` protocol:
Headway's engine here, or an OpenAI-compatible server (train/data/answer_server.py).
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from tqdm import tqdm

from infer.engine import Engine
from infer.learning.recording import recording
from infer.request import SamplingParams
from infer.settings.paths import private
from models.tokenizer import Tokenizer
from train.config import DataConfig
from train.data.dialogue import Dialogue, Row
from train.data.examples import Example
from train.data.sequences import Sequences
from train.features.recorded import FeatureRecorder
from train.planning.time_limit import TimeLimit
from train.storage import atomic


class Job(NamedTuple):
    key: int
    dialogue: Dialogue
    params: SamplingParams


class Conversation(NamedTuple):
    """A conversation with its responses."""

    rows: list[Row]
    cut: str | None = None  # why it lacks its last turns


Finished = Callable[[Job, str | None], None]  # with the error message, None on success
Enough = Callable[[int, float], bool]
PART = 16  # tokens of an answer that are worth to be trained on if there is no time for more
OUT_OF_TIME = "half of minutes= was over"


class Answerer(Protocol):
    """Contract: takes jobs from the iterator, completes all turns of each and reports it once, in any order.

    `check` is called often and may raise to stop; unreported jobs are then dropped. `enough(n, x)` is called often too,
    where n jobs in flight have a part of an answer, x whole ones in all: once it is true, these may be reported with
    that, and no others.
    """

    def answer(self, jobs: Iterator[Job], finished: Finished, check: Callable[[], None], enough: Enough) -> None: ...


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
    limit: TimeLimit | None = None,
    show: bool = False,
) -> dict[int, str]:
    """Generate the conversations of this process's share that no part in `folder` holds yet, and write parts.

    `examples` is by key, `share` is (rank, world size), and `params(n)` is for the n-th example. Finished conversations
    are kept if `check` raises. With `limit`, conversations for which there is no time are left out, some are cut short,
    and the order is random. Returns the reasons of those that failed, by key.
    """
    atomic.make_folder(folder)
    rank, world = share
    assigned = list(enumerate(examples.items()))[rank::world]
    done = read_parts(folder)
    missing = [(number, key, example) for number, (key, example) in assigned if key not in done]
    if limit is not None:
        random.Random(0).shuffle(missing)  # what is left out may be of any kind
    failed: dict[int, str] = {}

    def jobs() -> Iterator[Job]:
        for number, key, example in missing:
            yield Job(key, Dialogue(example, tokenizer, longest_prompt=longest_prompt), params(number))

    # a new file, since a kill may have cut off the last line of an earlier one
    path = folder / f"part-{secrets.token_hex(8)}.jsonl"
    total, already = len(assigned), len(assigned) - len(missing)
    answered, partly = 0, 0.0  # by this call: conversations, and their equivalent in parts of answers
    with (
        atomic.refuse_full_disk(path),
        open(path, "w", encoding="utf-8", opener=private) as part,
        tqdm(total=total, initial=already, unit="row", disable=not show, dynamic_ncols=True) as bar,
    ):

        def finish(job: Job, error: str | None) -> None:
            nonlocal answered
            place, cut = job.dialogue.example.place, job.dialogue.cut
            prefix = f"{place}: " if place else ""
            if error is None:
                write_line(part, job.key, Conversation(job.dialogue.rows, cut and prefix + cut))
            else:
                failed[job.key] = prefix + error
            answered += 1
            show_progress()
            bar.update()

        def show_progress() -> None:
            possible = total if limit is None else already + limit.about(answered + partly)
            parts = [f"failed={len(failed)}"] if failed else []
            parts += [f"time for about {possible} of {total}"] if possible < total else []
            bar.set_postfix_str(", ".join(parts), refresh=False)

        def enough(begun: int, equivalent: float) -> bool:
            nonlocal partly
            partly = equivalent
            return limit is not None and limit.over(already + answered + begun)

        answerer.answer(jobs(), finish, check, enough)
    return failed


class EngineGenerator:
    """Headway's engine, kept at full batch size: a conversation's next turn is queued as soon as the last one ends.

    With `recorder` features are taken meanwhile. A conversation then shares cached pages only with itself, since of
    what another one computed the features would be missing.
    """

    def __init__(self, engine: Engine, recorder: FeatureRecorder | None = None) -> None:
        self._engine, self._recorder = engine, recorder

    def answer(self, jobs: Iterator[Job], finished: Finished, check: Callable[[], None], enough: Enough) -> None:
        with ExitStack() as resources:
            if self._recorder is not None:
                resources.callback(self._recorder.flush)
                resources.enter_context(recording(self._engine, self._recorder))
            self._answer(jobs, finished, check, enough)

    def _answer(self, jobs: Iterator[Job], finished: Finished, check: Callable[[], None], enough: Enough) -> None:
        engine, running, recorder = self._engine, dict[str, Job](), self._recorder
        salt = secrets.token_hex(8)  # an earlier call may have left pages of a conversation that it did not finish
        prompts: dict[str, list[int]] = {}
        responses: dict[str, list[int]] = {}

        def end(job: Job, error: str | None) -> None:
            finished(job, error)
            if recorder is not None:
                recorder.end(job.key, job.dialogue.rows if error is None else [])

        def submit(job: Job) -> None:
            try:
                prompt = job.dialogue.next_prompt()
                if prompt is None:
                    end(job, None)
                    return
                params = job.params if recorder is None else replace(job.params, cache_salt=f"{job.key:x} {salt}")
                name = engine.add(prompt, params)
            except ValueError as error:
                end(job, str(error))
                return
            running[name], prompts[name], responses[name] = job, prompt, []

        def take(name: str) -> list[int]:
            """Return a request's response, and keep its features for the conversation."""
            prompt, response = prompts.pop(name), responses.pop(name)
            if recorder is not None:
                recorder.end_turn(name, running[name].key, prompt + response)
            return response

        try:
            while True:
                while len(running) < 2 * engine.config.max_batch and (job := next(jobs, None)) is not None:
                    submit(job)
                if not running:
                    return
                check()
                begun = [name for name in running if len(responses[name]) >= PART]
                if enough(len(begun), sum(len(responses[name]) / running[name].params.max_tokens for name in begun)):
                    for name in begun:
                        running[name].dialogue.stop(take(name), OUT_OF_TIME)
                        end(running[name], None)
                    return
                for output in engine.step():
                    responses[output.request_id] += output.token_ids
                    if output.finish_reason is not None:
                        response = take(output.request_id)
                        job = running.pop(output.request_id)
                        job.dialogue.take(response)
                        submit(job)
        finally:
            for name in running:
                engine.abort(name)


def write_line(part: IO[str], key: int, conversation: Conversation) -> None:
    rows = [[row.ids, list(map(int, row.loss_mask))] for row in conversation.rows]
    part.write(json.dumps({"key": key, "rows": rows, "cut": conversation.cut}) + "\n")
    part.flush()


def read_parts(folder: Path) -> dict[int, Conversation]:
    """Return the finished conversations by key. A line that a kill cut off is left out."""
    conversations: dict[int, Conversation] = {}
    for path in sorted(folder.glob("part-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                record = json.loads(line)
                rows = [Row(ids, list(map(bool, mask))) for ids, mask in record["rows"]]
                conversations[record["key"]] = Conversation(rows, record["cut"])
    return conversations


def collect_parts(folder: Path, keys: Collection[int], failed: Mapping[int, str]) -> Outcome:
    """Return the outcome, once every process has written its parts. Raises ValueError if conversations are missing."""
    try:
        return collect(keys, read_parts(folder), failed)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; run the same command again to have them answered") from error


def collect(keys: Collection[int], conversations: Mapping[int, Conversation], failed: Mapping[int, str]) -> Outcome:
    """Return the outcome for `keys`. Raises ValueError unless each is either in `conversations` or in `failed`."""
    answered = {key: conversations[key] for key in keys if key in conversations}
    lost = sum((key in answered) == (key in failed) for key in keys)
    done = sum(bool(conversation.rows) for conversation in answered.values())
    skipped = len(answered) - done
    counts = {"conversations": len(keys), "done": done, "skipped": skipped, "failed": len(failed)}
    if lost or done + skipped + len(failed) != len(keys):
        raise ValueError(
            f"of {len(keys)} conversations {done} were answered, {skipped} skipped and {len(failed)} failed: "
            f"{lost} are in none of these or in two"
        )
    sequences = Sequences.of([row for conversation in answered.values() for row in conversation.rows])
    return Outcome(sequences, dict(failed), counts, {key: one.cut for key, one in answered.items() if one.cut})
