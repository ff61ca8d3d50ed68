"""Schema of completion requests and of the fields that all generation requests share, and their `SamplingParams`.

Every list is bounded. Independent of models, tokenizers and the engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from infer.batch.grammar import Grammar
from infer.batch.params import MAX_INT, MOST_PENALTY, SamplingParams
from infer.server.protocol.errors import field_error
from infer.server.protocol.fields import EMPTY, Strict, Unless
from infer.server.protocol.structure import ResponseFormat, StructuredOutputs

MAX_PROMPTS = 4096  # limit of the schema; server.max_prompts and the context are the effective limits
MAX_PROMPT_TOKENS = 2**22
MAX_STOPS = 32  # OpenAI's bound is 4; evaluation harnesses send more
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_N = 32
MAX_LOGPROBS = 20  # OpenAI's bound for chats
MAX_PRIORITY = 2**31
GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar", "json_object")}
MAX_TIMEOUT_S = 1e9
SAMPLING_FIELDS = (  # that SamplingParams has too, with the same meaning
    *("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "n", "min_tokens", "stop", "stop_token_ids", "skip_special_tokens", "ignore_eos"),
    *("prompt_logprobs", "cache_salt", "seed", "acceptance", "posterior_threshold", "posterior_alpha"),
)
COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat may fill the context

TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Count = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]


class StreamOptions(Strict):
    accepted = frozenset({"include_obfuscation"})  # padding is optional

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # send the usage so far in every chunk


class Speculative(Strict):
    """Our extension: how this request is drafted. It does not change the generated text."""

    enabled: bool = True
    proposer: str | None = Field(default=None, max_length=64)  # null: the server's
    max_draft_tokens: int | None = Field(default=None, ge=1, le=63)
    detail: bool = False  # return each token with the depth at which its draft was accepted, 0 if the target chose it


def check_prompt(prompt: Any) -> Any:
    """Accept string | list of strings | ids | list of ids, with one error instead of one per member of a union."""
    if isinstance(prompt, str) or is_ids(prompt):
        return prompt
    if isinstance(prompt, list) and prompt and (all(isinstance(p, str) for p in prompt) or all(map(is_ids, prompt))):
        return prompt
    raise ValueError("must be a non-empty string, list of strings, list of token ids or list of lists of token ids")


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item <= MAX_INT for item in value)


def check_bias(bias: Any) -> Any:
    """Convert the keys, which are strings in JSON, to token ids."""
    if not isinstance(bias, dict):
        return bias
    for token in bias:
        if not (isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10):
            raise ValueError("keys must be token ids")
    return {int(token): value for token, value in bias.items()}


TokenIds = Annotated[list[int], Field(max_length=MAX_PROMPT_TOKENS)]
Prompt = Annotated[
    str
    | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
    | TokenIds
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)],
    BeforeValidator(check_prompt),
]
Stop = Annotated[  # OpenAI accepts a single string too
    list[StopString],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES), BeforeValidator(check_bias)
]


class GenerationRequest(Strict):
    accepted: ClassVar[frozenset[str]] = frozenset(
        {
            # OpenAI's: identifiers, billing, cache keys
            *("user", "safety_identifier", "metadata", "client_metadata", "service_tier"),
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
            # vLLM's: identifiers (here, `x-request-id` identifies a request), size of chunks, media
            *("request_id", "session_id", "stream_interval", "media_io_kwargs", "mm_processor_kwargs"),
            # vLLM's: meaningful only with a refused field, or only in its rendering endpoints
            *("length_penalty", "routed_experts_prompt_start", "return_token_offsets", "return_mm_kwargs"),
            *("guided_decoding_backend", "truncation_side"),
        }
    )
    refused: ClassVar[dict[str, Unless]] = {
        **dict.fromkeys(("moderation", "web_search_options", "logits_processors", "prompt_embeds"), Unless()),
        **dict.fromkeys(("watermarking", "use_beam_search", "include_stop_str_in_output"), Unless((False,))),
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection"), Unless()),
        **dict.fromkeys(("logprob_token_ids", "return_tokens_as_token_ids", "return_prompt_text"), Unless((False,))),
        **dict.fromkeys(("truncate_prompt_tokens", "guided_whitespace_pattern"), Unless()),
        "spaces_between_special_tokens": Unless((True,)),
        "thinking_token_budget": Unless((-1,)),
    }
    absent: ClassVar[dict[str, tuple[Any, ...]]] = {
        "seed": (-1,),
        "structured_outputs": ({},),
        "response_format": ({},),
    }

    @classmethod
    def select(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Move vLLM's older `guided_*` fields into `structured_outputs`."""
        guided = {GUIDED[name]: value for name, value in values.items() if name in GUIDED and value not in EMPTY}
        others = {name: value for name, value in values.items() if name not in GUIDED}
        if guided and others.get("structured_outputs") is not None:
            raise field_error("structured_outputs", "not together with guided_json and the like")
        return others | ({"structured_outputs": guided} if guided else {})

    prompt_field: ClassVar[str] = "messages"

    model: str
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=1 / MOST_PENALTY, le=100)
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63 - MAX_N)
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None  # false: keep them in the text
    prompt_logprobs: Count | None = None
    return_token_ids: bool | None = None
    priority: int | None = Field(default=None, gt=-MAX_PRIORITY, lt=MAX_PRIORITY)  # as in vLLM, lower runs first
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)  # ours: a deadline, at most the server's
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    acceptance: str | None = Field(default=None, max_length=64)  # rule for drafts: exact, block, typical; null: ours
    posterior_threshold: float | None = Field(default=None, ge=0, le=1)  # of acceptance: typical
    posterior_alpha: float | None = Field(default=None, ge=0, le=1)
    speculative: Speculative | None = None
    learn: bool | None = None  # ours: false: the head is not trained on this request
    store: bool | None = None  # OpenAI's: nothing is stored here, but false counts as `learn: false`
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def check_combinations(self) -> GenerationRequest:
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "not together with stream: true")
        if self.response_format is not None and self.structured_outputs is not None:
            raise field_error("structured_outputs", "not together with response_format")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens to generate, for which the context must have room; None: as many as it has."""
        return self.max_tokens

    @property
    def soft_limit(self) -> int | None:
        """Most tokens to generate without a `limit`, where the context has room for them."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """Number of top log-probabilities beside the chosen token; None for no log-probabilities."""
        return None

    @property
    def structure(self) -> tuple[str, Grammar] | None:
        """The request field that sets the output's grammar, and the grammar."""
        if self.structured_outputs is not None:
            return "structured_outputs", self.structured_outputs.grammar
        if self.response_format is not None and (grammar := self.response_format.grammar) is not None:
            return "response_format", grammar
        return None

    @property
    def drafts(self) -> Speculative:
        return self.speculative or Speculative()

    def sampling_params(self, max_tokens: int, bad_words: tuple[tuple[int, ...], ...] = ()) -> SamplingParams:
        """Return the sampling parameters. Raises ValueError naming an invalid field."""
        drafts, fields = self.drafts, {name: getattr(self, name) for name in SAMPLING_FIELDS}
        shared: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(
            **shared,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            bad_words=bad_words,
            max_tokens=max_tokens,
            logprobs=self.num_logprobs,
            speculate=drafts.enabled,
            proposer=drafts.proposer,
            max_draft_tokens=drafts.max_draft_tokens,
            learn=self.learn is not False and self.store is not False and self.cache_salt is None,
            priority=-(self.priority or 0),
        )


