"""outputs/<run>/data: the sequences of both splits, generated once per run or copied from a run with the same inputs.

    train.safetensors, held_out.safetensors   ids, mask and offsets (train/data/sequences.py)
    source.json                               what they are made from; once complete also the counts, and under NAMED
                                              which rows were left out, shortened or failed, and why
    failed.json                               conversations for which generation failed, and why

train.safetensors is written last and marks the data as complete. A run is resumed only if what its data are made from
equals source.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from infer.engine import Engine
from infer.request import SamplingParams
from train.config import OfflineFeaturesConfig, TrainConfig
from train.data.dialogue import provided_dialogue
from train.data.examples import Example
from train.data.prompts import Prompts, first_of, longest_prompt, read_prompts
from train.data.regenerate import (
    Answerer,
    Conversation,
    EngineGenerator,
    Outcome,
    collect,
    collect_parts,
    read_parts,
    regenerate,
    sampling_params,
)
from train.data.sequences import Sequences
from train.distributed.collectives import any_process, broadcast, gather, log_main, stopping_together
from train.features.recorded import FeatureRecorder
from train.planning.time_limit import TimeLimit, spread
from train.signals import StopRequest
from train.storage import atomic
from train.storage.run_folder import (
    INGREDIENTS,
    LIMITED,
    RECIPE,
    copy_twin,
    find_twin,
    ingredients,
    read_record,
    recipe,
    refuse_other,
)

TRAIN, HELD_OUT, SOURCE, FAILED = "train.safetensors", "held_out.safetensors", "source.json", "failed.json"
NAMED = "named"


class Data(NamedTuple):
    train: Sequences
    held_out: Sequences
    source: str
    counts: Mapping[str, Any]  # numbers of rows and conversations


def open_data(
    config: TrainConfig,
    engine: Engine,
    accelerator: Accelerator,
    folder: Path,
    stop: StopRequest,
    limit: Callable[[], TimeLimit | None] = lambda: None,
    recorder: FeatureRecorder | None = None,
) -> Data:
    """Return the run's data, generated first if needed, as many as the `limit`, measured then, has time for.

    `recorder` takes the features of training conversations that the engine answers. When a stop is requested, raises
    Interrupted on every process; finished conversations are kept.
    """
    # stage=regenerate retries conversations that failed before
    retry_failed = config.stage == "regenerate" and (folder / FAILED).is_file()
    if retry_failed or not (folder / TRAIN).is_file():
        Making(config, engine, accelerator, folder, stop, limit(), recorder).make(retry_failed)
    record = read_record(folder / SOURCE)
    assert engine.tokenizer is not None
    parts = ingredients(config, engine.target, engine.tokenizer, record["source"])
    refuse_other(config, parts, folder / SOURCE)
    return Data(
        Sequences.load(folder / TRAIN), Sequences.load(folder / HELD_OUT), record["source"], record.get("counts", {})
    )


@dataclass
class Making:
    config: TrainConfig
    engine: Engine
    accelerator: Accelerator
    folder: Path
    stop: StopRequest
    limit: TimeLimit | None
    recorder: FeatureRecorder | None

    def __post_init__(self) -> None:
        assert self.engine.tokenizer is not None
        self.tokenizer = self.engine.tokenizer
        self.longest = longest_prompt(self.config.data, self.engine.context)

    def make(self, retry_failed: bool) -> None:
        config, accelerator = self.config, self.accelerator
        with stopping_together(accelerator):
            prompts = read_prompts(config, self.tokenizer, self.engine.context, self.stop.check)
        for line in prompts.reading.lines():
            log_main(accelerator, line)
        parts = ingredients(config, self.engine.target, self.tokenizer, prompts.source)
        resumed = any_process(accelerator, (self.folder / SOURCE).is_file())
        if resumed:
            refuse_other(config, parts, self.folder / SOURCE)
        if not retry_failed and self._copy_from_twin(recipe(parts)):
            return
        if not resumed and accelerator.is_main_process:
            self._record(parts, {}, {})

        def greedy(number: int) -> SamplingParams:
            return SamplingParams(max_tokens=config.eval_max_tokens)

        def sampled(number: int) -> SamplingParams:
            return sampling_params(number, config.data, config.seed)

        provided = config.data.provides_responses
        work = f"{len(prompts.held_out)} held-out prompts"
        if not provided:
            work = f"{len(prompts.train)} training and {work}"
        generator = (
            "the target" if provided or config.data.server is None else f"{config.data.server}, and the target here,"
        )
        answerer: Answerer | None = None if provided else EngineGenerator(self.engine, self.recorder)
        if config.data.server is not None:  # before generation, so that an unusable server fails early
            from train.data.answer_server import ServerGenerator

            answerer = ServerGenerator(config.data, self.engine.target.config.vocab_size)
        log_main(accelerator, f"{generator} continues {work}")
        held_out = self._answer(EngineGenerator(self.engine), prompts.held_out, greedy, HELD_OUT)
        if answerer is None:
            keys = list(prompts.train)
            if self.limit is not None:
                keys = spread(keys, broadcast(accelerator, self.limit.affordable(len(keys))))
            dialogues = {key: provided_dialogue(prompts.train[key], self.tokenizer, self.longest) for key in keys}
            train = collect(keys, {key: Conversation(dialogue.rows) for key, dialogue in dialogues.items()}, {})
        else:
            train = self._answer(answerer, prompts.train, sampled, TRAIN, self.limit)
        if accelerator.is_main_process:
            assert train is not None
            assert held_out is not None
            self._write(prompts, parts, train, held_out)
        accelerator.wait_for_everyone()

    def _answer(
        self,
        answerer: Answerer,
        examples: Mapping[int, Example],
        params: Any,
        name: str,
        limit: TimeLimit | None = None,
    ) -> Outcome | None:
        """Generate responses, each process its share. Returns the outcome of all on the main process, else None."""
        accelerator, parts = self.accelerator, self.folder / Path(name).stem
        rank, world = accelerator.process_index, accelerator.num_processes
        failed: dict[int, str] = {}
        with stopping_together(accelerator, self.engine.target.join_gathers):
            failed = regenerate(
                answerer,
                examples,
                params,
                parts,
                self.tokenizer,
                longest_prompt=self.longest,
                share=(rank, world),
                check=self.stop.check,
                limit=limit,
                show=accelerator.is_main_process,
            )
        for others in gather(accelerator, list(failed.items())):
            failed |= dict(others)
        ended_early = any_process(accelerator, limit is not None and limit.reached)
        if not accelerator.is_main_process:
            return None
        kept = read_parts(parts).keys() | failed.keys() if ended_early else examples.keys()
        return collect_parts(parts, [key for key in examples if key in kept], failed)

    def _write(self, prompts: Prompts, parts: Mapping[str, Any], train_result: Outcome, eval_result: Outcome) -> None:
        """Write both splits, counts and failures: `train_result` of training prompts, `eval_result` of held-out ones.

        Raises ValueError if a split has no usable sequence.
        """
        train, failed, held_out = train_result.sequences, train_result.failed, eval_result.sequences.by_turn()
        shortened = list(train_result.shortened.values())
        asked, made = len(prompts.train), train_result.counts["conversations"]
        twice = sum(prompts.train[key].cut is not None for key in train_result.shortened)  # cut in the data as well
        counts = {
            "rows": prompts.reading.summary(),
            "answers": train_result.counts,
            "held_out": eval_result.counts,
            "shortened": len(prompts.reading.shortened) + len(shortened) - twice,
            "no_time": asked - made,
        }
        named = {
            "left out": prompts.reading.complaints,
            "shortened": prompts.reading.shortened + shortened,
            "failed": [*failed.values(), *eval_result.failed.values()],
        }
        for name, part in (("conversations", train_result), ("held-out prompts", eval_result)):
            if part.failed:
                first, counted = next(iter(part.failed.values())), part.counts["conversations"]
                log_main(self.accelerator, f"{len(part.failed)} of {counted} {name} failed, the first: {first}")
        for line in first_of("shortened", shortened):
            log_main(self.accelerator, line)
        if not len(train) or not len(held_out):
            which, part = ("no held-out", eval_result) if len(train) else ("none of the training", train_result)
            cause = "".join(f"{reason}; " for reason in [*part.failed.values()][:1])
            raise ValueError(
                f"data: {cause}the target answered {which} prompts with two tokens or more; raise data.max_new_tokens "
                "and eval_max_tokens, or look at the prompts"
            )
        if made < asked:
            log_main(
                self.accelerator,
                f"minutes={self.config.minutes:g}: on this machine there was time for {made} of {asked} conversations; "
                "answers and features take at most half of it",
            )
        tokens, learnt = int(train.offsets[-1]), int(train.assistant.sum())
        log_main(
            self.accelerator,
            f"{len(train)} sequences from {train_result.counts['done']} conversations "
            f"({train_result.counts['skipped']} more have no token to train on), {tokens} tokens, "
            f"{100 * learnt / tokens:.1f} % of them trained on; longest sequence {int(train.lengths.max())} tokens",
        )
        self._record(parts, counts, named)
        held_out.save(self.folder / HELD_OUT)
        train.save(self.folder / TRAIN)
        atomic.discard(self.folder / Path(HELD_OUT).stem)
        if failed:  # keep the parts for stage=regenerate, which retries the failed conversations
            atomic.write_text(self.folder / FAILED, json.dumps({f"{k:016x}": v for k, v in failed.items()}, indent=2))
        else:
            atomic.discard(self.folder / Path(TRAIN).stem)
            atomic.discard(self.folder / FAILED)

    def _record(self, parts: Mapping[str, Any], counts: Mapping[str, Any], named: Mapping[str, Any]) -> None:
        atomic.make_folder(self.folder)
        record = {"source": parts["source"], RECIPE: recipe(parts), INGREDIENTS: parts, "counts": counts, NAMED: named}
        if counts.get("no_time"):
            record[LIMITED] = {"minutes": self.config.minutes}
        atomic.write_text(self.folder / SOURCE, json.dumps(record, indent=2) + "\n")

    def _copy_from_twin(self, recipe_hash: str) -> bool:
        """Copy the sequences of a sibling run with the same recipe, if there is one. Returns whether it did."""
        files, accelerator = (SOURCE, HELD_OUT, TRAIN), self.accelerator
        minutes = None if self.limit is None else self.config.minutes
        twin = find_twin(self.folder.parents[1], recipe_hash, SOURCE, files, minutes)
        if any_process(accelerator, twin is None):
            return False
        assert twin is not None
        log_main(accelerator, f"reusing the sequences of {twin}")
        if accelerator.is_main_process:
            copy_twin(twin, self.folder, files)
            self._shorten_copy()
        accelerator.wait_for_everyone()
        return True

    def _shorten_copy(self) -> None:
        """Leave out sequences of another run for whose features there is no time; a store may have them already."""
        if self.limit is None or isinstance(self.config.features, OfflineFeaturesConfig):
            return
        sequences = Sequences.load(self.folder / TRAIN)
        count = self.limit.affordable(len(sequences))
        if count == len(sequences):
            return
        log_main(
            self.accelerator,
            f"minutes={self.config.minutes:g}: on this machine there is time for the features of {count} of its "
            f"{len(sequences)} sequences",
        )
        record = json.loads((self.folder / SOURCE).read_text(encoding="utf-8"))
        record[LIMITED] = {"minutes": self.config.minutes}
        atomic.write_text(self.folder / SOURCE, json.dumps(record, indent=2) + "\n")
        sequences.select(spread(range(len(sequences)), count)).save(self.folder / TRAIN)
