"""An engine as the profiler of step costs uses it: requests that last as long as they are timed, parts of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from infer.batch.params import SamplingParams
from infer.batch.tree import Budget, DraftTree
from infer.kvcache.hybrid import HybridPool
from infer.processes.threads import cpu_threads
from infer.request import Phase, Request
from infer.speculation.control.planner import NoDrafts, Planner
from infer.steps.serving import Serving


class ProfiledEngine:
    """The part of an engine that the profiler times. It must be idle."""

    def __init__(self, engine: Serving) -> None:
        self._engine, self._steps, self._pool, self._stats = engine, engine.steps, engine.steps.pool, engine.steps.stats
        self._speculator, self._threads = engine.steps.speculator, engine.threads
        self.overlap, self.step = engine.steps.overlap, engine.step

    @contextmanager
    def decoding(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, check: Callable[[], None] = lambda: None
    ) -> Iterator[list[Request]]:
        """Start requests, bring them to decoding and yield them; no step drafts. They end with the block, and no trace
        of them is left.

        These are fewer than `prompts` if no more fit at the same time, or if the first had ended when the last began.
        `check` is called between steps, and may raise.
        """
        engine, stats = self._engine, copy.deepcopy(self._stats)
        self._speculator.planner, self._steps.overlap = NoDrafts(), None
        longest = len(prompts[0]) + params.max_tokens
        fitting = self._pool.free_pages // (self._pool.pages_for(longest) + 1)
        requests = [engine.request(engine.add(prompt, params)) for prompt in prompts[:fitting]]
        try:
            while any(request.phase in (Phase.WAITING, Phase.PREFILL) for request in requests):
                check()
                engine.step()
            decoding = [request for request in requests if request.phase is Phase.DECODE]
            reserved = [self._pool.reserve(request, longest) for request in decoding]
            assert all(reserved)
            yield decoding
        finally:
            for request in requests:
                engine.abort(request.request_id)
            self._pool.pages.clear_cache()
            self._stats.restore(stats)
            self._speculator.planner, self._steps.overlap = Planner(), self.overlap

    @torch.inference_mode()
    def verify(self, requests: Sequence[Request], drafts: int) -> None:
        tree = DraftTree.chains([request.tokens[-1] for request in requests], [[1] * drafts] * len(requests))
        with cpu_threads(self._threads.plan.count(len(requests) * (1 + drafts))):
            self._steps.verify_drafts(list(requests), tree)
            if isinstance(self._pool, HybridPool):  # they are replayed as if all had been accepted
                self._pool.layers.replay([list(range(1, 1 + drafts))] * len(requests))

    @torch.inference_mode()
    def draft(self, requests: Sequence[Request], budget: Budget) -> None:
        with cpu_threads(self._threads.plan.count(len(requests) * (1 + budget.nodes))):
            self._speculator.propose(requests, [budget] * len(requests))

    @torch.inference_mode()
    def prefill_drafter(self, requests: Sequence[Request]) -> None:
        """Make the drafter read all committed positions of the requests. What it drafts from then on is worthless."""
        counts, engine = [request.computed for request in requests], self._engine
        size = len(self._speculator.wants_features(requests)) * engine.target.config.hidden_size
        with cpu_threads(self._threads.plan.count(sum(counts))):
            features = torch.zeros(sum(counts), size, dtype=engine.dtype, device=engine.device)
            for request, count in zip(requests, counts, strict=True):
                request.computed = 0  # nothing was read
                request.drafter.begin(request)
                request.computed, request.phase = count, Phase.PREFILL  # in which drafters read at once
            self._speculator.commit(requests, features.split(counts))
            for request in requests:
                request.phase = Phase.DECODE
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
