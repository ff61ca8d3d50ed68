"""State shared by the endpoints: tokenizer, limits, runtime and metrics. Starts a session from prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request

from infer.batch.constraint import Constraint
from infer.batch.grammar import Grammar
from infer.batch.stopping import StopText
from infer.engine import Engine
from infer.learning.status import LearningStatus
from infer.request import SamplingParams
from infer.server.engine_loop import Event
from infer.server.metrics import Metrics
from infer.server.middleware import TENANT
from infer.server.parsing.grammar_check import GrammarCheck
from infer.server.parsing.harmony import CHANNEL
from infer.server.parsing.stream import END_RESPONSE, RESPONSE, THINK
from infer.server.parsing.style_choice import choose_style
from infer.server.protocol.completions import GenerationRequest
from infer.server.protocol.errors import ApiError, invalid_field
from infer.server.protocol.fields import Strict, UnknownFields
from infer.server.protocol.logprobs import TokenNames
from infer.server.protocol.structure import check_size
from infer.server.runtime import Runtime
from infer.server.session import Choice, Prompt, Session
from models.tokenizer import Tokenizer

ENCODE_LIMIT_S = 30.0  # for templates that loop; Jinja's sandbox bounds memory but not time


class Service:
    """Shared state of the endpoints. Not usable before `attach`; until then the runtime refuses every request."""

    def __init__(self, model_id: str, runtime: Runtime) -> None:
        self.model_id, self.config, self.runtime = model_id, runtime.config, runtime
        counters = (lambda: self.runtime.snapshot), (lambda: self.runtime.stalls), (lambda: self.learning)
        self.metrics = Metrics(model_id, *counters)
        self.unknown_fields = UnknownFields(strict=self.config.strict)
        self.created = int(time.time())
        self.context = 0

    def attach(self, engine: Engine) -> None:
        assert engine.tokenizer is not None, "the server needs text"
        self.tokenizer: Tokenizer = engine.tokenizer
        self.names = TokenNames(self.tokenizer.token_bytes)
        self.context = min(engine.context, engine.memory.pages * engine.config.page_size)
        self.vocab_size = engine.target.config.vocab_size
        self.end_tokens, self._compile, self.seeds = engine.end_tokens, engine.compile, engine.seeds
        settings = {
            "tokenizer": self.tokenizer.backend.to_str(),
            "vocab_size": max(self.vocab_size, self.tokenizer.vocab_size),
            "eos_ids": list(engine.end_tokens),
        }
        self.grammars = GrammarCheck(settings)
        self.tool_style, self.unread = choose_style(self.config.tool_parser, self.tokenizer.chat)
        added = self.tokenizer.backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: index for index, token in added.items()}
        parser, templates = self.config.reasoning_parser, "\n".join(self.tokenizer.chat.texts.values())
        if parser == "auto":
            parser = "harmony" if CHANNEL in templates else "think" if THINK in templates else "none"
        self.reasoning_parser, self.wraps_answers = parser, f"{RESPONSE}{END_RESPONSE}" in templates
        self.proposer, self.proposers = engine.proposer_name, tuple(engine.speculator.names)
        self.metrics.speculative = self.proposer != "none"
        # No longer text can fit the context; saves tokenizing megabytes only to refuse them.
        self.max_characters = self.context * max(map(len, self.tokenizer.backend.get_vocab()), default=1)

    @property
    def learning(self) -> LearningStatus | None:
        """How the head learns, None unless the server was started with learn=true."""
        return None if self.runtime.learning is None else self.runtime.learning.status

    async def close(self) -> None:
        if self.context:
            await self.grammars.close()

    def check_model(self, model: str) -> None:
        if model != self.model_id:
            why = f"{model!r} is not served here; this server has {self.model_id!r}"
            raise invalid_field("model", why, "model_not_found", status=404)

    def check_fields(self, body: Strict, model: str | None) -> None:
        """Check what every request has: a server that is ready, known fields, and this server's model if it names one.

        Raises ApiError.
        """
        self.runtime.check_open()
        self.unknown_fields.check(body)
        if model is not None:
            self.check_model(model)

    def check(self, body: GenerationRequest) -> None:
        self.check_fields(body, body.model)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.check_ids(name, getattr(body, name) or ())
        proposer = body.drafts.proposer
        if proposer is not None and proposer not in self.proposers:
            why = f"{proposer!r} is not here; this server has {', '.join(self.proposers)}"
            raise invalid_field("speculative.proposer", why)

    def check_ids(self, name: str, ids: Any) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise invalid_field(name, f"{token} is outside the vocabulary of {self.vocab_size}")

    async def start(
        self,
        request: Request,
        body: GenerationRequest,
        encode: Callable[[Any], Prompt],
        prompts: Sequence[Any],
        *,
        structure: Callable[[], tuple[str, Grammar] | None],
        only_prompt: bool = False,
        with_special: bool = False,
    ) -> Session:
        """Validate, encode and submit a request, and return its session.

        `structure`: returns, once the prompts are encoded, the request field that sets the output's grammar, and the
        grammar. `with_special`: keep special tokens in the text even if the request does not ask for them.
        """
        arrival, param, max_tokens = time.monotonic(), body.prompt_field, body.limit
        self.runtime.check_room(len(prompts) * (body.n or 1))
        encoded = await self.encode_all(encode, prompts, param)
        longest = max(len(prompt.ids) for prompt in encoded)
        if longest + (max_tokens or 1) > self.context:
            raise self._too_long(f"{longest} tokens" + (f" and max_tokens={max_tokens}" if max_tokens else ""), param)
        if max_tokens is None:
            room = self.context - longest
            max_tokens = min(body.soft_limit or room, room)
        bound = structure()
        params = self._params(body, max_tokens, request.scope.get(TENANT, ""), bound and bound[1])
        params = replace(params, skip_special_tokens=params.skip_special_tokens and not with_special)
        assert params.seed is not None
        constraint = await self._constraint(*bound) if bound is not None else None
        outputs: asyncio.Queue[Event] = asyncio.Queue()
        request_ids = self.runtime.submit([prompt.ids for prompt in encoded], params, constraint, outputs)
        choices: list[Choice] = []
        for prompt in (prompt for prompt in encoded for _ in range(params.n)):
            stream = self.tokenizer.stream(context=prompt.ids, with_special=not params.skip_special_tokens)
            text = StopText(stream, params.stop)
            choices.append(Choice(len(choices), prompt, text, params.min_tokens, only_prompt=only_prompt))
        return Session(
            request_ids,
            choices,
            outputs,
            self.runtime.abort,
            seed=params.seed,
            prompt_tokens=sum(len(prompt.ids) for prompt in encoded),
            metrics=self.metrics,
            speculative=params.speculate and (params.proposer or self.proposer) != "none",
            arrival=arrival,
            timeout=min(self.config.request_timeout_s, body.timeout_s or self.config.request_timeout_s),
        )

    async def encode_all(self, encode: Callable[[Any], Prompt], prompts: Sequence[Any], param: str) -> list[Prompt]:
        """Encode prompts in a worker thread. Raises ApiError if that takes longer than ENCODE_LIMIT_S."""
        try:
            async with asyncio.timeout(ENCODE_LIMIT_S):
                return await asyncio.to_thread(lambda: [encode(prompt) for prompt in prompts])
        except TimeoutError:
            why = f"takes longer than {ENCODE_LIMIT_S:g} s to go through the template and the tokenizer"
            raise invalid_field(param, why, "prompt_timeout") from None

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > self.max_characters:
            raise self._too_long(f"{len(text)} characters", param)
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise invalid_field(param, str(error)) from error
        if not ids:
            raise invalid_field(param, "empty; it must hold at least one token", "empty_prompt")
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the text of a conversation; `options` are those of `Tokenizer.render_chat`."""
        try:
            return self.tokenizer.render_chat(messages, **options)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages", code="chat_template") from error

    def special_id(self, text: str) -> int | None:
        """Return the id of a text that is a special token, or None if it is ordinary text."""
        token = self.tokenizer.backend.token_to_id(text)
        return token if token in self.tokenizer.special_ids else None

    def echo(self, ids: list[int], prompt: str | list[int], *, add_special_tokens: bool) -> Prompt:
        """Return a prompt to be echoed before its completion: the text as sent, or decoded from `ids`."""
        self.check_ids("prompt", ids)
        stream, offsets, text = self.tokenizer.stream(), [], ""
        for token in ids:
            offsets.append(len(text))
            text += stream.push([token])
        if isinstance(prompt, str) and prompt != text:  # a tokenizer whose decoding does not restore the text
            offsets = self.tokenizer.offsets(prompt, add_special_tokens=add_special_tokens)
            return Prompt(ids, prompt, tuple(offsets))
        return Prompt(ids, text, tuple(offsets), stream.flush())

    def _params(self, body: GenerationRequest, max_tokens: int, tenant: str, grammar: Grammar | None) -> SamplingParams:
        # each bad word with and without a leading space, which tokenizers encode differently
        words = [form for word in body.bad_words or () for form in (word, " " + word.lstrip(" "))]
        try:
            ids = (tuple(self.encode(word, "bad_words", add_special_tokens=False)) for word in words)
            params = body.sampling_params(max_tokens, tuple(dict.fromkeys(ids)))
            seed = self.seeds.randrange(2**53) if params.seed is None else params.seed  # JavaScript represents it
            return replace(params, grammar=grammar, cache_salt=f"{tenant}/{params.cache_salt}", seed=seed)
        except ValueError as error:
            name = str(error).partition("=")[0]
            raise ApiError(400, str(error), param=name, code="invalid_value") from error

    async def _constraint(self, param: str, grammar: Grammar) -> Constraint:
        """Compile a grammar in a worker thread, after a separate process has compiled it safely (grammar_check.py)."""
        check_size(grammar, param)
        try:
            await self.grammars.check(grammar)
            return await asyncio.to_thread(self._compile, grammar)
        except ValueError as error:
            raise invalid_field(param, str(error), "invalid_grammar") from error

    def _too_long(self, length: str, param: str) -> ApiError:
        why = f"{length}; prompt and answer together may have {self.context} tokens"
        return invalid_field(param, why, "context_length_exceeded")
