"""Turns a user's text into token ids: a message in the model's chat template if it has one, else plain text."""

from __future__ import annotations

from models.tokenizer import Tokenizer


def uses_chat(chat: bool | None, tokenizer: Tokenizer) -> bool:
    """Return whether to use the chat template. `chat` None: if there is one. True: ValueError if there is none."""
    if chat and not tokenizer.chat.texts:
        raise ValueError(f"chat=true: {tokenizer.source} has no chat template; leave out chat=true for a plain text")
    return bool(tokenizer.chat.texts) if chat is None else chat


def prompt_ids(text: str, tokenizer: Tokenizer, *, chat: bool | None) -> list[int]:
    """Return a prompt's ids. A text in the chat template gets the ids that it would get as a message to the server.

    Raises ValueError as `uses_chat` does.
    """
    if not uses_chat(chat, tokenizer):
        return tokenizer.encode(text)
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])
