"""The engine: requests in, tokens out, one step at a time. Continuous batching over a paged KV pool, with drafts.

    engine = Engine.load(model_config, head_config, engine_config, proposer_config)
    for completion in engine.generate(["def main("], SamplingParams(max_tokens=64)): ...

A step is schedule, draft, forward, choose, verify, commit. What is drafted decides how many tokens a step emits, never
which. Not thread-safe: one thread owns an engine. Knows nothing of HTTP, and of text only what its tokenizer does.
"""

from __future__ import annotations

import copy
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from infer.config import EngineConfig, HeadConfig, ModelConfig, ProposerConfig
from infer.kv_cache import KVPool, LayerShape
from infer.proposers.base import NOTHING, Budget, NoProposer, Proposer
from infer.proposers.head import HeadProposer
from infer.proposers.ngram import NgramProposer
from infer.proposers.shapes import DynamicShape, StaticShape, TreeShape
from infer.request import (
    MAX_SEED,
    Completion,
    FinishReason,
    Phase,
    Request,
    SamplingParams,
    SpeculationStats,
    StepOutput,
)
from infer.runner import Runner
from infer.sampling import choice_parameters
from infer.scheduler import Scheduler
from infer.threads import ThreadPlan, cpu_threads
from infer.tree import MAX_NODES
from kernels.attention import assert_rows_independent
from kernels.choose import choose
from kernels.linear import PackedLinear, assert_row_invariant
from kernels.verify import accept
from models.heads import load_head
from models.heads.eagle3 import Eagle3Head
from models.layers import Linear, pack
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer


@dataclass
class EngineStats:
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of the pool's pages in use, 0..1
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device={name}: this machine has no usable GPU; model.device=cpu runs without")
    return torch.device(name)


def tree_shape(config: ProposerConfig) -> TreeShape | None:
    """How a head grows its drafts; None for chains."""
    if config.tree is not None:
        return StaticShape(config.tree)
    return DynamicShape(config.tree_width, config.max_draft_tokens) if config.tree_width > 1 else None


