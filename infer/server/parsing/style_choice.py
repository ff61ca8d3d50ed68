"""Choice of the style of tool calls: by the marks in a chat template, and by what it renders."""

from __future__ import annotations

from infer.server.parsing.harmony import HarmonyParser
from infer.server.parsing.stream import ChatParser
from infer.server.parsing.tool_styles import STYLES, ToolStyle
from models.chat import Chat
from models.chat_template import CALL_NAME

PYTHON_CALLS = "func_name1("  # how templates ask for calls in Python's syntax: no style reads those


def choose_style(name: str, chat: Chat) -> tuple[ToolStyle | None, str]:
    """Return the style with this name, for "auto" that of the chat template; without one, the reason."""
    template = chat.text_for(tools=True)
    if name != "auto":
        return STYLES.get(name), f"server.tool_parser={name}"
    if template is None or not chat.shows_tools:
        return None, "it shows the model no tools"
    style = style_of(template)
    if style is None or not reads(style, chat.call_text):
        return None, "it has the marks of no style that is known"
    return style, ""


def style_of(template: str | None) -> ToolStyle | None:
    """Detect the style from a chat template's text: the first whose marks it has. None if none are there."""
    text = template or ""
    if PYTHON_CALLS in text:
        return None
    return next((style for style in STYLES.values() if any(all(m in text for m in s) for s in style.shown_by)), None)


def reads(style: ToolStyle, text: str) -> bool:
    """Return whether the style finds the call in a rendered turn, unless that does not show it between its marks."""
    if not any(mark in text for mark in style.begins):
        return True
    parser = HarmonyParser([CALL_NAME]) if style.name == "harmony" else ChatParser(style, [CALL_NAME])
    return bool(parser.take(text, "stop").calls)
