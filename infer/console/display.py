"""Streams generated text, accepted draft tokens in another color. Knows terminals, not engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from infer.request import StepOutput
from models.tokenizer import DetokenizeStream, Tokenizer

DIM, GREEN, RESET = "\x1b[2m", "\x1b[32m", "\x1b[0m"
# A model may emit any character; those that control a terminal are replaced by a placeholder.
UNSAFE = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def use_color(setting: str, stream: TextIO) -> bool:
    if setting != "auto":
        return setting == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class AnswerText:
    """Streams the text of one answer: whole characters, accepted draft tokens in another color.

    `text` is what `show` has returned so far, without colors.
    """

    def __init__(self, stream: DetokenizeStream, *, color: bool, to_terminal: bool) -> None:
        self.text = ""
        self._stream, self._color, self._to_terminal = stream, color, to_terminal

    def show(self, output: StepOutput) -> str:
        """Return the text of a step and, if it was the last one, what is still held back."""
        shown = len(output.token_ids) - output.ended_by_token
        painted = ""
        for token, accepted in zip(output.token_ids[:shown], output.accepted[:shown], strict=True):
            painted += self._paint(self._stream.push([token]), GREEN if accepted else "")
        return painted + (self.finish() if output.finish_reason is not None else "")

    def finish(self) -> str:
        """Return what is still held back: an incomplete character."""
        return self._paint(self._stream.flush(), "")

    def _paint(self, piece: str, code: str) -> str:
        self.text += piece
        return paint(piece, code if self._color else "", to_terminal=self._to_terminal)


def paint(text: str, code: str, *, to_terminal: bool) -> str:
    """Return `text` in the color of an escape code, if there is one."""
    if to_terminal or code:
        text = text.translate(UNSAFE)
    return f"{code}{text}{RESET}" if code and text else text


class Display:
    """Shows texts of prompts that run together, in order: streams the first unfinished one and buffers the others."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        *,
        first: int,
        total: int,
        color: bool,
        out: TextIO,
    ) -> None:
        self._prompts, self._first, self._total = [tokenizer.decode(ids) for ids in prompts], first, total
        self._color, self._out, self._to_terminal = color, out, color or out.isatty()
        self._answers = [
            AnswerText(tokenizer.stream(context=ids), color=color, to_terminal=self._to_terminal) for ids in prompts
        ]
        self._kept = [""] * len(prompts)
        self._finished = [False] * len(prompts)
        self._live = -1
        self._show_next()

    def on_output(self, index: int, output: StepOutput) -> None:
        self._kept[index] += self._answers[index].show(output)
        self._finished[index] = output.finish_reason is not None
        self._show()

    def close(self) -> None:
        """Reset the terminal's color, also after an interrupt in the middle of a text."""
        self._write((RESET if self._color else "") + "\n")

    def _show(self) -> None:
        self._write(self._kept[self._live])
        self._kept[self._live] = ""
        if self._finished[self._live] and self._live + 1 < len(self._prompts):
            self._show_next()

    def _show_next(self) -> None:
        self._live += 1
        number = self._first + self._live + 1
        heading = f"[{number}/{self._total}]\n" if self._total > 1 else ""
        heading = ("\n" if self._live else "") + heading + self._prompts[self._live]
        self._write(paint(heading, DIM if self._color else "", to_terminal=self._to_terminal))
        self._show()

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
