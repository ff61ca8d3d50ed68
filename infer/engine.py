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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tqdm import tqdm

from infer.choosing import choose_rows
from infer.config import EngineConfig, HeadConfig, ModelConfig, ProposerConfig
from infer.drafting import Drafting
from infer.kv_cache import KVPool, LayerShape
from infer.logprobs import token_logprobs
from infer.memory import free_bytes, plan_memory, weight_bytes
from infer.pages import BlockKeys
from infer.proposers import build_proposers
from infer.proposers.base import Budget, Proposer
from infer.proposers.draft_model import DraftModelProposer
from infer.proposers.head import HeadProposer
from infer.proposers.shapes import tree_shape
from infer.request import MAX_SEED, Completion, Phase, Request, SamplingParams, SpeculationStats, StepOutput
from infer.runner import Runner
from infer.scheduler import Scheduler
from infer.stopping import FinishReason, StopText, cut
from infer.threads import ThreadPlan, cpu_threads
from infer.verification import rule_for, verify
from kernels.attention import assert_rows_independent
from kernels.linear import PackedLinear, assert_row_invariant
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


class Engine:
    """Takes over `target` and packs it for serving; its weights must not be trained afterwards. `head` is copied."""

    def __init__(
        self,
        target: LlamaTarget,
        *,
        tokenizer: Tokenizer | None = None,
        head: Eagle3Head | None = None,
        draft_model: LlamaTarget | None = None,
        proposer: str = "auto",
        config: EngineConfig | None = None,
        proposer_config: ProposerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or EngineConfig()
        self.proposer_config = proposer_config or ProposerConfig(name="auto")
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
        self._ids, self._arrivals = itertools.count(), itertools.count()
        self._stats, self._clock = EngineStats(), clock
        self._synthetic_rates = tuple(self.proposer_config.acceptance or ())
        self._head: HeadProposer | None = None
        self._draft_model: DraftModelProposer | None = None
        if draft_model is not None:
            self._use_draft_model(draft_model)
        if head is None:
            self._make_pool()
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
        wanted = proposer.name == "head" or (proposer.name == "combined" and "head" in proposer.sources)
        if head is not None and head.name != "none" and (wanted or proposer.name == "auto"):
            folder = head.folder(output_dir, model.name)
            if wanted or head.path or (folder / "config.json").is_file():
                loaded = load_head(
                    folder, dtype=dtype, device=device, target=target, allow_mismatch=head.allow_mismatch
                )
        smaller = None
        if proposer.draft_model is not None:
            drafter = ModelConfig(name="draft", path=proposer.draft_model, revision=proposer.draft_model_revision)
            smaller = load_target(drafter.path_or_hub_id, revision=drafter.revision, dtype=dtype, device=device)
            check_same_tokenizer(tokenizer, Tokenizer.load(smaller.folder), proposer.draft_model)
        return cls(
            target,
            tokenizer=tokenizer,
            head=loaded,
            draft_model=smaller,
            proposer=proposer.name,
            config=engine,
            proposer_config=proposer,
        )

    # ---- what a caller does -------------------------------------------------------------------------------------

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        parent: str | None = None,
    ) -> str:
        """Queues a request. Raises ValueError for a prompt that is empty, too long or not of this vocabulary.

        `parent`: an unfinished request with the same prompt, whose pages over it this one shares.
        """
        prompt = list(prompt_ids)
        if not prompt:
            raise ValueError("prompt: empty; it must hold at least one token")
        if len(prompt) >= self.context:
            raise ValueError(
                f"prompt: {len(prompt)} tokens; the context is {self.context}, one of which must be left to generate"
            )
        vocabulary = self.target.config.vocab_size
        for token in (*prompt, *params.token_ids):
            if not 0 <= token < vocabulary:
                raise ValueError(f"token id {token}: outside this target's vocabulary of {vocabulary}")
        needed = self._pool.pages_for(min(self.context, len(prompt) + params.max_tokens))
        if needed > self._pool.num_pages:
            raise ValueError(
                f"prompt of {len(prompt)} tokens with max_tokens={params.max_tokens}: needs {needed} KV pages, "
                f"the pool has {self._pool.num_pages}; raise engine.max_tokens_in_cache or ask for fewer tokens"
            )
        if params.n > 1:
            raise ValueError(f"n={params.n}: add() queues one answer; generate() gives several")
        if params.proposer is not None and params.proposer not in self._drafting.names:
            raise ValueError(f"proposer={params.proposer}: this engine has {', '.join(self._drafting.names)}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: this engine has no tokenizer; use stop_token_ids")
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id}: already in use by an unfinished request")
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        request = Request(request_id, prompt, params, seed, list(prompt), arrival=next(self._arrivals))
        request.rule = rule_for(request, self._drafting.name_for(request))
        if params.deadline_s is not None:
            request.deadline = self._clock() + params.deadline_s
        if self.config.prefix_cache and params.prompt_logprobs is None:  # these need every row of the prompt
            filled_by = self._drafting.filled_by(request)
            request.keys = BlockKeys(self._pool.pages.secret, params.cache_salt, filled_by, self.config.page_size)
        if params.stop:
            assert self.tokenizer is not None
            request.stop_text = StopText(self.tokenizer.stream(), params.stop)
        if parent is not None:
            request.parent = self._requests.get(parent)
            assert request.parent is None or request.parent.prompt_ids == prompt
            if request.keys is None or (request.parent and request.parent.keys is None):
                request.parent = None  # it shares nothing
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
        """What drafts for a request that names none."""
        return self._drafting.default

    @property
    def stats(self) -> EngineStats:
        stats = self._stats
        stats.running, stats.waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        stats.kv_usage = 1 - self._pool.free_pages / self._pool.num_pages
        stats.preemptions = self._scheduler.preemptions
        return stats

    def set_proposer(self, name: str, head: Eagle3Head | None = None) -> None:
        """Changes what drafts by default, and the head if one is given. "auto": the head if there is one, else n-gram.

        Raises ValueError for a name that this engine does not have, and while requests are unfinished.
        """
        if self.has_work:
            raise ValueError("set_proposer: requests are unfinished; wait for them or abort them")
        if head is not None:
            self._use_head(head)
        if name == "auto":
            name = "ngram" if self._head is None else "head"
        if name == "head" and self._head is None:
            raise ValueError("proposer=head: no head was given; export one by training, or proposer=ngram")
        vocabulary = self.target.config.vocab_size
        self._proposers = dict(build_proposers(self.proposer_config, self._head, self._draft_model, vocabulary))
        self._drafting = Drafting(self._proposers, name, self.context)

    def add_proposer(self, proposer: Proposer, limit: Budget) -> None:
        """Makes a proposer of your own the default one, under its own name. Only while idle; it keeps no KV."""
        assert not proposer.kv_layers, "layers of the pool are laid out when the engine is made"
        self.set_proposer("none")
        self._proposers[proposer.name] = (proposer, limit)
        self._drafting = Drafting(self._proposers, proposer.name, self.context)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One round: drafts and verifies every decoding request, and brings prompts forward by a chunk."""
        outputs = self._expire()
        step = self._scheduler.schedule()
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

        With n > 1 the n answers to a prompt stand beside each other. `on_output(index, output)` is called as tokens
        come. Raises ValueError before anything runs if a prompt is bad.
        """
        ids = [self._encode(prompt) for prompt in prompts]
        per_prompt = [params] * len(ids) if isinstance(params, SamplingParams) else list(params)
        if len(per_prompt) != len(ids):
            raise ValueError(f"params: {len(per_prompt)} for {len(ids)} prompts")
        added: list[str] = []
        try:
            for prompt, own in zip(ids, per_prompt, strict=True):
                first = None
                for single in answers(own):
                    added.append(self.add(prompt, single, parent=first))
                    first = first or added[-1]
            requests = [self._requests[request_id] for request_id in added]
            self._run_until_done(added, on_output, progress)
        except BaseException:
            for request_id in added:
                self.abort(request_id)
            raise
        return [self._completion(request) for request in requests]

    # ---- one step -----------------------------------------------------------------------------------------------

    def _decode(self, requests: list[Request], budgets: list[Budget]) -> list[StepOutput]:
        tree = self._drafting.propose(requests, budgets)
        self._publish(requests)
        rows = self._runner.verify(requests, tree, self._drafting.wants_features(requests))
        lengths = tree.length.tolist()
        logits = self._runner.logits(rows.hidden)
        choices = choose_rows(requests, lengths, logits, rows.positions, self._stop_ids(requests), tree)
        verdicts = verify(requests, tree, choices, [request.rule for request in requests], self._synthetic_rates)
        starts = [request.computed for request in requests]
        if not tree.is_chain:
            places = [[start + node for node in own.path] for start, own in zip(starts, verdicts, strict=True)]
            self._pool.move(requests, places, starts)
        inside = torch.arange(tree.token.shape[1]) < tree.length[:, None]
        depths = tree.depth.masked_fill(~inside, 0).amax(1).tolist()
        first_row = list(itertools.accumulate(lengths, initial=0))
        drafts = tree.token.tolist()
        outputs, kept_rows, survivors, counts = [], [], [], []
        for b, request in enumerate(requests):
            path, accepted = verdicts[b].path, len(verdicts[b].path) - 1
            path_rows = [first_row[b] + node for node in path]
            request.computed += len(path)
            tokens = self._emit(request, [*(drafts[b][node] for node in path[1:]), verdicts[b].bonus])
            emitted, taken = len(tokens), min(accepted, len(tokens))
            for stats in (request.stats, self._stats.speculation):
                stats.record(drafted=lengths[b] - 1, depth=depths[b], accepted=taken, emitted=emitted)
            output = self._output(request, tokens, [index < accepted for index in range(emitted)])
            output.logprobs = choices.logprobs(request, path_rows, tokens)
            request.logprobs += output.logprobs
            outputs.append(output)
            if request.finish_reason is None:
                survivors.append(request)
                counts.append(len(path))
                kept_rows += path_rows
        if survivors:
            self._commit(survivors, counts, rows.features[torch.tensor(kept_rows, device=self.device)])
        return outputs

    def _prefill(self, requests: list[Request], chunks: list[int]) -> list[StepOutput]:
        rows = self._runner.prefill(requests, chunks, self._drafting.wants_features(requests))
        self._score_prompts(requests, chunks, rows.hidden)
        ends = torch.tensor(chunks, device=self.device).cumsum(0) - 1
        for request, chunk in zip(requests, chunks, strict=True):
            request.computed += chunk
        complete = [b for b, request in enumerate(requests) if request.computed == len(request.tokens)]
        outputs: list[StepOutput] = []
        if complete:
            last = ends[torch.tensor(complete, device=self.device)]
            whole = [requests[b] for b in complete]
            logits = self._runner.logits(rows.hidden[last])
            choices = choose_rows(whole, [1] * len(whole), logits, rows.positions[last], self._stop_ids(whole))
            for row, (request, token) in enumerate(zip(whole, choices.token.tolist(), strict=True)):
                if len(request.tokens) == len(request.prompt_ids):  # not a replay
                    self._stats.prompt_tokens += len(request.prompt_ids)
                request.phase = Phase.DECODE
                tokens = self._emit(request, [token])
                output = self._output(request, tokens, [False] * len(tokens))
                output.logprobs = choices.logprobs(request, [row], tokens)
                request.logprobs += output.logprobs
                if len(request.output_ids) == len(tokens):
                    output.prompt_logprobs = request.prompt_logprobs
                outputs.append(output)
        pieces = rows.features.split(chunks)
        alive = [b for b, request in enumerate(requests) if request.finish_reason is None]
        if alive:
            features = torch.cat([pieces[b] for b in alive])
            self._commit([requests[b] for b in alive], [chunks[b] for b in alive], features)
            self._publish([requests[b] for b in alive])
        return outputs

    def _commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        for request, count, rows in zip(requests, counts, features.split(list(counts)), strict=True):
            self._pool.keep_features(request, count, rows)
        self._drafting.commit(requests, counts, features)

    def _publish(self, requests: Sequence[Request]) -> None:
        """Lets others share what is verified and was read by the proposer too."""
        for request in requests:
            self._pool.publish(request, self._drafting.synced(request))

    def _score_prompts(self, requests: list[Request], chunks: list[int], hidden: Tensor) -> None:
        """Log-probabilities of the prompt tokens after this chunk's rows, for requests that asked for them."""
        for request, chunk, piece in zip(requests, chunks, hidden.split(chunks), strict=True):
            top = request.params.prompt_logprobs
            following = request.prompt_ids[request.computed + 1 : request.computed + chunk + 1]
            known = len(request.prompt_logprobs) - request.computed  # a replay scores nothing twice
            if top is None or known >= len(following):
                continue
            logits = self._runner.logits(piece[known : len(following)])
            request.prompt_logprobs += token_logprobs(logits, following[known:], top)

    def _stop_ids(self, requests: Sequence[Request]) -> list[list[int]]:
        """The ids that end each request."""
        eos = self.target.config.eos_token_ids
        return [[*request.params.stop_token_ids, *(() if request.params.ignore_eos else eos)] for request in requests]

    def _emit(self, request: Request, tokens: list[int]) -> list[int]:
        """Appends tokens up to the first one that ends the request; what follows it is cut and not counted."""
        if self._expired(request):
            self._finish(request, "deadline")
            return []
        (stop_ids,) = self._stop_ids([request])
        emitted, reason, request.stop_reason = cut(
            tokens,
            room=min(request.remaining, self.context - len(request.tokens)),
            stop_ids=frozenset(stop_ids),
            emitted_before=len(request.output_ids),
            min_tokens=request.params.min_tokens,
            text=request.stop_text,
        )
        request.tokens += emitted
        self._stats.generation_tokens += len(emitted)
        if reason is not None:
            self._finish(request, reason)
        return emitted

    def _output(self, request: Request, tokens: list[int], accepted: list[bool]) -> StepOutput:
        return StepOutput(
            request.request_id, tokens, accepted, request.stats, request.finish_reason, request.stop_reason
        )

    def _expired(self, request: Request) -> bool:
        return request.deadline is not None and self._clock() > request.deadline

    def _expire(self) -> list[StepOutput]:
        """Ends requests whose deadline has passed, those that wait included."""
        late = [request for request in self._requests.values() if self._expired(request)]
        for request in late:
            self._finish(request, "deadline")
        return [self._output(request, [], []) for request in late]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._scheduler.remove(request)
        self._drafting.release(request)
        del self._requests[request.request_id]

    # ---- construction -------------------------------------------------------------------------------------------

    def _use_head(self, head: Eagle3Head) -> None:
        """Packs a copy of `head`; the pool is made anew only if the head keeps other layers than the last one."""
        packed = copy.deepcopy(head).to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)
        pack(packed, exact=self.config.exact)
        before = self._head
        self._head = HeadProposer(packed, len(self._target_layers), tree_shape(self.proposer_config))
        if before is None or before.kv_layers != self._head.kv_layers:
            self._make_pool()
        self._pool.pages.forget()  # another head fills pages otherwise
        self._head.attach(self._pool)

    def _use_draft_model(self, model: LlamaTarget) -> None:
        """Takes over `model` and packs it. Its layers come last in the pool."""
        if model.config.vocab_size != self.target.config.vocab_size:
            raise ValueError(
                f"proposer.draft_model: its vocabulary has {model.config.vocab_size} tokens, the target's "
                f"{self.target.config.vocab_size}; a draft model must share the target's tokenizer"
            )
        pack(model, exact=self.config.exact)
        self._draft_model = DraftModelProposer(model)

    def _make_pool(self) -> None:
        head_layers = self._head.kv_layers if self._head else ()
        draft_layers = self._draft_model.kv_layers if self._draft_model else ()
        layers = [*self._target_layers, *head_layers, *draft_layers]
        if hasattr(self, "_pool"):
            del self._pool  # the old one goes before the new one is planned
        self.memory = plan_memory(
            self.config,
            self.target.config,
            layers,
            self.dtype,
            weights=self._weight_bytes(),
            free=free_bytes(self.device),
        )
        self._pool = KVPool(
            layers,
            tree_layers=len(self._target_layers),
            num_pages=self.memory.pages,
            page_size=self.config.page_size,
            max_requests=self.config.max_batch,
            max_positions=self.context,
            dtype=self.dtype,
            device=self.device,
        )
        if self._draft_model is not None:
            self._draft_model.attach(self._pool, len(self._target_layers) + len(head_layers))
        self._runner = Runner(self.target, self._pool)
        self._scheduler = Scheduler(
            self._pool,
            max_batch=self.config.max_batch,
            max_rows=self.config.max_rows,
            prefill_chunk=self.config.prefill_chunk,
            draft_budget=lambda request: self._drafting.budget(request),
            draft_places=lambda request, budget: self._drafting.places(request, budget),
            on_preempt=lambda request: self._drafting.release(request),
            on_resume=lambda request: self._drafting.resume(request),
        )

    def _weight_bytes(self) -> int:
        modules = [self.target, *(own.module for own in (self._head, self._draft_model) if own is not None)]
        return weight_bytes(*modules)

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
        text = None
        if request.stop_text is not None:
            text = request.stop_text.finish()
        elif self.tokenizer is not None:
            text = self.tokenizer.decode(request.output_ids)
        return Completion(
            request.prompt_ids,
            request.output_ids,
            text,
            request.finish_reason,
            request.seed,
            request.stats,
            request.stop_reason,
            request.logprobs,
            request.prompt_logprobs,
            request.rule,
        )


def answers(params: SamplingParams) -> list[SamplingParams]:
    """One per answer that `n` asks for; the i-th has seed + i, drawn at random if none was given."""
    if params.n == 1:
        return [params]
    first = secrets.randbelow(MAX_SEED - params.n) if params.seed is None else params.seed
    return [replace(params, n=1, seed=(first + index) % (MAX_SEED + 1)) for index in range(params.n)]


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer, path: str) -> None:
    """Raises ValueError if the two would read a token id differently."""
    mine, theirs = target.backend.get_vocab(), draft.backend.get_vocab()
    if mine != theirs:
        word, index = min(mine.items() ^ theirs.items())
        raise ValueError(
            f"proposer.draft_model={path}: must share the target's tokenizer; they differ at id {index}, {word!r}"
        )
