"""A conversation on its way to token ids and loss mask: turn by turn, on the history that the target itself wrote.

Ids and mask are kept as they were generated. The next turn's prompt is rendered by the chat template, as in serving;
where it continues the ids so far, the row goes on. Where it does not (templates that strip earlier reasoning, text that
tokenises otherwise when read back) the row ends and another begins: one row per assistant turn, each of them exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from models.chat import Message
from models.tokenizer import Tokenizer
from train.data.examples import Example, has_served_slot


class Row(NamedTuple):
    ids: list[int]
    loss_mask: list[bool]  # True: the target wrote this token


ANSWER = "HEADWAY-ANSWER"  # stands where a template would write one


class TooLong(ValueError):
    """A good row whose prompt does not fit."""


class Dialogue:
    """`next_prompt`, then `take` what was answered, until there is no further prompt; `rows` are the result.

    An assistant's turn that calls a tool stays as it is in the data, unlearnt: the tool's result belongs to that very
    call. With `given` the data's own answers are taken by `take_given`.
    """

    def __init__(self, example: Example, tokenizer: Tokenizer, *, longest_prompt: int, given: bool = False) -> None:
        self.example, self._tokenizer, self._longest = example, tokenizer, longest_prompt
        self._given = given
        self._history: list[Message] = []
        self._left = list(example.messages)
        self._finished: list[Row] = []
        self._row = Row([], [])
        self._prompt_text = ""
        self._held = 0  # ids of the row that came before the last prompt's own
        self.cut: str | None = None  # why later turns are missing: too long, or the template refused them
        if example.loss_mask is not None:
            self._finished.append(Row(list(example.ids), list(example.loss_mask)))
        self._plain = list(example.ids) if example.loss_mask is None and not example.messages else None

    @property
    def rows(self) -> list[Row]:
        """What can be learnt from, so far."""
        return [row for row in (*self._finished, self._row) if has_served_slot(row.loss_mask)]

    def next_prompt(self) -> list[int] | None:
        """What the target is to continue now. Raises ValueError when the first prompt cannot be asked."""
        if self._plain is not None:
            prompt, self._plain = self._plain, None
        else:
            if not self._advance():
                return None
            try:
                self._prompt_text = self._tokenizer.render_chat(self._history, tools=self.example.tools)
                prompt = self._tokenizer.encode(self._prompt_text, add_special_tokens=False)
            except ValueError as error:
                if self._row.ids:
                    return self._end_early(error)
                raise
        if not 1 <= len(prompt) <= self._longest:
            error = TooLong(f"the prompt has {len(prompt)} tokens; 1 to {self._longest} are possible")
            if self._row.ids:
                return self._end_early(error)
            raise error
        self._continue(prompt)
        return prompt

    def take(self, ids: Sequence[int]) -> None:
        """The target's answer to the last prompt, the token that ended it included."""
        ends = len(ids) > 0 and ids[-1] in self._tokenizer.eos_ids
        text = self._tokenizer.decode(ids[:-1] if ends else ids, context=self._row.ids)  # as a client is sent it
        self._learn(ids)
        self._history.append({"role": "assistant", "content": text})

    def take_given(self) -> None:
        """The data's answer to the last prompt, as tokens after the prompt's own: how serving would have seen it."""
        message = self._left.pop(0)
        try:
            text = self._given_text(message)
        except ValueError as error:
            if not self.rows:
                raise
            self._end_early(error)  # what was learnt before is none the worse
            return
        self._history.append(message)
        ids = self._tokenizer.encode(text, context=self._row.ids)
        ends = [place for place, token in enumerate(ids) if token in self._tokenizer.eos_ids]
        self._learn(ids[: ends[-1] + 1] if ends else ids)  # what a template puts after the end is not generated

    def _given_text(self, message: Message) -> str:
        """What follows the row so far. Raises ValueError where the template does not tell it from its own words.

        A template may open in its prompt what its history never shows, such as a reasoning span. An answer that begins
        like that goes on behind the prompt, whole; any other stands where the history has it, behind a prompt without.
        """
        text = self._render([*self._history, message])
        if text.startswith(self._prompt_text):
            return text[len(self._prompt_text) :]
        before, found, after = self._render([*self._history, {"role": "assistant", "content": ANSWER}]).rpartition(
            ANSWER
        )
        if not found or not text.startswith(before) or not self._prompt_text.startswith(before):
            raise ValueError("the chat template does not continue its own prompt, so no token can be called the answer")
        opened, content = self._prompt_text[len(before) :], message.get("content")
        if isinstance(content, str) and content.startswith(opened) and not message.get("tool_calls"):
            return content[len(opened) :] + after
        del self._row.ids[self._held :], self._row.loss_mask[self._held :]
        self._continue(self._tokenizer.encode(before, add_special_tokens=False))
        return text[len(before) :]

    def _render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.render_chat(list(messages), tools=self.example.tools, generation_prompt=False)

    def _continue(self, prompt: Sequence[int]) -> None:
        """Puts the prompt into the row, or into another where it does not go on from this one."""
        self._held = len(self._row.ids)
        if list(prompt[: self._held]) != self._row.ids:
            self._finished.append(self._row)
            self._row, self._held = Row([], []), 0
        self._row.ids.extend(prompt[self._held :])
        self._row.loss_mask.extend([False] * (len(prompt) - self._held))

    def _learn(self, ids: Sequence[int]) -> None:
        self._row.ids.extend(ids)
        self._row.loss_mask.extend([True] * len(ids))

    def _advance(self) -> bool:
        """Moves what is said before the target's next turn into the history; False when there is no such turn."""
        asked = False
        while self._left:
            message = self._left[0]
            if message["role"] == "assistant":
                if self._given:
                    if self._history:
                        return True
                elif not self._is_kept():
                    self._left.pop(0)  # the target writes its own
                    if asked:
                        return True
                    continue  # a greeting before any question, or a second answer to one
            asked = message["role"] in ("user", "tool")
            self._history.append(self._left.pop(0))
        return asked and not self._given

    def _is_kept(self) -> bool:
        """Whether the assistant's turn that comes next must stay: it calls a tool, or a tool's result follows it."""
        following = self._left[1]["role"] if len(self._left) > 1 else None
        return bool(self._left[0].get("tool_calls")) or following == "tool"

    def _end_early(self, reason: ValueError) -> None:
        self.cut = f"cut after message {len(self._history)} of {len(self.example.messages)}: {reason}"
        self._left.clear()


def first_prompt(example: Example, tokenizer: Tokenizer, longest: int) -> list[int]:
    """What the target is asked first: the prompt that acceptance is measured on. Raises ValueError."""
    if example.loss_mask is not None:
        prompt = list(example.prompt)
        if not 1 <= len(prompt) <= longest:
            raise TooLong(f"the prompt has {len(prompt)} tokens; 1 to {longest} are possible")
        return prompt
    found = Dialogue(example, tokenizer, longest_prompt=longest).next_prompt()
    if found is None:
        raise ValueError("no turn is the target's to answer")
    return found


def given_rows(example: Example, tokenizer: Tokenizer, longest: int) -> list[Row]:
    """Rows of a conversation whose answers are in the data. Raises ValueError when there is nothing to learn."""
    return given_dialogue(example, tokenizer, longest).rows


def given_dialogue(example: Example, tokenizer: Tokenizer, longest: int) -> Dialogue:
    """As `given_rows`, with what is to be said of it."""
    dialogue = Dialogue(example, tokenizer, longest_prompt=longest, given=True)
    if example.messages:
        while dialogue.next_prompt() is not None:
            dialogue.take_given()
    if not dialogue.rows:
        raise ValueError("data.responses=given: the row holds no answer of two tokens")
    return dialogue
