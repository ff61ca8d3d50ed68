"""Outputs of requests, collected from the steps of an engine, and plain decoding as the oracle for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

from infer.batch.logprobs import TokenLogprob
from infer.engine import Engine
from infer.request import Completion, SamplingParams, StepOutput
from tests.interpreted import scaled

GREEDY = SamplingParams(max_tokens=scaled(24, 6), ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=scaled(24, 6), ignore_eos=True, temperature=0.9, top_k=60, top_p=0.95, seed=7)
# For requests that must meet others within their texts: pre-empted, updated, drafted for again and again.
LONG_GREEDY, LONG_SAMPLED = (replace(params, max_tokens=scaled(40, 6)) for params in (GREEDY, SAMPLED))


def ids(completions: Iterable[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @classmethod
    def of(cls, completion: Completion) -> Answer:
        return cls(**{f.name: getattr(completion, f.name) for f in fields(cls)})

    def take(self, output: StepOutput) -> None:
        assert self.finish_reason is None, f"{output.request_id}: an output after its last one"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    def is_prefix_of(self, full: Answer) -> bool:
        """Return whether this is a partial state of `full`, whatever the finish reasons."""
        return (
            self.token_ids == full.token_ids[: len(self.token_ids)]
            and self.logprobs == full.logprobs[: len(self.logprobs)]
            and self.prompt_logprobs in ([], full.prompt_logprobs)
        )


def answer_all(
    engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]], arrivals: Iterable[int] = ()
) -> list[Answer]:
    """Return each request's output. The i-th is added after `arrivals[i]` steps (ascending), by default at once."""
    answers = [Answer() for _ in requests]
    due = dict.fromkeys(range(len(requests)), 0) | dict(enumerate(arrivals))
    steps = added = 0
    while added < len(requests) or engine.has_work:
        while added < len(requests) and due[added] <= steps:
            prompt, params = requests[added]
            engine.add(prompt, params, request_id=str(added))
            added += 1
        for output in engine.step():
            answers[int(output.request_id)].take(output)
        steps += 1
    return answers


class Plain:
    """Plain decoding of one request at a time, with cached results. `engine`: no drafts, no prefix cache."""

    def __init__(self, engine: Engine) -> None:
        assert engine.proposer_name == "none"
        assert engine.config.max_batch == 1
        assert not engine.config.prefix_cache
        self._engine = engine
        self._cache: dict[tuple[tuple[int, ...], SamplingParams], Answer] = {}

    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        key = tuple(prompt), plain_params(params)
        if key not in self._cache:
            self._cache[key] = self.uncached(prompt, params)
        return self._cache[key]

    def uncached(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        """Return the output without caching it."""
        (answer,) = answer_all(self._engine, [(prompt, plain_params(params))])
        return answer


def plain_params(params: SamplingParams) -> SamplingParams:
    """Return the parameters without those that decide only how a request is served, not what plain decoding outputs."""
    return replace(
        params,
        speculate=False,
        proposer=None,
        max_draft_tokens=None,
        acceptance="exact",
        cache_salt="",
        learn=True,
        priority=0,
        deadline_s=None,
    )


MakePlain = Callable[..., Plain]
