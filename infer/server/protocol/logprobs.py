"""Log-probabilities in responses: OpenAI's formats for completions and for chats, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.batch.logprobs import TokenLogprob

LEAST = -9999.0  # OpenAI's substitute for minus infinity, which JSON lacks
Json = dict[str, Any]


@dataclass(frozen=True)
class ScoredToken:
    token: int
    offset: int  # start in the choice's text, in characters
    logprob: TokenLogprob | None  # None for the first token of a prompt, which has no prediction


class TokenNames:
    """Maps a token to its name in responses: its text, or its bytes if they are not valid UTF-8."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = token_bytes

    def bytes(self, token: int) -> bytes:
        """Return a token's bytes. Ids beyond the tokenizer's vocabulary, which the model's may exceed, have none."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def __call__(self, token: int) -> str:
        content = self.bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def completion_logprobs(tokens: Sequence[ScoredToken], top_n: int, name: TokenNames) -> Json:
    """Return OpenAI's format for completions: per position, the `top_n` most likely tokens and the chosen one."""
    tops: list[Json | None] = []
    for scored in tokens:
        if scored.logprob is None or not top_n:
            tops.append(None)
            continue
        top = {name(token): finite(value) for token, value in reversed(scored.logprob.top[:top_n])}
        tops.append({name(scored.token): finite(scored.logprob.logprob)} | top)
    return {
        "tokens": [name(scored.token) for scored in tokens],
        "token_logprobs": [scored.logprob and finite(scored.logprob.logprob) for scored in tokens],
        "top_logprobs": tops if top_n else None,
        "text_offset": [scored.offset for scored in tokens],
    }


def chat_logprobs(tokens: Sequence[ScoredToken], name: TokenNames) -> Json:
    def entry(token: int, value: float) -> Json:
        return {"token": name(token), "logprob": finite(value), "bytes": list(name.bytes(token))}

    content = [
        entry(scored.token, scored.logprob.logprob)
        | {"top_logprobs": [entry(token, value) for token, value in scored.logprob.top]}
        for scored in tokens
        if scored.logprob is not None
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(logprobs: Sequence[TokenLogprob], top_n: int, name: TokenNames) -> list[Json | None]:
    """Return vLLM's format for prompts: log-probabilities by token id, null for the first position."""
    places: list[Json | None] = [None]
    for logprob in logprobs:
        ranked = {token: (rank, value) for rank, (token, value) in enumerate(logprob.top[:top_n], 1)}
        ranked[logprob.token] = (logprob.rank, logprob.logprob)
        places.append(
            {
                str(token): {"logprob": finite(value), "rank": rank, "decoded_token": name(token)}
                for token, (rank, value) in ranked.items()
            }
        )
    return places


def finite(value: float) -> float:
    return max(value, LEAST)
