"""Text <-> token ids: one Tokenizer for training, serving and the demo, from a checkpoint's own files.

Reads tokenizer.json (the `tokenizers` library), the texts of special tokens, and the ids that end a text; how a
conversation becomes text is models/chat.py. Knows nothing about models, requests or HTTP; never runs code of a
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from models.chat import DEFAULT, Chat, Message, find_chat_templates
from models.token_bytes import token_bytes


class Tokenizer:
    """Safe to share between threads: nothing changes after `load`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        source: str = "tokenizer",
    ) -> None:
        """`chat_template`: the one template, or several by name (models/chat.py)."""
        backend.no_truncation()  # some exports carry their training set-up
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})  # name -> text, as templates use them
        templates = {DEFAULT: chat_template} if isinstance(chat_template, str) else chat_template
        self.chat = Chat(templates or {}, special_tokens=self.special_tokens, source=source)
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.source = source

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Raises ValueError when the folder has no tokenizer.json or one that cannot be read."""
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{folder}: no tokenizer.json; download the checkpoint's tokenizer as well")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{file}: not a tokenizer that `tokenizers` can read ({error})") from error
        settings = read_optional_json(folder / "tokenizer_config.json")
        specials = read_special_tokens(folder, settings)
        eos_ids = [
            *as_ids(read_optional_json(folder / "generation_config.json").get("eos_token_id")),
            *as_ids(read_optional_json(folder / "config.json").get("eos_token_id")),
        ]
        if "eos_token" in specials and (eos_id := backend.token_to_id(specials["eos_token"])) is not None:
            eos_ids.append(eos_id)
        return cls(
            backend,
            eos_ids=eos_ids,
            chat_template=find_chat_templates(folder, settings),
            special_tokens=specials,
            source=str(folder),
        )

    @property
    def chat_template(self) -> str | None:
        """Of a conversation without tools."""
        return self.chat.text_for(tools=False)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` is whatever the checkpoint puts around a text, such as a begin token."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("text: holds half of a surrogate pair, which is no character") from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Without special tokens; bytes that are no character become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=not with_special)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return token_bytes(self.backend)

    def stream(self, *, with_special: bool = False) -> DetokenizeStream:
        return DetokenizeStream(self, with_special=with_special)

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The conversation's ids up to the assistant's turn; see `Chat.render`."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)  # the template writes them

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The conversation's text; see `Chat.render`."""
        return self.chat.render(messages, **options)


class DetokenizeStream:
    """Text of ids as they come, whole characters only. The pieces, then `flush`, make up the text.

    `tokenizers` holds back an unfinished character but cannot be asked for it at the end, and it gives up when a later
    byte spoils a character already shown (byte-fallback vocabularies do that); both are mended here.
    """

    def __init__(self, tokenizer: Tokenizer, *, with_special: bool = False) -> None:
        self._tokenizer, self._with_special = tokenizer, with_special
        self._stream = DecodeStream(skip_special_tokens=not with_special)
        self._held: list[int] = []  # ids whose text has not been returned

    def push(self, ids: Iterable[int]) -> str:
        pieces = []
        for token in ids:
            self._held.append(token)
            piece = self._step(token)
            if piece is not None:
                self._held.clear()
                pieces.append(piece)
        return "".join(pieces)

    def flush(self) -> str:
        """What is still held back, an unfinished character as U+FFFD. Nothing may be pushed afterwards."""
        rest = self._tokenizer.decode(self._held, with_special=self._with_special)
        self._held.clear()
        return rest

    def _step(self, token: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer.backend, token)
        except Exception as error:  # the library raises nothing more precise
            if "Invalid prefix" not in str(error):
                raise
        self._stream = DecodeStream(skip_special_tokens=not self._with_special)
        pieces = [self._stream.step(self._tokenizer.backend, held) for held in self._held]
        return "".join(piece for piece in pieces if piece) or None


def read_optional_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must be a JSON object")
    return content


def as_ids(value: object) -> list[int]:
    """HF writes one id, a list of them, or null."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]


def token_text(value: object) -> str | None:
    """HF writes a special token as its text or as {"content": text, ...}."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def read_special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of all that tokenizer_config.json (`settings`) names, as transformers hands them to templates."""
    if "added_tokens_decoder" not in settings:  # written by an older transformers, which kept them in a file beside
        settings = {**settings, **read_optional_json(folder / "special_tokens_map.json")}
    extra = settings.get("extra_special_tokens")
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    return {name: text for name, value in named.items() if (text := token_text(value))}
