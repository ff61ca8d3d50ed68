"""What a row of data means: a conversation, or token ids to continue. One form out of the many that people use.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}     ShareGPT
    {"turns": ["...", "..."]}                                       what a user says, turn by turn
    {"prompt": "...", "response": "..."}                            the response is optional
    {"text": "..."}
    {"input_ids": [...], "loss_mask": [...]}                        1 = written by the target; kept as it is

Of several forms in one row the first of `FORMS` counts. Messages come out as `models/chat.py` normalises them, whatever
they were written as; `dialogue.py` renders. Knows no file and no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from models.chat import Message, normalise_message
from models.tokenizer import Tokenizer
from train.config import RowsDataConfig, as_list
from train.data.tables import drop_nulls, drop_schema_nulls, from_json_text, from_list_text

FORMS = ("input_ids", "messages", "conversations", "turns", "prompt", "text")
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {
    "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # ShareGPT's turn in which the assistant calls a tool
BESIDE = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # fields that some files put beside `value`


@dataclass(frozen=True)
class Example:
    """Before the target has answered. Either messages, or ids: a prompt, or with `loss_mask` a whole sequence.

    Of a whole sequence the first `asked` ids are its prompt: what it is held out by, and asked when it is.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    ids: tuple[int, ...] = ()
    loss_mask: tuple[bool, ...] | None = None
    asked: int = 0
    place: str = field(default="", compare=False)  # file and line, for what is said of it

    @property
    def prompt(self) -> tuple[int, ...]:
        """Of an example without messages."""
        return self.ids if self.loss_mask is None else self.ids[: self.asked]

    @property
    def opening_key(self) -> int:
        """By what comes before the first answer, the tools included: rows that open alike are on one side of the split,
        because acceptance is measured on that alone.
        """
        if not self.messages:
            return content_key(list(self.prompt))
        first = next(place for place, message in enumerate(self.messages, start=1) if message["role"] == "user")
        return content_key([self.messages[:first], self.tools])

    @property
    def asked_key(self) -> int:
        """By all that the target does not write: rows that ask the same throughout are answered alike."""
        if not self.messages:
            return content_key(list(self.prompt))
        return content_key([[message for message in self.messages if message["role"] != "assistant"], self.tools])

    @property
    def key(self) -> int:
        """By everything."""
        return content_key([self.messages, self.tools, self.ids, self.loss_mask])


def renamed(row: Mapping[str, Any], columns: Mapping[str, Any] | None) -> dict[str, Any]:
    """With our names beside the data's own; of several that mean one of ours, the first that the row has."""
    row = dict(row)
    for ours, theirs in (columns or {}).items():
        name = next((name for name in as_list(theirs) if row.get(name) is not None), None)
        if name is not None:
            row[ours] = row[name]
    return row


def content_key(content: Any) -> int:
    """63 bits of a hash over JSON-like content."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def parse_row(row: object, data: RowsDataConfig, tokenizer: Tokenizer) -> tuple[str, Example]:
    """The row's form and what it says. Raises ValueError saying what is wrong with the row."""
    if not isinstance(row, Mapping):
        raise ValueError("must be an object with named fields")
    row = {name: value for name, value in row.items() if value is not None}  # tables hold every column in every row
    row = renamed(row, data.columns)
    form = next((form for form in FORMS if form in row), None)
    if form is None:
        raise ValueError(f"must hold one of {', '.join(FORMS)}; it holds {', '.join(map(str, row)) or 'nothing'}")
    if form == "input_ids":
        return form, tokenised(row["input_ids"], row.get("loss_mask"), tokenizer.vocab_size, data.prompt_tokens)
    if form == "text" or (form == "prompt" and not (data.chat_template and tokenizer.chat.texts)):
        return form, plain(form, row, data, tokenizer)
    if form == "prompt":
        messages = [{"role": "user", "content": text_of("prompt", row["prompt"])}]
        if "response" in row:
            messages.append({"role": "assistant", "content": text_of("response", row["response"])})
    elif form == "messages":
        messages = check_messages(row["messages"])
    elif form == "conversations":
        messages = from_sharegpt(row["conversations"], row.get("system"))
    else:
        messages = from_turns(row["turns"])
    while messages and messages[0]["role"] == "assistant":  # many exports begin with a greeting
        messages = messages[1:]
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"{form} hold no turn to answer")
    return form, Example(messages=tuple(messages), tools=tuple(parse_tools(row.get("tools"))))


def plain(form: str, row: Mapping[str, Any], data: RowsDataConfig, tokenizer: Tokenizer) -> Example:
    """No chat template: a text to be continued, from its beginning or from the end of the prompt."""
    ids = tokenizer.encode(text_of(form, row[form]))
    if data.responses == "given":
        asked = len(ids) if form == "prompt" else min(data.prompt_tokens, len(ids))
        first = 1 if form == "text" else len(ids)
        if form == "prompt":
            if "response" not in row:
                raise ValueError("data.responses=given: the row has no response")
            ids += tokenizer.encode(text_of("response", row["response"]), context=ids)
            ids += tokenizer.eos_ids[:1]
        return Example(ids=tuple(ids), loss_mask=tuple(place >= first for place in range(len(ids))), asked=asked)
    return Example(ids=tuple(ids[: data.prompt_tokens] if form == "text" else ids))


