"""The work of a scheduled step: drafting, target forward, sampling, verification, commit (DESIGN section 5)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infer.engine.isolation import INTERNAL, isolated
from infer.engine.runner import Runner
from infer.engine.stats import EngineStats
from infer.kvcache.pool import KVPool
from infer.request import Phase, Request, StepOutput
from infer.sampling.choose import Choices, choose_rows
from infer.sampling.constraint import without_forbidden
from infer.sampling.logprobs import token_logprobs
from infer.sampling.stopping import FinishReason, cut
from infer.speculation.budget import Budget, Verified
from infer.speculation.speculator import Drafting
from infer.speculation.tree import DraftTree
from infer.speculation.verify import Verdict, verify
from kernels.gather import gather_rows


class Stepping:
    """Runs the decodes and prefills that an engine has scheduled.

    `rates`: acceptance rates of the synthetic proposer. `expired`: returns whether a request's deadline has passed.
    `finish`: called to end a request. `drafted`: called with the verified draft of each request.
    """

    def __init__(
        self,
        runner: Runner,
        pool: KVPool,
        drafting: Drafting,
        stats: EngineStats,
        *,
        context: int,
        rates: Sequence[float],
        expired: Callable[[Request], bool],
        finish: Callable[[Request, FinishReason], None],
        drafted: Callable[[Request, Verified], None],
    ) -> None:
        self._runner, self._pool, self._drafting, self._stats = runner, pool, drafting, stats
        self._context, self._rates = context, rates
        self._expired, self._finish, self._drafted = expired, finish, drafted
        self.rows = 0  # rows verified by the last decode

    def decode(self, requests: list[Request], budgets: list[Budget]) -> list[StepOutput]:
        tree = without_forbidden(self._drafting.propose(requests, budgets), requests)
        self.publish(requests)
        lengths = tree.length.tolist()
        self.rows = sum(lengths)
        aux, choices, verdicts = self.judge(requests, tree)
        starts = [request.computed for request in requests]
        if not tree.is_chain:
            places = [[start + node for node in own.path] for start, own in zip(starts, verdicts, strict=True)]
            self._pool.move(requests, places, starts)
        depths = tree.depths()
        first_row = list(itertools.accumulate(lengths, initial=0))
        drafts = tree.token.tolist()
        outputs, kept_rows, survivors, counts = [], [], [], []
        for b, request in enumerate(requests):
            path = verdicts[b].path
            path_rows = [first_row[b] + node for node in path]
            tokens = [*(drafts[b][node] for node in path[1:]), verdicts[b].bonus]
            output = self.advance(request, tokens, Verified(budgets[b], lengths[b] - 1, depths[b], path[1:]))
            outputs.append(self._scored(request, choices, path_rows, output))
            if request.finish_reason is None:
                survivors.append(request)
                counts.append(len(path))
                kept_rows += path_rows
        if survivors:
            self._commit_rows(survivors, counts, aux, kept_rows)
        return outputs

    def advance(self, request: Request, tokens: list[int], draft: Verified) -> StepOutput:
        """Advance a request by the `tokens` of a verify and emit them, up to the request's end.

        `tokens` are the draft's accepted tokens and the bonus token; only the last one's KV is not committed.
        """
        request.computed += len(tokens)
        self._drafted(request, draft)
        emitted, accepted = self._emit(request, tokens), len(draft.path)
        taken = min(accepted, len(emitted))
        for stats in (request.stats, self._stats.speculation):
            stats.record(drafted=draft.nodes, depth=draft.depth, accepted=taken, emitted=len(emitted))
        return self.output(request, emitted, [index < accepted for index in range(len(emitted))])

    def judge(self, requests: list[Request], tree: DraftTree) -> tuple[tuple[Tensor, ...], Choices, list[Verdict]]:
        """Verify the drafts. Returns features of every row, the target's choices, and a verdict per request.

        Writes KV only beyond the committed positions.
        """
        rows = self._runner.verify(requests, tree, self._drafting.wants_features(requests))
        choices = choose_rows(requests, tree.length.tolist(), rows.logits, rows.positions, tree)
        rules = [request.rule for request in requests]
        return rows.aux, choices, verify(requests, tree, choices, rules, self._rates)

    def prefill(self, requests: list[Request], chunks: list[int]) -> list[StepOutput]:
        rows = self._runner.prefill(requests, chunks, self._drafting.wants_features(requests))
        self._score_prompts(requests, chunks, rows.hidden)
        ends = torch.tensor(chunks, device=self._pool.device).cumsum(0) - 1
        for request, chunk in zip(requests, chunks, strict=True):
            request.computed += chunk
        complete = [b for b, request in enumerate(requests) if request.computed == len(request.tokens)]
        outputs: list[StepOutput] = []
        if complete:
            last = ends[torch.tensor(complete, device=self._pool.device)]
            whole = [requests[b] for b in complete]
            logits = self._runner.logits(rows.hidden[last])
            choices = choose_rows(whole, [1] * len(whole), logits, rows.positions[last])
            for row, (request, token) in enumerate(zip(whole, choices.token.tolist(), strict=True)):
                if len(request.tokens) == len(request.prompt_ids):  # not a recomputation after pre-emption
                    self._stats.prompt_tokens += len(request.prompt_ids)
                    self._stats.cached_tokens += request.cached
                request.phase = Phase.DECODE
                tokens = self._emit(request, [token])
                output = self._scored(request, choices, [row], self.output(request, tokens, [False] * len(tokens)))
                if request.output_length == len(tokens):
                    output.prompt_logprobs = request.prompt_logprobs
                outputs.append(output)
        alive = [b for b, request in enumerate(requests) if request.finish_reason is None]
        if alive:
            first = list(itertools.accumulate(chunks, initial=0))
            kept = [row for b in alive for row in range(first[b], first[b + 1])]
            self._commit_rows([requests[b] for b in alive], [chunks[b] for b in alive], rows.aux, kept)
            self.publish([requests[b] for b in alive])
        return outputs

    def _commit_rows(
        self, requests: Sequence[Request], counts: Sequence[int], aux: Sequence[Tensor], kept: Sequence[int]
    ) -> None:
        """Commit `counts[b]` new positions of each request; `kept` are their rows in `aux`."""
        features = torch.empty(0, 0, device=self._pool.device)
        if aux:
            ends = itertools.accumulate(counts)
            pairs = zip(requests, counts, ends, strict=True)
            read = [row for own, count, end in pairs if self._drafting.reads(own) for row in kept[end - count : end]]
            if len(read) == len(aux[0]):  # rows ascend, so these are all of them, as in a plain step
                features = torch.cat(list(aux), dim=-1)
            else:
                features = gather_rows(aux, torch.tensor(read, dtype=torch.int64, device=self._pool.device))
        self.commit(requests, counts, features)

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        """Commit `counts[b]` new positions of each request, with `features` `[n, F]` where the drafter reads them."""
        reading = [(own, count) for own, count in zip(requests, counts, strict=True) if self._drafting.reads(own)]
        pieces = features.split([count for _, count in reading]) if reading else ()
        for (request, count), rows in zip(reading, pieces, strict=True):
            self._pool.keep_features(request, count, rows)
        self._drafting.commit(requests, counts, features)

    def publish(self, requests: Sequence[Request]) -> None:
        """Publish to the prefix cache the positions that are verified and were read by the proposer too."""
        for request in requests:
            self._pool.publish(request, self._drafting.synced(request))

    def _score_prompts(self, requests: list[Request], chunks: list[int], hidden: Tensor) -> None:
        """Compute log-probabilities of the prompt tokens that follow this chunk's rows, for requests that want them."""
        for request, chunk, piece in zip(requests, chunks, hidden.split(chunks), strict=True):
            top = request.params.prompt_logprobs
            following = request.prompt_ids[request.computed + 1 : request.computed + chunk + 1]
            known = len(request.prompt_logprobs) - request.computed  # already scored, if this is a recomputation
            if top is None or known >= len(following):
                continue
            logits = self._runner.logits(piece[known : len(following)])
            with isolated(request):
                request.prompt_logprobs += token_logprobs(logits, following[known:], top)

    def _scored(self, request: Request, choices: Choices, rows: Sequence[int], output: StepOutput) -> StepOutput:
        """Return `output` with the log-probabilities of its tokens, sampled at `rows`, if the request wants them."""
        with isolated(request):
            output.logprobs = choices.logprobs(request, rows, output.token_ids)
            request.logprobs += output.logprobs
            return output
        return self.fail(request)

    def fail(self, request: Request) -> StepOutput:
        """End a failed request with an error, even if it has just finished; its tokens of this step are discarded."""
        if request.finish_reason is None:
            self._finish(request, "error")
        request.finish_reason = "error"
        return self.output(request, [], [])

    def _emit(self, request: Request, tokens: list[int]) -> list[int]:
        """Append and return the tokens up to the first that ends the request; later ones are discarded, uncounted."""
        if self._expired(request):
            self._finish(request, "deadline")
            return []
        if request.constraint is not None and request.constraint.error is not None:
            self._finish(request, "error")
            return []
        emitted, reason = [], None
        with isolated(request):
            emitted, reason, request.stop_reason = cut(
                tokens,
                room=min(request.remaining, self._context - len(request.tokens)),
                stop_ids=request.stop_ids,
                eos_id=request.eos_id,
                emitted_before=request.output_length,
                min_tokens=request.params.min_tokens,
                text=request.stop_text,
                constraint=request.constraint,
            )
        if request.failed:  # just now or earlier in this step
            self._finish(request, "error")
            return []
        request.tokens += emitted
        self._stats.generation_tokens += len(emitted)
        if reason is not None:
            self._finish(request, reason)
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
            error=INTERNAL if request.failed else request.constraint and request.constraint.error,
            internal=request.failed,
            cached_tokens=request.cached,
            queued_s=request.queued_s or 0.0,
        )
