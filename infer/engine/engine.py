"""The engine: continuous batching over a paged KV pool with speculative decoding, one step at a time.

    engine = Engine.load("owner/name", head="eagle3", engine=EngineConfig(max_batch=8))
    for completion in engine.generate(["def main("], SamplingParams(max_tokens=64)): ...

A step is schedule, draft, forward, sample, verify, commit. Drafts affect how many tokens a step emits, never which.
Not thread-safe: one thread owns an engine. It does not deal with HTTP, and with text only through its tokenizer.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine.exactness import probe_exactness, same_bits
from infer.engine.loading import load_parts, read_names
from infer.engine.offline import generate
from infer.engine.runner import Runner
from infer.engine.scheduler import Scheduler
from infer.engine.stats import EngineStats
from infer.engine.step import StepRunner
from infer.engine.threads import plan_threads
from infer.engine.validation import Limits, check_request
from infer.graphs.overlap import Overlap
from infer.graphs.step_graph import GraphCache, Recorded
from infer.graphs.warm_up import WarmUp
from infer.kvcache.blocks import BlockKeys
from infer.kvcache.memory import plan_memory, weight_bytes, workspace_bytes
from infer.kvcache.pool import KVPool
from infer.options.devices import memory_left, use_device
from infer.options.engine_sizes import DeviceFacts, context_of, engine_sizes
from infer.options.stored_weights import check_weights, drafter_format
from infer.parallel.comm import Ranks
from infer.parallel.launch import ranks_of
from infer.parallel.target_worker import Shard
from infer.parallel.tensor_parallel import LeadingShard
from infer.request import MAX_SEED, Completion, Request, SamplingParams, StepOutput
from infer.sampling.constraint import Constraint, Constraints
from infer.sampling.grammar import Grammar
from infer.sampling.logits_processors import check_first_row
from infer.sampling.params import as_ids, seed_source
from infer.sampling.stopping import FinishReason, StopText
from infer.speculation.budget import NOTHING, Budget
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.adaptive import ControllerState, make_controller
from infer.speculation.control.cost_model import CostTable
from infer.speculation.control.planner import Controller
from infer.speculation.control.profiled_engine import ProfiledEngine
from infer.speculation.proposers import build_proposers
from infer.speculation.proposers.base import NoProposer, Proposer
from infer.speculation.proposers.draft_model import DraftModelProposer
from infer.speculation.proposers.head import HeadProposer
from infer.speculation.speculator import Speculator
from infer.speculation.verify import rule_for
from models.end_tokens import within
from models.heads.base import Head
from models.heads.borrowing import borrow
from models.heads.config import HeadConfig
from models.heads.draft_model.head import DraftModelHead
from models.heads.weights import pack
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer


class Engine:
    """Takes ownership of `target` and `draft_model` and packs them: do not train them afterwards. `head` is copied.

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
    ) -> None:
        self.config = config or EngineConfig()
        self.proposer_config = proposer_config or ProposerConfig(name="auto")
        self.target, self.tokenizer = target, tokenizer
        check_weights(self.config, target)
        ends = (*target.end_tokens, *(tokenizer.eos_ids if tokenizer else ()))
        self.end_tokens = within(ends, target.config.vocab_size)  # each ends a request
        if self.config.tensor_parallel > 1 and ranks is None:
            raise ValueError(
                f"engine.tensor_parallel={self.config.tensor_parallel}: this target is whole; Engine.load divides one"
            )
        exact, packing = self.config.exact, self.config.packing
        use_device(target.norm.weight.device)
        self._shard = LeadingShard(target, ranks, **packing) if ranks else Shard(target, **packing)
        self.check_ranks = self._shard.check  # raises RankLost if another rank has ended, as the next step would
        self.device, self.dtype, self.rounds_activations = self._shard.device, self._shard.dtype, self._shard.integer
        self.context = context_of(self.config, target.config)
        self.seeds = seed_source(self.config.seed)  # of requests without a seed
        self.threads = plan_threads(self.config, self._shard, timer)
        if exact and probe:
            probe_exactness(self._shard, self.threads.plan)
            self.threads.admit = lambda count: same_bits(self._shard, self.threads.plan.many, count)
        self._requests: dict[str, Request] = {}
        self._ids, self._arrivals = itertools.count(), itertools.count()
        self._stats, self._clock, self._timer = EngineStats(), clock, timer
        self._controller_state, self._profiles_at_start = ControllerState(AcceptanceModel(priors)), profile
        self._graph_cache, self._warm_up = GraphCache(self.config, self.context), WarmUp()
        self._head: HeadProposer | None = None
        self._draft_model: DraftModelProposer | None = None
        if draft_model is not None:
            self._use_draft_model(draft_model)
        if head is not None:
            self._head = self._packed(head)
        self._make_pool()
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
        uses the exported head if there is one, else n-gram. With `engine.tensor_parallel` this process becomes rank 0;
        `close` the engine, or drop it, to end the other ranks.
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
            )

    # ---- public interface ---------------------------------------------------------------------------------------

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
        vocabulary, page_size = self.target.config.vocab_size, self.config.page_size
        limits = self.context, vocabulary, self._pool.num_pages, page_size, self.speculator.names
        check_request(prompt, params, Limits(*limits, has_text=self.tokenizer is not None))
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id}: already in use by an unfinished request")
        seed = self.seeds.randrange(MAX_SEED) if params.seed is None else params.seed
        params = self.proposer_config.with_rule(params)
        stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self.end_tokens)))
        request = Request(request_id, prompt, params, seed, list(prompt), stop_ids, arrival=next(self._arrivals))
        request.eos_id = self.tokenizer.eos_id if self.tokenizer and not params.ignore_eos else None
        request.rule = rule_for(request, self.speculator.name_for(request))
        request.added = self._clock()
        if params.deadline_s is not None:
            request.deadline = request.added + params.deadline_s
        if self.config.prefix_cache and params.prompt_logprobs is None:  # which need every row of the prompt
            secret, salt, size = self._pool.pages.secret, params.cache_salt, self.config.page_size
            request.keys = BlockKeys(secret, salt, self.speculator.filled_by(request), size)
            request.plain_keys = BlockKeys(secret, salt, "", size)
        if params.stop:
            assert self.tokenizer is not None
            stream = self.tokenizer.stream(context=prompt, with_special=not params.skip_special_tokens)
            request.stop_text = StopText(stream, params.stop)
        if params.grammar is not None:
            request.constraint = constraint or self.compile(params.grammar)
        check_first_row(request, vocabulary)
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

    @property
    def proposer_name(self) -> str:
        """Name of the proposer of requests that choose none."""
        return self.speculator.default

    @property
    def head(self) -> nn.Module | None:
        """The head that drafts: the packed copy of the one passed in."""
        return None if self._head is None else self._head.module

    @property
    def draft_model(self) -> DraftModelHead | None:
        return None if self._draft_model is None else self._draft_model.module

    @property
    def proposer_names(self) -> list[str]:
        return self.speculator.names

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
        phase, batch, rows = self._steps.activity
        return f"{phase} of {batch} requests, {rows} rows"

    @property
    def costs(self) -> CostTable | None:
        """Measured costs of steps and drafts; None if drafting is not adaptive, or if they are guesses (`profile`)."""
        planner = self.speculator.planner
        return planner.costs.measured if isinstance(planner, Controller) else None

    def set_proposer(self, name: str, head: Head | None = None, *, config: ProposerConfig | None = None) -> None:
        """Change the default proposer and, if passed, the head and the draft config.

        "auto": the head if there is one, else n-gram. Raises ValueError for a proposer that this engine does not have,
        and while requests are unfinished.
        """
        if self.has_work:
            raise ValueError("set_proposer: requests are unfinished; wait for them or abort them")
        self._drain()
        self.graphs: Recorded | None = None
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
            name = "ngram" if self._head is None else "head"
        if name == "head" and self._head is None:
            raise ValueError("proposer=head: no head was given; export one by training, or proposer=ngram")
        vocabulary = self.target.config.vocab_size
        self._proposers = dict(build_proposers(self.proposer_config, self._head, self._draft_model, vocabulary))
        self._draft_with(name)
        default = self._proposers.get(name, (NoProposer(), NOTHING))
        adaptive = self.proposer_config.adaptive
        if self._head is not None:
            self._head.confidence = None
        self._warm_up.run(self, self._pool, self._stats, default[1])
        self.graphs = self._graph_cache.record(self._runner, default, self.sizes.max_rows, adaptive=adaptive)
        if self.graphs is not None:
            parts = self.graphs.graphs, self._pool, self._scheduler, self.speculator, self._steps
            self._steps.overlap = Overlap(*parts, context=self.context, timer=self._timer)
        if adaptive and name != "none":
            self.speculator.planner = self._make_controller(profile=self._profiles_at_start)

    def _make_controller(self, *, profile: bool, check: Callable[[], None] | None = None) -> Controller:
        limits = {name: limit for name, (_, limit) in self._proposers.items()}
        return make_controller(
            self, self.profiled(), limits, self._controller_state, self._head, self._timer, profile=profile, check=check
        )

    def profiled(self) -> ProfiledEngine:
        """Return what the profiler of step costs needs. Only while idle."""
        return ProfiledEngine(self, self._pool, self._steps, self._stats)

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

    def add_proposer(self, proposer: Proposer, limit: Budget) -> None:
        """Add a custom proposer and make it the default. Only while idle; it must not keep KV layers."""
        assert not proposer.kv_layers, "layers of the pool are laid out when the engine is made"
        self.set_proposer("none")
        self._proposers[proposer.name] = (proposer, limit)
        self._draft_with(proposer.name)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one step: draft and verify every decoding request, and prefill a chunk of each scheduled prompt."""
        outputs = self._expire() + self._steps.step()
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is not None and request.finish_reason is not None:
                self._remove(request)
        return outputs

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_output: Callable[[int, StepOutput], None] | None = None,
        progress: bool = False,
        max_concurrency: int | None = None,
    ) -> list[Completion]:
        """Complete all prompts, batched within the engine's limits; results are in the order of the prompts.

        With n > 1 the n completions of a prompt are adjacent. `on_output(index, output)` is called for each output of a
        step. Prompts are added while fewer than `max_concurrency` completions are in progress. Raises ValueError for an
        invalid prompt, before anything runs unless `max_concurrency` delays that prompt.
        """
        return generate(self, prompts, params, on_output=on_output, progress=progress, max_concurrency=max_concurrency)

    def close(self) -> None:
        """End the other tensor parallel ranks, if any; the engine cannot compute without them."""
        self._shard.close()

    def _expire(self) -> list[StepOutput]:
        """End requests whose deadline has passed, waiting ones included, and requests that failed during prefill."""
        now, outputs = self._clock(), list[StepOutput]()
        for request in list(self._requests.values()):
            if request.failed or request.is_late(now):
                self._finish(request, "error" if request.failed else "deadline")
                outputs.append(self._steps.output(request, [], []))
        return outputs

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._remove(request)

    def _remove(self, request: Request) -> None:
        """Free all that a finished request holds."""
        self._scheduler.remove(request)
        self.speculator.forget(request)
        if self._steps.overlap is not None:
            self._steps.overlap.drop(request)
        del self._requests[request.request_id]

    # ---- construction -------------------------------------------------------------------------------------------

    def _packed(self, head: Head) -> HeadProposer:
        packed = copy.deepcopy(head, {id(self.target.embed_tokens): self.target.embed_tokens})
        borrow(packed, self.target)
        packed.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)
        narrow = drafter_format(self.config.head_weights, self.dtype, self.device)
        pack(packed, exact=self.config.exact, weight_format=narrow)
        return HeadProposer(packed, self.target.config.num_layers, self.proposer_config)

    def _use_head(self, head: Head) -> None:
        """Pack a copy of `head`. The pool is rebuilt only if its KV layers differ from the previous head's."""
        before, self._head = self._head, self._packed(head)
        # another head's acceptance does not apply to this one
        self._controller_state = ControllerState(AcceptanceModel())
        if before is not None and before.kv_layers == self._head.kv_layers:
            self._head = self._head.continuing(before, self._pool)
            self._pool.pages.clear_cache()  # cached pages hold the previous head's KV
            return
        # Free everything that refers to the old pool before the new one is planned.
        del before, self._pool, self._runner, self._scheduler, self._proposers, self.speculator, self._steps
        self._make_pool()

    def _use_draft_model(self, model: DraftModelHead) -> None:
        """Pack `model`. Its layers come last in the pool."""
        narrow = drafter_format(self.config.draft_weights, self.dtype, self.device)
        pack(model, exact=self.config.exact, weight_format=narrow)
        self._draft_model = DraftModelProposer(model, self.proposer_config)

    def _make_pool(self) -> None:
        head_layers = self._head.kv_layers if self._head else ()
        draft_layers = self._draft_model.kv_layers if self._draft_model else ()
        target_layers = self._shard.layer_shapes
        shapes = [*target_layers, *head_layers, *draft_layers]
        modules = [self.target, *(drafter.module for drafter in (self._head, self._draft_model) if drafter is not None)]
        weights = weight_bytes(*modules)
        free = memory_left(self.config, self.device, self._shard.free(), weights)
        facts = DeviceFacts(self.device.type, free, workspace_bytes(1, self.target.config, self.dtype))
        self.sizes = engine_sizes(self.config, self.context, facts)
        parts = self.config, self.target.config, shapes, self.dtype
        self.memory = plan_memory(*parts, sizes=self.sizes, weights=weights, free=free)
        layers = self._shard.allocate(self.memory.pages, self.config.page_size, [*head_layers, *draft_layers])
        self._pool = KVPool(layers, max_requests=self.config.max_batch, max_positions=self.context)
        if self._head is not None:
            self._head.attach(self._pool)
        if self._draft_model is not None:
            self._draft_model.attach(self._pool, len(target_layers) + len(head_layers))
        self._runner = Runner(self._shard, self._pool)
        self._scheduler = Scheduler(
            self._pool,
            max_batch=self.config.max_batch,
            max_rows=self.sizes.max_rows,
            prefill_chunk=self.sizes.prefill_chunk,
        )
        self._proposers: dict[str, tuple[Proposer, Budget]] = {}
        self._draft_with("none")

    def _drain(self) -> None:
        """Wait for a round in flight, if there is one: all of its requests have finished."""
        if self._steps.overlap is not None:
            self._steps.overlap.drain()
        self._steps.overlap = self._runner.graphs = None
        if self._head is not None:
            self._head.graphs = None

    def _draft_with(self, name: str) -> None:
        self.speculator = Speculator(self._proposers, name, self.context, self._timer)
        self._steps = StepRunner(
            self._runner,
            self._pool,
            self._scheduler,
            self.speculator,
            self._stats,
            self.threads,
            context=self.context,
            rates=self.proposer_config.rates,
            clock=self._clock,
            timer=self._timer,
        )
