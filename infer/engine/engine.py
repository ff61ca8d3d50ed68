"""The engine: continuous batching over a paged KV pool with speculative decoding, one step at a time.

    engine = Engine.load("owner/name", head="eagle3", engine=EngineConfig(max_batch=8))
    for completion in engine.generate(["def main("], SamplingParams(max_tokens=64)): ...

A step is schedule, draft, forward, sample, verify, commit. Drafts affect how many tokens a step emits, never which.
Not thread-safe: one thread owns an engine. Knows no files and no HTTP, and text only through a tokenizer.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from infer.batch.constraint import Constraint, Constraints
from infer.batch.grammar import Grammar
from infer.batch.params import MAX_SEED, as_ids
from infer.batch.stopping import StopText
from infer.batch.tree import NOTHING, Budget
from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.devices import use_device
from infer.engine import offline
from infer.engine.loading import load_parts, read_names
from infer.engine.parts import Parts, build_parts
from infer.engine.startup.controller import ControllerState, make_controller
from infer.engine.validation import check_request
from infer.graphs.overlap import Overlap
from infer.graphs.step_graph import GraphCache, Recorded
from infer.graphs.warm_up import WarmUp
from infer.kvcache.memory import context_of
from infer.options.stored_weights import check_weights
from infer.processes.comm import Ranks
from infer.processes.exactness import probe_exactness, same_bits
from infer.processes.launch import ranks_of
from infer.processes.target_worker import Shard
from infer.processes.tensor_parallel import LeadingShard
from infer.processes.threads import plan_threads
from infer.request import PLAIN, FinishReason, Proposer, Request, SamplingParams, StepOutput
from infer.sampling.emission import check_first_row
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.cost_model import CostTable
from infer.speculation.control.planner import Controller
from infer.speculation.proposers import Maker, build_proposers, pack_draft_model, pack_head
from infer.speculation.speculator import Speculator
from infer.speculation.verify import rule_for
from infer.steps.stats import EngineStats
from infer.steps.step import StepRunner
from models.end_tokens import within
from models.heads.base import Head
from models.heads.config import HeadConfig
from models.heads.draft_model.head import DraftModelHead
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer


class Engine:
    """Takes ownership of `target` and `draft_model` and packs them: do not train them afterwards. `head` is copied,
    unless `own_head`.

    Drafts are adaptive unless `proposer_config` says otherwise: the first engine of its kind profiles what they cost.
    `probe=False` skips the start-up check of what `exact` assumes of the kernels. `profile=False` leaves profiling of
    step costs to `profile()`, for a start that must not wait. `clock` is the time of deadlines, in seconds; `timer`
    times steps, from which drafts are planned.
    """

    def __init__(
        self,
        target: LlamaTarget,
        *,
        tokenizer: Tokenizer | None = None,
        head: Head | None = None,
        draft_model: DraftModelHead | None = None,
        proposer: str = "auto",
        config: EngineConfig | None = None,
        proposer_config: ProposerConfig | None = None,
        ranks: Ranks | None = None,
        priors: Mapping[str, Sequence[float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.perf_counter,
        probe: bool = True,
        profile: bool = True,
        own_head: bool = False,
    ) -> None:
        config, drafts = config or EngineConfig(), proposer_config or ProposerConfig(name="auto")
        self.config, self.proposer_config, self.target, self.tokenizer = config, drafts, target, tokenizer
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
        self.seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)  # for requests
        self.threads = plan_threads(config, self._shard, timer)
        if config.exact and probe:
            probe_exactness(self._shard, self.threads.plan)
            self.threads.admit = lambda count: same_bits(self._shard, self.threads.plan.many, count)
        self._requests: dict[str, Request] = {}
        self._ids, self._arrivals = itertools.count(), itertools.count()
        self._stats, self._clock, self._timer = EngineStats(), clock, timer
        self._controller_state, self._profiles_at_start = ControllerState(AcceptanceModel(priors)), profile
        self._graph_cache, self._warm_up = GraphCache(config, self.context), WarmUp()
        self._draft_model = None if draft_model is None else pack_draft_model(draft_model, target, config, drafts)
        self._head = None if head is None else pack_head(head, target, config, drafts, own=own_head)
        self._proposers: dict[str, Maker] = {}
        self.graphs: Recorded | None = None
        self.sizes, self.memory, self._pool, self._runner, self._scheduler = self._build_parts()
        self.steps = self._steps_with("none")
        self.set_proposer(proposer)

    @classmethod
    def load(
        cls,
        model: ModelConfig | str,
        head: HeadConfig | str | None = None,
        engine: EngineConfig | None = None,
        proposer: ProposerConfig | str | None = None,
        *,
        output_dir: str = "outputs",
        profile: bool = True,
    ) -> Engine:
        """Load an engine from configs, or from names as on a command line.

        Names: a model as in `model=` (infer/options/model_names.py), a head or its folder, a proposer. `proposer=auto`
        uses the exported head if there is one, else suffix decoding. Whatever is not said is as in the commands. With
        `engine.tensor_parallel` this process becomes rank 0; `close` the engine, or drop it, to end the other ranks.

        Drafts are made as far as they pay: at the first start on a machine the costs of steps and drafts are measured,
        for a few seconds, unless `profile=False` leaves that to `profile()` or `proposer.adaptive=False` drafts always.
        """
        model, head, proposer = read_names(model, head, proposer or "auto", output_dir)
        engine = engine or EngineConfig()
        with ranks_of(model, engine) as ranks:
            parts = load_parts(model, head, proposer, output_dir=output_dir, engine=engine, ranks=ranks)
            return cls(
                parts.target,
                tokenizer=parts.tokenizer,
                head=parts.head,
                draft_model=parts.draft_model,
                proposer=proposer.name,
                config=engine,
                proposer_config=parts.proposer,
                ranks=ranks,
                priors=parts.priors,
                profile=profile,
                own_head=True,
            )

    generate = offline.generate

    def close(self) -> None:
        """End the other tensor parallel ranks, if any; the engine cannot compute without them."""
        self._shard.close()

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
        if self.steps.overlap is not None:
            self.steps.overlap.drop(request)
        del self._requests[request.request_id]

    # ---- what callers may read ----------------------------------------------------------------------------------

    @property
    def speculator(self) -> Speculator:
        return self.steps.speculator

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

    # ---- who drafts ---------------------------------------------------------------------------------------------

    def set_proposer(self, name: str, head: Head | None = None, *, config: ProposerConfig | None = None) -> None:
        """Change the default proposer and, if passed, the head and the draft config.

        "auto": the head if there is one, else suffix decoding. Raises ValueError for a proposer that this engine does
        not have, and while requests are unfinished.
        """
        if self.has_work:
            raise ValueError("set_proposer: requests are unfinished; wait for them or abort them")
        self._leave_graphs()
        other_head = head is not None and (self._head is None or not self._head.fits(head))
        if other_head or config not in (None, self.proposer_config):
            self._graph_cache = GraphCache(self.config, self.context)  # frees memory before anything new takes it
        if config is not None:
            self.proposer_config = config
        if head is not None:
            self._use_head(head)
        for drafter in (self._head, self._draft_model):
            if config is not None and drafter is not None:
                drafter.set_drafts(config)
        if name == "auto":
            name = "suffix" if self._head is None else "head"
        if name == "head" and self._head is None:
            raise ValueError("proposer=head: no head was given; export one by training, or proposer=ngram")
        vocabulary = self.target.config.vocab_size
        self._proposers = build_proposers(self.proposer_config, self._head, self._draft_model, vocabulary)
        self.steps = self._steps_with(name)
        default = self._proposers[name]() if name in self._proposers else (PLAIN, NOTHING)
        adaptive = self.proposer_config.adaptive
        if self._head is not None:
            self._head.confidence = None
        self._warm_up.run(self, default[1])
        self.graphs = self._graph_cache.record(self._runner, default, self.sizes.max_rows, adaptive=adaptive)
        if self.graphs is not None:
            self.steps.overlap = Overlap(self.graphs.graphs, self.steps)
        if adaptive and name != "none":
            self.speculator.planner = self._make_controller(profile=self._profiles_at_start)

    def add_proposer(self, proposer: Proposer, limit: Budget) -> None:
        """Add a custom proposer and make it the default. Only while idle; it must not keep KV layers."""
        assert not proposer.needs.kv_layers, "layers of the pool are laid out when the engine is made"
        self.set_proposer("none")
        self._proposers[proposer.name] = lambda: (proposer, limit)
        self.steps = self._steps_with(proposer.name)

    def _use_head(self, head: Head) -> None:
        """Pack a copy of `head`. The pool is rebuilt only if its KV layers differ from the previous head's."""
        before, self._head = self._head, pack_head(head, self.target, self.config, self.proposer_config)
        # another head's acceptance does not apply to this one
        self._controller_state = ControllerState(AcceptanceModel())
        if before is not None and before.needs.kv_layers == self._head.needs.kv_layers:
            self._head = self._head.continuing(before, self._pool)
            self._pool.pages.clear_cache()  # cached pages hold the previous head's KV
            return
        before, self._proposers = None, {}
        self.steps = self._steps_with("none")  # nothing holds the previous head while memory is planned
        self.sizes, self.memory, self._pool, self._runner, self._scheduler = self._build_parts()

    def _build_parts(self) -> Parts:
        """Return a pool for the KV layers of target, head and draft model, and what addresses it."""
        drafters = [drafter for drafter in (self._head, self._draft_model) if drafter is not None]
        return build_parts(self.config, self.context, self._shard, drafters)

    def _steps_with(self, name: str) -> StepRunner:
        """Return what runs steps in which `name`, one of the proposers, drafts for requests that choose none."""
        return StepRunner(
            self._runner,
            self._scheduler,
            Speculator(self._proposers, name, self.context, self._timer),
            self._stats,
            self.threads,
            context=self.context,
            rates=self.proposer_config.rates,
            clock=self._clock,
            timer=self._timer,
        )

    def update_head(self, head: Head) -> None:
        """Draft with other weights of the same head from the next step on, for running requests too.

        Their drafts go on from what the weights before wrote to the KV cache; no token changes. Raises ValueError for
        a head of another kind, shape or vocabulary.
        """
        if self._head is None or not self._head.fits(head):
            raise ValueError("update_head: this engine drafts with no head of that kind, shape and draft vocabulary")
        pack_head(head, self.target, self.config, self.proposer_config).continuing(self._head, self._pool)
        self._pool.pages.clear_cache()  # the KV of new requests is of one head

    def _leave_graphs(self) -> None:
        """Wait for a round in flight, if there is one: all of its requests have finished."""
        if self.steps.overlap is not None:
            self.steps.overlap.drain()
        self.steps.overlap = self._runner.graphs = self.graphs = None
        if self._head is not None:
            self._head.graphs = None

    # ---- what drafts cost ---------------------------------------------------------------------------------------

    @property
    def costs(self) -> CostTable | None:
        """Measured costs of steps and drafts; None if drafting is not adaptive, or if they are guesses (`profile`)."""
        planner = self.speculator.planner
        return planner.costs.measured if isinstance(planner, Controller) else None

    @property
    def profile_due(self) -> bool:
        """Whether step costs are still to be profiled (`profile`); until then drafts are planned on guessed costs."""
        return self._controller_state.profile_due and isinstance(self.speculator.planner, Controller)

    def profile(self, check: Callable[[], None] = lambda: None) -> None:
        """Profile the costs of steps and drafts, if that is due. Only while idle; empties the prefix cache.

        `check` is called every few steps. If it raises, the planner is restored and the profile is still due.
        """
        assert not self.has_work, "profile: requests are unfinished"
        before = self.speculator.planner
        if not self.profile_due:
            return
        try:
            self.speculator.planner = self._make_controller(profile=True, check=check)
        except BaseException:
            self.speculator.planner = before
            raise

    def _make_controller(self, *, profile: bool, check: Callable[[], None] | None = None) -> Controller:
        state, timer = self._controller_state, self._timer
        return make_controller(self, self._proposers, state, self._head, timer, profile=profile, check=check)
