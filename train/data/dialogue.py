"""Converts a conversation to token ids and a loss mask, turn by turn, on the history that the target itself generated.

Ids and mask are kept as they were generated. The next turn's prompt is rendered by the chat template, as in serving. If
it extends the ids so far, the row continues. If not (the template strips earlier reasoning, or decoded text
re-tokenizes differently), the row ends and a new one begins: one row per assistant turn, each of them exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from models.chat import Message
from models.tokenizer import Tokenizer
from train.data.examples import Example, has_served_slot


class Row(NamedTuple):
    ids: list[int]
    loss_mask: list[bool]  # True: the target generated this token


ANSWER = "HEADWAY-ANSWER"  # placeholder that shows where a template puts an assistant message


def count_answers(example: Example, tokenizer: Tokenizer) -> int:
    """Return how many turns the target is asked for, if no prompt is too long."""
    dialogue = Dialogue(example, tokenizer, longest_prompt=0)
    prompts = sum(1 for _ in iter(dialogue._advance, False))
    return prompts + (example.loss_mask is None and not example.messages)


class TooLong(ValueError):
    """A valid row whose prompt exceeds the longest possible one."""


class Dialogue:
    """The state of one conversation: alternate `next_prompt` and `take` until there is no prompt; `rows` is the result.

    An assistant turn that calls a tool is kept as in the data and masked out of the loss, since the tool's result
    belongs to that call; so is one of weight 0. With `provided` the data's responses are used instead, by
    `take_provided`.
    """

    def __init__(self, example: Example, tokenizer: Tokenizer, *, longest_prompt: int, provided: bool = False) -> None:
        self.example, self._tokenizer, self._longest = example, tokenizer, longest_prompt
        self._provided = provided
        self._history: list[Message] = []
        self._left = list(example.messages)
        self._finished: list[Row] = []
        self._row = Row([], [])
        self._prompt_text = ""
        self._held = 0  # number of ids in the row before the last prompt extended it
        # why later turns are missing: too long, rejected by the template or, with `provided`, unusable in the data
        self.cut: str | None = f"cut: {example.cut}" if provided and example.cut else None
        if example.loss_mask is not None:
            self._finished.append(Row(list(example.ids), list(example.loss_mask)))
        self._plain = list(example.ids) if example.loss_mask is None and not example.messages else None

    @property
    def rows(self) -> list[Row]:
        """Rows so far that have at least one served slot, so that a head can be trained on them."""
        return [row for row in (*self._finished, self._row) if has_served_slot(row.loss_mask)]

    def next_prompt(self) -> list[int] | None:
        """Return the next prompt for the target, None after the last. Raises ValueError if the first is invalid."""
        plain, self._plain = self._plain, None
        if plain is None and not self._advance():
            return None
        try:
            if plain is None:
                self._prompt_text = self._tokenizer.render_chat(self._history, tools=self.example.tools)
                plain = self._tokenizer.encode(self._prompt_text, add_special_tokens=False)
            refuse_length(plain, self._longest)
        except ValueError as error:
            if self._row.ids:
                return self._end_early(error)
            raise
        self._continue(plain)
        return plain

    def take(self, ids: Sequence[int]) -> None:
        """Append the target's response to the last prompt, including the token that ended it."""
        ends = len(ids) > 0 and ids[-1] in self._tokenizer.eos_ids
        text = self._tokenizer.decode(ids[:-1] if ends else ids, context=self._row.ids)  # as a client receives it
        self._learn(ids)
        self._history.append({"role": "assistant", "content": text})

    def stop(self, ids: Sequence[int], reason: str) -> None:
        """Append a part of the target's response to the last prompt and end the conversation there."""
        self._learn(ids)
        self.cut = f"cut within an answer of {len(ids)} tokens: {reason}"
        self._left.clear()

    def take_provided(self) -> None:
        """Append the data's response to the last prompt, tokenized after the prompt's tokens, as in serving."""
        message = self._left.pop(0)
        try:
            text = self._response_text(message)
        except ValueError as error:
            if not self.rows:
                raise
            self._end_early(error)  # earlier turns remain valid
            return
        self._history.append(message)
        ids = self._tokenizer.encode(text, context=self._row.ids)
        end = next((place for place, token in enumerate(ids, start=1) if token in self._tokenizer.eos_ids), len(ids))
        self._learn(ids[:end], learnt=not is_skipped(message))  # the target generates nothing after its end token

    def _response_text(self, message: Message) -> str:
        """Return the text that follows the row so far. Raises ValueError if the template does not separate it.

        A template's generation prompt may open a span that it does not render in the history, such as reasoning. A
        response that begins with this opening continues the generation prompt; for any other, the row's prompt is
        replaced by one without the opening, as rendered in the history.
        """
        text = self._render([*self._history, message])
        if text.startswith(self._prompt_text):
            return text[len(self._prompt_text) :]
        before, separator, after = self._render([*self._history, {"role": "assistant", "content": ANSWER}]).rpartition(
            ANSWER
        )
        if not separator or not text.startswith(before) or not self._prompt_text.startswith(before):
            raise ValueError("the chat template does not continue its own prompt, so no token can be called the answer")
        opening, content = self._prompt_text[len(before) :], message.get("content")
        if isinstance(content, str) and content.startswith(opening) and not message.get("tool_calls"):
            return content[len(opening) :] + after
        del self._row.ids[self._held :], self._row.loss_mask[self._held :]
        self._continue(self._tokenizer.encode(before, add_special_tokens=False))
        return text[len(before) :]

    def _render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.render_chat(list(messages), tools=self.example.tools, generation_prompt=False)

    def _continue(self, prompt: Sequence[int]) -> None:
        """Extend the row to the prompt, or begin a new row if the prompt does not start with the row's ids.

        A template without a mark after answers (GLM's) ends them by the next turn's, which is then the target's own.
        """
        self._held = len(self._row.ids)
        if list(prompt[: self._held]) != self._row.ids:
            self._finished.append(self._row)
            self._row, self._held = Row([], []), 0
        (*_, last), eos_ids = self._row.ids or [None], self._tokenizer.eos_ids
        is_open = self._provided and last is not None and self._row.loss_mask[-1] and last not in eos_ids
        new = prompt[self._held :]
        self._row.ids.extend(new)
        self._row.loss_mask.extend([is_open and place == 0 and token in eos_ids for place, token in enumerate(new)])

    def _learn(self, ids: Sequence[int], *, learnt: bool = True) -> None:
        self._row.ids.extend(ids)
        self._row.loss_mask.extend([learnt] * len(ids))

    def _advance(self) -> bool:
        """Move messages up to the target's next turn into the history. Return False if there is no such turn."""
        awaits_response = False
        while self._left:
            message = self._left[0]
            if message["role"] == "assistant":
                if self._provided:
                    if self._history:
                        return True
                elif not self._is_kept():
                    self._left.pop(0)  # the target generates this turn itself
                    if awaits_response:
                        return True
                    continue  # a greeting before any question, or a second response to one
            if awaits_response and self.example.questions and not self._provided:
                return True
            awaits_response = message["role"] in ("user", "tool")
            self._history.append(self._left.pop(0))
        return awaits_response and not self._provided

    @property
    def unfinished(self) -> bool:
        """Whether messages are left behind the last prompt."""
        return bool(self._left)

    def _is_kept(self) -> bool:
        """Return whether the next assistant turn is kept: it calls a tool, a tool's result follows, its weight is 0."""
        message, following = self._left[0], self._left[1]["role"] if len(self._left) > 1 else None
        return bool(message.get("tool_calls")) or following == "tool" or is_skipped(message)

    def _end_early(self, reason: ValueError) -> None:
        self.cut = f"cut after message {len(self._history)} of {len(self.example.messages)}: {reason}"
        self._left.clear()


