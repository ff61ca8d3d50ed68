"""What each keyword of JSON Schema does in a grammar: the list that the translation uses, and the manual's table.

A keyword of no list is an annotation, as JSON Schema 2020-12 says (section 6.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from infer.json_schema.formats import BESIDE_A_PATTERN, FORMATS, MAX_DURATION, MAX_FRACTION

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class Shape(NamedTuple):
    """What the value of a keyword must be, also as a phrase to follow "must be"."""

    phrase: str
    holds: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


SCHEMA = Shape("an object or a boolean", lambda value: isinstance(value, dict | bool))
SCHEMAS = Shape("a list of schemas", lambda value: isinstance(value, list))
NAMED = Shape("an object of schemas", lambda value: isinstance(value, dict))
NAMES = Shape("a list of strings", lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value))
COUNT = Shape("a count", lambda value: is_number(value) and value >= 0 and value == int(value))
NUMBER = Shape("a number", is_number)
BOUND = Shape("a number or a boolean", lambda value: isinstance(value, int | float))
TEXT = Shape("a string", lambda value: isinstance(value, str))
LIST = Shape("a list", lambda value: isinstance(value, list))
ANYTHING = Shape("any value", lambda value: True)
TYPE = Shape(
    f"one or a list of {', '.join(TYPES)}",
    lambda value: all(item in TYPES for item in (value if isinstance(value, list) else [value])),
)

# Keywords that are enforced, at least in part.
ENFORCED: dict[str, Shape] = {
    **{"type": TYPE, "enum": LIST, "const": ANYTHING},
    **{"properties": NAMED, "patternProperties": NAMED, "additionalProperties": SCHEMA, "required": NAMES},
    **{"propertyNames": SCHEMA, "minProperties": COUNT, "maxProperties": COUNT, "unevaluatedProperties": SCHEMA},
    **{"items": SCHEMA, "prefixItems": SCHEMAS, "additionalItems": SCHEMA, "minItems": COUNT, "maxItems": COUNT},
    "unevaluatedItems": SCHEMA,
    **{"minLength": COUNT, "maxLength": COUNT, "pattern": TEXT, "format": TEXT},
    **{"minimum": NUMBER, "maximum": NUMBER, "exclusiveMinimum": BOUND, "exclusiveMaximum": BOUND},
    **{"multipleOf": NUMBER, "anyOf": SCHEMAS, "oneOf": SCHEMAS, "allOf": SCHEMAS, "not": SCHEMA},
    **{"$ref": TEXT, "$dynamicRef": TEXT, "$recursiveRef": TEXT},
}
# Keywords that cannot be enforced, each with whether its value asks for nothing in a schema.
IGNORED: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "uniqueItems": lambda value, schema: value is False,
    "contains": lambda value, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "if": lambda value, schema: schema.keys().isdisjoint({"then", "else"}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), lambda value, schema: not value),
}
# Keywords without a meaning of their own. `$id` and the anchors are what references refer to.
ANNOTATIONS = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"),
    *("contentEncoding", "contentMediaType", "contentSchema", "$vocabulary", "$defs", "definitions"),
    *("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "minContains", "maxContains", "then", "else"),
)
OWN = [name for name, regex in FORMATS.items() if regex is None]
PARTLY = {  # how enforced keywords are read, and what of them is not enforced
    ("oneOf",): "enforced as `anyOf`, which is the same where the alternatives exclude each other",
    ("not",): "enforced if it is `true` or `{}`, which nothing satisfies",
    (
        "pattern",
    ): "enforced in the syntax of ECMA-262 and Python, with `\\d`, `\\w` and `\\s` in ASCII. Look-ahead behind "
    "`^` is enforced, but no other look-around, no `\\b`, and nothing of a pattern with back-references",
    (
        "format",
    ): f"enforced: {', '.join(f'`{name}`' for name in FORMATS)}. A second's fraction has at most {MAX_FRACTION} "
    f"digits, which is all that {' and '.join(f'`{name}`' for name in BESIDE_A_PATTERN)} ask for beside a `pattern`; a "
    f"number in a duration has at most {MAX_DURATION}. Other formats are annotations",
    ("propertyNames",): "enforced by `enum`, `const`, a `pattern`, lengths or a format (not "
    f"{', '.join(f'`{name}`' for name in OWN)}), unless there are `patternProperties`",
    ("patternProperties",): "enforced; a 400 if a name could match two of the patterns",
    (
        "minProperties",
        "maxProperties",
    ): "enforced if all `properties` are required, and as at least one of a closed list",
    (
        "unevaluatedProperties",
        "unevaluatedItems",
    ): "`false` is enforced: names that no part of the schema declares; items in a schema without parts",
    (
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
    ): "enforced; a bound beyond 2^53 is narrowed to that, "
    "and a 400 if nothing within 2^53 satisfies it, as are such numbers in `enum`, `const` and `multipleOf`",
    (
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
    ): "enforced inside the schema: a pointer, an `$id`, an anchor; others are a 400",
    ("items", "prefixItems", "additionalItems"): "enforced, also as in draft 7: a list, with `additionalItems`",
}


def table() -> str:
    """Return the table of keywords in the server's manual, in Markdown."""
    plain = ENFORCED.keys() - {name for names in PARTLY for name in names}
    rows: dict[tuple[str, ...], str] = {
        tuple(name for name in ENFORCED if name in plain): "enforced",
        **PARTLY,
        tuple(IGNORED): "not enforced",
        ANNOTATIONS: "annotations, or read with another keyword",
    }
    lines = [f"| {', '.join(f'`{name}`' for name in names)} | {text} |" for names, text in rows.items()]
    return "\n".join(["| keyword | in a grammar |", "|---|---|", *lines, "| others | annotations |"]) + "\n"
