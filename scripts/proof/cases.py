"""A case: requests, when they arrive, and the engine that decodes them; what it answers; where two answers differ."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from infer.batch.grammar import Grammar
from infer.batch.logprobs import TokenLogprob
from infer.engine import Engine
from infer.request import Phase, SamplingParams, SpeculationStats


class Ask(NamedTuple):
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0  # the step before which it is added; if the engine is idle earlier, then

    @property
    def positions(self) -> int:
        return len(self.prompt) + self.params.max_tokens


class Case(NamedTuple):
    drafts: str  # of matrix.DRAFTS
    engine: dict[str, Any]  # keys of EngineConfig that differ from the user's
    asks: tuple[Ask, ...]  # by arrival

    def save(self, path: Path) -> None:
        asks = [{"prompt": a.prompt, "params": stated(a.params), "arrival": a.arrival} for a in self.asks]
        record = {"drafts": self.drafts, "engine": self.engine, "requests": asks}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Case:
        """Raises ValueError for a file that `save` did not write."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            asks = [Ask(tuple(a["prompt"]), params_of(a["params"]), a["arrival"]) for a in record["requests"]]
            return cls(record["drafts"], record["engine"], tuple(asks))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"repeat={path}: is no case that prove.py wrote ({error!r})") from error


def stated(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are not at their defaults, for JSON."""
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    changed = {name: value for name, value in fields.items() if value != getattr(SamplingParams(), name)}
    return changed | ({"grammar": dataclasses.asdict(params.grammar)} if params.grammar else {})


def params_of(record: dict[str, Any]) -> SamplingParams:
    fields, grammar = dict(record), record.get("grammar")
    if grammar:
        fields["grammar"] = Grammar(**grammar | {"unenforced": tuple(grammar["unenforced"])})
    return SamplingParams(**fields)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: tuple[Any, ...] | None = None  # finish reason, stop reason, error


class Difference(NamedTuple):
    request: int
    place: int  # of the token in the output, or in the prompt
    what: str
    expected: Any
    got: Any

    @property
    def of_output(self) -> bool:
        return self.what in ("token", "log-probability")

    def __str__(self) -> str:
        return f"request {self.request}, {self.what} {self.place}: {self.got} in place of {self.expected}"


def run(engine: Engine, asks: Sequence[Ask]) -> tuple[list[Answer], Counter[str]]:
    """Return every request's answer, and counts of what happened on the way.

    `accepted`, `rejected` nodes; `siblings`: nodes beside the longest path of their tree; `joined`: requests added
    while another one decoded; `chunks`: steps that ended within a prompt; `preempted`; `cached`: tokens of prompts
    found in the prefix cache; `constrained`: tokens under a grammar; `shaped`: under penalties, bias or masks;
    `overruled`: greedy ones that were not the likeliest without them; `failures` of proposers.
    """
    answers, counts, stats = [Answer() for _ in asks], Counter[str](), SpeculationStats()
    added, steps, live = 0, 0, set[int]()
    while added < len(asks) or engine.has_work:
        if not engine.has_work:
            steps = max(steps, asks[added].arrival)
        while added < len(asks) and asks[added].arrival <= steps:
            counts["joined"] += any(answers[index].token_ids for index in live)
            engine.add(asks[added].prompt, asks[added].params, request_id=str(added))
            live.add(added)
            added += 1
        for output in engine.step():
            index = int(output.request_id)
            answer = answers[index]
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            if output.finish_reason is not None:
                live.remove(index)
                answer.finish = output.finish_reason, output.stop_reason, output.error
                stats.merge(output.stats)
                counts["cached"] += output.cached_tokens
        steps += 1
        for request in (engine.request(str(index)) for index in live):
            counts["chunks"] += request.phase is Phase.PREFILL and 0 < request.computed < len(request.prompt_ids)
    counts["accepted"], counts["rejected"] = stats.accepted, stats.drafted - stats.accepted
    counts["siblings"] = stats.drafted - sum(stats.drafted_by_position)
    counts["preempted"], counts["failures"] = engine.stats.preemptions, engine.stats.proposer_failures
    counts["tokens"] = sum(len(answer.token_ids) for answer in answers)
    for ask, answer in zip(asks, answers, strict=True):
        if ask.params.grammar is not None:
            counts["constrained"] += len(answer.token_ids)
        if ask.params.shapes_logits:
            counts["shaped"] += len(answer.token_ids)
        if ask.params.temperature == 0 and ask.params.logprobs_of == "raw":
            counts["overruled"] += sum(each.rank > 1 for each in answer.logprobs)
    return answers, counts


def first_difference(expected: Sequence[Answer], got: Sequence[Answer]) -> Difference | None:
    """Return the earliest token, log-probability (its bits, and those of the likeliest others) or end that differs."""
    found = list[Difference]()
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        parts = (
            ("token", one.token_ids, other.token_ids),
            ("log-probability", one.logprobs, other.logprobs),
            ("log-probability of the prompt", one.prompt_logprobs, other.prompt_logprobs),
            ("end", [one.finish], [other.finish]),
        )
        for what, left, right in parts:
            longest = max(len(left), len(right))
            left, right = ([*each, *[None] * (longest - len(each))] for each in (left, right))
            place = next((at for at in range(longest) if left[at] != right[at]), None)
            if place is not None:
                found.append(Difference(index, place, what, left[place], right[place]))
    return min(found, key=lambda difference: (difference.what == "end", difference.place), default=None)
