"""Sample responses with the accepted draft tokens marked, for reports and W&B's table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from infer.config import TrackerConfig, WandbConfig
from infer.engine import Engine
from infer.request import SamplingParams, StepOutput
from models.tokenizer import Tokenizer
from train.publishing.trackers import Sample

SHOWN_TEXTS = 2  # in a report


def how_many(tracker: TrackerConfig) -> int:
    """Return the number of samples needed: for the report, or for the tracker if that is more."""
    return max(SHOWN_TEXTS, tracker.samples if isinstance(tracker, WandbConfig) else 0)


def marked_responses(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> list[Sample]:
    """Generate greedy responses with the engine's current proposer and mark accepted tokens."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    flags: dict[int, list[bool]] = {}

    def keep(index: int, output: StepOutput) -> None:
        flags.setdefault(index, []).extend(output.accepted)

    completions = engine.generate(prompts, SamplingParams(max_tokens=max_tokens), on_output=keep)
    return [
        Sample(
            tokenizer.decode(prompt),
            mark(tokenizer, prompt, completion.token_ids, flags[index]),
            completion.stats.acceptance_length,
        )
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def mark(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], accepted: Sequence[bool]) -> str:
    """Return the text after the prompt, with every run of accepted draft tokens between ⟦ and ⟧."""
    stream = tokenizer.stream(context=prompt)
    pieces = [(stream.push([token]), flag) for token, flag in zip(ids, accepted, strict=True)]
    pieces.append((stream.flush(), False))
    runs = [(flag, "".join(text for text, _ in run)) for flag, run in groupby(pieces, lambda piece: piece[1])]
    return "".join(f"⟦{text}⟧" if flag else text for flag, text in runs if text)
