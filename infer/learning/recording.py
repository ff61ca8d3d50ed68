"""Takes hidden states and logits out of a running engine, such as features to train a head on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor

from infer.batch.tree import DraftTree
from infer.request import Request
from infer.steps.runner import DecodeBatch, Decoded, HostBatch, Rows, Runner
from infer.steps.serving import Serving
from kernels.rows import AttentionRows


class Span(NamedTuple):
    """Consecutive committed positions of a request, from `first` on, and the rows of the step that computed them."""

    request: Request
    first: int
    rows: Sequence[int]


class Recorder(Protocol):
    """Takes what the target computes at committed positions, in the step that computes it.

    After a pre-emption positions come again. Those of a cached prefix do not come: they were computed for another
    request. A verify's last positions may lie past the request's end. The tensors are valid during the call.
    """

    @property
    def layers(self) -> tuple[int, ...]:
        """The hidden states to take, as `aux_layers` of the target."""
        ...

    def take_states(self, spans: Sequence[Span], states: Sequence[Tensor]) -> None:
        """Take the hidden states of these spans: `states` are `[R, H]` of each layer, for all rows of the step."""
        ...

    def take_logits(self, spans: Sequence[Span], logits: Tensor) -> None:
        """Take the target's logits `[R, V]` at these spans, before penalties, masks and temperature.

        Of a prompt only its last position has logits.
        """
        ...


@contextmanager
def recording(engine: Serving, recorder: Recorder) -> Iterator[None]:
    """Show `recorder` what the target computes within the block. Only while the engine is idle, without CUDA graphs."""
    steps, runner = engine.steps, engine.steps.runner
    busy = engine.has_work or steps.overlap or runner.graphs
    assert not busy
    steps.runner = RecordingRunner(runner, recorder)
    try:
        yield
    finally:
        steps.runner = runner


class RecordingRunner(Runner):
    """A runner that shows a recorder what it computes. Without CUDA graphs, whose forwards return no more than drafters
    read.
    """

    def __init__(self, runner: Runner, recorder: Recorder) -> None:
        super().__init__(runner.shard, runner.pool)
        self._recorder = recorder
        self._states: tuple[Tensor, ...] = ()  # of the last forward

    def forward(self, ids: Tensor, rows: AttentionRows, aux: Sequence[int], depths: Tensor | None = None) -> Rows:
        computed = super().forward(ids, rows, (*aux, *self._recorder.layers), depths)
        self._states = computed.aux[len(aux) :]
        return computed._replace(aux=computed.aux[: len(aux)])

    def prefill(self, requests: Sequence[Request], chunks: Sequence[int], aux: Sequence[int]) -> Rows:
        computed = super().prefill(requests, chunks, aux)
        bounds = itertools.pairwise(itertools.accumulate(chunks, initial=0))
        spans = [Span(r, r.computed, range(*rows)) for r, rows in zip(requests, bounds, strict=True)]
        self._recorder.take_states(spans, self._states)
        ends = [(r, first + len(rows) - 1, rows[-1]) for r, first, rows in spans if first + len(rows) == len(r.tokens)]
        if ends:
            logits = self.shard.logits(computed.hidden[[row for *_, row in ends]])
            self._recorder.take_logits([Span(r, place, [row]) for row, (r, place, _) in enumerate(ends)], logits)
        return computed

    def decode(self, tree: DraftTree, batch: DecodeBatch, aux: Sequence[int]) -> Decoded:
        assert isinstance(batch, HostBatch)
        decoded = super().decode(tree, batch, aux)
        paths, depths = decoded.accepted.path.tolist(), decoded.accepted.depth.tolist()
        spans, first = list[Span](), 0
        for request, path, depth, length in zip(batch.requests, paths, depths, tree.length.tolist(), strict=True):
            spans.append(Span(request, request.computed, [first + node for node in path[: depth + 1]]))
            first += length
        self._recorder.take_states(spans, self._states)
        self._recorder.take_logits(spans, batch.choices.raw)
        return decoded
