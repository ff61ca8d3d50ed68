"""Validates a request against the engine's limits, before any work is done for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infer.sampling.params import SamplingParams


class Limits(NamedTuple):
    context: int
    vocab_size: int
    pages: int  # of the whole KV pool
    page_size: int
    proposers: Sequence[str]
    has_text: bool  # whether there is a tokenizer


def check_request(prompt: Sequence[int], params: SamplingParams, limits: Limits) -> None:
    """Raise ValueError for an empty or too long prompt, ids outside the vocabulary, or unsupported parameters."""
    if not prompt:
        raise ValueError("prompt: empty; it must hold at least one token")
    if len(prompt) >= limits.context:
        raise ValueError(
            f"prompt: {len(prompt)} tokens; the context is {limits.context}, one of which must be left to generate"
        )
    for name, tokens in (("prompt", prompt), *params.token_ids.items()):
        for token in tokens:
            if not 0 <= token < limits.vocab_size:
                raise ValueError(f"{name}: token id {token} is outside this target's vocabulary of {limits.vocab_size}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > limits.vocab_size:
            raise ValueError(f"{name}={getattr(params, name)}: the vocabulary has {limits.vocab_size} tokens")
    needed = -(-min(limits.context, len(prompt) + params.max_tokens) // limits.page_size)
    if needed > limits.pages:
        raise ValueError(
            f"prompt of {len(prompt)} tokens with max_tokens={params.max_tokens}: needs {needed} KV pages, "
            f"the pool has {limits.pages}; raise engine.max_tokens_in_cache or ask for fewer tokens"
        )
    if params.n > 1:
        raise ValueError(f"n={params.n}: add() queues one answer; generate() gives several")
    if params.proposer is not None and params.proposer not in limits.proposers:
        raise ValueError(f"proposer={params.proposer}: this engine has {', '.join(limits.proposers)}")
    if params.stop and not limits.has_text:
        raise ValueError("stop: this engine has no tokenizer; use stop_token_ids")
