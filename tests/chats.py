"""Chat templates of many families, and conversations to render with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES: dict[str, dict[str, str]] = {
    path.stem: {"default": path.read_text(encoding="utf-8")}
    for path in sorted(FOLDER.glob("*.jinja"))
    if not path.stem.endswith("_tool_use")
}
TEMPLATES["hermes"]["tool_use"] = (FOLDER / "hermes_tool_use.jinja").read_text(encoding="utf-8")
# What each family's templates support.
TAKES_PARTS = {"gemma3", "glm4moe", "minimax", "qwen3_5", "vision"}
NEEDS_PARTS = {"vision"}
SHOWS_DEVELOPER = {"gpt_oss", "granite3_3", "hermes", "llama3", "llama3_1", "phi4_mini", "smollm2", "vision"}
SHOWS_CALLS = {
    *("deepseek", "deepseek_v3", "glm4moe", "gpt_oss", "hermes", "llama3_1", "minimax", "mistral"),
    *("qwen2_5", "qwen3", "qwen3_5"),
}
NEEDS_TEXT_ARGUMENTS = {"deepseek", "deepseek_v3"}

Conversation = dict[str, Any]  # messages and optionally tools, as fields of a request or of a dataset row

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Ort <b>für</b> é"}, "days": {"type": "integer"}},
    "required": ["city"],
}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "the weather", "parameters": PARAMETERS},
}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie ist es in Zürich? <b>"}
DEVELOPER, ANSWER = {"role": "developer", "content": "Be exact."}, {"role": "assistant", "content": "Fine."}
ARGUMENTS = {"city": "Zürich", "days": 2}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": '{"t": 3}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}


def calling(arguments: Any, content: str | None = None, **more: Any) -> dict[str, Any]:
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


def conversation(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> Conversation:
    return {"messages": list(messages)} | ({"tools": tools} if tools else {})


CONVERSATIONS: dict[str, Conversation] = {
    "one turn": conversation(USER),
    "system": conversation(SYSTEM, USER, ANSWER, USER),
    "developer": conversation(DEVELOPER, USER),
    "parts": conversation(PARTS),
    "one part": conversation({"role": "user", "content": [{"type": "text", "text": "one"}]}),
    "parts everywhere": conversation({**PARTS, "role": "system"}, PARTS, {**PARTS, "role": "assistant"}, USER),
    "reasoning": conversation(USER, {**ANSWER, "reasoning_content": "hm"}, USER),
    "tools": conversation(SYSTEM, USER, tools=[LOOK]),
    "object": conversation(SYSTEM, USER, calling(ARGUMENTS), RESULT, ANSWER, USER, tools=[LOOK]),
    "text": conversation(SYSTEM, USER, calling(json.dumps(ARGUMENTS)), RESULT, tools=[LOOK]),
    "call and text": conversation(USER, calling(json.dumps(ARGUMENTS), "I look."), RESULT, tools=[LOOK]),
    "empty content": conversation(USER, calling(json.dumps({}), ""), RESULT, tools=[LOOK]),
    "null in text": conversation(USER, calling('{"city": null}'), RESULT, tools=[LOOK]),
    "call without tools": conversation(USER, calling(json.dumps(ARGUMENTS)), RESULT, ANSWER, USER),
    "tool result in parts": conversation(USER, calling("{}"), {**RESULT, "content": PARTS["content"]}, tools=[LOOK]),
    "thought call": conversation(USER, calling("{}", reasoning_content="hm"), RESULT, tools=[LOOK]),
}


def with_templates(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """Return the tokenizer with the family's templates; its one special token is both BOS and EOS."""
    return Tokenizer(
        tokenizer.backend,
        eos_ids=tokenizer.eos_ids,
        chat_template=TEMPLATES[name],
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        source=name,
    )