class CompletionRequest(GenerationRequest):
    refused = GenerationRequest.refused | {
        "suffix": Unless(),
        "best_of": Unless((1,)),
        "max_completion_tokens": Unless(hint="say max_tokens"),
        "top_logprobs": Unless(hint="say logprobs: N"),
        **dict.fromkeys(("tools", "functions", "reasoning_effort"), Unless(hint="it is a field of chats")),
    }
    absent = GenerationRequest.absent | {"logprobs": (False,)}
    prompt_field = "prompt"

    prompt: Prompt
    logprobs: Count | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None  # null: the checkpoint's default

    @model_validator(mode="after")
    def check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "must be at least 1; 0 only with echo: true")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # type: ignore[return-value]

    @property
    def only_prompt(self) -> bool:
        """Whether to return the echoed prompt alone."""
        return self.max_tokens == 0

    @property
    def limit(self) -> int | None:
        return 1 if self.only_prompt else self.max_tokens

    @property
    def soft_limit(self) -> int:
        return COMPLETION_MAX_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def sampling_params(self, max_tokens: int, bad_words: tuple[tuple[int, ...], ...] = ()) -> SamplingParams:
        """As in the base class; with `echo`, also request log-probabilities of the prompt."""
        params = super().sampling_params(max_tokens, bad_words)
        if not self.echo or self.logprobs is None:
            return params
        return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))
