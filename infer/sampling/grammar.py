"""Grammars that constrain an output, and their translation for llguidance. Light: imports no torch.

White space between JSON tokens is limited to 40 characters, so that a model cannot emit it for ever, and so are numbers
(infer/sampling/number_limit.py). `oneOf` is read as `anyOf`: equivalent wherever the alternatives exclude each other,
as those of a discriminated union do.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import llguidance

KINDS = ("json_object", "json_schema", "regex", "choice", "lark", "calls", "tagged_calls")
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}", "coerce_one_of": True}
# Keywords whose numbers llguidance computes with as doubles.
NUMBER_KEYWORDS = {"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # name -> schema
REMARKS = {"default", "example", "examples", "title", "description", "$comment"}
EXACT = 2**53  # up to which a double holds every integer
NOT_TEXT = "\ufdd0"  # a noncharacter
# Strings, regular expressions and comments of a Lark grammar, or a token's name. Matches in linear time.
LARK_PARTS = re.compile(r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"|//[^\n]*+|/[^/\\\n]*+(?:\\.[^/\\\n]*+)*+/|<[^\s<>]++>')
REASONS = {  # of llguidance's codes, which are errors without a sentence
    "NoExtensionBias": "nothing can satisfy it",
    "ParserTooComplex": "it allows too many ways to go on",
    "LexerTooComplex": "its regular expressions take too much work",
}


@dataclass(frozen=True)
class Grammar:
    """A grammar whose `text` is a JSON schema, a regular expression, a JSON list of strings, or llguidance's Lark.

    `calls` is Lark whose output is JSON between marks: tool calls; in `tagged_calls` some values stand there without
    quotes. `after`: the grammar applies behind this mark and line breaks, any text precedes it. Raises ValueError
    naming the kind if `text` does not have that form; `compile_matcher` finds all other errors.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark", "calls", "tagged_calls"]
    text: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"grammar={self.kind}: must be one of {', '.join(KINDS)}")
        if self.kind in ("json_schema", "choice"):
            try:
                content = json.loads(self.text)
            except ValueError as error:
                raise ValueError(f"{self.kind}: not valid JSON ({error})") from error
            if self.kind == "json_schema" and not isinstance(content, dict | bool):
                raise ValueError("json_schema: must be a JSON object")
            is_choice = isinstance(content, list) and content and all(isinstance(item, str) for item in content)
            if self.kind == "choice" and not is_choice:
                raise ValueError("choice: must be a list of strings, at least one")
        elif self.kind != "json_object" and not self.text:
            raise ValueError(f"{self.kind}: is empty")

    @property
    def source(self) -> str:
        """The grammar in llguidance's format. Raises ValueError for a schema that it would not keep exactly."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind == "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(self.text))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        if self.kind in ("lark", "calls", "tagged_calls"):
            for schema in schemas_in(self.text):
                check_numbers(schema, self.kind)
            return LLMatcher.grammar_from_lark(self.text)
        if self.kind == "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS)
        check_numbers(json.loads(self.text), "json_schema")
        return LLMatcher.grammar_from_json_schema(self.text, overrides=JSON_OPTIONS)


def check_numbers(schema: Any, subject: str) -> None:
    """Raise ValueError naming a number in a JSON schema in whose place llguidance would enforce a neighbour."""
    for keyword, number in numbers_in(schema):
        limit = EXACT if isinstance(number, int) and not keyword.startswith("exclusive") else EXACT - 1
        if abs(number) > limit:
            raise ValueError(
                f"{subject}: {keyword} {number} is beyond 2^53, where numbers cannot be enforced exactly; "
                "leave the bound out, or make the value a string"
            )


def schemas_in(lark: str) -> Iterator[Any]:
    """Yield the JSON schemas in a Lark grammar; one that is not JSON is left to llguidance."""
    for mark in re.finditer(r"%json\s*+", lark):
        with contextlib.suppress(ValueError, RecursionError):
            yield json.JSONDecoder().raw_decode(lark, mark.end())[0]


def numbers_in(schema: Any) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers that a JSON schema compares values with, each with the keyword that holds it."""
    pending: list[tuple[str, Any]] = [("", schema)]  # schemas with "", and what a keyword compares values with
    while pending:
        keyword, node = pending.pop()
        if isinstance(node, list):
            pending += [(keyword, item) for item in node]
        elif isinstance(node, dict):
            for key, value in node.items():
                if not keyword and key in NAMED_SCHEMAS and isinstance(value, dict):
                    pending += [("", item) for item in value.values()]
                elif keyword or key not in REMARKS:
                    pending.append((keyword or (key if key in NUMBER_KEYWORDS else ""), value))
        elif keyword and isinstance(node, int | float):
            yield keyword, node


