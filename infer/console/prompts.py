"""A user's text as a prompt's token ids: a message in the chat template of a model that has one, else a plain text."""

from __future__ import annotations

from models.tokenizer import Tokenizer


def uses_chat(chat: bool | None, tokenizer: Tokenizer) -> bool:
    """`chat` None: what the model is made for. ValueError: a chat template is wanted where there is none."""
    if chat and not tokenizer.chat.texts:
        raise ValueError(f"chat=true: {tokenizer.source} has no chat template; leave out chat=true for a plain text")
    return bool(tokenizer.chat.texts) if chat is None else chat


def prompt_ids(text: str, tokenizer: Tokenizer, *, chat: bool | None) -> list[int]:
    """As a user's message it is what a server's client would send. ValueError as `uses_chat`."""
    if not uses_chat(chat, tokenizer):
        return tokenizer.encode(text)
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])
