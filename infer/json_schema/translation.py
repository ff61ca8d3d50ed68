"""Translates a client's JSON schema of any draft into one that llguidance enforces, in the keywords of draft 2020-12.

Every reference becomes one to `#/$defs/<number>`, so the result has no other definitions, identifiers or anchors. What
asks for nothing is left out, and so is what no grammar can enforce (keywords.py), which `remarks` says.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

from infer.json_schema import keywords
from infer.json_schema.formats import BESIDE_A_PATTERN, FORMATS, LIMITS
from infer.json_schema.regexes import translate as translate_regex

EXACT = 2**53  # up to which a double, in which llguidance computes, holds every integer
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
ANCHORS = ("$anchor", "$dynamicAnchor")
PARTS = ("allOf", "anyOf", "oneOf")
MAX_PATH = 200  # characters of a place in a message
MAX_REFERENCES = 16  # that lead to one another, in names
MAX_COUNT = 2**20  # no answer has so many of anything, so that this is no bound
UPPER = ("maximum", "exclusiveMaximum")
Json = dict[str, Any]
Place = tuple[str, ...]


class Translation(NamedTuple):
    """A schema for llguidance, what of the client's it does not enforce, and its regular expressions by place."""

    schema: Any
    remarks: tuple[str, ...]
    patterns: dict[str, str]


def translate(document: Any, *, closed: bool = False) -> Translation:
    """Translate a schema. Raises ValueError naming the place and keyword of what is malformed or cannot be kept.

    `closed`: objects with declared properties have no others unless the schema says so, as in OpenAI's strict schemas.
    """
    translator = Translator(document, closed=closed)
    try:
        schema, definitions = translator.schema(document, (), ""), translator.definitions()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if definitions and isinstance(schema, dict):
        schema["$defs"] = definitions
    return Translation(schema, tuple(translator.remarks), translator.patterns)


