"""Offline generation: completes a list of prompts and returns when all are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from tqdm import tqdm

from infer.batch.params import MAX_SEED
from infer.request import Completion, Request, SamplingParams, StepOutput
from infer.steps.serving import Serving
from models.tokenizer import Tokenizer


def generate(
    engine: Serving,
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
    ids = [encode(prompt, engine.tokenizer) for prompt in prompts]
    per_prompt = [params] * len(ids) if isinstance(params, SamplingParams) else list(params)
    if len(per_prompt) != len(ids):
        raise ValueError(f"params: {len(per_prompt)} for {len(ids)} prompts")
    waiting = deque(zip(ids, per_prompt, strict=True))
    requests, index, active, tokens = list[Request](), dict[str, int](), 0, 0
    bar = tqdm(total=sum(one.n for one in per_prompt), unit="prompt", disable=not progress, dynamic_ncols=True)
    try:
        while waiting or active:
            while waiting and (max_concurrency is None or active < max_concurrency):
                (prompt, prompt_params), first = waiting.popleft(), None
                if prompt_params.n > 1 and prompt_params.seed is None:
                    prompt_params = replace(prompt_params, seed=engine.seeds.randrange(MAX_SEED - prompt_params.n))
                for single in completion_params(prompt_params):
                    request_id = engine.add(prompt, single, parent=first)
                    index[request_id], active = len(requests), active + 1
                    requests.append(engine.request(request_id))
                    first = first or request_id
            for output in engine.step():
                if output.request_id not in index:
                    continue
                tokens += len(output.token_ids)
                if on_output is not None:
                    on_output(index[output.request_id], output)
                if output.finish_reason is not None:
                    active -= 1
                    bar.set_postfix(tokens=tokens, refresh=False)
                    bar.update()
    except BaseException:
        for request in requests:
            engine.abort(request.request_id)
        raise
    finally:
        bar.close()
    return [completion(request, engine.tokenizer) for request in requests]


def completion_params(params: SamplingParams) -> list[SamplingParams]:
    """Return params for each of the `n` completions: the i-th gets seed + i."""
    if params.n == 1:
        return [params]
    assert params.seed is not None
    return [replace(params, n=1, seed=(params.seed + index) % (MAX_SEED + 1)) for index in range(params.n)]


def encode(prompt: str | Sequence[int], tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise ValueError("prompt: text given, but this engine has no tokenizer; pass token ids")
    return tokenizer.encode(prompt)


def completion(request: Request, tokenizer: Tokenizer | None) -> Completion:
    """Return the `Completion` of a finished request."""
    assert request.finish_reason is not None
    text = None
    if request.stop_text is not None:
        text = request.stop_text.finish()
    elif tokenizer is not None:
        with_special = not request.params.skip_special_tokens
        ids = request.output_ids[:-1] if request.ended_by_token else request.output_ids
        text = tokenizer.decode(ids, context=request.prompt_ids, with_special=with_special)
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
        request.error,
    )
