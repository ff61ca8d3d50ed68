"""Grammar of forced calls: the text in which a style writes them, with each tool's arguments by its schema.

Arguments in tags are forced parameter by parameter where each has a type of its own. A schema that says more than that
(references outside its definitions, alternatives of the whole, patterns) is forced as one JSON object in the same
place, which is parsed as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer.sampling.grammar import JSON_OPTIONS, REMARKS, Grammar, check_numbers
from infer.server.parsing.schema_check import fits, resolve
from infer.server.parsing.tagged_arguments import Tags
from infer.server.parsing.tool_styles import ToolStyle
from infer.server.protocol.tools import FunctionTool

MAX_DEPTH = 8  # of references and alternatives that are followed
EMPTY, TEXT = '""', "TEXT_"  # Lark of no text, and of the names of rules of texts
DEFINITIONS = ("$defs", "definitions")
SCOPES = {"$id", "$anchor", "$dynamicRef", "$dynamicAnchor"}
OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$schema", *DEFINITIONS, *REMARKS}


def call_grammar(style: ToolStyle, tools: Sequence[FunctionTool], *, most: int, tokens: Mapping[str, int]) -> Grammar:
    """Return a grammar that allows one to `most` calls and nothing else.

    `tokens`: ids of added tokens by their text. llguidance treats most of them as special, whatever the tokenizer says,
    and then matches them by reference only. Each tool's schema is a separate JSON document, so that its references
    resolve inside it. Raises ValueError naming a tool whose parameters are not an object, or hold a number that cannot
    be kept.
    """
    marks = [mark for mark in style.marks if mark in tokens]

    def literal(text: str) -> str:
        """Return the Lark of a text, with its marks as tokens."""
        pieces = re.split("|".join(map(re.escape, marks)), text) if marks else [text]
        found = re.findall("|".join(map(re.escape, marks)), text) if marks else []
        lark = [json.dumps(pieces[0])] if pieces[0] else []
        for mark, piece in zip(found, pieces[1:], strict=True):
            lark += [f"<[{tokens[mark]}]>", *([json.dumps(piece)] if piece else [])]
        return " ".join(lark)

    most, between = min(most, style.most), literal(style.separator)
    repeated = f"call ({between} call){{0,{most - 1}}}" if most > 1 else "call"
    rules = [
        f"start: {literal(style.opening)} {repeated} {literal(style.closing)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        schema = tool.arguments_schema
        check_numbers(schema, f"the parameters of {tool.name}")
        before, _, after = style.form.replace("$name", tool.name).partition("$arguments")
        rules.append(f"call_{i}: {literal(before)} arguments_{i} {literal(after)}")
        parameters = None if style.tags is None else tagged(schema, style.tags)
        if style.tags is None or parameters is None:
            rules.append(f"arguments_{i}: {as_json(schema)}")
            continue
        opening, middle, closing = style.tags.parts
        values = [f"value_{i}_{j}{'' if required else '?'}" for j, (_, required, _) in enumerate(parameters)]
        rules.append(f"arguments_{i}: {' '.join(values) or EMPTY}")
        for j, (key, _, forms) in enumerate(parameters):
            value = f"({' | '.join(forms)})"
            rules.append(f"value_{i}_{j}: {literal(opening + key + middle)} {value} {literal(closing)}")
            rules += text_rules(forms, style.tags)
    kind = "calls" if style.tags is None else "tagged_calls"
    return Grammar(kind, "\n".join(dict.fromkeys(rules)))


def as_json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def text_rules(forms: Sequence[str], tags: Tags) -> list[str]:
    """Return the rules of the texts among the forms of a value: any that does not hold the mark after it."""
    end = re.escape(tags.marks[-1]).replace("/", r"\/")
    bounds = [form.removeprefix(TEXT).replace("_", ",") for form in forms if form.startswith(TEXT)]
    return [f"{TEXT}{bound.replace(',', '_')}: /(?s:.{{{bound}}})/ & ~/(?s:.*){end}(?s:.*)/" for bound in bounds]


def tagged(schema: Mapping[str, Any], tags: Tags) -> list[tuple[str, bool, list[str]]] | None:
    """Return, for each parameter, its name, whether it is required, and the Lark of each form that its value may have.

    None for a schema that says more than its parameters' types.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not (set(schema) <= OF_OBJECTS and isinstance(properties, dict) and isinstance(required, list)):
        return None
    if not (all(name in properties for name in required) and all(map(is_local, references(schema)))):
        return None
    found = []
    for key, member in properties.items():
        forms = forms_of(member, schema, tags)
        if not forms or key != key.strip() or "\n" in key or any(mark in key for mark in tags.marks):
            return None
        found.append((key, key in required, forms))
    return found


def references(schema: Any) -> Iterator[str]:
    """Yield what a schema refers to, and the scopes that it opens."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield from SCOPES & set(node)
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
        pending += list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []


def is_local(reference: str) -> bool:
    return reference.startswith(tuple(f"#/{name}/" for name in DEFINITIONS))


def forms_of(member: Any, schema: Mapping[str, Any], tags: Tags, depth: int = 0) -> list[str] | None:
    """Return the Lark of each form that a parameter's value may have; None if it has one that tags cannot show."""
    keys = set(member) - REMARKS if isinstance(member, dict) else set()
    if member is True or (isinstance(member, dict) and not keys):  # any value: any text is one
        return [f"{TEXT}0_"]
    if not isinstance(member, dict) or depth > MAX_DEPTH:
        return None
    if keys == {"$ref"}:
        try:
            return forms_of(resolve(schema, member["$ref"]), schema, tags, depth + 1)
        except (ValueError, TypeError, LookupError, AttributeError):
            return None
    for name in ("anyOf", "oneOf"):
        if keys == {name} and isinstance(member[name], list):
            forms = [forms_of(option, schema, tags, depth + 1) for option in member[name]]
            return None if None in forms else [form for option in forms for form in option or ()]
    if keys <= {"type", "enum", "const"} and keys & {"enum", "const"}:
        listed = member["enum"] if isinstance(member.get("enum"), list) else [member.get("const")]
        values = [value for value in listed if fits(value, member)]
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        return [json.dumps(text) for text in texts] if all(t and tags.marks[-1] not in t for t in texts) else None
    kinds: Any = member.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" not in kinds:
        return None if None in kinds else [as_json({**member, **{n: schema[n] for n in DEFINITIONS if n in schema}})]
    least, most = member.get("minLength", 0), member.get("maxLength", "")
    if not keys <= {"type", "minLength", "maxLength"} or not all(isinstance(n, int) or n == "" for n in (least, most)):
        return None
    others = [kind for kind in kinds if kind != "string"]
    return [f"{TEXT}{least}_{most}", *([as_json({"type": others})] if others else [])]
