#!/usr/bin/env bash
# Packages: trl 1.16.0 (which carries published chat templates unchanged), jinja2 3.1.6.
# Behaviour: Qwen3.5's chat template writes a tool call's parameter true as `True` and null as `None`, Python's spelling,
#   while the same values one level deeper are JSON (`{"on": true}`). Nemotron 3's template does so too; Qwen3.6 and
#   GLM-4.5 write `true` and `null` in the same places.
# One would have guessed: JSON at every level, as the tool's schema declares a boolean.
# Why it matters: a model sees its own calls like this in every later turn, so a server that reads values as JSON gets the
#   string "True" for a boolean, and one that compares a call with its rendered history finds another text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jinja2==3.1.6
"$folder/env/bin/pip" download --quiet --no-deps --dest "$folder" trl==1.16.0
"$folder/env/bin/python" - "$folder" <<'PYTHON'
import json
import pathlib
import sys
import zipfile

import jinja2

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("trl-*.whl")))
environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
environment.filters["tojson"] = lambda value, **options: json.dumps(value, **options)
call = {"type": "function", "function": {"name": "set", "arguments": {"on": True, "none": None, "deep": {"on": True}}}}
messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
seen = {}
for name in ("qwen3_5_think", "nemotron_3_nano", "qwen3_6", "glm4moe"):
    template = wheel.read(f"trl/chat_templates/{name}.jinja").decode()
    text = environment.from_string(template).render(messages=messages, tools=[], add_generation_prompt=False)
    text = text[text.index("hi") :]
    seen[name] = [word for word in ("True", "None", "true\n", "null\n", 'true<', 'null<', '{"on": true}') if word in text]
    print(name, seen[name])
python = ["True", "None", '{"on": true}']
assert seen["qwen3_5_think"] == seen["nemotron_3_nano"] == python, "the templates have changed"
assert "True" not in seen["qwen3_6"] + seen["glm4moe"]
PYTHON
