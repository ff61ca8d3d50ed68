"""Base model for request objects. Each field is implemented, accepted without effect, or refused unless it is a no-op.

Every field of OpenAI's or vLLM's schemas is in one of these three groups, listed in the model of the object that
contains it. Any other field is ignored with one log line, or refused with `server.strict=true`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator

from infer.server.protocol.errors import field_error, invalid_field, join_path, shown
from infer.settings.other_names import elsewhere

log = logging.getLogger("headway.server")

EMPTY: tuple[Any, ...] = (None, [], {}, "", False, 0)
MAX_UNKNOWN = 32  # unknown names kept per object
MAX_WARNINGS = 256  # warnings per server
MAX_WARNED_LENGTH = 120


class Unless(NamedTuple):
    """A field that is refused unless its value is a no-op.

    `defaults`: documented values that are no-ops, besides null and empty values. If one of them is a number or a
    boolean, 0 and false are not no-ops unless listed. `hint`: what to do instead.
    """

    defaults: tuple[Any, ...] = ()
    hint: str = ""


class Strict(BaseModel):
    """A JSON object of a request: strict types, finite numbers, and every field classified.

    `accepted`: fields without effect here, whatever their value. `refused`: fields that would change the output and are
    not implemented. `absent`: values of implemented fields that count as null. These tables take precedence over the
    model's fields, so that a subclass can refuse inherited ones.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    accepted: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[dict[str, Unless]] = {}
    absent: ClassVar[dict[str, tuple[Any, ...]]] = {}
    _unknown: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def sort_fields(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, dict):
            return handler(values)
        names = {field.alias or name for name, field in cls.model_fields.items()}
        kept: dict[str, Any] = {}
        unknown: list[str] = []
        for name, value in cls.select(values).items():
            if name in cls.refused:
                check_refused(name, value, cls.refused[name])
            elif name in names and name not in cls.accepted:
                if not is_one_of(value, cls.absent.get(name, ())):
                    kept[name] = value
            elif name not in cls.accepted and len(unknown) < MAX_UNKNOWN:
                unknown.append(name)
        model = handler(kept)
        model._unknown = tuple(unknown)
        return model

    @classmethod
    def select(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the fields to validate: all, unless overridden by a model for objects of many schemas."""
        return values

    @property
    def remark(self) -> str | None:
        """A log line about what is left out of the request, and why."""
        return None


def check_refused(name: str, value: Any, unless: Unless) -> None:
    defaults, is_number = unless.defaults, isinstance(value, int | float)
    stated = is_number and any(isinstance(default, int | float) for default in defaults)
    if not is_one_of(value, defaults if stated else (*EMPTY, *defaults)):
        options = " or ".join(map(shown, defaults))
        hint = unless.hint or (f"leave it out (or {options})" if options else "leave it out")
        raise field_error(name, f"not implemented by this server; {hint}", "unsupported_parameter")


def is_one_of(value: Any, options: tuple[Any, ...]) -> bool:
    """Return whether `value` is in `options`, where 1 is not true and 0 is not false."""
    return any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in options)


def objects_in(value: Any, path: str = "") -> Iterator[tuple[str, Strict]]:
    """Yield the models inside a validated request with their paths. A list contains only models, or none."""
    if isinstance(value, Strict):
        yield path, value
        for name, field in type(value).model_fields.items():
            yield from objects_in(getattr(value, name), join_path(path, field.alias or name))
    elif isinstance(value, list) and value and isinstance(value[0], Strict):
        for index, item in enumerate(value):
            yield from objects_in(item, join_path(path, index))


class UnknownFields:
    """Handles fields of no schema: one warning per name, or with `strict` a 400."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._warned: set[str] = set()

    def check(self, body: Strict) -> None:
        """Log the unknown fields of a request. Raises ApiError for one if `strict`."""
        for path, model in objects_in(body):
            for name in model._unknown:
                self._unknown(join_path(path, name))
            if model.remark is not None:
                self._warn(model.remark)

    def _unknown(self, param: str) -> None:
        if self._strict:
            raise invalid_field(param, "unknown field; this server runs with server.strict=true", "unknown_parameter")
        here = elsewhere(param)
        why = f"; the server calls it {here}" if here else " (server.strict=true rejects it)"
        field = re.sub(r"\[\d+\]", "[]", param)[:MAX_WARNED_LENGTH]  # so that each name is warned about once
        self._warn(f"{field} is an unknown field and is ignored{why}")

    def _warn(self, remark: str) -> None:
        text = remark.encode("ascii", "backslashreplace").decode()
        text = "".join(char if char.isprintable() else "?" for char in text)[: 2 * MAX_WARNED_LENGTH]
        if text in self._warned or len(self._warned) > MAX_WARNINGS:
            return
        self._warned.add(text)
        log.warning("request: %s", text)
        if len(self._warned) == MAX_WARNINGS:
            self._warned.add("")
            log.warning("request: %d warnings logged; no more will be logged", MAX_WARNINGS)
