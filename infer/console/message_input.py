"""Reads a user's messages from a terminal, with line editing and pastes of several lines, or from a pipe."""

from __future__ import annotations

import os
import select
import signal
import sys
from types import ModuleType

PROMPT, CONTINUED = "> ", ". "
BOLD, RESET = "\x1b[1m", "\x1b[0m"


class MessageInput:
    """From a terminal a message ends with Enter, from a pipe with its line; a `\\` at its end continues it on the next.

    A paste is one message, however many lines it has: readline inserts it into the line being edited (bracketed paste).
    Where it cannot do that, all lines that are waiting when Enter is read are taken together.
    """

    def __init__(self, *, color: bool) -> None:
        self.interactive = sys.stdin.isatty()
        # readline does not count what is between \1 and \2 as columns.
        self._prompt = f"\1{BOLD}\2{PROMPT}\1{RESET}\2" if color and self.interactive else PROMPT
        self._readline = line_editing() if self.interactive and sys.stdout.isatty() else None
        self._takes_waiting = self.interactive and not takes_pastes(self._readline)

    def read(self) -> str | None:
        """Return the next message; None at the end of the input (Ctrl-D).

        Raises KeyboardInterrupt on Ctrl-C at an empty prompt. Ctrl-C after text discards the text and prompts again.
        """
        while True:
            try:
                return self._read()
            except EOFError:
                return None
            except KeyboardInterrupt:
                print(file=sys.stderr)
                if self._readline is None or not self._readline.get_line_buffer():
                    raise

    def _read(self) -> str:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            lines = [self._line(self._prompt)]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._line(CONTINUED))
            while self._takes_waiting and select.select([sys.stdin], [], [], 0)[0]:
                lines.append(self._line(""))
            return "\n".join(lines)
        finally:
            signal.signal(signal.SIGINT, before)

    def _line(self, prompt: str) -> str:
        if not self.interactive:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.removesuffix("\n")
        if self._readline is None:  # standard output may be a file
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        return input(prompt)


def line_editing() -> ModuleType | None:
    """Return readline, which `input` uses from then on; None if Python was built without it."""
    try:
        import readline
    except ImportError:
        return None
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("tab: tab-insert")
    return readline


def takes_pastes(readline: ModuleType | None) -> bool:
    """Return whether bracketed paste works: GNU readline from version 7 on, in a terminal that knows escape codes."""
    if readline is None or "libedit" in (readline.__doc__ or "") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return int(readline._READLINE_LIBRARY_VERSION.partition(".")[0]) >= 7
