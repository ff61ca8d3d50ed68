"""The requests of OpenAI's API that this server implements: fields, bounds, and a refusal for every other field.

A field that is known but not implemented passes only with the value that asks for nothing (`n: 1`, `stop: null`).
Knows the wire and `SamplingParams`; knows nothing about models, tokens or the engine.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from infer.request import SamplingParams
from infer.server.errors import field_error

MAX_MESSAGES = 2048
MAX_PARTS = 256  # of one message
MAX_STOP_TOKEN_IDS = 128
COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat may fill the context

ANY = object()  # a field without effect here, whatever its value
NOTHING: dict[str, tuple[Any, ...]] = {  # field -> values that ask for nothing; null always does
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stop": ([],),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # without tools there is nothing to call in parallel
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "user": (ANY,),  # OpenAI: an identifier of the end user, without effect on the answer
    **dict.fromkeys(
        (
            "audio",
            "prediction",
            "reasoning_effort",
            "metadata",
            "moderation",
            "prompt_cache_key",
            "safety_identifier",
            "verbosity",
            "web_search_options",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "chat_template",
            "chat_template_kwargs",
            "allowed_token_ids",
            "bad_words",
            "priority",
            "prompt_logprobs",
        ),
        (),
    ),
}
MESSAGE_NOTHING: dict[str, tuple[Any, ...]] = {
    "name": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "reasoning_content": (),
}


def drop_nothing(values: Any, known: set[str], nothing: dict[str, tuple[Any, ...]]) -> Any:
    """Drops the fields that ask for nothing; raises for those that ask for what is not implemented."""
    if not isinstance(values, dict):
        return values
    kept = {}
    for name, value in values.items():
        if name in known:
            kept[name] = value
        elif name not in nothing:
            raise field_error(name, "unknown field", "unknown_parameter")
        elif value is not None and ANY not in nothing[name] and not is_one_of(value, nothing[name]):
            allowed = " or ".join([str(option).lower() for option in nothing[name]] or ["null"])
            raise field_error(
                name, f"not implemented by this server; leave it out (or {allowed})", "unsupported_parameter"
            )
    return kept


def is_one_of(value: Any, options: tuple[Any, ...]) -> bool:
    """Like `in`, but 1 is not true and 0 is not false."""
    return any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in options)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, values: Any) -> Any:
        options = {"continuous_usage_stats": (False,), "include_obfuscation": (False, True)}  # padding is optional
        return drop_nothing(values, set(cls.model_fields), options)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_content(values.get("content"))
        return drop_nothing(values, set(cls.model_fields), MESSAGE_NOTHING)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


def check_content(content: Any) -> None:
    """Before pydantic tries the two forms of a content and reports both failures."""
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise field_error("content", "must be a string or a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise field_error(
                "content", 'every part must be {"type": "text", "text": ...}; this server reads text only'
            )


def check_prompt(prompt: Any) -> Any:
    """string | list of strings | ids | list of ids, without the four complaints of a union."""
    if isinstance(prompt, str) or is_ids(prompt):
        return prompt
    if isinstance(prompt, list) and prompt and (all(isinstance(p, str) for p in prompt) or all(map(is_ids, prompt))):
        return prompt
    raise ValueError("must be a non-empty string, list of strings, list of token ids or list of lists of token ids")


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(check_prompt)]


class GenerationRequest(Strict):
    """What completions and chats have in common."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, values: Any) -> Any:
        return drop_nothing(values, set(cls.model_fields), NOTHING)

    @model_validator(mode="after")
    def check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "only together with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """A request without a seed gets a random one, short enough for JavaScript's numbers to hold."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbelow(2**53) if self.seed is None else self.seed,
            max_tokens=max_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    return_token_ids: bool | None = None  # as vLLM: `token_ids` beside each text, without streaming

    @model_validator(mode="after")
    def check_return_token_ids(self) -> CompletionRequest:
        if self.return_token_ids and self.stream:
            raise field_error("return_token_ids", "not together with stream: true", "unsupported_parameter")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # type: ignore[return-value]


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def check_limits(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise field_error("max_tokens", "contradicts max_completion_tokens; give one of them")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
