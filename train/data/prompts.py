"""Reads rows into a run's training and held-out prompts: checked, deduplicated, split and counted.

Reading stops as soon as both sides are full. Bad rows never stop a run: they are counted, and the first ones are
reported with their place. Responses are generated in train/data/regenerate.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from models.demo.corpus import corpus_hash, cut_prompts, held_out_prompts
from models.tokenizer import Tokenizer
from train.config import ChatDataConfig, DataConfig, DemoDataConfig, HubDataConfig, RowsDataConfig, TrainConfig, as_list
from train.data.dialogue import TooLong, first_prompt, provided_dialogue
from train.data.examples import Example, content_key, parse_row
from train.data.sources import Item, RowSource, read_items

SHOWN = 8  # number of bad rows reported
BAD, LONG = "bad", "too long"  # reasons for leaving a row out, of which the first rows are reported
KEYS = 2**63  # keys are below it
TO_TRAIN, TO_HELD_OUT = "train", "held out"


@dataclass
class Reading:
    """Counts of the rows read: each is trained on, held out or dropped."""

    forms: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    complaints: list[str] = field(default_factory=list)  # the first SHOWN, with their place
    shortened: list[str] = field(default_factory=list)  # all conversations trained on without their last turns
    read: int = 0
    train: int = 0
    held_out: int = 0

    def drop(self, reason: str, complaint: str | None = None) -> None:
        self.dropped[reason] += 1
        if complaint is not None and len(self.complaints) < SHOWN:
            self.complaints.append(complaint)

    def lines(self) -> list[str]:
        """Return a summary to print: the counts, then `named`."""
        forms = ", ".join(f"{count} {form}" for form, count in self.forms.most_common())
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common()) or "none"
        return [
            f"{self.read} rows read ({forms}): {self.train} to train on, {self.held_out} held out; left out: {dropped}",
            *self.named(),
        ]

    def named(self) -> list[str]:
        """Return lines to print about rows that were left out or shortened."""
        lines = [f"left out: {complaint}" for complaint in self.complaints]
        more = self.dropped[BAD] + self.dropped[LONG] - len(self.complaints)
        lines += [f"left out: {more} more"] if more > 0 else []
        return lines + first_of("shortened", self.shortened)

    def summary(self) -> dict[str, object]:
        kept = {"read": self.read, "train": self.train, "held_out": self.held_out}
        return {**kept, "dropped": dict(self.dropped), "forms": dict(self.forms)}


def first_of(label: str, lines: Sequence[str]) -> list[str]:
    """Return the first SHOWN lines, labelled with `label`, and a line with the number of others."""
    more = [f"{label}: {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"{label}: {line}" for line in lines[:SHOWN]] + more


@dataclass
class Prompts:
    train: dict[int, Example]  # by key
    held_out: dict[int, Example]  # prompts as token ids, or questions
    source: str  # identifies the data in the record
    reading: Reading


def read_prompts(
    config: TrainConfig, tokenizer: Tokenizer, context: int, check: Callable[[], None] = lambda: None
) -> Prompts:
    """Return the prompts of both sides. `check` is called between rows and may raise to stop."""
    data = config.data
    if isinstance(data, DemoDataConfig):
        if data.prompt_tokens + 2 >= context:
            raise ValueError(f"data.prompt_tokens={data.prompt_tokens}: leaves no room in a context of {context}")
        train = by_key(cut_prompts(tokenizer, "train", data.num_sequences, data.prompt_tokens, config.seed))
        held_out = by_key(held_out_prompts(tokenizer, config.eval_prompts, data.prompt_tokens, config.seed))
        count = len(train) + len(held_out)
        reading = Reading(Counter(prompt=count), read=count, train=len(train), held_out=len(held_out))
        return Prompts(train, held_out, f"demo corpus {corpus_hash()}", reading)
    assert isinstance(data, RowSource)
    return Reader(data, tokenizer, longest_prompt(data, context), config.eval_prompts, check).read()


def by_key(prompts: list[list[int]]) -> dict[int, Example]:
    """Return the prompts by key. The key includes the number, so equal prompts are kept."""
    return {content_key([number, ids]): Example(ids=tuple(ids)) for number, ids in enumerate(prompts)}


def longest_prompt(data: DataConfig, context: int) -> int:
    """Return the maximum length of a prompt in tokens, leaving room for a response in the context."""
    limit = data.max_prompt_tokens if isinstance(data, RowsDataConfig) else context
    return min(limit, context - 3)


@dataclass
class Reader:
    data: RowSource
    tokenizer: Tokenizer
    longest: int
    eval_prompts: int
    check: Callable[[], None] = lambda: None
    reading: Reading = field(default_factory=Reading)
    train: dict[int, Example] = field(default_factory=dict)
    held_out: dict[int, Example] = field(default_factory=dict)  # by opening key

    @property
    def name(self) -> str:
        return "data=chat" if isinstance(self.data, ChatDataConfig) else f"data.path={self.data.path}"

    def read(self) -> Prompts:
        """Read rows until both sides are full. Raises ValueError if a side stays empty."""
        held_out_items = read_items(self.data, held_out=True)
        if held_out_items is not None:
            self._fill(held_out_items, TO_HELD_OUT)
            self._refuse_empty(self.held_out, "row to hold out")
        items = read_items(self.data, held_out=False)
        assert items is not None
        self._fill(items, None if held_out_items is None else TO_TRAIN)
        if not self.held_out:
            self._hold_one_out()
        self._refuse_empty(self.train, "row to train on")
        self.reading.train, self.reading.held_out = len(self.train), len(self.held_out)
        reading = self.reading
        assert reading.read == reading.train + reading.held_out + reading.dropped.total(), "a row was lost"
        held_out = [example.key if example.questions else key for key, example in self.held_out.items()]
        digest = content_key([[example.key for example in self.train.values()], held_out])
        source = f"{name_of(self.data)} {digest:016x}"
        return Prompts(self.train, self.held_out, source, reading)

    def read_prompts(self) -> list[list[int]]:
        """Return the first prompts of up to `eval_prompts` rows, all treated as held out. Raises ValueError if none.

        `held_out` are then these rows.
        """
        items = read_items(self.data, held_out=False)
        assert items is not None
        self._fill(items, TO_HELD_OUT)
        self._refuse_empty(self.held_out, "prompt")
        return [first_prompt(example, self.tokenizer, self.longest) for example in self.held_out.values()]

    def _fill(self, items: Iterable[Item], side: str | None) -> None:
        """Take rows until `side` is full; with None until both are, a hash of each row's opening deciding its side."""
        for item in items:
            self.check()
            full = {TO_TRAIN: len(self.train) >= self.data.num_sequences}
            full[TO_HELD_OUT] = len(self.held_out) >= self.eval_prompts
            if full[side] if side else all(full.values()):
                break
            self.reading.read += 1
            try:
                if item.error is not None:
                    raise ValueError(item.error)
                self._take(item, side)
            except TooLong as error:
                self.reading.drop(LONG, f"{item.place}: {error}")
            except (ValueError, RecursionError) as error:  # RecursionError: of JSON nested too deep for a template
                self.reading.drop(BAD, f"{item.place}: {error}")

    def _take(self, item: Item, side: str | None) -> None:
        form, example = parse_row(item.row, self.data, self.tokenizer)
        example = replace(example, place=item.place)
        opening_key, provided = example.opening_key, self.data.provides_responses
        self.reading.forms[form] += 1
        side = side or (TO_HELD_OUT if opening_key < self.data.held_out_share * KEYS else TO_TRAIN)
        if opening_key in self.held_out:
            self.reading.drop("held out already")
        elif side == TO_HELD_OUT:
            if len(self.held_out) < self.eval_prompts:
                self._hold_out(example)
            else:
                self.reading.drop("on the held-out side, which is full")
        else:
            # responses make rows distinct only if they are trained on
            key = example.key if provided else example.prompt_key
            if key in self.train:
                self.reading.drop("twins")
            elif len(self.train) >= self.data.num_sequences:
                self.reading.drop("beyond data.num_sequences")
            else:
                if provided:
                    cut = provided_dialogue(example, self.tokenizer, self.longest).cut
                else:
                    first_prompt(example, self.tokenizer, self.longest)
                    cut = example.cut and f"cut: {example.cut}"
                self.reading.shortened += [f"{example.place}: {cut}"] if cut else []
                self.train[key] = example

    def _hold_out(self, example: Example) -> None:
        """Hold out a row; acceptance is measured on the response to its first prompt, or to each of its questions."""
        prompt = first_prompt(example, self.tokenizer, self.longest)
        self.held_out[example.opening_key] = example if example.questions else Example(ids=tuple(prompt))

    def _hold_one_out(self) -> None:
        """Move the training row with the lowest opening key to the held-out side, when the hash has selected none.

        The other rows with its opening are dropped. Raises ValueError if all rows have the same opening.
        """
        openings = len({example.opening_key for example in self.train.values()})
        if openings < 2:
            usable = f"{openings or 'no'} usable prompt among {self.reading.read} rows"
            raise ValueError(self._caused(f"{usable}, too few to hold one out; give at least two that differ"))
        first = min(self.train.values(), key=lambda example: example.opening_key)
        self._hold_out(first)
        same = [key for key, example in self.train.items() if example.opening_key == first.opening_key]
        for key in same:
            del self.train[key]
        if len(same) > 1:
            self.reading.dropped["held out already"] += len(same) - 1

    def _refuse_empty(self, rows: Mapping[int, object], wanted: str) -> None:
        if not rows:
            raise ValueError(self._caused(f"no usable {wanted} among {self.reading.read} rows"))

    def _caused(self, text: str) -> str:
        """Return an error that says what is wrong with the first bad row, first of all if most rows are bad."""
        dropped = self.reading.dropped.most_common()
        left_out = ", ".join(f"{count} {reason}" for reason, count in dropped)
        parts = [*self.reading.complaints[:1], f"{text} (left out: {left_out})" if dropped else text]
        if dropped and dropped[0][0] not in (BAD, LONG):
            parts.reverse()
        return f"{self.name}: {'; '.join(parts)}"


def name_of(data: RowSource) -> str:
    if isinstance(data, HubDataConfig):
        return f"{data.path}{f' ({data.subset})' if data.subset else ''}, {data.split}"
    if isinstance(data, ChatDataConfig):
        return f"built-in prompts, {corpus_hash()}"
    paths = [Path(entry if isinstance(entry, str) else entry["path"]) for entry in as_list(data.path)]
    times = Counter(path.name for path in paths)
    return ", ".join(path.name if times[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in paths)
