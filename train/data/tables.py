"""Undoes what tables do to a row's free-form values: they fill in nulls, and hold lists and objects as JSON text.

A column of Parquet or Arrow gives every struct all fields that any row has, with nulls where this row had none. Such a
null cannot be told from one that was written, so null fields are dropped from rows of every format, JSON Lines too: the
same rows give the same prompts. List elements stay, and so does everything inside JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def drop_nulls(value: Any, *, schema: bool = False) -> Any:
    """Return the value without null fields at any depth; of a JSON `schema`, keep a default of null that it allows."""
    if isinstance(value, list):
        return [drop_nulls(item, schema=schema) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept = {name: drop_nulls(item, schema=schema) for name, item in value.items() if item is not None}
    if schema and "default" in value and "default" not in kept and allows_null(kept):
        kept = {name: kept.get(name) for name in value if name in kept or name == "default"}
    return kept


def allows_null(schema: Any) -> bool:
    """Return whether a JSON schema allows null itself; references are not resolved."""
    if not isinstance(schema, Mapping):
        return False
    kinds, listed = schema.get("type"), schema.get("enum")
    if kinds == "null" or schema.get("nullable") is True:
        return True
    if any(isinstance(values, list) and wanted in values for values, wanted in ((kinds, "null"), (listed, None))):
        return True
    branches = [branch for name in ("anyOf", "oneOf") for branch in schema.get(name) or ()]
    return any(allows_null(branch) for branch in branches)


def from_json_text(name: str, value: Any) -> Any:
    """Return the value, parsed if it is JSON text; None for empty text. Raises ValueError if the text is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is a text and no JSON") from None


def from_list_text(value: Any) -> Any:
    """Return the value, parsed if it is the JSON text of a list."""
    try:
        parsed = from_json_text("", value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, list) else value
