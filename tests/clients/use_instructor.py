"""Instructor: structured output by tools (its default), in JSON modes and streamed."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from checks import ARGUMENTS, ASKED_JSON, MODEL, URL, expect, run
from pydantic import BaseModel

openai_client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
messages = [{"role": "user", "content": ASKED_JSON}]


class add(BaseModel):
    a: int
    b: Literal[1, 2]


class Point(BaseModel):
    x: Literal[1, 2]
    y: Literal[1, 2]


class Line(BaseModel):
    """A nested model, whose schema has $defs."""

    start: Point
    end: Point


def tools() -> None:
    client = instructor.from_openai(openai_client)
    result = client.chat.completions.create(model=MODEL, response_model=add, messages=messages)
    expect(result.model_dump(), ARGUMENTS)
    assert isinstance(client.chat.completions.create(model=MODEL, response_model=Line, messages=messages), Line)


def stream() -> None:
    client = instructor.from_openai(openai_client)
    pieces = list(client.chat.completions.create_partial(model=MODEL, response_model=add, messages=messages))
    add.model_validate(pieces[-1].model_dump())  # its tool is `Partialadd`, a name that the target has not learnt


def structured() -> None:
    for mode in (instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_client, mode=mode)
        result = client.chat.completions.create(model=MODEL, response_model=add, messages=messages)
        expect(result.model_dump(), ARGUMENTS)


run("instructor", stream=stream, tools=tools, structured=structured)
