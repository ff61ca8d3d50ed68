"""Whether a JSON value fits a JSON schema: its types, names, values and bounds.

For calls that a model writes unasked, where no grammar has kept the schema. Keywords with regular expressions
(`pattern`, `patternProperties`), `format` and conditions are not checked, so nothing of a client's runs here.
References resolve inside the schema.
"""

from __future__ import annotations

import operator
from typing import Any

from infer.server.protocol.fields import is_one_of

MAX_CHECKS = 20_000  # schemas applied to values, for one call
TYPES: dict[str, Any] = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
BOUNDS = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
LENGTHS = {
    str: ("minLength", "maxLength"),
    list: ("minItems", "maxItems"),
    dict: ("minProperties", "maxProperties"),
}


def fits(value: Any, schema: Any, document: Any = None) -> bool:
    """Return whether the value fits. Nothing fits a schema that is malformed or takes more than MAX_CHECKS.

    `document`: where the schema's references resolve; itself by default.
    """
    try:
        return Check(schema if document is None else document).holds(value, schema)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return False


class Check:
    """A check against one document. Its methods raise for a malformed schema."""

    def __init__(self, document: Any) -> None:
        self._document, self._left = document, MAX_CHECKS

    def holds(self, value: Any, schema: Any) -> bool:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too much to check")
        if isinstance(schema, bool):
            return schema
        either = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
        return (
            ("type" not in schema or is_a(value, schema["type"]))
            and ("const" not in schema or is_one_of(value, (schema["const"],)))
            and ("enum" not in schema or is_one_of(value, tuple(schema["enum"])))
            and is_within(value, schema)
            and ("$ref" not in schema or self.holds(value, resolve(self._document, schema["$ref"])))
            and all(self.holds(value, option) for option in schema.get("allOf", ()))
            and all(any(self.holds(value, option) for option in options) for options in either)
            and (not isinstance(value, dict) or self._members_hold(value, schema))
            and (not isinstance(value, list) or self._items_hold(value, schema))
        )

    def _members_hold(self, value: dict[str, Any], schema: dict[str, Any]) -> bool:
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", True) if "patternProperties" not in schema else True
        return set(schema.get("required", ())) <= set(value) and all(
            self.holds(item, properties.get(name, others)) for name, item in value.items()
        )

    def _items_hold(self, value: list[Any], schema: dict[str, Any]) -> bool:
        first = schema.get("prefixItems", [])
        pairs = zip(value, [*first, *[schema.get("items", True)] * (len(value) - len(first))], strict=False)
        return all(self.holds(item, item_schema) for item, item_schema in pairs)


def resolve(document: Any, reference: str) -> Any:
    """Return the schema to which a reference in the document points. Raises ValueError, TypeError or LookupError."""
    root, _, path = reference.partition("#")
    if root or (path and not path.startswith("/")):
        raise ValueError("neither the document nor a place inside it")
    node = document
    for part in path.split("/")[1:]:
        key = unquoted(part).replace("~1", "/").replace("~0", "~")
        node = node[int(key)] if isinstance(node, list) else node[key]
    return node


def unquoted(part: str) -> str:
    """Decode `%20` and the like, in ASCII."""
    first, *rest = part.split("%")
    return first + "".join(chr(int(piece[:2], 16)) + piece[2:] for piece in rest)


def is_a(value: Any, kinds: str | list[str]) -> bool:
    if isinstance(kinds, list):
        return any(is_a(value, kind) for kind in kinds)
    if kinds in ("number", "integer"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kinds == "number" or value == int(value))
    return isinstance(value, TYPES[kinds])


def is_within(value: Any, schema: dict[str, Any]) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return all(holds(value, schema[name]) for name, holds in BOUNDS.items() if name in schema)
    if not isinstance(value, str | list | dict):
        return True
    least, most = LENGTHS[type(value)]
    return schema.get(least, 0) <= len(value) <= schema.get(most, len(value))
