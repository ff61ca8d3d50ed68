"""Fits a conversation to a template that takes system turns at the front only, strict alternation, or ids of one form.

Clients put system turns anywhere, send several user turns in a row, and choose ids of any form; calls in rows of data
have none. What a template takes stays as it is. The rest it would refuse, or leave out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from models.chat_template import LONG_ID, Template

Message = Mapping[str, Any]
SYSTEM = ("system", "developer")
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # the form that Mistral's templates ask for
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def fit_turns(messages: Sequence[Message], template: Template) -> list[Message]:
    """Return normalized messages in a form that the template takes."""
    return identify_calls(join_user_turns(place_system_turns(messages, template), template), template)


def place_system_turns(messages: Sequence[Message], template: Template) -> list[Message]:
    """Join each system turn that the template does not take where it stands to a turn beside it.

    At the front that is the system turn before it. Later its text is put before that of the user turn that follows,
    else after that of the user's or tool's turn before it, else it is a user turn.
    """
    placed: list[Message] = []
    held: Message | None = None  # system turns that wait for the next turn
    leading = True

    def release() -> None:
        if held is not None and placed[-1].get("role") in ("user", "tool"):
            placed[-1] = joined(placed[-1], held)
        elif held is not None:
            placed.append({**held, "role": "user"})

    for message in messages:
        role = str(message.get("role"))
        shown_as = "system" if role == "developer" and not template.knows_developer else role
        leading = leading and role in SYSTEM
        around = (("system",), ("user",)) if leading else (("user", "assistant"), ("user",))
        if role not in SYSTEM or not placed or template.shows((*around[0], shown_as, *around[1]), len(around[0])):
            if role == "user" and held is not None:
                message = joined(held, message) | {"role": "user"}
            else:
                release()
            held = None
            placed.append(message)
        elif leading:
            placed[-1] = joined(placed[-1], message)
        else:
            held = message if held is None else joined(held, message)
    release()
    return placed


def join_user_turns(messages: Sequence[Message], template: Template) -> list[Message]:
    """Make one of several user turns in a row, unless the template shows all of them."""
    turns: list[Message] = []
    for message in messages:
        again = message.get("role") == "user" and turns and turns[-1].get("role") == "user"
        if again and not all(template.shows(("user", "user"), at) for at in (0, 1)):
            turns[-1] = joined(turns[-1], message)
        else:
            turns.append(message)
    return turns


def joined(first: Message, second: Message) -> dict[str, Any]:
    """Return the first message with the text of the second after its own."""
    texts = [text for message in (first, second) if (text := content_text(message))]
    return {**first, "content": "\n\n".join(texts)}


def content_text(message: Message) -> str:
    """Return a message's text, whatever the form of its content; several parts are joined by newlines."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def identify_calls(messages: Sequence[Message], template: Template) -> list[Message]:
    """Give calls and their results the ids that the template asks for: nine letters and digits, or any at all.

    Ids of another form are mapped one to one, the same way in every conversation. A result without an id belongs to the
    first call before it that has none.
    """
    needed, short = not template.takes_id(None), not template.takes_id(LONG_ID)
    if not (needed or short):
        return list(messages)
    known: dict[str, str] = {}  # id in the messages -> id for the template
    taken: set[str] = set()  # the values of `known`
    made = (f"call_{number}" for number in count())  # for calls without an id
    waiting: list[str] = []  # of calls whose results have not come

    def identify(identity: str) -> str:
        if identity not in known:
            text, new = identity, identity
            while (short and not SHORT_ID.fullmatch(new)) or new in taken:
                new, text = short_id(text), text + "'"
            known[identity] = new
            taken.add(new)
        return known[identity]

    turns: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            calls = [{**call, "id": identify(call["id"] if call.get("id") else next(made))} for call in calls]
            waiting = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            identity = message.get("tool_call_id")
            new = identify(identity) if identity else waiting[0] if waiting else identify(next(made))
            waiting = [other for other in waiting if other != new]
            message = {**message, "tool_call_id": new}
        turns.append(message)
    return turns


def short_id(text: str) -> str:
    """Return nine letters and digits that depend on the text alone."""
    number, digits = int.from_bytes(hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:8], "big"), ""
    for _ in range(9):
        number, digit = divmod(number, len(DIGITS))
        digits += DIGITS[digit]
    return digits