class GrammarTokenizer(NamedTuple):
    """llguidance's tokenizer, and the ids of its special tokens by their text."""

    tokenizer: llguidance.LLTokenizer
    special_ids: dict[str, int]


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_ids: list[int]) -> GrammarTokenizer:
    """Make llguidance's tokenizer. Raises ValueError if llguidance is not installed or cannot read `tokenizer_json`.

    An added token that is special, or written `<...>`, never matches text in llguidance; only a reference does. But
    where a grammar forces text, llguidance encodes it, finds the added token there, and fails. So these tokens get
    names that no text holds, and their own text is spelled in ordinary tokens.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise ValueError("grammar: needs llguidance; pip install 'headway[serve]'") from error
    written = json.loads(tokenizer_json)
    special = {
        token["content"]: token
        for token in written["added_tokens"]
        if token["special"] or re.fullmatch("<.+>", token["content"], re.DOTALL)
    }
    names = {text: f"<{NOT_TEXT}{token['id']}>" for text, token in special.items()}
    model, pieces = written["model"], written["model"]["vocab"]
    if isinstance(pieces, dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in pieces.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in pieces]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    for text, token in special.items():
        token |= {"content": names[text], "special": True}
    tokenizer = LLTokenizer(json.dumps(written), n_vocab=vocab_size, eos_token=eos_ids or None)
    return GrammarTokenizer(tokenizer, {text: token["id"] for text, token in special.items()})


def by_id(lark: str, special_ids: dict[str, int]) -> str:
    """Return a Lark grammar that refers to special tokens by id instead of by name."""

    def reference(match: re.Match[str]) -> str:
        return f"<[{special_ids[match[0]]}]>" if match[0] in special_ids else match[0]

    return LARK_PARTS.sub(reference, lark)


def compile_matcher(grammar: Grammar, tokenizer: GrammarTokenizer) -> llguidance.LLMatcher:
    """Compile a grammar. Raises ValueError saying what is wrong with it."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # they contain the parser's state, and with it what the client wrote
    )
    if grammar.kind == "lark":
        grammar = replace(grammar, text=by_id(grammar.text, tokenizer.special_ids))
    source = behind(grammar.after, grammar.source, tokenizer.special_ids) if grammar.after else grammar.source
    matcher = LLMatcher(tokenizer.tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(f"{grammar.kind}: {reason_of(matcher)}")
    return matcher


def behind(mark: str, source: str, special_ids: dict[str, int]) -> str:
    """Return a grammar of any text up to a mark, up to two line breaks, and what the grammar `source` allows."""
    grammars = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    free = f"<[{special_ids[mark]}]>" if mark in special_ids else ""
    free = f"free: /(?s:.*)/ {free}" if free else f"free[suffix={json.dumps(mark)}]: /(?s:.*)/"
    first = {"lark_grammar": f"start: free /\\n{{0,2}}/ @body\n{free}"}
    return json.dumps({"grammars": [first, {**grammars[0], "name": "body"}, *grammars[1:]]})


def reason_of(matcher: llguidance.LLMatcher) -> str:
    """Return why a matcher failed, on one line."""
    words = matcher.get_error().replace("<non-verbose/>", "").split()
    return " ".join(REASONS.get(word, word) for word in words)[:300] or "failed"