def tokenised(ids: object, mask: object, vocab_size: int, prompt_tokens: int) -> Example:
    """What comes before the first learnt token is the prompt.

    If that is no more than the one token that any text begins with, the first `prompt_tokens` stand for a prompt.
    """
    if not isinstance(ids, list) or not all(type(item) is int and 0 <= item < vocab_size for item in ids):
        raise ValueError(f"input_ids must be a list of token ids below {vocab_size}")
    if not isinstance(mask, list) or not all(item in (0, 1) for item in mask) or len(mask) != len(ids):
        raise ValueError("loss_mask must be a list of 0 and 1, as long as input_ids")
    if not has_served_slot(mask):
        raise ValueError("loss_mask leaves nothing to learn: two neighbouring tokens must be the target's own")
    first = mask.index(1)
    asked = first if first > 1 else min(prompt_tokens, len(ids))
    return Example(ids=tuple(ids), loss_mask=tuple(bool(item) for item in mask), asked=asked)


def has_served_slot(mask: Sequence[int | bool]) -> bool:
    return any(a and b for a, b in pairwise(mask[1:]))


def check_messages(messages: object) -> list[dict[str, Any]]:
    exact, messages = isinstance(messages, str), from_list_text(messages)
    if not isinstance(messages, list) or not all(isinstance(item, Mapping) and "role" in item for item in messages):
        raise ValueError('messages must be a list of {"role": ..., "content": ...}')
    checked = []
    for number, item in enumerate(messages, start=1):
        try:
            message = normalise_message(without_legacy(item if exact else drop_nulls(item)))
        except ValueError as error:
            raise ValueError(f"{error} (message {number})") from error
        if message.get("role") not in ROLES:
            raise ValueError(f"message {number}: role {message.get('role')!r}; must be one of {', '.join(ROLES)}")
        silent = message["role"] == "assistant" and ("tool_calls" in message or "reasoning_content" in message)
        if not isinstance(message.get("content"), list) and not ("content" not in message and silent):
            text_of(f"message {number}: content", message.get("content"))
        checked.append(message)
    return checked


def without_legacy(message: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's functions of before there were tools: `function_call` of an assistant, the role `function`."""
    message = dict(message)
    if message["role"] == "function":
        message["role"] = "tool"
    call = message.pop("function_call", None)
    return message if call is None or message.get("tool_calls") else {**message, "tool_calls": parse_calls(call)}


def from_sharegpt(turns: object, system: object) -> list[dict[str, Any]]:
    turns = from_list_text(turns)
    if not isinstance(turns, list) or not all(isinstance(item, Mapping) for item in turns):
        raise ValueError('conversations must be a list of {"from": ..., "value": ...}')
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for item in turns:
        if "role" in item:  # some files mix the two ways
            messages.append(dict(item))
            continue
        speaker, value = str(item.get("from", "")).lower(), item.get("value")
        if speaker in CALLS:
            messages.append({"role": "assistant", "tool_calls": parse_calls(value)})
        else:
            message = {"role": SHAREGPT.get(speaker, speaker), "content": value}
            messages.append({**message, **{name: item[name] for name in BESIDE if name in item}})
    return check_messages(messages)


def parse_calls(value: object) -> list[dict[str, Any]]:
    """The JSON that a ShareGPT turn holds: one call or several, {"name": ..., "arguments": ...} each."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        raise ValueError("function_call holds no JSON") from None
    calls: list[Any] = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise ValueError('function_call must hold {"name": ..., "arguments": ...}')
    return [{"type": "function", "function": dict(call)} for call in calls]


def parse_tools(tools: object) -> list[dict[str, Any]]:
    """A list, or the JSON text of one or of each tool; tables cannot hold a column of free form otherwise."""
    exact, tools = isinstance(tools, str), from_json_text("tools", tools)
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise ValueError("tools must be a list")
    return [parse_tool(tool, exact=exact) for tool in tools]


def parse_tool(tool: Any, *, exact: bool) -> dict[str, Any]:
    """As a request has it, a bare function too. `exact`: it was a JSON text, whose nulls nobody filled in."""
    if isinstance(tool, str):
        exact, tool = True, from_json_text("tools", tool)
    if not isinstance(tool, Mapping):
        raise ValueError("tools must be a list of functions")
    tool = dict(tool) if exact else drop_schema_nulls(tool)
    if "function" in tool:
        return {"type": "function", **tool}
    return {"type": "function", "function": {name: item for name, item in tool.items() if name != "type"}}


def from_turns(turns: object) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns must be a list of texts")
    texts = [turn.get("content") if isinstance(turn, Mapping) else turn for turn in turns]
    return [{"role": "user", "content": text_of("turns", text)} for text in texts]


def text_of(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    return value
