#!/usr/bin/env bash
# Packages: trl 1.16.0 (which carries published chat templates unchanged), jinja2 3.1.6.
# Behaviour: DeepSeek-V3's chat template has marks for tool calls and their results, but never reads `tools`: the prompt
#   with tools is byte for byte the one without. And of two rounds of calls in one conversation only the first stands
#   behind `<Assistant>` and between the marks that open and close a list of calls; the second begins with a line break and
#   the mark of a single call, and its results have no mark that opens their list.
# One would have guessed: that a template with eight marks for tools shows them, and that each round looks like the first.
# Why it matters: apply_chat_template(tools=...) succeeds, and the model answers as if there were no tools; in an agent's
#   second step it is prompted in a format that no first step had.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jinja2==3.1.6
"$folder/env/bin/pip" download --quiet --no-deps --dest "$folder" trl==1.16.0
"$folder/env/bin/python" - "$folder" <<'PYTHON'
import pathlib
import sys
import zipfile

import jinja2

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("trl-*.whl")))
template = wheel.read("trl/chat_templates/deepseekv3.jinja").decode()
template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
question = [{"role": "user", "content": "hi"}]
plain, with_tools = (template.render(messages=question, tools=t, add_generation_prompt=True) for t in (None, tools))
print("with tools the prompt is", "the same" if plain == with_tools else "another")


def round_of(number):
    function = {"name": "add", "arguments": f'{{"a": {number}}}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    return [call, {"role": "tool", "content": str(number)}]


text = template.render(messages=question + round_of(1) + round_of(2), tools=tools)
print(text)
assert plain == with_tools, "the template shows tools now"
assert [text.count(mark) for mark in ("<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁outputs▁begin｜>")] == [1, 1, 1]
assert [text.count(mark) for mark in ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>")] == [2, 2, 2]
PYTHON