class Translator:
    def __init__(self, document: Any, *, closed: bool) -> None:
        self._document, self._closed = document, closed
        self._known: dict[str, tuple[Any, str]] | None = None  # URI -> schema and the base of its references
        self._numbers: dict[int, int] = {}  # id of a schema that is referred to -> its number
        self._pending: list[tuple[Any, Place, str]] = []  # those schemas with their places and bases
        self.remarks: dict[str, None] = {}
        self.patterns: dict[str, str] = {}

    def definitions(self) -> Json:
        """Translate the schemas that are referred to, and those that these refer to."""
        result: Json = {}
        while len(result) < len(self._pending):
            result[str(len(result))] = self.schema(*self._pending[len(result)])
        return result

    def schema(self, node: Any, place: Place, base: str) -> Any:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise malformed(place, keywords.SCHEMA)
        base = base_of(node, base)
        result: Json = {}
        for key, value in node.items():
            if key in keywords.ENFORCED:
                self._enforce(key, value, node, result, (*place, key), base)
            elif key in keywords.IGNORED and not keywords.IGNORED[key](value, node):
                self.remarks[f"{key} is not enforced"] = None
        if "not" in result:
            return False
        if not result.get("allOf", True):
            del result["allOf"]
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(result.get(exclusive), bool) and result.pop(exclusive) and bound in result:  # of draft 4
                result[exclusive] = result.pop(bound)
        if self._closed and not node.keys().isdisjoint({"properties", "patternProperties"}):
            result.setdefault("additionalProperties", False)
        if node.get("unevaluatedProperties") is False and "additionalProperties" not in node:
            self._close(node, result, base)
        if "propertyNames" in node:
            self._name(node["propertyNames"], result, (*place, "propertyNames"), base)
        self._count(result)
        return result

    def _enforce(self, key: str, value: Any, node: Json, result: Json, place: Place, base: str) -> None:
        """Add a keyword to the translated schema `result`, in the order of the client's, which llguidance heeds."""
        shape = keywords.ENFORCED[key]
        if key == "items" and isinstance(value, list):  # before draft 2020-12
            result["prefixItems"] = self._list(value, place, base)
            if "additionalItems" in node:
                result["items"] = self.schema(node["additionalItems"], (*place[:-1], "additionalItems"), base)
            return
        if not shape.holds(value):
            raise malformed(place, shape)
        if key in ("additionalItems", "propertyNames"):
            return
        if shape == keywords.SCHEMA:
            value = self.schema(value, place, base)
        elif shape == keywords.SCHEMAS:
            value = self._list(value, place, base)
        elif shape == keywords.NAMED:
            items = {name: self.schema(item, (*place, name), base) for name, item in value.items()}
            value = items if key == "properties" else self._by_pattern(items, place)
        elif shape == keywords.COUNT:
            value = int(value)
        elif shape in (keywords.NUMBER, keywords.BOUND) and keywords.is_number(value):
            value = self._number(key, value)
        elif key in ("const", "enum"):
            check_numbers(key, value)
        if key in REFERENCES:
            result["$ref"] = self._refer(value, place, base)
        elif key == "pattern":
            if regexes := self._patterns(value, place):
                result["pattern"] = regexes[0]
                result["allOf"] = [*result.get("allOf", []), *({"pattern": regex} for regex in regexes[1:])]
        elif key == "format":
            self._format(value, result, beside="pattern" in node)
        elif key == "allOf":  # patterns may be there already
            result["allOf"] = [*value, *result.get("allOf", [])]
        elif key == "not":
            if node["not"] is True or asks_for_nothing(node["not"]):
                result["not"] = True
            elif node["not"] is not False:
                self.remarks["not is not enforced"] = None
        elif key in ("maxItems", "maxLength", "maxProperties") and value >= MAX_COUNT:
            pass
        elif key == "unevaluatedItems":
            if value is False and node.keys().isdisjoint({"items", *PARTS, *REFERENCES}):
                result["items"] = False
            elif value is not True:
                self.remarks["unevaluatedItems is not enforced"] = None
        elif key == "unevaluatedProperties":
            if not isinstance(value, bool) and value != {}:
                self.remarks["unevaluatedProperties is not enforced"] = None
        else:
            result[key] = value

    def _list(self, nodes: list[Any], place: Place, base: str) -> list[Any]:
        return [self.schema(node, (*place, str(index)), base) for index, node in enumerate(nodes)]

    def _number(self, key: str, value: float) -> float:
        """Return a bound or a divisor that llguidance computes with exactly: a bound that is too far away is nearer."""
        limit, sign = limit_of(key, value), 1 if key in UPPER else -1
        if key != "multipleOf" and sign * value > limit:
            self.remarks[f"{key} beyond 2^53 is narrowed to that"] = None
            return sign * limit
        check_numbers(key, value)
        return value

    def _by_pattern(self, items: Json, place: Place) -> Json:
        translated = ((self._patterns(name, (*place, name))[:1], item) for name, item in items.items())
        return {regexes[0]: item for regexes, item in translated if regexes}

    def _patterns(self, text: str, place: Place) -> list[str]:
        """Return the regular expressions of a pattern that can be enforced; of those for names only the first is."""
        regexes, exact = translate_regex(text)
        if not exact or (len(regexes) > 1 and place[-1] == text):
            self.remarks[f"{'look-around' if regexes else 'a back-reference'} in a pattern is not enforced"] = None
        self.patterns |= dict.fromkeys(regexes, shown(place))
        return regexes

    def _format(self, name: str, result: Json, *, beside: bool) -> None:
        if name not in FORMATS:
            plain = re.fullmatch(r"[\w.+-]{1,40}", name, re.ASCII)
            self.remarks |= {} if beside else {f"format {name if plain else '(...)'} is an annotation": None}
            return
        regex = FORMATS[name] if not beside else BESIDE_A_PATTERN.get(name, FORMATS[name])
        if regex is None:
            result["format"] = name
        more = [LIMITS[name]] if name in LIMITS else []
        if regex is not None and beside:
            more.append({"pattern": regex})
        elif regex is not None:
            result["pattern"] = regex
        if more:
            result["allOf"] = [*result.get("allOf", []), *more]

    def _name(self, node: Any, result: Json, place: Place, base: str) -> None:
        """Enforce `propertyNames` by properties, or by a pattern of properties."""
        for _ in range(MAX_REFERENCES):
            if isinstance(node, dict) and isinstance(reference := node.get("$ref"), str):
                node, base = self._target(reference, base, place)
        names = self.schema(node, place, base)
        allowed, others = finite_names(names), result.get("additionalProperties", True)
        said = set(names) - {"type"} if isinstance(names, dict) else set()
        if allowed is None and not said:
            return
        if "patternProperties" in result or (
            allowed is None and said.isdisjoint({"pattern", "minLength", "maxLength"})
        ):
            self.remarks["propertyNames is not enforced"] = None
        elif allowed is not None:
            declared = result.get("properties", {})
            result["properties"] = dict.fromkeys(declared, False) | {
                name: declared.get(name, others) for name in allowed
            }
            result["additionalProperties"] = False
        elif others is not False:
            regex = names.get("pattern")
            if regex is None:
                regex = rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
            if said - ({"pattern"} if "pattern" in names else {"minLength", "maxLength"}):
                self.remarks["propertyNames is enforced by its pattern alone"] = None
            result["patternProperties"], result["additionalProperties"] = {regex: others}, False

    def _close(self, node: Json, result: Json, base: str) -> None:
        """Enforce `unevaluatedProperties: false`: admit the names that the parts of a schema declare, and no others."""
        pending, seen = [(node, base)], set[int]()
        names, patterns = Json(), Json()
        while pending:
            part, base = pending.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            base = base_of(part, base)
            for key in part.keys() & {"properties", "patternProperties", *PARTS, *REFERENCES}:
                if not keywords.ENFORCED[key].holds(part[key]):
                    raise malformed((key,), keywords.ENFORCED[key])
            if part.get("additionalProperties", False) is not False:
                return
            names |= dict.fromkeys(part.get("properties") or (), True)
            patterns |= dict.fromkeys(part.get("patternProperties") or (), True)
            pending += [(item, base) for key in PARTS for item in part.get(key) or ()]
            pending += [(part[key], base) for key in ("then", "else", "if") if key in part]
            pending += [self._target(part[key], base, (key,)) for key in REFERENCES if key in part]
        result["properties"] = names | result.get("properties", {})
        if patterns:
            result["patternProperties"] = self._by_pattern(patterns, ("patternProperties",)) | result.get(
                "patternProperties", {}
            )
        result["additionalProperties"] = False

    def _count(self, result: Json) -> None:
        """Leave out counts of properties where llguidance has none."""
        counts = {"minProperties", "maxProperties"} & result.keys()
        properties = result.get("properties", {})
        if not counts or not properties.keys() - set(result.get("required", ())):
            return
        is_list = result.get("additionalProperties") is False and not result.get("patternProperties")
        if result.get("minProperties", 0) <= 1 and "maxProperties" not in result and is_list:
            return
        for key in counts:
            least, most = key == "minProperties" and result[key] == 0, is_list and result[key] >= len(properties)
            if not least and not (most and key == "maxProperties"):
                self.remarks[f"{key} beside optional properties is not enforced"] = None
            del result[key]

    def _refer(self, reference: str, place: Place, base: str) -> str:
        node, base = self._target(reference, base, place)
        if id(node) not in self._numbers:
            self._numbers[id(node)] = len(self._pending)
            self._pending.append((node, (reference,), base))
        return f"#/$defs/{self._numbers[id(node)]}"

    def _target(self, reference: Any, base: str, place: Place) -> tuple[Any, str]:
        """Return the schema that a reference means, and the base of references in it."""
        if self._known is None:
            self._known = identified(self._document)
        uri = base.partition("#")[0] + reference if reference.startswith("#") else urljoin(base, reference)
        root, _, fragment = uri.partition("#")
        fragment = unquote(fragment)
        try:
            if fragment and not fragment.startswith("/"):
                return self._known[f"{root}#{fragment}"]
            node, base = self._known[root]
            for part in fragment.split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                node = node[int(key)] if isinstance(node, list) else node[key]
                base = base_of(node, base)
        except (LookupError, ValueError, TypeError) as error:
            raise ValueError(f"{shown(place)}: {reference[:MAX_PATH]!r} is not in this schema") from error
        return node, base


