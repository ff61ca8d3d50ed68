"""Sampling parameters of a request. Words are lists of token ids: the caller tokenizes them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from infer.batch.grammar import Grammar

MAX_INT = 2**63 - 1  # of an int64 tensor
MAX_SEED = MAX_INT
MAX_N = 2**16
MAX_LOGPROBS = 64
# The sampler computes in fp32 (kernels/choose.py, kernels/shape.py). A logit divided by a temperature below
# LEAST_TEMPERATURE is so large that hardly a bit of the added noise survives; further down all quotients are infinite.
LEAST_TEMPERATURE = 1e-5
LEAST_NORMAL, MOST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
# A logit of 65504, times this, divided by LEAST_TEMPERATURE, is still finite.
MOST_PENALTY = MOST_BIAS = 1e10
BIAS_RULE = f"must be {-MOST_BIAS:g} to {MOST_BIAS:g}"
ABSENT = {
    *("seed", "logprobs", "prompt_logprobs", "max_draft_tokens", "deadline_s"),
    *("posterior_threshold", "posterior_alpha"),
}
# Field -> minimum, maximum, and the rule that an error states.
INTEGERS = {
    "top_k": (0, MAX_INT, "must be 0 (off) or at least 1, and fit 64 bits"),
    "seed": (0, MAX_SEED, "must be 0 to 2^63 - 1, or absent"),
    "n": (1, MAX_N, f"must be 1 to {MAX_N}"),
    "max_tokens": (1, MAX_INT, "must be at least 1, and fit 64 bits"),
    "min_tokens": (0, MAX_INT, "must be 0 to max_tokens"),
    "logprobs": (0, MAX_LOGPROBS, f"must be 0 to {MAX_LOGPROBS}, or absent"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"must be 0 to {MAX_LOGPROBS}, or absent"),
    "max_draft_tokens": (1, MAX_INT, "must be at least 1; speculate=false drafts nothing"),
    "priority": (-MAX_INT, MAX_INT, "must fit 64 bits"),
}
FLOATS = {
    "temperature": (0.0, MOST_FLOAT, "must be 0 (greedy) or a positive number, finite in fp32"),
    "top_p": (0.0, 1.0, "must be above 0 and at most 1 (off)"),
    "min_p": (0.0, 1.0, "must be 0 (off) to 1"),
    "presence_penalty": (-2.0, 2.0, "must be -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "must be -2 to 2"),
    "repetition_penalty": (
        1 / MOST_PENALTY,
        MOST_PENALTY,
        f"must be {1 / MOST_PENALTY:g} to {MOST_PENALTY:g} (1: off)",
    ),
    "deadline_s": (0.0, 1e300, "must be above 0 and finite, or absent"),
    "posterior_threshold": (0.0, 1.0, "must be 0 to 1, or absent"),
    "posterior_alpha": (0.0, 1.0, "must be 0 to 1, or absent"),
}
ACCEPTANCE_RULES = ("exact", "block", "typical")
# Other names of the rules: rejection sampling is the usual one that keeps the target's distribution, as exact does.
RULE_NAMES = dict.fromkeys(("rejection", "standard", "rejection_sampler"), "exact") | {
    "typical_acceptance_sampler": "typical"
}
POSTERIOR_THRESHOLD, POSTERIOR_ALPHA = 0.09, 0.3  # of typical acceptance, as Medusa generates
AcceptanceRule = Literal["exact", "rejection", "block", "typical"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled and when generation stops. Defaults: greedy, until an end token or `max_tokens`.

    A row's logits pass through these steps in order, each only if requested: repetition, frequency and presence
    penalty, `logit_bias`, the masks (`allowed_token_ids`, `bad_words`, and end tokens and stop ids before
    `min_tokens`), temperature, `min_p`, `top_k`, `top_p`. Penalties and masks at a row use exactly that row's prefix.
    The mask of a `grammar` is the last step before the temperature, and the output ends where nothing may follow;
    `min_tokens` and `ignore_eos` have no effect beside a grammar.

    Every number is bounded by the type that computes with it: an integer by int64, a float by fp32. Raises ValueError
    naming the field.
    """

    temperature: float = 0.0  # 0, or below LEAST_TEMPERATURE: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; drops tokens less likely than this fraction of the most likely one
    presence_penalty: float = 0.0  # subtracted from the logit of every token in the output so far
    frequency_penalty: float = 0.0  # the same, times the number of occurrences
    repetition_penalty: float = 1.0  # divides (multiplies, if negative) logits of tokens in prompt or output
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # added to the logits of these ids
    allowed_token_ids: tuple[int, ...] | None = None  # only these are sampled
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of ids; the last id is masked after the others
    seed: int | None = None  # null: drawn at random and returned
    n: int = 1  # completions of the prompt; the i-th has seed + i
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # the text ends before any of these; needs an engine with a tokenizer
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True  # false: the text, which is searched for stop strings, shows special tokens
    ignore_eos: bool = False  # true: continue after the target's end tokens
    grammar: Grammar | None = None  # constrains the output; needs an engine with a tokenizer
    logprobs: int | None = None  # of the sampled token and this many most likely ones; 0: the sampled one only
    prompt_logprobs: int | None = None  # the same at every prompt position but the first
    logprobs_of: Literal["raw", "processed"] = "raw"  # of the target's raw distribution, or of the one sampled from
    speculate: bool = True  # false: no drafts for this request
    proposer: str | None = None  # null: the engine's
    max_draft_tokens: int | None = None  # maximum draft depth; null: the engine's
    # exact, also called rejection; block and typical relax a guarantee (kernels/acceptance.py); null: the engine's
    acceptance: AcceptanceRule | None = None
    posterior_threshold: float | None = (
        None  # of typical: a token more likely than this is accepted; null: the engine's
    )
    posterior_alpha: float | None = None  # and one more likely than this times exp(-entropy); null: the engine's
    learn: bool = True  # the head may be trained on this request, where a server trains it (infer/learning/)
    cache_salt: str = ""  # requests share cached text (KV pages, earlier responses) only with equal salts
    priority: int = 0  # higher runs first
    deadline_s: float | None = None  # ends the request this long after it was added

    def __post_init__(self) -> None:
        for name, (minimum, maximum, rule) in INTEGERS.items():
            self._set(name, integer(name, getattr(self, name), minimum, maximum, rule))
        for name, (low, high, rule) in FLOATS.items():
            self._set(name, real(name, getattr(self, name), low, high, rule))
        check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, INTEGERS["min_tokens"][2])
        check(self.top_p > 0, "top_p", self.top_p, FLOATS["top_p"][2])
        deadline_ok = self.deadline_s is None or self.deadline_s > 0
        check(deadline_ok, "deadline_s", self.deadline_s, FLOATS["deadline_s"][2])
        if self.temperature < LEAST_TEMPERATURE:
            self._set("temperature", 0.0)
        # Below fp32's normal range, use an equivalent value: top_p keeps the most likely token only, min_p drops none.
        self._set("top_p", max(self.top_p, LEAST_NORMAL))
        self._set("min_p", self.min_p if self.min_p >= LEAST_NORMAL else 0.0)
        self._check_tokens()
        self._set("stop", tuple(self.stop))
        check(all(isinstance(text, str) for text in self.stop), "stop", list(self.stop), "must be strings")
        check(all(self.stop), "stop", list(self.stop), "an empty string would stop at once")
        try:
            self.cache_salt.encode()
        except UnicodeEncodeError:
            raise ValueError("cache_salt: holds half of a surrogate pair, which is no character") from None
        check(self.logprobs_of in ("raw", "processed"), "logprobs_of", self.logprobs_of, "must be raw or processed")
        if self.grammar is not None:  # it alone decides where the output ends
            self._set("min_tokens", 0)
            self._set("ignore_eos", False)
        self._set("acceptance", acceptance_rule("acceptance", self.acceptance))

    def _check_tokens(self) -> None:
        """Check and normalize token ids. The engine checks them against its vocabulary."""
        biases = [
            (token_id("logit_bias", token), real(f"logit_bias[{token}]", bias, -MOST_BIAS, MOST_BIAS, BIAS_RULE))
            for token, bias in pairs(self.logit_bias)
        ]
        self._set("logit_bias", tuple(biases))
        self._set("stop_token_ids", as_ids("stop_token_ids", self.stop_token_ids))
        self._set("bad_words", tuple(as_ids("bad_words", word) for word in self.bad_words))
        check(all(self.bad_words), "bad_words", list(self.bad_words), "an empty sequence forbids nothing")
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", as_ids("allowed_token_ids", self.allowed_token_ids))
            check(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "name at least one, or leave it out")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def typical(self) -> tuple[float, float]:
        """Threshold and alpha of typical acceptance."""
        threshold, alpha = self.posterior_threshold, self.posterior_alpha
        return (POSTERIOR_THRESHOLD if threshold is None else threshold, POSTERIOR_ALPHA if alpha is None else alpha)

    @property
    def token_ids(self) -> dict[str, Sequence[int]]:
        """Every token id in these parameters, by field, for checking against a vocabulary."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": [token for token, _ in pairs(self.logit_bias)],
            "bad_words": [token for word in self.bad_words for token in word],
        }

    @cached_property
    def shapes_logits(self) -> bool:
        """Whether any step before the temperature applies, the grammar aside."""
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


def as_ids(name: str, tokens: Iterable[Any]) -> tuple[int, ...]:
    return tuple(token_id(name, token) for token in tokens)


def token_id(name: str, token: Any) -> int:
    number = integer(name, token, 0, MAX_INT, "must be token ids")
    assert number is not None
    return number


def integer(name: str, value: Any, minimum: int, maximum: int, rule: str) -> int | None:
    """Return `value` as a plain int, which torch accepts; None stays None. Raises ValueError naming the field."""
    if value is None and name in ABSENT:
        return None
    try:
        if value is None:
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}: must be an integer") from None
    check(minimum <= number <= maximum, name, number, rule)
    return number


def real(name: str, value: Any, minimum: float, maximum: float, rule: str) -> float | None:
    """Return `value` as a plain float; None stays None. Raises ValueError naming the field, for NaN too."""
    if value is None and name in ABSENT:
        return None
    number = float("nan")
    if value is not None and not isinstance(value, str | bytes):
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        except (TypeError, ValueError):
            pass
    check(minimum <= number <= maximum, name, value, rule)
    return number


def check(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print very long integers
            value = f"an integer of {value.bit_length()} bits"
        raise ValueError(f"{name}={value}: {rule}")


def acceptance_rule(name: str, value: Any) -> Any:
    """Return the rule that a name means; None stays None. Raises ValueError naming the field."""
    rule = RULE_NAMES.get(value, value) if isinstance(value, str) else value
    check(rule is None or rule in ACCEPTANCE_RULES, name, value, f"must be one of {', '.join(ACCEPTANCE_RULES)}")
    return rule
