"""Whether a JSON value fits a JSON schema: its types, names, values and bounds.

For calls that a model writes unasked, where no grammar has kept the schema. It is translated as for a grammar, so that
both mean the same. Keywords with regular expressions (`pattern`, `patternProperties`) and `format` are not checked, so
nothing of a client's runs here.
"""

from __future__ import annotations

import operator
from typing import Any

from infer.json_schema.translation import translate
from infer.server.protocol.fields import is_one_of

MAX_CHECKS = 20_000  # schemas applied to values, for one call
MAX_REFERENCES = 8  # that are followed to the properties of an object
ERRORS = (ValueError, TypeError, AttributeError, LookupError, RecursionError)  # of a malformed schema
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


def fits(value: Any, schema: Any) -> bool:
    """Return whether the value fits. Nothing fits a schema that is malformed or takes more than MAX_CHECKS."""
    try:
        translated = translate(schema).schema
        return Check(translated).holds(value, translated)
    except ERRORS:
        return False


def fits_member(value: Any, schema: Any, key: str) -> bool:
    """Return whether the value fits a member of an object with this schema; any fits one that it does not declare."""
    try:
        document = node = translate(schema).schema
        definitions = definitions_of(document)
        for _ in range(MAX_REFERENCES):
            if "properties" in node or "$ref" not in node:
                break
            node = referred(definitions, node["$ref"])
        return Check(document).holds(value, node["properties"][key])
    except LookupError:
        return True
    except ERRORS:
        return False


def definitions_of(document: Any) -> dict[str, Any]:
    """Return the definitions of a translated schema."""
    return document.get("$defs", {}) if isinstance(document, dict) else {}


def referred(definitions: dict[str, Any], reference: str) -> Any:
    """Return what a reference in a translated schema refers to."""
    return definitions[reference.rpartition("/")[2]]


class Check:
    """A check against a translated schema. Its methods raise for a malformed one."""

    def __init__(self, schema: Any) -> None:
        self._definitions = definitions_of(schema)
        self._left = MAX_CHECKS

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
            and ("$ref" not in schema or self.holds(value, referred(self._definitions, schema["$ref"])))
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
