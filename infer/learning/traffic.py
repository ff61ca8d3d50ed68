"""Turns requests that were served into examples to train the head on: what verification computed is kept meanwhile.

A request's prompt and response, the features that the head reads, and the target's likeliest tokens at every position
that was decided. Nothing is computed for it but these tokens, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.learning.pieces import STATES, Piece, Pieces, Turn, joined
from infer.learning.recording import Span
from infer.request import Request
from kernels.copies import select_rows

TOP_K = 32  # of the target's tokens
MOST_TOKENS = 8192  # of a request: a longer one is no example
LEAST_TOKENS = 3  # of an example, and from the last token of its prompt on: one token is predicted from two


class Example(NamedTuple):
    ids: Tensor  # int64 [T]: from position `first` on; earlier ones lay in cached pages
    first: int
    prompt: int  # how many of these are the prompt's
    states: Tensor  # [T, L, H] in the target's dtype, of the layers that the head reads; the last may be 0
    top_ids: Tensor  # int32 [T, k]
    top_log_probs: Tensor  # fp16 [T, k]; -inf where no token was decided
    temperature: float
    seed: int


class TrafficRecorder:
    """Records the requests that `wants` agrees to. A `Recorder` (infer/learning/recording.py)."""

    def __init__(self, layers: Sequence[int], wants: Callable[[Request], bool]) -> None:
        self.layers, self._wants = tuple(layers), wants
        self._pieces, self._running = Pieces(), dict[str, Request]()

    def take_states(self, spans: Sequence[Span], states: Sequence[Tensor]) -> None:
        wanted = self._wanted(spans)
        if wanted:
            rows = [row for span in wanted for row in span.rows]
            taken = select_rows(states, rows).view(len(rows), len(states), -1)
            self._pieces.add(wanted, {STATES: taken.cpu()})

    def take_logits(self, spans: Sequence[Span], logits: Tensor) -> None:
        wanted = self._wanted(spans)
        if wanted:
            rows = logits[[row for span in wanted for row in span.rows]]
            top = rows.topk(min(TOP_K, rows.shape[-1]))
            log_probs = (top.values - rows.logsumexp(-1, keepdim=True)).half()
            self._pieces.add(wanted, {"top_ids": top.indices.int().cpu(), "top_log_probs": log_probs.cpu()})

    def ended(self) -> Iterator[Example]:
        """Yield the examples of requests that have ended since the last call. Call after every step."""
        for name, request in list(self._running.items()):
            if request.finish_reason is None:
                continue
            del self._running[name]
            example = example_of(request, self._pieces.pop(name))
            if example is not None:
                yield example

    def _wanted(self, spans: Sequence[Span]) -> list[Span]:
        wanted = [span for span in spans if self._wants(span.request) and len(span.request.tokens) <= MOST_TOKENS]
        self._running |= {request.request_id: request for request, _, _ in wanted}
        return wanted


def example_of(request: Request, pieces: Sequence[Piece]) -> Example | None:
    """Return the example of a request that has ended; None if it is too short, too long, failed or was aborted."""
    ids, whole = request.tokens, request.finish_reason in ("stop", "length")
    tensors, first = joined([Turn(ids, pieces)], ids)
    prompt = len(request.prompt_ids) - first
    if not whole or len(ids) > MOST_TOKENS or prompt < 1 or len(ids) - first - prompt < LEAST_TOKENS - 1:
        return None
    log_probs = tensors["top_log_probs"]
    log_probs[(log_probs == 0).all(-1)] = -torch.inf  # rows that no piece wrote
    return Example(
        ids=torch.tensor(ids[first:]),
        first=first,
        prompt=prompt,
        states=tensors[STATES][first:],
        top_ids=tensors["top_ids"][first:],
        top_log_probs=log_probs[first:],
        temperature=request.params.temperature,
        seed=request.seed,
    )
