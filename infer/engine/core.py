"""The core of an engine: its requests, and the parts that run them, one step at a time.

A step is schedule, draft, forward, sample, verify, commit. Drafts affect how many tokens a step emits, never which.
Knows no files and no HTTP, and text only through a tokenizer; `Engine` chooses who drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine.runner import Runner
from infer.engine.scheduler import Scheduler
from infer.engine.stats import EngineStats
from infer.engine.step import StepRunner
from infer.engine.validation import check_request
from infer.graphs.overlap import Overlap
from infer.kvcache.memory import DeviceFacts, context_of, engine_sizes, plan_memory, weight_bytes, workspace_bytes
from infer.kvcache.pool import KVPool
from infer.options.devices import memory_left, use_device
from infer.options.stored_weights import check_weights
from infer.processes.comm import Ranks
from infer.processes.exactness import probe_exactness, same_bits
from infer.processes.target_worker import Shard
from infer.processes.tensor_parallel import LeadingShard
from infer.processes.threads import plan_threads
from infer.request import FinishReason, Proposer, Request, SamplingParams, StepOutput
from infer.sampling.constraint import Constraint, Constraints
from infer.sampling.emission import check_first_row
from infer.sampling.grammar import Grammar
from infer.sampling.params import MAX_SEED, as_ids, seed_source
from infer.sampling.stopping import StopText
from infer.speculation.proposers.draft_model import DraftModelProposer
from infer.speculation.proposers.head import HeadProposer
from infer.speculation.speculator import Speculator
from infer.speculation.tree import Budget
from infer.speculation.verify import rule_for
from models.end_tokens import within
from models.heads.base import Head
from models.heads.draft_model.head import DraftModelHead
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer


class EngineCore:
    """Packs `target`, and takes requests once `_make_pool` and `_draft_with` have built the parts that run them.

    The arguments are those of `Engine`.
    """

    def __init__(
        self,
        target: LlamaTarget,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        proposer_config: ProposerConfig,
        ranks: Ranks | None,
        clock: Callable[[], float],
        timer: Callable[[], float],
        *,
        probe: bool,
    ) -> None:
        self.config, self.proposer_config, self.target, self.tokenizer = config, proposer_config, target, tokenizer
        check_weights(config, target)
        ends = (*target.end_tokens, *(tokenizer.eos_ids if tokenizer else ()))
        self.end_tokens = within(ends, target.config.vocab_size)  # each ends a request
        if config.tensor_parallel > 1 and ranks is None:
            raise ValueError(
                f"engine.tensor_parallel={config.tensor_parallel}: this target is whole; Engine.load divides one"
            )
        use_device(target.norm.weight.device)
        self._shard = LeadingShard(target, ranks, **config.packing) if ranks else Shard(target, **config.packing)
        self.check_ranks = self._shard.check  # raises RankLost if another rank has ended, as the next step would
        self.device, self.dtype, self.rounds_activations = self._shard.device, self._shard.dtype, self._shard.integer
        self.context = context_of(config, target.config)
        self.seeds = seed_source(config.seed)  # of requests without a seed
        self.threads = plan_threads(config, self._shard, timer)
        if config.exact and probe:
            probe_exactness(self._shard, self.threads.plan)
            self.threads.admit = lambda count: same_bits(self._shard, self.threads.plan.many, count)
        self._requests: dict[str, Request] = {}
        self._ids, self._arrivals = itertools.count(), itertools.count()
        self._stats, self._clock, self._timer = EngineStats(), clock, timer
        self._head: HeadProposer | None = None
        self._draft_model: DraftModelProposer | None = None
        self._proposers: dict[str, tuple[Proposer, Budget]] = {}

    # ---- requests -----------------------------------------------------------------------------------------------

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        parent: str | None = None,
        constraint: Constraint | None = None,
    ) -> str:
        """Queue a request; return its id. Raises ValueError for a prompt that is empty, too long or out of vocabulary.

        `parent`: an unfinished request with the same prompt, whose prompt pages are shared. `constraint`: the result of
        `compile(params.grammar)`, if the caller compiled it in another thread.
        """
        prompt = list(as_ids("prompt", prompt_ids))
        check_request(
            prompt,
            params,
            context=self.context,
            vocab_size=self.target.config.vocab_size,
            pages=self._pool.num_pages,
            page_size=self.config.page_size,
            proposers=self.speculator.names,
            has_text=self.tokenizer is not None,
        )
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id}: already in use by an unfinished request")
        seed = self.seeds.randrange(MAX_SEED) if params.seed is None else params.seed
        params = self.proposer_config.with_rule(params)
        stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self.end_tokens)))
        request = Request(request_id, prompt, params, seed, list(prompt), stop_ids, arrival=next(self._arrivals))
        request.eos_id = self.tokenizer.eos_id if self.tokenizer and not params.ignore_eos else None
        self.speculator.assign(request)
        request.rule = rule_for(request, request.drafter.name)
        request.added = self._clock()
        if params.deadline_s is not None:
            request.deadline = request.added + params.deadline_s
        if self.config.prefix_cache and params.prompt_logprobs is None:  # which need every row of the prompt
            drafter = request.drafter
            filled_by = drafter.name if drafter.proposer.needs.kv_layers else ""
            request.keys = self._pool.keys(params.cache_salt, filled_by)
            request.plain_keys = self._pool.keys(params.cache_salt, "")
        if params.stop:
            assert self.tokenizer is not None
            stream = self.tokenizer.stream(context=prompt, with_special=not params.skip_special_tokens)
            request.stop_text = StopText(stream, params.stop)
        if params.grammar is not None:
            request.constraint = constraint or self.compile(params.grammar)
        check_first_row(request, self.target.config.vocab_size)
        if parent is not None:
            request.parent = self._requests.get(parent)
            assert request.parent is None or request.parent.prompt_ids == prompt
            if request.keys is None or (request.parent and request.parent.keys is None):
                request.parent = None  # it may not share pages
        self._requests[request_id] = request
        self._scheduler.add(request)
        return request_id

    def compile(self, grammar: Grammar) -> Constraint:
        """Compile a grammar for one request, in any thread. Raises ValueError if it is invalid or too large."""
        return self._constraints.compile(grammar)

    @cached_property
    def _constraints(self) -> Constraints:
        if self.tokenizer is None:
            raise ValueError("grammar: this engine has no tokenizer")
        return Constraints(self.tokenizer, self.target.config.vocab_size, self.end_tokens)

    def abort(self, request_id: str) -> None:
        """Abort a request and free its pages at once. A finished or unknown id is no error: it may just have ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")

    def request(self, request_id: str) -> Request:
        """Return an unfinished request; do not modify it. Its `seed` is the one in use, random if none was set."""
        return self._requests[request_id]

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one step: draft and verify every decoding request, and prefill a chunk of each scheduled prompt."""
        outputs = self._expire() + self.steps.step()
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is not None and request.finish_reason is not None:
                self._remove(request)
        return outputs

    def _expire(self) -> list[StepOutput]:
        """End requests whose deadline has passed, waiting ones included, and requests that failed during prefill."""
        now, outputs = self._clock(), list[StepOutput]()
        for request in list(self._requests.values()):
            if request.failed or request.is_late(now):
                self._finish(request, "error" if request.failed else "deadline")
                outputs.append(self.steps.output(request, [], []))
        return outputs

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._remove(request)

    def _remove(self, request: Request) -> None:
        """Free all that a finished request holds."""
        self._scheduler.remove(request)
        self.speculator.forget(request)
        if self.overlap is not None:
            self.overlap.drop(request)
        del self._requests[request.request_id]

    # ---- what callers may read ----------------------------------------------------------------------------------

    @property
    def proposer_name(self) -> str:
        """Name of the proposer of requests that choose none."""
        return self.speculator.default

    @property
    def head(self) -> Head | None:
        """The head that drafts: the packed copy of the one passed in."""
        return None if self._head is None else self._head.module

    @property
    def draft_model(self) -> DraftModelHead | None:
        return None if self._draft_model is None else self._draft_model.module

    @property
    def stats(self) -> EngineStats:
        stats = self._stats
        stats.running, stats.waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        stats.kv_usage = 1 - self._pool.free_pages / self._pool.num_pages
        stats.preemptions, stats.proposer_failures = self._scheduler.preemptions, self.speculator.failures
        stats.forecast = self.speculator.planner.forecast
        return stats

    @property
    def activity(self) -> str:
        """Description of the step in progress, or of the last one. May be read from any thread."""
        phase, batch, rows = self.steps.activity
        return f"{phase} of {batch} requests, {rows} rows"

    # ---- parts --------------------------------------------------------------------------------------------------

    def _make_pool(self) -> None:
        """Build the pool for the KV layers of target, head and draft model, and what addresses it. Frees the old one's.

        Sets what was planned, too: `sizes` and `memory`.
        """
        head, draft_model, target_layers = self._head, self._draft_model, self._shard.layer_shapes
        drafters = [drafter for drafter in (head, draft_model) if drafter is not None]
        draft_layers = [layer for drafter in drafters for layer in drafter.needs.kv_layers]
        weights = weight_bytes(self.target, *(drafter.module for drafter in drafters))
        free = memory_left(self.config, self.device, self._shard.free(), weights)
        facts = DeviceFacts(self.device.type, free, workspace_bytes(1, self.target.config, self.dtype))
        self.sizes = engine_sizes(self.config, self.context, facts)
        self.memory = plan_memory(
            self.config,
            self.target.config,
            [*target_layers, *draft_layers],
            self.dtype,
            sizes=self.sizes,
            weights=weights,
            free=free,
        )
        layers = self._shard.allocate(self.memory.pages, self.config.page_size, draft_layers)
        self._pool = KVPool(layers, max_requests=self.config.max_batch, max_positions=self.context)
        if head is not None:
            head.attach(self._pool)
        if draft_model is not None:  # whose layers come last
            draft_model.attach(self._pool, len(layers.caches) - len(draft_model.needs.kv_layers))
        self._runner = Runner(self._shard, self._pool)
        self._scheduler = Scheduler(
            self._pool,
            max_batch=self.config.max_batch,
            max_rows=self.sizes.max_rows,
            prefill_chunk=self.sizes.prefill_chunk,
        )

    def _draft_with(self, name: str) -> None:
        """Let `name`, one of the proposers, draft for requests that choose none."""
        self.speculator = Speculator(self._proposers, name, self.context, self._timer)
        self.steps = StepRunner(
            self._runner,
            self._scheduler,
            self.speculator,
            self._stats,
            self.threads,
            context=self.context,
            rates=self.proposer_config.rates,
            clock=self._clock,
            timer=self._timer,
        )
        self.overlap: Overlap | None = None  # of the graphs in use, whose rounds `_steps` reads
