"""Constrains a request's output to its grammar: masks of the tokens that may follow at each row, drafted rows included.

The matcher's state is that of the emitted tokens. Along a draft path it is advanced and then rolled back, so a row of a
tree is masked exactly as in plain decoding, and speculation does not change the output.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from infer.batch.grammar import Grammar, compile_matcher, make_tokenizer, reason_of
from infer.batch.number_limit import NumberLimit, Place
from kernels.shape import packed
from models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

MAX_REMARKS = 256  # log lines about keywords that are not enforced
# CPU time for one request's masks in one step; a slower grammar would delay every request in the batch. Not wall time:
# beside busy processes any grammar may take seconds.
STEP_LIMIT_S = 1.0


class Constraints:
    """Compiles grammars for one tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        # `n_vocab` may exceed the number of the tokenizer's tokens (padding), but must not be smaller.
        size = max(vocab_size, tokenizer.vocab_size)
        self._tokenizer = make_tokenizer(tokenizer.backend.to_str(), size, list(eos_ids))
        numbers, tagged = (NumberLimit(tokenizer.token_bytes, vocab_size, quoted=quoted) for quoted in (True, False))
        self._numbers = {"json_object": numbers, "json_schema": numbers, "calls": numbers, "tagged_calls": tagged}
        self._said: set[str] = set()

    def compile(self, grammar: Grammar) -> Constraint:
        """Compile a grammar, and log once what of its schemas is not enforced. Raises ValueError if it is invalid."""
        matcher = compile_matcher(grammar, self._tokenizer)
        for remark in grammar.remarks:
            if remark not in self._said and len(self._said) < MAX_REMARKS:
                self._said.add(remark)
                log.warning("JSON schema: %s", remark)
        return Constraint(matcher, self._vocab_size, self._numbers.get(grammar.kind), after=grammar.after)


class Constraint:
    """The grammar of one request. `numbers` limits the numbers of JSON, which begins `after` a mark; None: no JSON."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        numbers: NumberLimit | None = None,
        *,
        after: str = "",
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._matcher, self.vocab_size, self._numbers, self._clock = matcher, vocab_size, numbers, clock
        self._allow_all = packed(torch.ones(vocab_size, dtype=torch.bool))
        self._place = Place(after=after.encode())  # of the emitted tokens
        self.error: str | None = None  # why the request cannot continue

    def copy(self) -> Constraint:
        """Return a copy for another completion of the same prompt. Call before any token is pushed."""
        after = self._place.after.decode()
        return Constraint(self._matcher.deep_copy(), self.vocab_size, self._numbers, after=after, clock=self._clock)

    def push(self, token: int) -> bool:
        """Advance by an emitted token; return whether the output ends: nothing may follow, or the grammar failed."""
        if not self._matcher.try_consume_tokens([token]):
            failed = self._matcher.is_error()
            self._fail(reason_of(self._matcher) if failed else "no token that it and the other masks allow can follow")
        if self._numbers is not None:
            self._place = self._numbers.after(self._place, token)
        return self.error is not None or self._matcher.is_stopped()

    def words(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return masks of the tokens that may follow the emitted tokens and the drafted tokens of each path.

        int32 `[n, ceil(V / 32)]`, a bit per token (kernels/shape.py). The row of a path that the grammar forbids allows
        every token: the target cannot choose the path's last token, so this row is never reached.
        """
        began = self._clock()
        rows = self._allow_all.repeat(len(paths), 1)
        consumed: list[int] = []
        for row, path in enumerate(paths):
            if self.error is None and self._walk(consumed, path) and not self._matcher.is_stopped():
                rows[row] = self._mask(path)
        self._matcher.rollback(len(consumed))
        if self._matcher.is_error():
            self._fail(reason_of(self._matcher))
        elif self._clock() - began > STEP_LIMIT_S:
            self._fail(f"takes more than {STEP_LIMIT_S:g} s of CPU time per step")
        return rows if self.error is None else self._allow_all.repeat(len(paths), 1)

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Return the nodes of a draft tree that the grammar permits along with their ancestors. Node 0 is the root."""
        paths: dict[int, list[int]] = {0: []}
        consumed: list[int] = []
        for node in range(1, len(tokens)):
            if parents[node] in paths and self.error is None:
                path = [*paths[parents[node]], tokens[node]]
                if self._walk(consumed, path):
                    paths[node] = path
        self._matcher.rollback(len(consumed))
        return list(paths)

    def _walk(self, consumed: list[int], path: Sequence[int]) -> bool:
        """Move the state from the drafted tokens `consumed` to those of `path`; return False if these are forbidden."""
        common = 0
        while common < min(len(consumed), len(path)) and consumed[common] == path[common]:
            common += 1
        self._matcher.rollback(len(consumed) - common)
        del consumed[common:]
        for token in path[common:]:
            if not self._matcher.try_consume_tokens([token]):
                return False
            consumed.append(token)
        return True

    def _mask(self, path: Sequence[int]) -> Tensor:
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype="<i4")
        allowed = torch.from_numpy(mask[: len(self._allow_all)].astype(np.int32)) & self._allow_all
        if self._numbers is None:
            return allowed
        return self._numbers.apply(functools.reduce(self._numbers.after, path, self._place), allowed)

    def _fail(self, reason: str) -> None:
        self.error = self.error or f"the grammar cannot be followed further: {reason}"
