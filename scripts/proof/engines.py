"""Engines over one loaded target: the reference, which decodes one request alone, and a new one for every case."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from infer.batch.tree import MAX_NODES
from infer.config import EngineConfig
from infer.engine import Engine
from infer.engine.loading import load_parts
from scripts.proof.cases import Answer, Ask, Case, Difference, first_difference, run
from scripts.proof.config import ProveConfig
from scripts.proof.matrix import proposer_of


class Engines:
    """Loads target, head and draft model once; engines share their packed weights, and nothing else."""

    def __init__(self, config: ProveConfig) -> None:
        self._whole = replace(config.engine, tensor_parallel=1)
        drafts = replace(config.proposer, name="auto" if config.head.name == "none" else "head", adaptive=False)
        names = config.model, config.head, drafts
        self.config, self.parts = config, load_parts(*names, output_dir=config.output_dir, engine=self._whole)
        self.tokenizer, self._answers = self.parts.tokenizer, dict[Ask, Answer]()
        self._head: Any = self.parts.head
        self._reference, self._room = self._build("none", self._whole, [], probe=True), 0
        self._head, self.context, self.compile = self._reference.head, self._reference.context, self._reference.compile

    def make(self, drafts: str, asks: Sequence[Ask], *, profile: bool = False, **settings: Any) -> Engine:
        """Return a new engine, with room for the requests, that drafts as matrix.DRAFTS says.

        `settings`: keys of EngineConfig. `profile`: adaptive drafts are planned by what they cost on this machine; else
        by a clock that ticks once whenever it is read, so that rows cost nothing and drafts are made on any machine.
        """
        config = replace(self.config.engine, max_batch=max(1, len(asks)), **settings)
        return self._build(drafts, config, asks, profile=profile)

    def _build(
        self, drafts: str, config: EngineConfig, asks: Sequence[Ask], *, probe: bool = False, profile: bool = False
    ) -> Engine:
        proposer = proposer_of(drafts, self.parts.proposer, self.parts.head)
        if drafts == "none":
            config = replace(config, max_batch=1, prefix_cache=False)
        if config.max_tokens_in_cache is None:
            rows = config.page_size * -(-MAX_NODES // config.page_size)
            room = sum(rows + ask.positions + config.page_size for ask in asks)
            config = replace(config, max_tokens_in_cache=max(config.page_size, room))
        if config.tensor_parallel > 1:
            models = self.config.model, self.config.head
            return Engine.load(*models, config, proposer, output_dir=self.config.output_dir)
        fresh = config.head_weights != self.config.engine.head_weights
        return Engine(
            self.parts.target,
            tokenizer=self.tokenizer,
            head=self.parts.head if fresh else self._head,
            draft_model=self.parts.draft_model,
            proposer=proposer.name,
            config=config,
            proposer_config=proposer,
            priors=self.parts.priors,
            probe=probe,
            profile=profile,
            timer=time.perf_counter if profile else partial(next, itertools.count(step=1e-3)),
            own_head=not (probe or fresh),
        )

    def plain(self, ask: Ask) -> Answer:
        """Return the answer of plain decoding to one request alone, in a cache that holds nothing else."""
        key = ask._replace(arrival=0)
        if key not in self._answers:
            if ask.positions > self._room:
                self._room = 2 * ask.positions
                self._reference = self._build("none", self._whole, [key, key])
            (self._answers[key],), _ = run(self._reference, [key])
        return self._answers[key]

    def compare(self, case: Case) -> tuple[Difference | None, Counter[str]]:
        """Run a case in a new engine; return where it first differs from plain decoding, and what happened in it."""
        expected = [self.plain(ask) for ask in case.asks]
        engine = self.make(case.drafts, case.asks, **case.engine)
        try:
            answers, counts = run(engine, case.asks)
        finally:
            engine.close()
        return first_difference(expected, answers), counts
