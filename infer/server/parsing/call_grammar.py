"""Grammar of forced calls: the text in which a style writes them, with each tool's arguments by its schema.

Arguments in tags are forced parameter by parameter where each has a type of its own. A schema that says more than that
(alternatives of the whole, patterns) is forced as one JSON object in the same place, which is parsed as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from infer.batch.grammar import Grammar
from infer.json_schema.translation import Translation, translate
from infer.server.parsing.schema_check import definitions_of, fits, referred
from infer.server.parsing.stream import split
from infer.server.parsing.tagged_arguments import Tags
from infer.server.parsing.tool_styles import ToolStyle
from infer.server.protocol.tools import FunctionTool

MAX_DEPTH = 8  # of references and alternatives that are followed
EMPTY, TEXT = '""', "TEXT_"  # Lark of no text, and of the names of rules of texts
OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs"}


def call_grammar(style: ToolStyle, tools: Sequence[FunctionTool], *, most: int, tokens: Mapping[str, int]) -> Grammar:
    """Return a grammar that allows one to `most` calls and nothing else.

    `tokens`: ids of added tokens by their text. llguidance treats most of them as special, whatever the tokenizer says,
    and then matches them by reference only. Each tool's schema is a separate JSON document, so that its references
    resolve inside it; its `$comment` names the tool in errors. Raises ValueError naming a tool whose parameters are not
    an object, or are malformed.
    """
    marks = [mark for mark in style.marks if mark in tokens]

    def literal(text: str) -> str:
        """Return the Lark of a text, with its marks as tokens."""
        lark: list[str] = []
        while text:
            before, mark, text = split(text, marks, last=True) if marks else (text, "", "")
            lark += [json.dumps(before)] if before else []
            lark += [f"<[{tokens[mark]}]>"] if mark else []
        return " ".join(lark)

    most = min(most, style.most)
    repeated = f"call ({literal(style.separator)} call){{0,{most - 1}}}" if most > 1 else "call"
    rules = [
        f"start: {literal(style.opening)} {repeated} {literal(style.closing)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    unenforced: list[str] = []
    for i, tool in enumerate(tools):
        schema = {**tool.arguments_schema, "$comment": f"the parameters of {tool.name}"}
        before, _, after = style.form.replace("$name", tool.name).partition("$arguments")
        rules.append(f"call_{i}: {literal(before)} arguments_{i} {literal(after)}")
        translated = None if style.tags is None else translation_of(schema)
        parameters = None if style.tags is None or translated is None else tagged(translated.schema, style.tags)
        if style.tags is None or translated is None or parameters is None:
            rules.append(f"arguments_{i}: {as_json(schema)}")
            continue
        unenforced += translated.remarks
        opening, middle, closing = style.tags.parts
        values = [f"value_{i}_{j}{'' if required else '?'}" for j, (_, required, _) in enumerate(parameters)]
        rules.append(f"arguments_{i}: {' '.join(values) or EMPTY}")
        for j, (key, _, forms) in enumerate(parameters):
            value = f"({' | '.join(forms)})"
            rules.append(f"value_{i}_{j}: {literal(opening + key + middle)} {value} {literal(closing)}")
            rules += text_rules(forms, style.tags)
    kind = "calls" if style.tags is None else "tagged_calls"
    return Grammar(kind, "\n".join(dict.fromkeys(rules)), unenforced=tuple(unenforced))


def translation_of(schema: Mapping[str, Any]) -> Translation:
    try:
        return translate(schema)
    except ValueError as error:
        raise ValueError(f"{schema['$comment']}: {error}") from error


def as_json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def text_rules(forms: Sequence[str], tags: Tags) -> list[str]:
    """Return the rules of the texts among the forms of a value: any that does not hold the mark after it."""
    end = re.sub(r"[.^$*+?()\[\]{}|\\/]", r"\\\g<0>", tags.marks[-1])
    bounds = [form.removeprefix(TEXT).replace("_", ",") for form in forms if form.startswith(TEXT)]
    return [f"{TEXT}{bound.replace(',', '_')}: /(?s:.{{{bound}}})/ & ~/(?s:.*){end}(?s:.*)/" for bound in bounds]


def tagged(schema: Any, tags: Tags) -> list[tuple[str, bool, list[str]]] | None:
    """Return, for each parameter, its name, whether it is required, and the Lark of each form that its value may have.

    `schema` is translated. None for one that says more than its parameters' types.
    """
    if not isinstance(schema, dict) or not set(schema) <= OF_OBJECTS:
        return None
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not all(name in properties for name in required):
        return None
    parameters = []
    for key, member in properties.items():
        forms = forms_of(member, definitions_of(schema), tags)
        if not forms or key != key.strip() or "\n" in key or any(mark in key for mark in tags.marks):
            return None
        parameters.append((key, key in required, forms))
    return parameters


def forms_of(member: Any, definitions: dict[str, Any], tags: Tags, depth: int = 0) -> list[str] | None:
    """Return the Lark of each form that a parameter's value may have; None if it has one that tags cannot show."""
    if member is True or member == {}:  # any value: any text is one
        return [f"{TEXT}0_"]
    if member is False or depth > MAX_DEPTH:
        return None
    keys = set(member)
    if keys == {"$ref"}:
        return forms_of(referred(definitions, member["$ref"]), definitions, tags, depth + 1)
    for name in ("anyOf", "oneOf"):
        if keys == {name}:
            forms = [forms_of(option, definitions, tags, depth + 1) for option in member[name]]
            return None if None in forms else [form for option in forms for form in option or ()]
    if keys <= {"type", "enum", "const"} and keys & {"enum", "const"}:
        values = [value for value in member.get("enum", [member.get("const")]) if fits(value, member)]
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        return [json.dumps(text) for text in texts] if all(t and tags.marks[-1] not in t for t in texts) else None
    kinds: Any = member.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" not in kinds:
        return None if None in kinds else [as_json({**member, "$defs": definitions} if definitions else member)]
    if not keys <= {"type", "minLength", "maxLength"}:
        return None
    others = [kind for kind in kinds if kind != "string"]
    text = f"{TEXT}{member.get('minLength', 0)}_{member.get('maxLength', '')}"
    return [text, *([as_json({"type": others})] if others else [])]
