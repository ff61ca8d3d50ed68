"""Keeps text on a command line and in a written config literal, whatever it contains.

Two languages would interpret it: Hydra's grammar of overrides (quotes, commas, braces, numbers) and OmegaConf's
interpolation (`${...}`, with significant backslashes). A shell has taken the user's quotes away, so a prompt with a
comma would need two layers of them. Neither language is escaped case by case. Text that could be read as anything but
itself is written as `${text:x<its bytes in hexadecimal>}`, which both pass on, and which the resolver below decodes
before a schema sees it. Only `null` and `???`, which mean no value, cannot be texts. Knows dataclasses and no command.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_type_hints

from omegaconf import OmegaConf

_hints = functools.cache(get_type_hints)
TEXT, NULL = (str, str | None), "null"
# no interpolation, backslash, control character or surrogate
PLAIN = re.compile(r"(?:(?!\$\{)[^\\\x00-\x1f\x7f-\x9f\ud800-\udfff])*")
SWEEP = re.compile(r",|\$\{|^(?:choice|range|interval|glob|sort|shuffle)\(")


def encode(text: str) -> str:
    """Return `text` in the form that OmegaConf reads as `text`."""
    return text if PLAIN.fullmatch(text) else _in_hexadecimal(text)


def _in_hexadecimal(text: str) -> str:
    """Encode the bytes of `text`; surrogates stand for bytes of a file name that are not UTF-8."""
    return f"${{text:x{text.encode('utf-8', 'surrogateescape').hex()}}}"


def _decode(encoded: str) -> str:
    return bytes.fromhex(encoded.removeprefix("x")).decode("utf-8", "surrogateescape")


OmegaConf.register_new_resolver("text", _decode, replace=True)


def encode_all(value: Any) -> Any:
    """Return a config as plain containers with encoded texts, for writing it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode_all(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_all(item) for item in value]
    return encode(value) if isinstance(value, str) else value


def literal_overrides(words: Sequence[str], schema: type) -> list[str]:
    """Return the words of a command line, encoding those that set a text of `schema` so that Hydra leaves it unchanged.

    `null` keeps its usual meaning. A list of texts is `[a,b]`, with quotes around an item that contains a comma. With
    `-m` a comma sweeps and `${key}` is that key's value, except in fields whose metadata say FREE_TEXT.
    """
    return [_literal_word(word, schema, sweeping=sweeps(words)) for word in words]


def sweeps(words: Sequence[str]) -> bool:
    return bool({"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(words))


def _literal_word(word: str, schema: type, *, sweeping: bool) -> str:
    key, equals, text = word.partition("=")
    kinds = list(_kinds(schema, key.lstrip("+").split("."))) if equals and not word.startswith("-") else []
    free = any(field.metadata.get("free_text") for field, _ in kinds)
    if not kinds or text == NULL or (sweeping and not free and SWEEP.search(text)):
        return word
    types = [kind for _, kind in kinds]
    if all(kind in TEXT for kind in types) or (Any in types and text[:1] not in ("[", "{")):
        return key + equals + quote(text)
    if text[:1] == "[" and text[-1:] == "]" and (set(types) == {list[str]} or (Any in types and _lists_texts(text))):
        return key + equals + "[" + ",".join(map(quote, list_items(text[1:-1]))) + "]"
    return word


def _kinds(schema: type, keys: Sequence[str]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Yield each declaration of a key (field and type): in the schema, or in any option of its group."""
    hints = _hints(schema)
    for field in dataclasses.fields(schema):
        if field.name != keys[0]:
            continue
        kind = hints[field.name]
        if len(keys) == 1 and not dataclasses.is_dataclass(kind):
            yield field, kind
        elif len(keys) > 1 and dataclasses.is_dataclass(kind):
            for option in _options(cast(type, kind)):
                yield from _kinds(option, keys[1:])


def _options(kind: type) -> Iterator[type]:
    yield kind
    for option in kind.__subclasses__():
        yield from _options(option)


def quote(text: str) -> str:
    """Return `text` as a quoted string in which neither Hydra nor YAML finds anything to unescape."""
    return "'" + (_in_hexadecimal(text) if "'" in text else encode(text)) + "'"


def _lists_texts(text: str) -> bool:
    """Return whether a value of type Any is a list, not nested, with characters outside Hydra's grammar."""
    return text[1:2] not in ("[", "{") and re.search(r"[^\w,. /*\[\]-]", text) is not None


def list_items(text: str) -> list[str]:
    """Return the items of a list: the text between commas, without surrounding blanks and quotes."""
    parts = re.findall(r"""\s*(?:'([^']*)'|"([^"]*)"|([^,]*?))\s*(?:,|$)""", text)
    items = [single or double or bare for single, double, bare in parts]
    return items[:-1] if items and not items[-1] else items
