#!/usr/bin/env bash
# Package: llguidance 1.9.1
# Behaviour: `format: date` admits 2023-02-29, 1900-02-29 and 0000-01-01, though not 2024-02-30, and `date-time` admits
#   second 60 of any minute. A fraction of a second may have any number of digits.
# One would have guessed: either any eight digits in groups, or the dates that exist; days are checked per month.
# Why it matters: an answer that keeps the schema is refused by date.fromisoformat, pydantic and jsonschema's checker.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet llguidance==1.9.1
"$folder/env/bin/python" - <<'PYTHON'
import datetime
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def admits(form, text):
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": form}))
    matcher = LLMatcher(tokenizer, grammar)
    tokens = list(json.dumps(text).encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def exists(text):
    try:
        return bool(datetime.datetime.fromisoformat(text))
    except ValueError:
        return False


cases = {
    ("date", "2024-02-29"): True,
    ("date", "2024-02-30"): False,
    ("date", "2023-02-29"): True,
    ("date", "1900-02-29"): True,
    ("date", "0000-01-01"): True,
    ("date-time", "2023-06-15T12:00:60Z"): True,
    ("date-time", f"2023-06-15T12:00:00.{'0' * 500}Z"): True,
}
for (form, text), seen in cases.items():
    print(f"{form:9} {text[:30]:30} admitted: {admits(form, text)!s:5} exists: {exists(text)}")
    assert admits(form, text) == seen, "the behaviour has changed"
PYTHON