def is_skipped(message: Message) -> bool:
    """Return whether an assistant message is history only: OpenAI's fine-tuning format marks it by a weight of 0."""
    return message.get("weight") == 0


def refuse_length(prompt: Sequence[int], longest: int) -> None:
    if not 1 <= len(prompt) <= longest:
        raise TooLong(f"the prompt has {len(prompt)} tokens; 1 to {longest} are possible")


def first_prompt(example: Example, tokenizer: Tokenizer, longest: int) -> list[int]:
    """Return a conversation's first prompt, on which acceptance is measured.

    Raises ValueError if there is none, and its subclass TooLong if it does not have 1 to `longest` tokens.
    """
    if example.loss_mask is not None:
        refuse_length(example.prompt, longest)
        return list(example.prompt)
    prompt_ids = Dialogue(example, tokenizer, longest_prompt=longest).next_prompt()
    if prompt_ids is None:
        raise ValueError(example.cut or "no turn is the target's to answer")
    return prompt_ids


def provided_dialogue(example: Example, tokenizer: Tokenizer, longest: int) -> Dialogue:
    """Return a finished conversation whose responses are in the data. Raises ValueError if no row is usable."""
    dialogue = Dialogue(example, tokenizer, longest_prompt=longest, provided=True)
    if example.messages:
        while dialogue.next_prompt() is not None:
            dialogue.take_provided()
    if not dialogue.rows:
        raise ValueError(example.cut or "data.responses=given: the row holds no answer of two tokens")
    return dialogue
