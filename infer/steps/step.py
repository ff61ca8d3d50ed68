"""The step of the engine. Its phases are those of docs/architecture.md, "One step"."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from infer.batch.logprobs import token_logprobs
from infer.batch.tree import Budget, DraftTree, VerifiedDraft
from infer.processes.threads import Threads, cpu_threads
from infer.request import Phase, Request, StepOutput
from infer.sampling.choose import Choices, Emitted, choose_rows, row_parameters
from infer.sampling.emission import cut, without_forbidden
from infer.sampling.isolation import INTERNAL, isolated, together
from infer.speculation.speculator import Speculator
from infer.steps.runner import Decoded, HostBatch, Runner
from infer.steps.scheduler import Scheduler
from infer.steps.stats import EngineStats
from kernels.copies import select_rows, upload


class StepsAhead(Protocol):
    """Runs steps one round ahead of what was read, where they can be captured (infer/graphs/overlap.py)."""

    @property
    def most_rows(self) -> int: ...

    @property
    def timed(self) -> tuple[int, int, None, float] | None:
        """Requests, rows, None and seconds of the last round read, if it could be timed."""

    def drop(self, request: Request) -> None: ...

    def drain(self) -> list[StepOutput]: ...

    def graphs_of(self, drafter: str) -> Any: ...

    def step(self) -> list[StepOutput] | None:
        """Return None, with nothing done, if the host must run the step."""
        ...


class StepRunner:
    """Runs the steps of an engine.

    A request that ends in a step gets its finish reason here; the engine removes it once the step is done. `rates`:
    acceptance rates of the synthetic proposer. `clock` is the time of deadlines, in seconds; `timer` times steps.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        speculator: Speculator,
        stats: EngineStats,
        threads: Threads,
        *,
        context: int,
        rates: Sequence[float],
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner, self.pool, self.scheduler, self.speculator = runner, runner.pool, scheduler, speculator
        self.stats, self.context, self.timer = stats, context, timer
        self._threads, self._rates, self._clock = threads, rates, clock
        self.overlap: StepsAhead | None = None
        self.rows = 0  # rows verified by the last decode
        self.activity = ("nothing", 0, 0)  # phase, requests, target rows

    def step(self) -> list[StepOutput]:
        """Run one step: draft and verify every decoding request, and prefill a chunk of each scheduled prompt."""
        begin = self.timer()  # a step's cost includes planning
        decoding, load = self.scheduler.decoding, self.scheduler.load
        self.activity = ("scheduling", load, 0)
        planned = self.speculator.plan(decoding, load)
        if self.overlap is not None and (outputs := self._step_ahead(self.overlap, len(decoding))) is not None:
            return outputs
        admissible = self.scheduler.admissible()
        budgets = self.speculator.track(decoding, planned, admissible, load)
        step = self.scheduler.schedule(decoding, budgets, admissible)
        if step.admitted or step.preempted:
            self.speculator.sync(step.admitted, step.preempted)
        outputs, drafting, rows = list[StepOutput](), self.speculator.seconds, step.rows
        with cpu_threads(self._threads.plan.count(rows)):
            if step.decodes:
                self.activity = ("decode", len(step.decodes), rows - sum(step.chunks))
                outputs += self.decode(step.decodes, step.budgets)
            if step.prefills:
                self.activity = ("prefill", len(step.prefills), sum(step.chunks))
                outputs += self.prefill(step.prefills, step.chunks)
        if step.decodes and not step.prefills:
            drafting = self.speculator.seconds - drafting
            self._observe(len(step.decodes), self.rows, drafting, self.timer() - begin)
        return outputs

    def _step_ahead(self, overlap: StepsAhead, decoding: int) -> list[StepOutput] | None:
        self.activity = ("overlapped round", decoding, overlap.most_rows)
        with cpu_threads(self._threads.plan.count(overlap.most_rows)):
            outputs = overlap.step()
        if outputs is not None and overlap.timed is not None:
            self._observe(*overlap.timed)
        return outputs

    def _observe(self, batch: int, rows: int, drafting: float | None, seconds: float) -> None:
        steps = self.stats.steps
        if rows == batch:
            steps.plain, steps.plain_s = steps.plain + 1, steps.plain_s + seconds
        else:
            steps.drafted, steps.drafted_s = steps.drafted + 1, steps.drafted_s + seconds
            steps.drafting_s, steps.drafted_rows = steps.drafting_s + (drafting or 0.0), steps.drafted_rows + rows
        self._threads.record_step(rows, seconds)
        self.speculator.planner.record_step(batch, rows, drafting, seconds)

    def decode(self, requests: list[Request], budgets: list[Budget]) -> list[StepOutput]:
        """Draft for these requests within their budgets, verify, and emit and commit what was accepted."""
        tree = without_forbidden(self.speculator.propose(requests, budgets), requests)
        self.publish(requests)  # of the last step: a head reads what a verify has committed with its next draft
        lengths, depths = tree.length.tolist(), tree.depths()
        self.rows = sum(lengths)
        decoded, choices = self.verify_drafts(requests, tree)
        tokens, paths, accepted = (field.tolist() for field in decoded.accepted[:3])
        first_row = list(itertools.accumulate(lengths, initial=0))
        outputs, counts = [], [count + 1 for count in accepted]
        path_rows = [[first_row[b] + node for node in paths[b][:count]] for b, count in enumerate(counts)]
        for b, (request, count) in enumerate(zip(requests, counts, strict=True)):
            draft = VerifiedDraft(budgets[b], lengths[b] - 1, depths[b], paths[b][1:count])
            outputs.append(self.advance(request, tokens[b][:count], draft))
        if any(request.params.logprobs is not None for request in requests):
            self._score(requests, choices, path_rows, outputs)
        survivors = [b for b, request in enumerate(requests) if request.finish_reason is None]
        if survivors:
            kept = [requests[b] for b in survivors]
            self.commit(kept, features_of(kept, decoded.aux, [path_rows[b] for b in survivors]))
        return outputs

    def advance(self, request: Request, tokens: list[int], draft: VerifiedDraft) -> StepOutput:
        """Advance a request by the `tokens` of a verify and emit them, up to the request's end.

        `tokens` are the draft's accepted tokens and the bonus token; only the last one's KV is not committed.
        """
        request.computed += len(tokens)
        self.speculator.verified(request, draft)
        emitted, accepted = self._emit(request, tokens), len(draft.path)
        taken = min(accepted, len(emitted))
        for stats in (request.stats, self.stats.speculation):
            stats.record(drafted=draft.nodes, depth=draft.depth, accepted=taken, emitted=len(emitted))
        return self.output(request, emitted, [index < accepted for index in range(len(emitted))])

    def verify_drafts(self, requests: list[Request], tree: DraftTree) -> tuple[Decoded, Choices]:
        """Verify the drafts. Returns the outcome, and the target's choice at every row.

        Writes KV only beyond the committed positions.
        """
        batch = HostBatch(requests, tree, self.pool, self._rates)
        return self.runner.decode(tree, batch, self.speculator.wants_features(requests)), batch.choices

    def prefill(self, requests: list[Request], chunks: list[int]) -> list[StepOutput]:
        """Compute the next `chunks[b]` positions of each prompt; emit the first token of those that are complete."""
        for request in requests:
            if request.queued_s is None:
                request.queued_s = self._clock() - request.added
        first, device = list(itertools.accumulate(chunks, initial=0)), self.pool.device
        pairs = zip(requests, chunks, strict=True)
        complete = [b for b, (request, chunk) in enumerate(pairs) if request.computed + chunk == len(request.tokens)]
        prefilled, ones, last = [requests[b] for b in complete], [1] * len(complete), None
        if complete:
            last = upload([first[b + 1] - 1 for b in complete], device)
            parameters = row_parameters(prefilled, ones, device)
        rows = self.runner.prefill(requests, chunks, self.speculator.wants_features(requests))
        self._score_prompts(requests, chunks, rows.hidden)
        for request, chunk in zip(requests, chunks, strict=True):
            request.computed += chunk
        outputs: list[StepOutput] = []
        if complete:
            logits = self.runner.shard.logits(rows.hidden[last])
            choices = choose_rows(prefilled, ones, parameters, logits, rows.positions[last])
            for request, token in zip(prefilled, choices.token.tolist(), strict=True):
                if len(request.tokens) == len(request.prompt_ids):  # not a recomputation after pre-emption
                    self.stats.prompt_tokens += len(request.prompt_ids)
                    self.stats.cached_tokens += request.cached
                request.phase = Phase.DECODE
                tokens = self._emit(request, [token])
                outputs.append(self.output(request, tokens, [False] * len(tokens)))
                if request.output_length == len(tokens):
                    outputs[-1].prompt_logprobs = request.prompt_logprobs
            if any(request.params.logprobs is not None for request in prefilled):
                self._score(prefilled, choices, [[row] for row in range(len(prefilled))], outputs)
        unfinished = [b for b, request in enumerate(requests) if request.finish_reason is None]
        if unfinished:
            kept = [requests[b] for b in unfinished]
            self.commit(kept, features_of(kept, rows.aux, [range(first[b], first[b + 1]) for b in unfinished]))
            self.publish(kept)
        return outputs

    def commit(self, requests: Sequence[Request], features: Sequence[Tensor]) -> None:
        """Commit new positions of each request, with `features[b]` `[n, F]` of them."""
        for request, rows in zip(requests, features, strict=True):
            self.pool.keep_features(request, rows)
        self.speculator.commit(requests, features)

    def publish(self, requests: Sequence[Request]) -> None:
        """Publish to the prefix cache the positions that are verified and were read by the proposer too."""
        for request in requests:
            self.pool.publish(request, request.drafter.synced(request))

    def _score_prompts(self, requests: list[Request], chunks: list[int], hidden: Tensor) -> None:
        """Compute log-probabilities of the prompt tokens that follow this chunk's rows, for requests that want them."""
        for request, chunk, piece in zip(requests, chunks, hidden.split(chunks), strict=True):
            top = request.params.prompt_logprobs
            following = request.prompt_ids[request.computed + 1 : request.computed + chunk + 1]
            scored = len(request.prompt_logprobs) - request.computed  # more than 0 in a recomputation
            if top is None or scored >= len(following):
                continue
            logits = self.runner.shard.logits(piece[scored : len(following)])
            with isolated(request):
                tokens = upload(following[scored:], self.pool.device)
                request.prompt_logprobs += token_logprobs([logits], tokens, [top] * len(tokens))

    def _score(
        self, requests: Sequence[Request], choices: Choices, rows: Sequence[Sequence[int]], outputs: list[StepOutput]
    ) -> None:
        """Add log-probabilities of their tokens, sampled at `rows`, to the outputs of requests that want any."""
        emitted = [Emitted(r, at, output.token_ids) for r, at, output in zip(requests, rows, outputs, strict=True)]
        logprobs = together(requests, lambda group: choices.logprobs(emitted, set(group)))
        for b, (request, _, tokens) in enumerate(emitted):
            if request.failed and tokens:  # even if it has just finished; its tokens of this step are discarded
                request.finish_reason = "error"
                outputs[b] = self.output(request, [], [])
            outputs[b].logprobs = logprobs.get(request.request_id, [])
            request.logprobs += outputs[b].logprobs

    def _emit(self, request: Request, tokens: list[int]) -> list[int]:
        """Append and return the tokens up to the first that ends the request; later ones are discarded, uncounted."""
        if request.is_late(self._clock()):
            request.finish_reason = "deadline"
            return []
        room = min(request.remaining, self.context - len(request.tokens))
        emitted, reason, request.stop_reason = cut(tokens, request, room=room)
        if request.failed:  # just now or earlier in this step
            request.finish_reason = "error"
            return []
        request.tokens += emitted
        self.stats.generation_tokens += len(emitted)
        request.finish_reason = reason
        return emitted

    def output(self, request: Request, tokens: list[int], accepted: list[bool]) -> StepOutput:
        return StepOutput(
            request.request_id,
            tokens,
            accepted,
            request.stats,
            request.finish_reason,
            request.stop_reason,
            request.ended_by_token,
            error=INTERNAL if request.failed else request.error,
            internal=request.failed,
            cached_tokens=request.cached,
            queued_s=request.queued_s or 0.0,
        )


def features_of(requests: Sequence[Request], aux: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Sequence[Tensor]:
    """Return the features `[n, F]` of the n rows of each request; n is 0 for one whose drafter reads none."""
    rows = [each if request.drafter.aux_layers else () for request, each in zip(requests, rows, strict=True)]
    counts = [len(each) for each in rows]
    if not aux:
        return torch.empty(sum(counts), 0).split(counts)
    return select_rows(aux, [row for each in rows for row in each]).split(counts)
