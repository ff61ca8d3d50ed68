"""Shrinks a case that differs from plain decoding: fewer requests, tokens and parameters that still show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace

from infer.request import SamplingParams
from scripts.proof.cases import Ask, Case, Difference
from scripts.proof.situations import LATER

TRIES = 50  # runs of smaller cases
LEAST = 2  # tokens of an output; a request that ends with its first one leaves nothing in the prefix cache
KEPT = ("seed", "max_tokens", "min_tokens", "temperature", "logprobs", "ignore_eos")  # fields that are no use to reset


def shrink(
    case: Case, difference: Difference, differs: Callable[[Case], Difference | None], tries: int = TRIES
) -> tuple[Case, Difference]:
    """Return a smaller case that `differs` says still differs, and where; after at most `tries` runs.

    Greedy: the first change that keeps the difference is made, and the search begins anew with what is left.
    """
    seen = [case]
    while True:
        for smaller in changes(case, difference):
            if smaller in seen:
                continue
            if len(seen) > tries:
                return case, difference
            seen.append(smaller)
            found = differs(smaller)
            if found is not None:
                case, difference = smaller, found
                break
        else:
            return case, difference


def changes(case: Case, difference: Difference) -> Iterator[Case]:
    """Yield smaller cases: first shorter outputs, which make all later runs cheap, then what leaves out most."""
    asks, shown = case.asks, difference.request
    longest = max(ask.params.max_tokens for ask in asks)
    least = longest if difference.what == "end" else max(LEAST, difference.place + 1 if difference.of_output else 0)
    as_is, alone = [ask.arrival for ask in asks], [index * LATER for index in range(len(asks))]
    for most, arrivals in ((least, [0] * len(asks)), (least, alone), (least, as_is), (longest, [0] * len(asks))):
        pairs = zip(asks, arrivals, strict=True)
        yield case._replace(asks=tuple(shortened(ask, most)._replace(arrival=arrival) for ask, arrival in pairs))
    others = [index for index in range(len(asks)) if index != shown]
    half = len(others) // 2
    subsets = [[], others[:half], others[half:], *(others[:i] + others[i + 1 :] for i in range(len(others)))]
    for kept in (subset for subset in subsets if len(subset) < len(others)):
        yield case._replace(asks=tuple(ask for index, ask in enumerate(asks) if index in (*kept, shown)))
    for half in (1, 0):  # of every prompt, the later one first
        yield case._replace(asks=tuple(ask._replace(prompt=halves(ask.prompt)[half]) for ask in asks))
    for name in sorted({name for ask in asks for name in changed(ask.params)}):
        default = getattr(SamplingParams(), name)
        yield case._replace(asks=tuple(with_params(ask, **{name: default}) for ask in asks))


def shortened(ask: Ask, most: int) -> Ask:
    params = ask.params
    return with_params(ask, max_tokens=min(most, params.max_tokens), min_tokens=min(most, params.min_tokens))


def halves(prompt: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    middle = len(prompt) // 2
    return prompt[:middle] or prompt, prompt[middle:]


def with_params(ask: Ask, **fields: object) -> Ask:
    return ask._replace(params=replace(ask.params, **fields))


def changed(params: SamplingParams) -> list[str]:
    """Return the fields that are not at their defaults, but for those that are no use to reset."""
    names = (field.name for field in dataclasses.fields(params) if field.name not in KEPT)
    return [name for name in names if getattr(params, name) != getattr(SamplingParams(), name)]
