"""The session of chat.py: reads messages and commands, streams answers, keeps the history.

The conversation goes to standard output; card, figures and notices go to standard error.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from infer.config import ChatConfig
from infer.console.card import describe_engine, describe_sampling, print_card
from infer.console.chat_history import Dialogue, Turn
from infer.console.display import DIM, AnswerText, paint, use_color
from infer.console.interactive import InteractiveEngine
from infer.console.message_input import PROMPT, MessageInput
from infer.engine import Engine
from infer.request import SamplingParams, SpeculationStats, StepOutput

COMMANDS = {
    "/help": "this list",
    "/off": "decode without drafts from now on: the same text, slower",
    "/on": "draft again",
    "/system": "/system TEXT: the system message from now on; without a text none",
    "/new": "begin a new conversation (also /reset)",
    "/regenerate": "answer the last message again, from the same seed",
    "/quit": "end the program (also Ctrl-D)",
}
ANSWER_SHARE = 0.25  # fraction of the context that a prompt leaves for its answer, unless max_tokens is less


class ChatSession:
    """A chat. Raises ValueError for a model without a chat template, or whose template takes no system message."""

    def __init__(self, config: ChatConfig, engine: Engine, params: SamplingParams) -> None:
        assert engine.tokenizer is not None
        self._tokenizer = engine.tokenizer
        if not self._tokenizer.chat.texts:
            raise ValueError(
                f"model={config.model.name}: has no chat template, so there is nobody to talk to; "
                f"python infer/generate.py model={config.model.name} prompt='...' continues a text"
            )
        self._config, self._engine, self._params = config, engine, params
        self._dialogue = Dialogue(config.system)
        self._tokenizer.render_chat(self._dialogue.messages("?"))
        self._room = min(engine.context, engine.memory.pages * engine.config.page_size)
        self._color = use_color(config.color, sys.stdout)
        self._to_terminal = self._color or sys.stdout.isatty()
        self._input = MessageInput(color=self._color)
        self._interactive = InteractiveEngine(engine)
        self._interrupted = False  # the last event was Ctrl-C: another one ends the program
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._help(),
            "/off": lambda _: self._speculate(False),
            "/on": lambda _: self._speculate(True),
            "/system": self._system,
            "/new": lambda _: self._new(),
            "/reset": lambda _: self._new(),
            "/regenerate": lambda _: self._regenerate(),
        }

    def run(self) -> None:
        """Run until the input ends, /quit, or Ctrl-C twice at an empty prompt."""
        config = self._config
        print_card(
            "Headway chats",
            [
                *describe_engine(self._engine, config.model, config.head, config.output_dir),
                ("sampling", f"{describe_sampling(self._params)}, up to {config.max_tokens} tokens an answer"),
                *([("color", "green: accepted draft tokens")] if self._color else ()),
                ("commands", "/help lists them; Ctrl-C stops an answer, Ctrl-D ends"),
            ],
            out=sys.stderr,
        )
        try:
            with self._stopped_by_ctrl_c():
                while (message := self._next_message()) is not None:
                    self._take(message)
        finally:
            self._interactive.close()

    def _next_message(self) -> str | None:
        """Return the next message, or None at the end."""
        self._interactive.idle()
        while True:
            try:
                message = self._input.read()
            except KeyboardInterrupt:
                if self._interrupted:
                    return None
                self._interrupted = True
                self._notify("Ctrl-C again, or Ctrl-D, ends the program")
                continue
            self._interrupted = False
            if message is None or message.strip() == "/quit":
                return None
            if not self._input.interactive:
                self._notify(PROMPT + message)
            return message

    def _take(self, message: str) -> None:
        word, _, rest = message.strip().partition(" ")
        try:
            if word in self._commands:
                self._commands[word](rest.strip())
            elif word[:1] == "/" and word[1:].isalpha():
                self._notify(f"{word}: no such command, nothing was sent; /help lists the commands")
            elif message.strip():
                self._answer(message)
        except ValueError as error:
            self._notify(f"error: {error}")

    def _answer(self, message: str) -> Turn | None:
        """Generate and show an answer; None if stopped before its first token. ValueError: it cannot be answered."""
        tokens = self._params.max_tokens
        room = self._room - min(tokens, int(ANSWER_SHARE * self._room))
        prompt, dropped = self._dialogue.prompt(message, self._tokenizer.apply_chat_template, room)
        if dropped:
            self._notify(f"the context of {self._room} tokens is full: the oldest {dropped} turns were dropped")
        params = replace(self._params, max_tokens=min(tokens, self._room - len(prompt)))
        stream = self._tokenizer.stream(context=prompt)
        text = AnswerText(stream, color=self._color, to_terminal=self._to_terminal)
        turn, last = Turn(message, "", prompt, []), None
        begin = time.perf_counter()
        first = None
        for last in self._interactive.generate(prompt, params):
            first = first or time.perf_counter()
            turn.token_ids += last.token_ids
            self._write(text.show(last))
        seconds = time.perf_counter() - begin
        turn.whole = last is not None and last.finish_reason is not None
        self._write(("" if turn.whole else text.finish()) + "\n")
        turn.answer = text.text
        if last is None or first is None:
            self._notify("stopped before the first token; the message was removed from the conversation")
            return None
        self._notify(self._figures(turn, last, seconds, first - begin, params))
        self._dialogue.turns.append(turn)
        return turn

    def _figures(self, turn: Turn, last: StepOutput, seconds: float, until_first: float, params: SamplingParams) -> str:
        count = len(turn.token_ids)
        drafted = describe_drafts(last.stats, self._engine.proposer_name, self._params.speculate)
        line = f"{drafted}, {count / seconds:.1f} tokens/s, {count} tokens, the first after {until_first:.2f} s"
        if not turn.whole:
            return f"{line}; stopped"
        if last.error is not None:
            return f"{line}; ended by an error: {last.error}"
        if last.finish_reason != "length":
            return line
        limit = f"max_tokens={params.max_tokens}" if params.max_tokens == self._params.max_tokens else "the context"
        return f"{line}; cut at {limit}"

    def _help(self) -> None:
        width = max(map(len, COMMANDS))
        self._notify("\n".join(f"{name:<{width}}  {meaning}" for name, meaning in COMMANDS.items()))
        self._notify("a line that ends in \\ continues on the next line; pasted lines are one message")

    def _speculate(self, on: bool) -> None:
        self._params = replace(self._params, speculate=on)
        self._notify("speculation is on" if on else "speculation is off: plain decoding, the same text")

    def _system(self, text: str) -> None:
        changed = replace(self._dialogue, system=text or None)
        self._tokenizer.render_chat(changed.messages("?"))
        self._dialogue = changed
        self._notify(f"system message: {text}" if text else "no system message")

    def _new(self) -> None:
        self._dialogue = Dialogue(self._dialogue.system)
        self._notify("a new conversation")

    def _regenerate(self) -> None:
        if not self._dialogue.turns:
            raise ValueError("/regenerate: nothing was said yet")
        before = self._dialogue.turns.pop()
        turn = None
        try:
            turn = self._answer(before.message)
        finally:
            if turn is None:
                self._dialogue.turns.append(before)
        if turn is not None and turn.whole and before.whole and turn.prompt_ids == before.prompt_ids:
            same = turn.token_ids == before.token_ids
            self._notify("the same tokens as before" if same else "not the same tokens as before")

    @contextmanager
    def _stopped_by_ctrl_c(self) -> Iterator[None]:
        """Handle Ctrl-C while no message is being read: one just after an answer must not end the program."""

        def stop(*_: object) -> None:
            self._interrupted = True
            self._interactive.stop()

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _notify(self, text: str) -> None:
        color = use_color(self._config.color, sys.stderr)
        print(paint(text, DIM if color else "", to_terminal=sys.stderr.isatty()), file=sys.stderr, flush=True)


def describe_drafts(stats: SpeculationStats, proposer: str, speculate: bool) -> str:
    if not speculate or proposer == "none":
        return "τ 1.00, no drafts"
    drafted = f"drafted by {proposer.replace('_', ' ')}" if stats.drafted else "nothing was drafted"
    return f"τ {stats.acceptance_length:.2f}, {drafted}"
