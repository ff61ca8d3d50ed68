"""Shows generated text as it comes, accepted draft tokens in another colour. Knows terminals, not engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from infer.request import StepOutput
from models.tokenizer import DetokenizeStream, Tokenizer

DIM, GREEN, RESET = "\x1b[2m", "\x1b[32m", "\x1b[0m"
# A model may emit any character; those that steer a terminal are shown as a placeholder.
UNSAFE = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def use_color(setting: str, stream: TextIO) -> bool:
    if setting != "auto":
        return setting == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Display:
    """Texts of prompts that run together, shown in order: the first unfinished one live, the others kept meanwhile."""

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
        self._color, self._out = color, out
        self._streams: list[DetokenizeStream] = [tokenizer.stream(context=ids) for ids in prompts]
        self._kept = [""] * len(prompts)
        self._finished = [False] * len(prompts)
        self._live = -1
        self._show_next()

    def on_output(self, index: int, output: StepOutput) -> None:
        stream = self._streams[index]
        shown = len(output.token_ids) - output.ended_by_token
        for token, accepted in zip(output.token_ids[:shown], output.accepted[:shown], strict=True):
            self._kept[index] += self._paint(stream.push([token]), GREEN if accepted else "")
        if output.finish_reason is not None:
            self._kept[index] += self._paint(stream.flush(), "")
            self._finished[index] = True
        self._show()

    def close(self) -> None:
        """Leaves the terminal as it was, also after an interrupt in the middle of a text."""
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
        heading = ("\n" if self._live else "") + heading
        self._write(self._paint(heading + self._prompts[self._live], DIM))
        self._show()

    def _paint(self, text: str, code: str) -> str:
        if not text or not self._color:
            return text
        text = text.translate(UNSAFE)
        return f"{code}{text}{RESET}" if code else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
