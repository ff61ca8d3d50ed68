"""Random requests: every field of SamplingParams, prompts with common prefixes, lengths up to the context."""

from __future__ import annotations

import random
from dataclasses import replace

from infer.batch.grammar import Grammar
from infer.request import SamplingParams

VOCAB_SIZE = 96  # of the small target (conftest.py): END, then the bytes from "!" on
PROPOSERS = ("ngram", "suffix", "head", "draft_model", "combined", "synthetic", "none")
BEGINNINGS = ([], [5, 6, 7] * 4, list(range(40, 75)), list(range(40, 58)) + [3] * 8)
SAMPLED = {"temperature": (0.3, 0.8, 1.0, 2.0), "seed": (0, 7, 2**40 + 1, 2**63 - 1, None)}
FIELDS = {
    "top_k": (1, 5, 40),
    "top_p": (0.5, 0.95),
    "min_p": (0.05, 0.3),
    "presence_penalty": (1.0, -0.5),
    "frequency_penalty": (0.7, -0.3),
    "repetition_penalty": (1.3, 0.9),
    "logit_bias": ({7: 5.0, 9: -5.0}, {11: 2.0}),
    "bad_words": (((7,), (5, 6)), tuple((token,) for token in range(50, 96))),
    "allowed_token_ids": (tuple(range(3, 60)), (8, 9)),
    "n": (2, 3),
    "stop": (("e",), ("AB", "\n", "z")),
    "stop_token_ids": (tuple(range(30, 50)), (2,)),
    "skip_special_tokens": (False,),
    "ignore_eos": (True,),
    "logprobs": (0, 3),
    "prompt_logprobs": (0, 2),
    "logprobs_of": ("processed",),
    "speculate": (False,),
    "proposer": PROPOSERS,
    "max_draft_tokens": (1, 2),
    "acceptance": ("block", "typical"),
    "posterior_threshold": (0.0, 0.5),
    "posterior_alpha": (0.1, 1.0),
    "cache_salt": ("a", "b"),
    "priority": (-1, 3),
    "deadline_s": (0.01, 0.5),
    "learn": (False,),
}
GRAMMARS = (Grammar("regex", "([A-M]{2,9}|[0-9]+)x?"), Grammar("choice", '["AB", "ABC", "!?"]'))
SHARE = 0.12  # of the requests that set a certain field


def random_params(rng: random.Random) -> SamplingParams:
    options: dict = {"max_tokens": rng.choice([1, 2, 5, 9, 20, 200])}
    if rng.random() < 0.6:
        options |= {name: rng.choice(values) for name, values in SAMPLED.items()}
    for name, values in FIELDS.items():
        if rng.random() < SHARE:
            options[name] = rng.choice(values)
    if rng.random() < SHARE:
        for name in (
            "ignore_eos",
            "bad_words",
            "allowed_token_ids",
        ):  # the last two may leave nothing
            options.pop(name, None)
        options["grammar"] = rng.choice(GRAMMARS)
    elif rng.random() < SHARE:
        options["min_tokens"] = rng.randrange(1, min(options["max_tokens"], 12) + 1)
    return SamplingParams(**options)


def random_prompt(rng: random.Random, context: int) -> list[int]:
    if rng.random() < 0.03:
        return [rng.randrange(1, VOCAB_SIZE)] * (context - rng.choice([1, 2, 5]))
    return rng.choice(BEGINNINGS) + [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]


def singles(params: SamplingParams, seed: int) -> list[SamplingParams]:
    """Return parameters for each of the `n` outputs; the i-th has seed + i. `seed`: for a request without one."""
    first = seed if params.seed is None else params.seed
    return [replace(params, n=1, seed=(first + index) % 2**63) for index in range(params.n)]


def is_exact(params: SamplingParams) -> bool:
    """Return whether the output must equal that of plain decoding."""
    if params.speculate and params.proposer == "synthetic":
        return False
    return params.acceptance in (None, "exact") or params.temperature == 0
