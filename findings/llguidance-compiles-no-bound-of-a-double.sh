#!/usr/bin/env bash
# Packages: llguidance 1.9.1, zod 4.6.7
# Behaviour: zod writes `minimum` and `maximum` of plus and minus 1.8e308 for `z.float64()`, and 3.4e38 for `z.float32()`.
#   llguidance refuses both ("Failed to generate regex for float range"), as every bound of a number from about 9.2e18 on.
# One would have guessed: a bound that every double keeps is no bound.
# Why it matters: the schema of a plain number field, which asks for nothing, fails the whole request.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet llguidance==1.9.1
cd "$folder"
npm install --silent zod@4.6.7
cat > schemas.mjs <<'JS'
import * as z from "zod";
for (const type of [z.number(), z.float32(), z.float64(), z.number().max(9e15)]) console.log(JSON.stringify(z.toJSONSchema(type)));
JS
node schemas.mjs > schemas.txt
"$folder/env/bin/python" - <<'PYTHON'
from llguidance import LLMatcher, LLTokenizer

tokenizer, failed = LLTokenizer("byte"), []
for schema in open("schemas.txt", encoding="utf-8"):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    failed.append(matcher.is_error())
    print(schema.strip(), "->", matcher.get_error() or "compiles")
assert failed == [False, True, True, False], "the behaviour has changed"
PYTHON
