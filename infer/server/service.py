"""What the endpoints share: the tokenizer, the limits, the runtime and the metrics. Turns prompts into sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from infer.config import ServerConfig
from infer.engine import Engine
from infer.server.errors import ApiError
from infer.server.metrics import Metrics
from infer.server.protocol import GenerationRequest
from infer.server.runtime import Runtime
from infer.server.session import Session
from models.tokenizer import Tokenizer


class Service:
    """Not usable before `attach`; the runtime says so to every request until then."""

    def __init__(self, model_id: str, config: ServerConfig, load: Callable[[], Engine]) -> None:
        self.model_id, self.config = model_id, config
        self.runtime = Runtime(load, max_waiting=config.max_waiting)
        self.metrics = Metrics(model_id, lambda: self.runtime.snapshot)
        self.created = int(time.time())
        self.context = 0

    @property
    def attached(self) -> bool:
        return self.context > 0

    def attach(self, engine: Engine) -> None:
        assert engine.tokenizer is not None, "the server needs text"
        self.tokenizer: Tokenizer = engine.tokenizer
        self.context = min(engine.context, engine.memory.pages * engine.config.page_size)
        self.vocab_size = engine.target.config.vocab_size
        self.speculative = engine.proposer_name != "none"
        # No text of more characters than this can fit the context; saves tokenising megabytes in order to refuse them.
        self.max_characters = self.context * max(map(len, self.tokenizer.backend.get_vocab()), default=1)

    def check(self, request: GenerationRequest) -> None:
        self.runtime.check_open()
        if request.model != self.model_id:
            message = f"model: {request.model!r} is not served here; this server has {self.model_id!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        for token in request.stop_token_ids or ():
            if not 0 <= token < self.vocab_size:
                message = f"stop_token_ids: {token} is outside the vocabulary of {self.vocab_size}"
                raise ApiError(400, message, param="stop_token_ids", code="invalid_value")

    async def start(
        self,
        request: GenerationRequest,
        encode: Callable[[Any], list[int]],
        prompts: Sequence[Any],
        *,
        param: str,
        max_tokens: int | None,
        default_max_tokens: int | None,
    ) -> Session:
        """`encode` runs in a worker thread. `default_max_tokens=None` lets the answer fill the context."""
        arrival = time.monotonic()
        ids = await asyncio.to_thread(lambda: [encode(prompt) for prompt in prompts])
        longest = max(map(len, ids))
        self._check_length(longest, max_tokens, param)
        if max_tokens is None:
            room = self.context - longest
            max_tokens = room if default_max_tokens is None else min(default_max_tokens, room)
        params = request.sampling_params(max_tokens)
        return Session(
            generation=self.runtime.submit(ids, params),
            streams=[self.tokenizer.stream() for _ in ids],
            prompt_tokens=sum(map(len, ids)),
            params=params,
            metrics=self.metrics,
            speculative=self.speculative,
            arrival=arrival,
            timeout=self.config.request_timeout_s,
        )

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > self.max_characters:
            raise self._too_long(f"{len(text)} characters", param)
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from error
        if not ids:
            raise ApiError(400, f"{param}: empty; it must hold at least one token", param=param, code="empty_prompt")
        return ids

    def _check_length(self, prompt: int, max_tokens: int | None, param: str) -> None:
        if prompt + (max_tokens or 1) > self.context:
            raise self._too_long(f"{prompt} tokens" + (f" and max_tokens={max_tokens}" if max_tokens else ""), param)

    def _too_long(self, what: str, param: str) -> ApiError:
        message = f"{param}: {what}; prompt and answer together may have {self.context} tokens"
        return ApiError(400, message, param=param, code="context_length_exceeded")
