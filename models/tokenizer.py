"""Text <-> token ids: one Tokenizer for training, serving and the demo, from a checkpoint's own files.

Reads tokenizer.json (the `tokenizers` library) or a GGUF file's keys, the texts of special tokens, and the ids that end
a text; conversations are rendered in models/chat.py. Independent of models, requests and HTTP; never runs code of a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from models.chat import DEFAULT, Chat, Message, find_chat_templates
from models.config import read_json
from models.end_tokens import END_TEXTS, PART, WHOLE, read_end_tokens
from models.gguf import is_gguf
from models.token_bytes import is_continuation, token_bytes, unfinished

CONTEXT = 4  # tokens before a text that affect its beginning: a space before the first word, an unfinished character


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
        backend.no_truncation()  # some exports keep their training settings
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})  # name -> text, as templates use them
        templates = {DEFAULT: chat_template} if isinstance(chat_template, str) else chat_template
        self.chat = Chat(templates or {}, special_tokens=self.special_tokens, source=source)
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *self._turn_ends()]))
        self.special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.source = source

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load the tokenizer of a checkpoint's folder or GGUF file.

        Raises ValueError when the folder has no tokenizer.json or one that cannot be read, and for a GGUF file that
        lacks a required key.
        """
        folder = Path(folder)
        if is_gguf(folder):
            return cls._of_gguf(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{folder}: no tokenizer.json; download the checkpoint's tokenizer as well")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{file}: not a tokenizer that `tokenizers` can read ({error})") from error
        settings = read_optional_json(folder / "tokenizer_config.json")
        specials = read_special_tokens(folder, settings)
        eos = specials.get("eos_token")
        return cls(
            backend,
            eos_ids=read_end_tokens(folder, None if eos is None else backend.token_to_id(eos)),
            chat_template=find_chat_templates(folder, settings),
            special_tokens=specials,
            source=str(folder),
        )

    @classmethod
    def _of_gguf(cls, path: Path) -> Self:
        from models.gguf.file import open_gguf
        from models.gguf.tokenizer import build_tokenizer, chat_templates, special_tokens

        file = open_gguf(path)
        return cls(
            build_tokenizer(file),
            eos_ids=read_end_tokens(file.path),
            chat_template=chat_templates(file),
            special_tokens=special_tokens(file),
            source=str(file.path),
        )

    def _turn_ends(self) -> list[int]:
        """Return the id of the mark that the chat template writes after an assistant's content, if it writes one."""
        added, end = self.backend.get_added_tokens_decoder(), self.chat.turn_end.lstrip()
        marks = {token.content: index for index, token in added.items() if token.special or token.content in END_TEXTS}
        written = [text for text in marks if end.startswith(text)]
        return [marks[text] for text in sorted(written, key=len)[-1:] if not (text == PART and WHOLE in marks)]

    @property
    def chat_template(self) -> str | None:
        """The template for conversations without tools."""
        return self.chat.text_for(tools=False)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_id(self) -> int | None:
        """The id of the tokenizer's `eos_token`; `eos_ids` has every end token of the checkpoint."""
        eos = self.special_tokens.get("eos_token")
        return None if eos is None else self.backend.token_to_id(eos)

    def encode(self, text: str, *, context: Sequence[int] = (), add_special_tokens: bool = True) -> list[int]:
        """Return a text's ids; `add_special_tokens` adds what the checkpoint puts around a text, such as a begin token.

        `context`: the ids that the text continues; no special tokens are added then. Without context the text is taken
        as the beginning, and many tokenizers then put a space before its first word. Raises ValueError for half of a
        surrogate pair.
        """
        if context:
            prefix = self.decode(self.stream(context=context, with_special=True).context, with_special=True)
            prefix_ids, full_ids = (self.encode(part, add_special_tokens=False) for part in (prefix, prefix + text))
            if full_ids[: len(prefix_ids)] == prefix_ids:
                return full_ids[len(prefix_ids) :]
            add_special_tokens = False  # a token spans both texts, which the context's ids lack
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("text: holds half of a surrogate pair, which is no character") from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the character where each token of `encode` begins; for a special token, the end of the text so far."""
        starts, end = [], 0
        for first, last in self.backend.encode(text, add_special_tokens=add_special_tokens).offsets:
            starts.append(max(first, starts[-1] if starts else 0) if last > first else end)
            end = max(end, last)
        return starts

    def decode(self, ids: Sequence[int], *, context: Sequence[int] = (), with_special: bool = False) -> str:
        """Return the text of ids, without special tokens by default; bytes that form no character become U+FFFD.

        `context`: the ids before them, whose text is not returned. Without context the ids are taken as the beginning,
        and many tokenizers then drop the space before the first word.
        """
        if context:
            stream = self.stream(context=context, with_special=with_special)
            return stream.push(ids) + stream.flush()
        return self.backend.decode(list(ids), skip_special_tokens=not with_special)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return token_bytes(self.backend)

    def stream(self, *, context: Sequence[int] = (), with_special: bool = False) -> DetokenizeStream:
        return DetokenizeStream(self, context=context, with_special=with_special)

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the conversation's ids up to the assistant's turn; see `Chat.render`."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)  # the template writes them

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the conversation's text; see `Chat.render`."""
        return self.chat.render(messages, **options)


class DetokenizeStream:
    """Incremental detokenizer that emits whole characters only. The pieces, then `flush`, make up the text.

    `context`: the ids that come before, of which only the last few are read. Their text is not returned, except that
    a character which they leave unfinished belongs to the text that finishes it.

    Like `DecodeStream` of `tokenizers`, it decodes new ids together with the last ones that produced text, and removes
    the text of those. Unlike it, it returns what it holds at the end, continues after a byte that invalidates a
    character already emitted (byte-fallback vocabularies decode a run of bytes as a whole), and never holds more than
    an unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer, *, context: Sequence[int] = (), with_special: bool = False) -> None:
        self._tokenizer, self._with_special = tokenizer, with_special
        last_ids = self._last_text(context)
        count = len(last_ids) - self._unfinished(last_ids)
        self._shown, self._held = last_ids[:count], last_ids[count:]  # the last ids that produced text, the ids since
        self._prefix = self._decode(self._shown)
        self._pushed = False

    @property
    def context(self) -> list[int]:
        """The last ids so far that produced text."""
        return self._shown

    def push(self, ids: Iterable[int]) -> str:
        return "".join(self._push(token) for token in ids if self._is_text(token))

    def flush(self) -> str:
        """Return what is still held back, an unfinished character as U+FFFD. Nothing may be pushed afterwards."""
        return self._release(len(self._held)) if self._pushed else ""

    def _push(self, token: int) -> str:
        self._held.append(token)
        self._pushed = True
        return self._release(len(self._held) - self._unfinished(self._held))

    def _release(self, count: int) -> str:
        """Release the first `count` held ids and return their text."""
        if not count:
            return ""
        released, self._held = self._held[:count], self._held[count:]
        text = self._decode([*self._shown, *released])
        invalidated = not text.startswith(self._prefix)
        piece = self._decode(released) if invalidated else text[len(self._prefix) :]
        self._shown = released if piece else [*self._shown, *released]
        self._prefix = self._decode(self._shown)
        return piece

    def _last_text(self, context: Sequence[int]) -> list[int]:
        """Return the last CONTEXT ids that are text, and up to three more where a character would be cut in two."""
        last: list[int] = []
        for token in reversed(context):
            if self._is_text(token):
                last.append(token)
                starts_character = not is_continuation(self._tokenizer.token_bytes[token])
                if len(last) >= CONTEXT and (starts_character or len(last) == CONTEXT + 3):
                    break
        return last[::-1]

    def _unfinished(self, ids: Sequence[int]) -> int:
        return unfinished([self._tokenizer.token_bytes[token] for token in ids[-CONTEXT:]])

    def _is_text(self, token: int) -> bool:
        if not self._with_special and token in self._tokenizer.special_ids:
            return False
        return self._tokenizer.backend.id_to_token(token) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.backend.decode(ids, skip_special_tokens=False)


def read_optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def read_special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> text of the special tokens in tokenizer_config.json (`settings`), as passed to templates in HF."""
    if "added_tokens_decoder" not in settings:  # written by an older transformers, which kept them in a separate file
        settings = {**settings, **read_optional_json(folder / "special_tokens_map.json")}
    extra = settings.get("extra_special_tokens")
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    # Hugging Face writes a token as its text or as {"content": text, ...}.
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if text and isinstance(text, str)}
