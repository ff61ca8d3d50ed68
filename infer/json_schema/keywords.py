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
PARTLY = {  # of enforced keywords: what is not, or how they are read
    "oneOf": "as `anyOf`, which is the same where the alternatives exclude each other",
    "not": "of `true` and `{}`, which nothing satisfies; any other is ignored",
    "pattern": "as ECMA-262's and Python's, `\\d`, `\\w` and `\\s` in ASCII. Look-ahead behind `^` is enforced; other "
    "look-around and `\\b` are left out, and a pattern with back-references is ignored",
    "format": ", ".join(f"`{name}`" for name in FORMATS)
    + f". A second's fraction has at most {MAX_FRACTION} digits, a duration's number {MAX_DURATION}; beside a "
    f"`pattern`, {' and '.join(f'`{name}`' for name in BESIDE_A_PATTERN)} ask for no more than that. Other formats are "
    "annotations",
    "propertyNames": "by `enum`, `const`, `pattern`, lengths and formats, unless beside `patternProperties`; not by "
    + ", ".join(f"`{name}`" for name, regex in FORMATS.items() if regex is None),
    "patternProperties": "if no name can match two of the patterns; else the schema is a 400",
    "minProperties": "and `maxProperties`, if all `properties` are required, or it asks for one of a closed list",
    "unevaluatedProperties": "if `false`: names that no part of the schema declares",
    "unevaluatedItems": "if `false`, in a schema without parts",
    "minimum": "and the other bounds: one beyond 2^53 that would admit more is narrowed to 2^53; one that would admit "
    "only more is a 400, as are such numbers in `enum`, `const` and `multipleOf`",
    "$ref": "inside the schema: by pointer, `$id`, `$anchor`. A reference elsewhere is a 400",
    "$dynamicRef": "and `$recursiveRef`, as `$ref`",
    "items": "and `prefixItems`, also as in draft 7: a list, with `additionalItems`",
}


def table() -> str:
    """Return the table of keywords in the server's manual, in Markdown."""

    def row(names: Any, text: str) -> str:
        return f"| {', '.join(f'`{name}`' for name in names)} | {text} |"

    plain = [name for name in ENFORCED if name not in PARTLY]
    rows = [
        "| keyword | in a grammar |",
        "|---|---|",
        row(plain, "enforced"),
        *(row([name], f"enforced {text}") for name, text in PARTLY.items()),
        row(IGNORED, "not enforced; the log says so once, unless it asks for nothing"),
        row(ANNOTATIONS, "annotations, and what other keywords refer to"),
        "| any other | an annotation |",
    ]
    return "\n".join(rows) + "\n"
