"""What a request may ask for. Token ids only: turning words into ids is the caller's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from infer.grammar import Grammar

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 64
ACCEPTANCE_RULES = ("exact", "block", "typical")
AcceptanceRule = Literal["exact", "block", "typical"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Defaults ask for nothing: greedy, until an end token or `max_tokens`.

    A row's logits go through, in this order and each only if asked for: repetition, frequency and presence penalty,
    `logit_bias`, the masks (`allowed_token_ids`, `bad_words`, and end tokens and stop ids before `min_tokens`),
    temperature, `min_p`, `top_k`, `top_p`. Penalties and masks at a row see exactly that row's own prefix. A `grammar`
    masks last of all before the temperature, and ends the output where nothing may follow.

    Raises ValueError naming the field.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; tokens less likely than this share of the likeliest are left out
    presence_penalty: float = 0.0  # taken off the logit of every token in the output so far
    frequency_penalty: float = 0.0  # the same, times how often it is there
    repetition_penalty: float = 1.0  # divides (multiplies, if negative) logits of tokens in prompt or output
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # added to the logits of these ids
    allowed_token_ids: tuple[int, ...] | None = None  # no others are chosen
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of ids, the last of which is not chosen after the others
    seed: int | None = None  # null: drawn at random and returned
    n: int = 1  # answers to the prompt; the i-th has seed + i
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # ends the text before any of these; the engine needs a tokenizer for it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # true: goes on after every end token of the target
    grammar: Grammar | None = None  # the output is of this form; the engine needs a tokenizer for it
    logprobs: int | None = None  # of the chosen token and of this many likeliest; 0: of the chosen one alone
    prompt_logprobs: int | None = None  # likewise at every prompt position but the first
    logprobs_of: Literal["raw", "processed"] = "raw"  # the target's own law, or the one that was sampled from
    speculate: bool = True  # false: no drafts for this request
    proposer: str | None = None  # null: the engine's
    max_draft_tokens: int | None = None  # at most this deep; null: the engine's
    acceptance: AcceptanceRule = "exact"  # block and typical give something up (infer/lossy.py)
    cache_salt: str = ""  # requests share cached text (KV pages, earlier responses) only under one salt
    priority: int = 0  # higher runs first
    deadline_s: float | None = None  # ends the request this long after it was added

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", pairs(self.logit_bias))
        object.__setattr__(self, "bad_words", tuple(tuple(word) for word in self.bad_words))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            check(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "name at least one, or leave it out")
        for name in ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            check(math.isfinite(getattr(self, name)), name, getattr(self, name), "must be a finite number")
        check(self.temperature >= 0, "temperature", self.temperature, "must be 0 (greedy) or a positive number")
        check(self.top_k >= 0, "top_k", self.top_k, "must be 0 (off) or at least 1")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1 (off)")
        check(0 <= self.min_p <= 1, "min_p", self.min_p, "must be 0 (off) to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            check(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "must be -2 to 2")
        check(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "must be above 0 (1 is off)")
        for token, bias in pairs(self.logit_bias):
            check(math.isfinite(bias), f"logit_bias[{token}]", bias, "must be a finite number")
        check(all(self.bad_words), "bad_words", list(self.bad_words), "an empty sequence forbids nothing")
        check(all(self.stop), "stop", list(self.stop), "an empty string would stop at once")
        seed_ok = self.seed is None or 0 <= self.seed <= MAX_SEED
        check(seed_ok, "seed", self.seed, "must be 0 to 2^63 - 1, or absent")
        check(self.n >= 1, "n", self.n, "must be at least 1")
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "must be 0 to max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"must be 0 to {MAX_LOGPROBS}, or absent")
        check(self.logprobs_of in ("raw", "processed"), "logprobs_of", self.logprobs_of, "must be raw or processed")
        if self.grammar is not None:  # which says itself what may come, and when the output ends
            for name in ("ignore_eos", "min_tokens", "bad_words", "allowed_token_ids"):
                check(not getattr(self, name), name, getattr(self, name), "not together with a grammar")
        drafts_ok = self.max_draft_tokens is None or self.max_draft_tokens >= 1
        check(
            drafts_ok, "max_draft_tokens", self.max_draft_tokens, "must be at least 1; speculate=false drafts nothing"
        )
        rules = ", ".join(ACCEPTANCE_RULES)
        check(self.acceptance in ACCEPTANCE_RULES, "acceptance", self.acceptance, f"must be one of {rules}")
        deadline_ok = self.deadline_s is None or self.deadline_s > 0
        check(deadline_ok, "deadline_s", self.deadline_s, "must be above 0, or absent")

    @property
    def token_ids(self) -> list[int]:
        """Every id that is named, for checking against a vocabulary."""
        biased = [token for token, _ in pairs(self.logit_bias)]
        words = [token for word in self.bad_words for token in word]
        return [*self.stop_token_ids, *(self.allowed_token_ids or ()), *biased, *words]

    @property
    def shapes_logits(self) -> bool:
        """Whether anything comes before the temperature."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_tokens
        )


def pairs(bias: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)


def check(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value}: {rule}")
