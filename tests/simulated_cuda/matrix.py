"""What the tests serve on a simulated device: every proposer, every kind of request, with and without graphs.

The cross of both is not whole: every kind of request meets plain decoding, a chain and a beam of EAGLE-3; all other
proposers meet a greedy request and one with top-k and top-p.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infer.batch.grammar import Grammar
from infer.request import SamplingParams

STEPS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5} | STEPS

REQUESTS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(**STEPS),
    "sampled": SamplingParams(**SAMPLED),
    "top-k": SamplingParams(top_k=20, **SAMPLED),
    "top-p": SamplingParams(top_p=0.9, top_k=40, **SAMPLED),
    "min-p": SamplingParams(min_p=0.05, **SAMPLED),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, **SAMPLED),
    "bias": SamplingParams(logit_bias={5: 2.0}, **STEPS),
    "bad words": SamplingParams(bad_words=((5, 6), (7,)), min_tokens=2, stop_token_ids=(9,), **STEPS),
    "allowed ids": SamplingParams(allowed_token_ids=(0, 5, 6), **SAMPLED),
    "grammar": SamplingParams(grammar=Grammar("regex", "[a-z]{30}"), temperature=1.0, seed=4, max_tokens=8),
    "logprobs": SamplingParams(logprobs=3, **SAMPLED),
    "processed logprobs": SamplingParams(logprobs=2, logprobs_of="processed", presence_penalty=0.5, **SAMPLED),
    "prompt logprobs": SamplingParams(prompt_logprobs=2, **STEPS),
    "typical": SamplingParams(acceptance="typical", **SAMPLED),
    "block": SamplingParams(acceptance="block", top_k=20, **SAMPLED),
}


@dataclass(frozen=True)
class Drafter:
    """A proposer, what its head is (tests/heads.py) and how it drafts."""

    proposer: str
    head: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    draft_model: bool = False
    requests: tuple[str, ...] = ("greedy", "top-p")  # of REQUESTS; the first is what others are compared with


BEAM: dict[str, Any] = {"tree": "beam:2x2:4"}
STATIC: dict[str, Any] = {"tree": [[0], [1], [0, 0]]}
EAGLE3 = "eagle3, whole vocabulary"
EXACT = tuple(name for name, params in REQUESTS.items() if params.acceptance is None)  # all but what needs a draft

DRAFTERS: dict[str, Drafter] = {
    "none": Drafter("none", requests=EXACT),
    "ngram": Drafter("ngram"),
    "suffix": Drafter("suffix"),
    "draft model": Drafter("draft_model", draft_model=True),
    "draft model, beam": Drafter("draft_model", None, BEAM, draft_model=True),
    "combined": Drafter("combined", EAGLE3, {"sources": ["suffix", "head"]}),
    "eagle": Drafter("head", "eagle"),
    "eagle3": Drafter("head", EAGLE3, requests=tuple(REQUESTS)),
    "eagle3, truncated": Drafter("head", "eagle3"),
    "eagle3, beam": Drafter("head", EAGLE3, BEAM, requests=tuple(REQUESTS)),
    "eagle3, static": Drafter("head", EAGLE3, STATIC),
    "eagle3, adaptive": Drafter("auto", EAGLE3, {"adaptive": True}, requests=("greedy", "top-p", "bias")),
    "mtp": Drafter("head", "mtp"),
    "mtp, beam": Drafter("head", "mtp", BEAM),
    "mlp": Drafter("head", "mlp"),
    "mlp, beam": Drafter("head", "mlp", BEAM),
    "lstm": Drafter("head", "lstm"),
    "lstm, beam": Drafter("head", "lstm", BEAM),
    "medusa": Drafter("head", "medusa"),
    "medusa, beam": Drafter("head", "medusa", BEAM),
    "medusa, static": Drafter("head", "medusa", STATIC),
    "p-eagle": Drafter("head", "p-eagle, one layer"),
    "p-eagle, beam": Drafter("head", "p-eagle, one layer", BEAM),
    "dflash": Drafter("head", "dflash, one layer"),
    "dflash, beam": Drafter("head", "dflash, one layer", BEAM),
    "dspark": Drafter("head", "dspark, gated"),
    "dspark, beam": Drafter("head", "dspark, gated", BEAM),
    "dflash2": Drafter("head", "dflash2, truncated"),
    "dflash2, beam": Drafter("head", "dflash2, truncated", BEAM),
}
