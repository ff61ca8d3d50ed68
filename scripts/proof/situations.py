"""The situations that requests meet in a cell: each shapes plain requests, and says which events must have happened."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from infer.batch.grammar import Grammar
from models.tokenizer import Tokenizer
from scripts.proof.cases import Ask

LATER = 10**6  # a step that comes only once the engine is idle
CHUNK = 16  # prompt tokens of a step where prompts are to be cut
INTEGERS = {"type": "array", "items": {"type": "integer"}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "numbers": INTEGERS},
    "required": ["name", "numbers"],
}
OBJECT, WORDS = Grammar("json_schema", json.dumps(SCHEMA)), Grammar("regex", r"([a-z]{2,9} ){2,40}\.")
TOOL: dict[str, Any] = {"name": "find", "description": "Finds a person and numbers.", "parameters": SCHEMA}
QUESTION = {"role": "user", "content": "Find Ada with the numbers 1, 2 and 3, and then Grace with the numbers 4 and 5."}


@dataclass
class Kit:
    """What situations are made of."""

    tokenizer: Tokenizer
    page_size: int
    seed: int


Shaped = tuple[Sequence[Ask], dict[str, Any]]


class Situation(NamedTuple):
    shape: Callable[[Sequence[Ask], Kit], Shaped]
    shows: tuple[str, ...] = ()  # counts of cases.run that must not be zero
    least: int = 1  # requests


def together(asks: Sequence[Ask], kit: Kit) -> Shaped:
    return asks, {}


def staggered(asks: Sequence[Ask], kit: Kit) -> Shaped:
    """Requests come one after the other, in another order, while earlier ones decode; some end at an end token."""
    order = random.Random(kit.seed).sample(asks, len(asks))
    ends = (replace(ask.params, ignore_eos=index % 2 == 0) for index, ask in enumerate(order))
    return [Ask(ask.prompt, params, 3 * i) for i, (ask, params) in enumerate(zip(order, ends, strict=True))], {}


def prefix_hits(asks: Sequence[Ask], kit: Kit) -> Shaped:
    """A first request fills the cache; the others begin with its prompt, or with whole pages of it."""
    first, text = asks[0], asks[0].prompt * (1 + 3 * kit.page_size // len(asks[0].prompt))
    cuts = (len(text) if i % 2 else 2 * kit.page_size for i in range(len(asks)))
    later = [Ask((*text[:cut], *ask.prompt[:8]), ask.params, LATER) for ask, cut in zip(asks, cuts, strict=True)]
    return [first._replace(prompt=text), *later], {"prefix_cache": True}


def chunked(asks: Sequence[Ask], kit: Kit) -> Shaped:
    """Prompts are read in small pieces beside decoding requests; their own log-probabilities are compared too."""
    scored = (replace(ask.params, prompt_logprobs=(None, 0)[i % 2]) for i, ask in enumerate(asks))
    asks = [Ask(ask.prompt, params, i) for i, (ask, params) in enumerate(zip(asks, scored, strict=True))]
    return asks, {"prefill_chunk": CHUNK, "max_rows": 4 * CHUNK + len(asks)}


def short_of_pages(asks: Sequence[Ask], kit: Kit) -> Shaped:
    """The pool holds all prompts and a third of the outputs, so that requests are pre-empted and computed again."""
    prompts, tokens = sum(len(ask.prompt) for ask in asks), sum(ask.params.max_tokens for ask in asks)
    return asks, {"max_tokens_in_cache": max(prompts + tokens // 3, 2 * kit.page_size + max(a.positions for a in asks))}


def structured(asks: Sequence[Ask], kit: Kit) -> Shaped:
    grammars = (replace(ask.params, grammar=(OBJECT, WORDS)[i % 2]) for i, ask in enumerate(asks))
    return [ask._replace(params=params) for ask, params in zip(asks, grammars, strict=True)], {}


def tools(asks: Sequence[Ask], kit: Kit) -> Shaped:
    """Every output is a forced call of a tool, as the server forces one."""
    from infer.server.parsing.call_grammar import call_grammar
    from infer.server.parsing.style_choice import choose_style

    style = choose_style("auto", kit.tokenizer.chat)[0]
    assert style is not None
    added = {token.content: index for index, token in kit.tokenizer.backend.get_added_tokens_decoder().items()}
    grammar, prompt = call_grammar(style, [tool()], most=2, tokens=added), tool_prompt(kit.tokenizer)
    return [ask._replace(prompt=prompt, params=replace(ask.params, grammar=grammar)) for ask in asks], {}


def tool() -> Any:
    from infer.server.protocol.tools import FunctionTool

    return FunctionTool(**TOOL)


def tool_prompt(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.apply_chat_template([QUESTION], tools=[tool().for_template()]))


def penalties(asks: Sequence[Ask], kit: Kit) -> Shaped:
    """Neighbours have different logits processors; of every second request the processed values are compared."""
    shaped = []
    for index, ask in enumerate(asks):
        token, last = ask.prompt[len(ask.prompt) // 2], ask.prompt[-1]
        options: tuple[dict[str, Any], ...] = (
            {"repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": 0.4},
            {"logit_bias": {token: 3.0, last: -4.0}, "bad_words": ((token, last), (last, token))},
            {"min_tokens": 12, "frequency_penalty": 1.5, "stop_token_ids": (token,)},
        )
        of = {"logprobs_of": "processed" if index % 2 else "raw"}
        shaped.append(ask._replace(params=replace(ask.params, **options[index % len(options)], **of)))
    return shaped, {}


SITUATIONS = {
    "together": Situation(together),
    "order of arrival": Situation(staggered, ("joined",), least=2),
    "prefix hit": Situation(prefix_hits, ("cached",)),
    "chunked prompt": Situation(chunked, ("chunks",)),
    "pre-emption": Situation(short_of_pages, ("preempted",), least=2),
    "structured": Situation(structured, ("constrained",)),
    "tools": Situation(tools, ("constrained",)),
    "penalties": Situation(penalties, ("shaped",)),
}
