"""Grammars that constrain an output, and their translation for llguidance. Light: imports no torch.

White space between JSON tokens is limited to 40 characters, so that a model cannot emit it for ever. `oneOf` is read as
`anyOf`: equivalent wherever the alternatives exclude each other, as those of a discriminated union do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import llguidance

KINDS = ("json_object", "json_schema", "regex", "choice", "lark")
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}", "coerce_one_of": True}


@dataclass(frozen=True)
class Grammar:
    """A grammar whose `text` is a JSON schema, a regular expression, a JSON list of strings, or llguidance's Lark.

    Raises ValueError naming the kind if `text` does not have that form; `compile_matcher` finds all other errors.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark"]
    text: str = ""

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
        """The grammar in llguidance's format."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind == "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(self.text))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(self.text)
        schema = self.text if self.kind == "json_schema" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_ids: list[int]) -> llguidance.LLTokenizer:
    """Make llguidance's tokenizer. Raises ValueError if llguidance is not installed or cannot read `tokenizer_json`."""
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise ValueError("grammar: needs llguidance; pip install 'headway[serve]'") from error
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_ids or None)


def compile_matcher(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Compile a grammar. Raises ValueError saying what is wrong with it."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # they contain the parser's state, and with it what the client wrote
    )
    matcher = LLMatcher(tokenizer, grammar.source, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(f"{grammar.kind}: {one_line(matcher.get_error())}")
    return matcher


def one_line(error: str) -> str:
    return " ".join(error.split())[:300] or "failed"
