"""The matrix of cells: sampling x drafts x requests x situation, and the order in which pairs of values are covered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from infer.config import ProposerConfig
from infer.request import SamplingParams
from infer.settings.draft_tree import CHAIN, Beam
from models.heads.base import Head
from scripts.proof.cases import Ask, Case
from scripts.proof.situations import OBJECT, SITUATIONS, Kit, tool_prompt

SAMPLINGS = ("greedy", "seeded")
LENGTH = 32  # tokens of an output: several pages and drafts
ATTEMPTS = 3  # to make happen what a cell is about, with other prompts and longer outputs
TOP = 2  # likeliest tokens whose log-probabilities are compared beside the chosen one's
BEAM = Beam(4, 5, 16)
# by name, what drafts: keys of ProposerConfig
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"name": "head", "tree": CHAIN},
    "tree": {"name": "head", "tree": str(BEAM)},
    "ngram": {"name": "ngram"},
    "suffix": {"name": "suffix"},
    "combined": {"name": "combined"},
    "draft model, chain": {"name": "draft_model", "tree": CHAIN},
    "draft model, tree": {"name": "draft_model", "tree": str(BEAM)},
    "auto": {"name": "auto", "adaptive": True},
}
NONE = {"none": {"name": "none"}}  # the reference


class Cell(NamedTuple):
    sampling: str
    drafts: str
    requests: int
    situation: str

    def __str__(self) -> str:
        batch = f"{self.requests} request{'s' if self.requests > 1 else ''}"
        return f"{self.sampling}, {self.drafts}, {batch}, {self.situation}"

    @property
    def values(self) -> set[tuple[str, Any]]:
        return set(self._asdict().items())

    @property
    def pairs(self) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
        return set(itertools.combinations(self._asdict().items(), 2))


def proposer_of(drafts: str, config: ProposerConfig, head: Head | None) -> ProposerConfig:
    """Return how these drafts are made: as the user configured the proposer, but for what DRAFTS says."""
    settings: dict[str, Any] = {"adaptive": False} | (DRAFTS | NONE)[drafts]
    depth = None if head is None else head.config.max_depth
    if drafts == "tree" and depth is not None:
        settings["tree"] = str(BEAM._replace(depth=min(depth, BEAM.depth)))
    if drafts == "combined" and head is None and "head" in config.sources:
        settings["sources"] = ["suffix", "ngram"]
    return replace(config, **settings)


def uncovered(engines: Any) -> dict[str, str]:
    """Return the drafts and situations that target, head and environment of these Engines have none of, and why."""
    from infer.server.parsing.style_choice import choose_style

    reasons, parts, context = {}, engines.parts, engines.context
    if parts.head is None:
        reasons |= dict.fromkeys(("chain", "tree"), "no head was given: give head=NAME, or the folder of one")
    if parts.draft_model is None:
        lacking = (name for name in DRAFTS if name.startswith("draft model"))
        reasons |= dict.fromkeys(lacking, "no draft model was given: proposer.draft_model=<folder>")
    style, reason = choose_style("auto", parts.tokenizer.chat)
    if style is None:
        reasons["tools"] = f"the chat template calls no tools: {reason}"
    elif len(tool_prompt(parts.tokenizer)) + ATTEMPTS * LENGTH >= context:
        reasons["tools"] = f"a question with a tool does not fit the context of {context} tokens"
    try:
        engines.compile(OBJECT)
    except ValueError as error:
        reasons |= dict.fromkeys(("structured", "tools"), str(error))
    return reasons


def cover(requests: Sequence[int], lacking: Sequence[str] = ()) -> Iterator[Cell]:
    """Yield cells until every pair of values was in one. Next comes the one with most new values, and of those the one
    with most new pairs for what it costs, which grows with its requests.
    """
    axes = (SAMPLINGS, [name for name in DRAFTS if name not in lacking], sorted(set(requests)))
    situations = [name for name in SITUATIONS if name not in lacking]
    cells = [Cell(*values) for values in itertools.product(*axes, situations)]
    cells = [cell for cell in cells if cell.requests >= SITUATIONS[cell.situation].least]
    values, pairs, last = set[Any](), set[Any](), ""

    def gain(cell: Cell) -> tuple[Any, ...]:
        new = len(cell.pairs - pairs) / (4 + cell.requests)
        return len(cell.values - values), new, cell.sampling != last  # samplings take turns

    while (best := max(cells, key=gain)).pairs - pairs:
        values |= best.values
        pairs |= best.pairs
        last = best.sampling
        yield best


def make_case(cell: Cell, prompts: Sequence[tuple[int, ...]], kit: Kit, number: int, attempt: int = 0) -> Case:
    """Return the requests of cell `number`, which take the prompts in turn, in their situation.

    A further `attempt` has other prompts and longer outputs.
    """
    asks, first = [], number + attempt * cell.requests
    for index in (each % len(prompts) for each in range(first, first + cell.requests)):  # so that references recur
        sampling = {"temperature": (0.7, 1.0)[index % 2], "top_k": 50, "top_p": 0.95, "seed": kit.seed + index}
        length = {"max_tokens": LENGTH * (attempt + 1) - index % 3, "ignore_eos": True}
        params = SamplingParams(logprobs=TOP, **length, **(sampling if cell.sampling == "seeded" else {}))
        asks.append(Ask(prompts[index], params))
    shaped, settings = SITUATIONS[cell.situation].shape(asks, kit)
    return Case(cell.drafts, settings, tuple(shaped))