def identified(document: Any) -> dict[str, tuple[Any, str]]:
    """Return the schemas that have a URI, by it: the document, those with an `$id` and those with an anchor."""
    known: dict[str, tuple[Any, str]] = {"": (document, base_of(document, ""))}
    pending = [(document, "")]
    while pending:
        node, base = pending.pop()
        if isinstance(node, dict):
            base = base_of(node, base)
            if isinstance(node.get("$id"), str):
                known.setdefault(base, (node, base))
            for key in ANCHORS:
                if isinstance(node.get(key), str):
                    known.setdefault(f"{base}#{node[key]}", (node, base))
        if isinstance(node, dict | list):
            pending += [(item, base) for item in (node.values() if isinstance(node, dict) else node)]
    return known


def base_of(node: Any, base: str) -> str:
    """Return the base of references in a schema, where `base` is that of references beside it."""
    identifier = node.get("$id") if isinstance(node, dict) else None
    return urljoin(base, identifier).partition("#")[0] if isinstance(identifier, str) else base


def finite_names(schema: Any) -> list[str] | None:
    """Return the names that a translated schema of names admits; None if it does not list them."""
    if isinstance(schema, bool):
        return None if schema else []
    if "enum" in schema or "const" in schema:
        return [name for name in schema.get("enum", [schema.get("const")]) if isinstance(name, str)]
    for key in ("anyOf", "oneOf"):
        options = [finite_names(option) for option in schema.get(key, ())]
        if options and None not in options:
            return [name for option in options for name in option or ()]
    kinds = schema.get("type", "string")
    return None if "string" in ([kinds] if isinstance(kinds, str) else kinds) else []


def asks_for_nothing(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.keys().isdisjoint({*keywords.ENFORCED, *keywords.IGNORED})


def limit_of(key: str, number: float) -> int:
    """Return up to which number llguidance keeps those of a keyword exactly."""
    return EXACT if isinstance(number, int) and not key.startswith("exclusive") else EXACT - 1


def check_numbers(key: str, value: Any) -> None:
    """Raise ValueError naming a number in whose place llguidance would enforce a neighbour."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list | dict):
            pending += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int | float) and abs(item) > limit_of(key, item):
            raise ValueError(
                f"{key} {item} is beyond 2^53, where numbers cannot be enforced exactly; "
                "leave it out, or make the value a string"
            )


def shown(place: Place) -> str:
    return ".".join(place)[-MAX_PATH:] or "the schema"


def malformed(place: Place, shape: keywords.Shape) -> ValueError:
    return ValueError(f"{shown(place)}: must be {shape.phrase}")
