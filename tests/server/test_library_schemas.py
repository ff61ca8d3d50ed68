"""Schemas of every type of pydantic's fields and of zod: values that fit are taken, others are not, answers are valid.

zod_schemas.mjs records zod's (MCP's TypeScript SDK, OpenAI's and Vercel's helpers write the same).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pydantic
import pytest

from infer.batch.constraint import Constraint, Constraints
from infer.batch.grammar import Grammar
from infer.server.parsing.schema_check import fits
from tests.server.library_types import PYDANTIC

Json = dict[str, Any]
ZOD: Json = json.loads((Path(__file__).parent / "zod_schemas.json").read_text(encoding="utf-8"))


def pydantic_types() -> Iterator[tuple[str, Json, list[Any], list[Any]]]:
    for name, (annotation, fit, unfit) in PYDANTIC.items():
        model = pydantic.create_model("Model", value=(annotation, ...))
        for value in fit:
            model.model_validate_json(json.dumps({"value": value}))
        yield name, model.model_json_schema(), fit, unfit


def zod_types(library: str) -> Iterator[tuple[str, Json, list[Any], list[Any]]]:
    for name, row in ZOD[library]["types"].items():
        yield name, row["schema"], row["fit"], row["unfit"]


def types_of(library: str) -> Iterator[tuple[str, Json, list[Any], list[Any]]]:
    return pydantic_types() if library == "pydantic" else zod_types(library)


@pytest.fixture(scope="module")
def constraints(tiny_tokenizer: Any) -> Constraints:
    return Constraints(tiny_tokenizer, tiny_tokenizer.vocab_size, list(tiny_tokenizer.eos_ids))


def takes(constraint: Constraint, tokens: list[int]) -> bool:
    """Return whether the tokens are a complete output of a grammar."""
    matcher = constraint.copy()._matcher
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


# Fit by zod's own checks, which no JSON schema says: those of parts behind a look-around, and of addresses' forms.
@pytest.mark.parametrize("library", ["pydantic", *ZOD])
def test_every_type_is_a_grammar(
    library: str, constraints: Constraints, tiny_tokenizer: Any, walk: Callable[..., tuple[str, bool]]
) -> None:
    wrong: list[Any] = []
    ended = 0
    for name, schema, fit, unfit in types_of(library):
        grammar = Grammar("json_schema", json.dumps(schema))
        constraint = constraints.compile(grammar)
        for expected, values in ((True, fit), (False, unfit)):
            texts = [json.dumps({"value": value}, ensure_ascii=False) for value in values]
            tokens = [tiny_tokenizer.encode(text, add_special_tokens=False) for text in texts]
            wrong += [
                (name, text) for text, ids in zip(texts, tokens, strict=True) if takes(constraint, ids) != expected
            ]
        wrong += [(name, "unmarked", value) for value in fit if not fits({"value": value}, schema)]
        text, is_complete = walk(grammar, seed=1, max_tokens=600)
        ignored = any(remark.endswith("is not enforced") for remark in grammar.remarks)
        if is_complete and not (ignored or jsonschema_rs.is_valid(schema, json.loads(text))):
            wrong.append((name, "walk", text))
        ended += is_complete
    assert wrong == []
    assert ended > 0.9 * len(list(types_of(library)))
