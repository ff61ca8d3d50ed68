"""Validates a request against the engine's limits, before any work is done for it."""

from __future__ import annotations

from collections.abc import Sequence

from infer.batch.params import SamplingParams


def check_request(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    context: int,
    vocab_size: int,
    pages: int,
    page_size: int,
    proposers: Sequence[str],
    has_text: bool,
) -> None:
    """Raise ValueError for an empty or too long prompt, ids outside the vocabulary, or unsupported parameters.

    `pages`: of the whole KV pool. `has_text`: whether there is a tokenizer.
    """
    if not prompt:
        raise ValueError("prompt: empty; it must hold at least one token")
    if len(prompt) >= context:
        raise ValueError(
            f"prompt: {len(prompt)} tokens; the context is {context}, one of which must be left to generate"
        )
    for name, tokens in (("prompt", prompt), *params.token_ids.items()):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name}: token id {token} is outside this target's vocabulary of {vocab_size}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise ValueError(f"{name}={getattr(params, name)}: the vocabulary has {vocab_size} tokens")
    needed = -(-min(context, len(prompt) + params.max_tokens) // page_size)
    if needed > pages:
        raise ValueError(
            f"prompt of {len(prompt)} tokens with max_tokens={params.max_tokens}: needs {needed} KV pages, "
            f"the pool has {pages}; raise engine.max_tokens_in_cache or ask for fewer tokens"
        )
    if params.n > 1:
        raise ValueError(f"n={params.n}: add() queues one answer; generate() gives several")
    if params.proposer is not None and params.proposer not in proposers:
        raise ValueError(f"proposer={params.proposer}: this engine has {', '.join(proposers)}")
    if params.stop and not has_text:
        raise ValueError("stop: this engine has no tokenizer; use stop_token_ids")
