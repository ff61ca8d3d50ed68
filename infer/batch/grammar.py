"""Grammars that constrain an output, and their translation for llguidance. Light: imports no torch.

White space between JSON tokens is limited to 40 characters, so that a model cannot emit it for ever, and so are numbers
(infer/batch/number_limit.py). What the keywords of a JSON schema do is in infer/json_schema/keywords.py.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from infer.json_schema.regexes import ASCII
from infer.json_schema.regexes import translate as translate_regex
from infer.json_schema.translation import Translation, translate

if TYPE_CHECKING:
    import llguidance

KINDS = ("json_object", "json_schema", "regex", "choice", "lark", "calls", "tagged_calls")
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}", "coerce_one_of": True}
COMPACT_OPTIONS: Any = {"whitespace_flexible": False, "coerce_one_of": True}
NOT_TEXT = "\ufdd0"  # a noncharacter
# Strings, regular expressions and comments of Lark, a token's name, the mark of a JSON schema. Matches in linear time.
LARK_PARTS = re.compile(
    r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"|//[^\n]*+|/[^/\\\n]*+(?:\\.[^/\\\n]*+)*+/|<[^\s<>]++>|%json\b\s*+'
)
REASONS = {  # of llguidance's codes, which are errors without a sentence
    "NoExtensionBias": "nothing can satisfy it",
    "ParserTooComplex": "it allows too many ways to go on",
    "LexerTooComplex": "its regular expressions take too much work",
}


@dataclass(frozen=True)
class Grammar:
    """A grammar whose `text` is a JSON schema, a regular expression, a JSON list of strings, or llguidance's Lark.

    `calls` is Lark whose output is JSON between marks: tool calls; in `tagged_calls` some values stand there without
    quotes. A schema in either is named by its `$comment` in errors. `after`: the grammar applies behind this mark and
    line breaks, any text precedes it. `compact`: JSON has no white space between tokens; `closed`: objects have no
    properties that the schema does not declare; `unenforced`: remarks on schemas that were translated before. Raises
    ValueError naming the kind if `text` does not have that form; `compile_matcher` finds other errors.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark", "calls", "tagged_calls"]
    text: str = ""
    after: str = ""
    compact: bool = False
    closed: bool = False
    unenforced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"grammar={self.kind}: must be one of {', '.join(KINDS)}")
        if self.kind in ("json_schema", "choice"):
            try:
                content = json.loads(self.text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{self.kind}: not valid JSON ({error})") from error
            if self.kind == "json_schema" and not isinstance(content, dict | bool):
                raise ValueError("json_schema: must be a JSON object")
            is_choice = isinstance(content, list) and content and all(isinstance(item, str) for item in content)
            if self.kind == "choice" and not is_choice:
                raise ValueError("choice: must be a list of strings, at least one")
        elif self.kind != "json_object" and not self.text:
            raise ValueError(f"{self.kind}: is empty")

    @functools.cached_property
    def source(self) -> Source:
        """The grammar for llguidance. Raises ValueError for what is malformed or cannot be enforced."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            regexes, exact = translate_regex(self.text)
            if not exact or len(regexes) > 1:
                raise ValueError("regex: look-around, \\b and back-references are not supported")
            return Source(LLMatcher.grammar_from_regex(regexes[0]))
        if self.kind == "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(self.text))
            return Source(LLMatcher.grammar_from_lark(f"start: {choices}"))
        schemas: list[tuple[str, Translation]] = []
        if self.kind in ("lark", "calls", "tagged_calls"):
            return Source(LLMatcher.grammar_from_lark(self._lark(schemas)), schemas)
        schema = json.loads(self.text) if self.kind == "json_schema" else {"type": "object"}
        schemas.append((self.kind, self._translate(schema, self.kind)))
        return Source(self.alone(schemas[0][1].schema), schemas)

    def _translate(self, schema: Any, subject: str) -> Translation:
        try:
            return translate(schema, closed=self.closed)
        except ValueError as error:
            raise ValueError(f"{subject}: {error}") from error

    def alone(self, schema: Any) -> str:
        """Return the source of a translated schema that is all of a grammar."""
        from llguidance import LLMatcher

        options = COMPACT_OPTIONS if self.compact else JSON_OPTIONS
        schema = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)

    def _lark(self, schemas: list[tuple[str, Translation]]) -> str:
        """Return the grammar with translated JSON schemas, which are added to `schemas`, and classes in ASCII."""
        out: list[str] = []
        place = 0
        while match := LARK_PARTS.search(self.text, place):
            out += [self.text[place : match.start()], match[0]]
            place = match.end()
            if match[0].startswith("/") and not match[0].startswith("//"):
                out[-1] = re.sub(r"\\.", lambda escape: ASCII.get(escape[0], escape[0]), match[0], flags=re.DOTALL)
            elif match[0].startswith("%json"):
                try:
                    schema, place = json.JSONDecoder().raw_decode(self.text, place)
                except (ValueError, RecursionError):  # left to llguidance
                    continue
                out.append(self._nested(schema, schemas))
        return "".join([*out, self.text[place:]])

    def _nested(self, schema: Any, schemas: list[tuple[str, Translation]]) -> str:
        keywords = schema if isinstance(schema, dict) else {}
        subject = f"{self.kind}: JSON schema {len(schemas) + 1}"
        if self.kind in ("calls", "tagged_calls"):
            subject = str(keywords.get("$comment", subject))
        schemas.append((subject, self._translate(schema, subject)))
        translated = schemas[-1][1].schema
        options = {"x-guidance": keywords.get("x-guidance", JSON_OPTIONS)}
        return json.dumps(translated | options if isinstance(translated, dict) else translated)

    @property
    def remarks(self) -> list[str]:
        """What of its JSON schemas is not enforced."""
        remarks = (remark for _, item in self.source.schemas for remark in item.remarks)
        return list(dict.fromkeys([*self.unenforced, *remarks]))


class Source(NamedTuple):
    """A grammar in llguidance's format, and the JSON schemas in it by what they are called in errors."""

    text: str
    schemas: Sequence[tuple[str, Translation]] = ()


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


def compile_matcher(grammar: Grammar, tokenizer: GrammarTokenizer) -> llguidance.LLMatcher:
    """Compile a grammar. Raises ValueError saying what is wrong with it, and in which schema."""
    if grammar.kind == "lark":
        ids = {name: f"<[{index}]>" for name, index in tokenizer.special_ids.items()}  # how Lark refers to them by id
        grammar = replace(grammar, text=LARK_PARTS.sub(lambda match: ids.get(match[0], match[0]), grammar.text))
    source = grammar.source.text
    if grammar.after:
        source = behind(grammar.after, source, tokenizer.special_ids)
    matcher = matcher_of(source, tokenizer)
    if matcher.is_error():
        for subject, translation in grammar.source.schemas:
            for regex, place in translation.patterns.items():
                alone = matcher_of(grammar.alone({"type": "string", "pattern": regex}), tokenizer)
                if alone.is_error():
                    raise ValueError(f"{subject}: {place}: {reason_of(alone)}")
            alone = matcher_of(grammar.alone(translation.schema), tokenizer)
            if alone.is_error():
                raise ValueError(f"{subject}: {reason_of(alone)}")
        raise ValueError(f"{grammar.kind}: {reason_of(matcher)}")
    return matcher


def matcher_of(source: str, tokenizer: GrammarTokenizer) -> llguidance.LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # they contain the parser's state, and with it what the client wrote
    )
    return LLMatcher(tokenizer.tokenizer, source, log_level=0, limits=limits)


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