class Engine:
    """Takes over `target` and packs it for serving; its weights must not be trained afterwards. `head` is copied."""

    def __init__(
        self,
        target: LlamaTarget,
        *,
        tokenizer: Tokenizer | None = None,
        head: Eagle3Head | None = None,
        proposer: str = "auto",
        config: EngineConfig | None = None,
        proposer_config: ProposerConfig | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.proposer_config = proposer_config or ProposerConfig(name=proposer)
        self.target, self.tokenizer = target, tokenizer
        weight = target.embedding_weight
        self.device, self.dtype = weight.device, weight.dtype
        self.context = target.config.max_position_embeddings
        pack(target, exact=self.config.exact)
        linears = [m.packed for m in target.modules() if isinstance(m, Linear) and m.packed is not None]
        given = self.config.threads or torch.get_num_threads()
        self._threads = ThreadPlan(given, given)
        if self.device.type == "cpu" and not self.config.threads:
            self._threads = ThreadPlan.measure(linears, self.dtype)
        if self.config.exact:
            self._probe_exactness(linears)
        shape = LayerShape(target.config.num_kv_heads, target.config.head_dim)
        self._target_layers = [shape] * target.config.num_layers
        self._requests: dict[str, Request] = {}
        self._ids = itertools.count()
        self._stats = EngineStats()
        self._drafter: HeadProposer | None = None
        self._shape = tree_shape(self.proposer_config)
        if head is None:
            self._make_pool(())
        else:
            self._use_head(head)
        self.set_proposer(proposer)

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        head: HeadConfig | None = None,
        engine: EngineConfig | None = None,
        proposer: ProposerConfig | None = None,
        *,
        output_dir: str = "outputs",
    ) -> Engine:
        """From the configs of an entry point. `proposer=auto` takes the exported head if there is one, else n-gram."""
        proposer = proposer or ProposerConfig(name="auto")
        device = resolve_device(model.device)
        dtype = getattr(torch, model.dtype)
        target = load_target(model.path_or_hub_id, revision=model.revision, dtype=dtype, device=device)
        tokenizer = Tokenizer.load(target.folder)
        loaded = None
        if head is not None and head.name != "none" and proposer.name in ("auto", "head"):
            folder = head.folder(output_dir, model.name)
            if proposer.name == "head" or head.path or (folder / "config.json").is_file():
                loaded = load_head(
                    folder, dtype=dtype, device=device, target=target, allow_mismatch=head.allow_mismatch
                )
        return cls(
            target,
            tokenizer=tokenizer,
            head=loaded,
            proposer=proposer.name,
            config=engine,
            proposer_config=proposer,
        )

    # ---- what a caller does -------------------------------------------------------------------------------------

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> str:
        """Queues a request. Raises ValueError for a prompt that is empty, too long or not of this vocabulary."""
        prompt = list(prompt_ids)
        if not prompt:
            raise ValueError("prompt: empty; it must hold at least one token")
        if len(prompt) >= self.context:
            raise ValueError(
                f"prompt: {len(prompt)} tokens; the context is {self.context}, one of which must be left to generate"
            )
        vocabulary = self.target.config.vocab_size
        for token in (*prompt, *params.stop_token_ids):
            if not 0 <= token < vocabulary:
                raise ValueError(f"token id {token}: outside this target's vocabulary of {vocabulary}")
        needed = self._pool.pages_for(min(self.context, len(prompt) + params.max_tokens))
        if needed > self._pool.num_pages:
            raise ValueError(
                f"prompt of {len(prompt)} tokens with max_tokens={params.max_tokens}: needs {needed} KV pages, "
                f"the pool has {self._pool.num_pages}; raise engine.max_tokens_in_cache or ask for fewer tokens"
            )
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id}: already in use by an unfinished request")
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        request = Request(request_id, prompt, params, seed, list(prompt))
        self._requests[request_id] = request
        self._scheduler.add(request)
        return request_id

    def abort(self, request_id: str) -> None:
        """Drops a request and frees its pages at once. A finished or unknown id is no error: it may just have ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")

    def seed_of(self, request_id: str) -> int:
        """The seed in use, drawn at random if the request brought none."""
        return self._requests[request_id].seed

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def proposer_name(self) -> str:
        return self._proposer.name

    @property
    def stats(self) -> EngineStats:
        stats = self._stats
        stats.running, stats.waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        stats.kv_usage = 1 - self._pool.free_pages / self._pool.num_pages
        stats.preemptions = self._scheduler.preemptions
        return stats

    def set_proposer(self, name: str, head: Eagle3Head | None = None) -> None:
        """Changes what drafts: "auto", "none", "ngram" or "head" (a new `head`, or the one it has). Only while idle."""
        if self.has_work:
            raise ValueError("set_proposer: requests are unfinished; wait for them or abort them")
        if head is not None:
            self._use_head(head)
        self._proposer = self._make_proposer(name)
        self._runner = Runner(self.target, self._pool, self._proposer.aux_layers)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One round: drafts and verifies every decoding request, and brings prompts forward by a chunk."""
        step = self._scheduler.schedule()
        outputs: list[StepOutput] = []
        rows = len(step.decodes) + sum(budget.nodes for budget in step.budgets) + sum(step.chunks)
        with cpu_threads(self._threads.count(rows)):
            if step.decodes:
                outputs += self._decode(step.decodes, step.budgets)
            if step.prefills:
                outputs += self._prefill(step.prefills, step.chunks)
        return outputs

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_output: Callable[[int, StepOutput], None] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Completes all prompts, batched as far as the engine's limits go; results in the order of the prompts.

        `on_output(index, output)` is called as tokens come. Raises ValueError before anything runs if a prompt is bad.
        """
        ids = [self._encode(prompt) for prompt in prompts]
        per_prompt = [params] * len(ids) if isinstance(params, SamplingParams) else list(params)
        if len(per_prompt) != len(ids):
            raise ValueError(f"params: {len(per_prompt)} for {len(ids)} prompts")
        added: list[str] = []
        try:
            for prompt, own in zip(ids, per_prompt, strict=True):
                added.append(self.add(prompt, own))
            requests = [self._requests[request_id] for request_id in added]
            self._run_until_done(added, on_output, progress)
        except BaseException:
            for request_id in added:
                self.abort(request_id)
            raise
        return [self._completion(request) for request in requests]

    # ---- one step -----------------------------------------------------------------------------------------------

    def _decode(self, requests: list[Request], budgets: list[Budget]) -> list[StepOutput]:
        tree = self._proposer.propose(requests, budgets)
        rows = self._runner.verify(requests, tree)
        lengths = tree.length.tolist()
        choice = self._choose(requests, lengths, rows.hidden, rows.positions)
        grid = choice.new_full(tree.token.shape, -1)
        grid[torch.arange(grid.shape[1], device=grid.device) < tree.length[:, None].to(grid.device)] = choice
        last = accept(tree.token, tree.parent, tree.depth, tree.ancestors, tree.length, grid).tolist()
        paths = [list(range(last[b] + 1)) if tree.is_chain else tree.path(b, last[b]) for b in range(len(requests))]
        starts = [request.computed for request in requests]
        if not tree.is_chain:
            places = [[start + node for node in path] for start, path in zip(starts, paths, strict=True)]
            self._pool.move(requests, places, starts)
        depths = tree.depth.masked_fill(torch.arange(grid.shape[1]) >= tree.length[:, None], 0).amax(1).tolist()
        first_row = list(itertools.accumulate(lengths, initial=0))
        chosen, outputs, kept_rows, survivors, counts = grid.tolist(), [], [], [], []
        for b, request in enumerate(requests):
            path, accepted = paths[b], len(paths[b]) - 1
            request.computed += len(path)
            tokens = self._emit(request, [chosen[b][node] for node in path])
            for stats in (request.stats, self._stats.speculation):
                stats.record(
                    drafted=lengths[b] - 1, depth=depths[b], accepted=min(accepted, len(tokens)), emitted=len(tokens)
                )
            flags = [index < accepted for index in range(len(tokens))]
            outputs.append(StepOutput(request.request_id, tokens, flags, request.stats, request.finish_reason))
            if request.finish_reason is None:
                survivors.append(request)
                counts.append(len(path))
                kept_rows += [first_row[b] + node for node in path]
        if survivors and self._proposer.aux_layers:
            self._proposer.commit(survivors, counts, rows.features[torch.tensor(kept_rows, device=self.device)])
        return outputs

    def _prefill(self, requests: list[Request], chunks: list[int]) -> list[StepOutput]:
        rows = self._runner.prefill(requests, chunks)
        ends = torch.tensor(chunks, device=self.device).cumsum(0) - 1
        for request, chunk in zip(requests, chunks, strict=True):
            request.computed += chunk
        complete = [b for b, request in enumerate(requests) if request.computed == len(request.tokens)]
        outputs: list[StepOutput] = []
        if complete:
            last = ends[torch.tensor(complete, device=self.device)]
            finished_prompts = [requests[b] for b in complete]
            ones = [1] * len(complete)
            choice = self._choose(finished_prompts, ones, rows.hidden[last], rows.positions[last]).tolist()
            for request, token in zip(finished_prompts, choice, strict=True):
                if len(request.tokens) == len(request.prompt_ids):  # not a replay
                    self._stats.prompt_tokens += len(request.prompt_ids)
                request.phase = Phase.DECODE
                tokens = self._emit(request, [token])
                outputs.append(StepOutput(request.request_id, tokens, [False], request.stats, request.finish_reason))
        if self._proposer.aux_layers:
            pieces = rows.features.split(chunks)
            alive = [b for b, request in enumerate(requests) if request.finish_reason is None]
            if alive:
                features = torch.cat([pieces[b] for b in alive])
                self._proposer.commit([requests[b] for b in alive], [chunks[b] for b in alive], features)
        return outputs

    def _choose(self, requests: list[Request], counts: list[int], hidden: Tensor, positions: Tensor) -> Tensor:
        """The target's choice at each of the `counts[b]` rows of each request, `[R]`."""
        parameters = choice_parameters(requests, self.device)
        if parameters is not None:
            owner = torch.repeat_interleave(torch.tensor(counts, device=self.device))
            parameters = parameters.rows(owner)
        return choose(self._runner.logits(hidden), parameters, positions)

    def _emit(self, request: Request, tokens: list[int]) -> list[int]:
        """Appends tokens up to the first one that ends the request; what follows it is cut and not counted."""
        params = request.params
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= set(self.target.config.eos_token_ids)
        room = min(request.remaining, self.context - len(request.tokens))
        emitted: list[int] = []
        reason: FinishReason | None = None
        for token in tokens[:room]:
            emitted.append(token)
            if token in stops:
                reason = "stop"
                break
        if reason is None and len(emitted) == room:
            reason = "length"
        request.tokens += emitted
        self._stats.generation_tokens += len(emitted)
        if reason is not None:
            self._finish(request, reason)
        return emitted

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._scheduler.remove(request)
        self._proposer.release(request)
        del self._requests[request.request_id]

    # ---- construction -------------------------------------------------------------------------------------------

    def _use_head(self, head: Eagle3Head) -> None:
        """Packs a copy of `head`; the pool is made anew only if the head keeps other layers than the last one."""
        packed = copy.deepcopy(head).to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)
        pack(packed, exact=self.config.exact)
        drafter = HeadProposer(packed, len(self._target_layers), self._shape)
        if self._drafter is None or self._drafter.kv_layers != drafter.kv_layers:
            self._make_pool(drafter.kv_layers)
        drafter.attach(self._pool)
        self._drafter = drafter

    def _make_pool(self, head_layers: Sequence[LayerShape]) -> None:
        self._pool = KVPool(
            [*self._target_layers, *head_layers],
            num_pages=self.config.num_pages(self.context),
            page_size=self.config.page_size,
            max_requests=self.config.max_batch,
            max_positions=self.context,
            dtype=self.dtype,
            device=self.device,
        )
        self._scheduler = Scheduler(
            self._pool,
            max_batch=self.config.max_batch,
            max_rows=self.config.max_rows,
            prefill_chunk=self.config.prefill_chunk,
            draft_budget=self._draft_budget,
            draft_places=self._draft_places,
            on_preempt=lambda request: self._proposer.release(request),
        )

    def _make_proposer(self, name: str) -> Proposer:
        if name == "none":
            return NoProposer()
        if name == "head" or (name == "auto" and self._drafter is not None):
            if self._drafter is None:
                raise ValueError("proposer=head: no head was given; export one by training, or proposer=ngram")
            return self._drafter
        if name in ("ngram", "auto"):
            return NgramProposer(self.proposer_config.ngram_min, self.proposer_config.ngram_max)
        raise ValueError(f"proposer={name}: must be auto, head, ngram or none")

    def _draft_budget(self, request: Request) -> Budget:
        """No deeper than tokens may still be emitted, the bonus token set aside."""
        if isinstance(self._proposer, NoProposer):
            return NOTHING
        asked = self.proposer_config
        room = max(0, min(request.remaining, self.context - len(request.tokens)) - 1)
        if room == 0 or self._proposer is not self._drafter or self._shape is None:
            depth = min(asked.max_draft_tokens, room)
            return Budget(depth, depth)
        return Budget(asked.tree_nodes or MAX_NODES - 1, min(self._shape.depth, room))

    def _draft_places(self, request: Request, budget: Budget) -> int:
        return self._proposer.places(budget) if budget.nodes else 0

    def _probe_exactness(self, linears: Sequence[PackedLinear]) -> None:
        """Asserts that rows keep their bits in any company, and under either number of threads."""
        config, answers = self.target.config, []
        shapes = {(linear.in_features, linear.out_features): linear for linear in linears}.values()
        for threads in {self._threads.few, self._threads.many}:
            with cpu_threads(threads):
                bits = [assert_row_invariant(linear, self.dtype, self.device) for linear in shapes]
                sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
                answers.append([*bits, assert_rows_independent(*sizes, self.dtype, self.device)])
        for first, other in zip(answers[0], answers[-1], strict=True):
            if not torch.equal(first, other):
                raise ValueError(
                    f"engine.exact=true: {self._threads.few} and {self._threads.many} threads give other bits on this "
                    "machine; set engine.threads to one number"
                )

    # ---- generate -----------------------------------------------------------------------------------------------

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("prompt: text given, but this engine has no tokenizer; pass token ids")
        return self.tokenizer.encode(prompt)

    def _run_until_done(
        self, ids: list[str], on_output: Callable[[int, StepOutput], None] | None, progress: bool
    ) -> None:
        index = {request_id: place for place, request_id in enumerate(ids)}
        left = len(ids)
        tokens = 0
        with tqdm(total=left, unit="prompt", disable=not progress, dynamic_ncols=True) as bar:
            while left:
                for output in self.step():
                    if output.request_id not in index:
                        continue
                    tokens += len(output.token_ids)
                    if on_output is not None:
                        on_output(index[output.request_id], output)
                    if output.finish_reason is not None:
                        left -= 1
                        bar.set_postfix(tokens=tokens, refresh=False)
                        bar.update()

    def _completion(self, request: Request) -> Completion:
        assert request.finish_reason is not None
        text = None if self.tokenizer is None else self.tokenizer.decode(request.output_ids)
        return Completion(
            request.prompt_ids, request.output_ids, text, request.finish_reason, request.seed, request.stats
        )
