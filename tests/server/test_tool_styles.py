"""Each family's published format of tool calls: found from its chat template, read whole and cut, by schema."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from infer.config import TOOL_STYLES
from infer.server.parsing.harmony import HarmonyParser
from infer.server.parsing.stream import ChatParser, Parts
from infer.server.parsing.style_choice import choose_style, style_of
from infer.server.parsing.tool_styles import STYLES
from models.chat import Chat
from models.tokenizer import Tokenizer
from tests.chats import SHOWS_CALLS, TEMPLATES
from tests.server.harness import MODEL, MakeServer, Server
from tests.server.test_call_round_trip import chat_message, content_of, content_of_items, response_items
from tests.vocabularies import FAMILIES

# template -> its style; for the others its tools or its calls are not read
STYLE_OF = {
    **{"glm4moe": "glm45", "gpt_oss": "harmony", "granite3_3": "granite", "hermes": "hermes", "llama3_1": "llama3"},
    **{"minimax": "minimax_m2", "mistral": "mistral", "phi4_mini": "phi4_mini"},
    **{"qwen2_5": "hermes", "qwen3": "hermes", "qwen3_5": "qwen3_coder"},
}
ARGUMENTS: dict[str, Any] = {"a": 1, "s": 'x\n</b> "é" 5', "on": True, "none": None, "deep": {"k": [1, "2"]}}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "s": {"type": "string"},
        "on": {"type": "boolean"},
        "none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "deep": {"$ref": "#/$defs/Deep"},
    },
    "$defs": {"Deep": {"type": "object", "properties": {"k": {"type": "array"}}}},
}
SCHEMAS: dict[str, Any] = {"add": PARAMETERS, "add_all": PARAMETERS, "now": {"type": "object", "properties": {}}}
CALLS = [("add", ARGUMENTS), ("now", {}), ("add_all", {"a": 22})]
DEEPSEEK = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]


def chat_of(family: str) -> Chat:
    return Chat(TEMPLATES[family], special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, source=family)


def parser_of(name: str, **options: Any) -> ChatParser:
    if name == "harmony":
        return HarmonyParser(list(SCHEMAS), **options)
    return ChatParser(STYLES[name], list(SCHEMAS), schemas=SCHEMAS, **options)


def streamed(parser: ChatParser, text: str, size: int = 1) -> Parts:
    parts = Parts()
    for start in range(0, len(text), size):
        parts.items += parser.take(text[start : start + size], None).items
    parts.items += parser.take("", "stop").items
    return parts


def found(parts: Parts) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parts.calls if call.complete]


def written(name: str, calls: list[tuple[str, Any]]) -> str:
    """Return the text of calls in a style, as its published template writes them."""
    style, texts = STYLES[name], []
    for function, arguments in calls:
        text = json.dumps(arguments, ensure_ascii=False)
        if style.tags is not None:
            values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
            text = "".join(style.tags.form.replace("$key", k).replace("$value", v) for k, v in values.items())
        texts.append(style.form.replace("$name", function).replace("$arguments", text))
    return style.opening + style.separator.join(texts) + style.closing


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_template_tells_the_style(family: str) -> None:
    style, unread = choose_style("auto", chat_of(family))
    assert (style and style.name) == STYLE_OF.get(family)
    assert bool(unread) == (style is None)


@pytest.mark.parametrize("family", sorted(SHOWS_CALLS - {"deepseek"}))
def test_what_the_template_writes_is_read(family: str) -> None:
    """Calls in a history, as the model has seen them in training; Llama's and gpt-oss's templates show one."""
    style = STYLES[STYLE_OF.get(family, "deepseek_v3")]
    calls = CALLS[:1] if family in ("llama3_1", "gpt_oss") else CALLS
    shown = [
        {"id": f"abcdefgh{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    tools = [
        {"type": "function", "function": {"name": n, "description": n, "parameters": s}} for n, s in SCHEMAS.items()
    ]
    tools = [tool for tool in tools if tool["function"]["name"] != "now" or family != "gpt_oss"]
    if family == "gpt_oss":
        tools = []
    question = [{"role": "user", "content": "hi"}]
    turn = {"role": "assistant", "content": None, "tool_calls": shown}
    prompt = chat_of(family).render(question, tools=tools)
    text = chat_of(family).render([*question, turn], tools=tools, generation_prompt=False)
    answer = text[len(prompt) :] if text.startswith(prompt) else text.rpartition("hi")[2]
    if style.bare:
        answer = answer.partition("<|end_header_id|>\n\n")[2] or answer
    assert found(streamed(parser_of(style.name), answer)) == calls, answer
    assert found(parser_of(style.name).take(answer, "stop")) == calls


@pytest.mark.parametrize("name", STYLES)
def test_calls_are_read_wherever_the_text_is_cut(name: str) -> None:
    calls = CALLS[: STYLES[name].most]
    text = written(name, calls)
    for size in (1, 2, 7, len(text)):
        parts = streamed(parser_of(name), text, size)
        assert (found(parts), parts.content) == (calls, "")
    whole = parser_of(name).take(text, "stop").calls
    for end in range(len(text) + 1):
        parts = parser_of(name).take(text[:end], "length")
        *complete, last = parts.calls or [None]
        assert complete == whole[: len(complete)]
        if last is not None:
            expected = whole[len(complete)]
            assert last.name == expected.name
            assert expected.arguments.startswith(last.arguments)
            assert last.complete == (last.arguments == expected.arguments)
        begun = parts.content.lstrip()  # a partial mark is none
        assert any(mark.startswith(begun) for mark in (*STYLES[name].begins, "{"))


@pytest.mark.parametrize("name", STYLES)
def test_a_call_of_no_tool_is_content(name: str) -> None:
    text = written(name, [("rm", {"a": 1})])
    for parts in (streamed(parser_of(name), text), parser_of(name).take(text, "stop")):
        assert parts.calls == []
        assert parts.content == ('{"a": 1}' if name == "harmony" else text)


CODER, GLM = "qwen3_coder", "glm45"
ONE = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
# style, text -> content ("=": all of it), calls
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (CODER, ONE, "", [("add", {"a": 1})]),
    (CODER, f"I add.\n{ONE}\n{ONE}\n", "I add.\n", [("add", {"a": 1})] * 2),
    (CODER, "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "", [("add", {"a": 1})]),
    (
        CODER,
        "<tool_call><function=add><parameter=s>\n\n 1\n\n</parameter></function></tool_call>",
        "",
        [("add", {"s": "\n 1\n"})],
    ),
    (
        CODER,
        "<tool_call>\n<function=add>\n<parameter=on>\nFalse\n</parameter>\n</function>\n</tool_call>",
        "",
        [("add", {"on": False})],
    ),
    (
        CODER,
        "<tool_call>\n<function=add>\n<parameter=s>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "",
        [("add", {"s": "True"})],
    ),
    (
        CODER,
        "<tool_call>\n<function=add>\n<parameter=x>\n[1]\n</parameter>\n</function>\n</tool_call>",
        "",
        [("add", {"x": [1]})],
    ),
    (
        CODER,
        "<tool_call>\n<function=add>\n<parameter=a>\none\n</parameter>\n</function>\n</tool_call>",
        "",
        [("add", {"a": "one"})],
    ),
    (CODER, "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    (CODER, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [("add", {"a": 1})]),
    (CODER, '<function=add>{"a": 1}</function>', "", [("add", {"a": 1})]),
    (CODER, "<tool_call>\n<function=add>\nso\n</function>\n</tool_call>", "=", []),
    (CODER, "<tool_call>\n<function=add>\n<parameter=a>\n1\n", "=", []),
    (CODER, "<tool_call>\n<function=add>\n<parameter=a\n", "=", []),
    (CODER, "a <function=f> b <tool_call>", "=", []),
    (GLM, "<tool_call>add\n<arg_key>s</arg_key>\n<arg_value>5</arg_value>\n</tool_call>", "", [("add", {"s": "5"})]),
    (GLM, "So.\n<tool_call>now\n</tool_call><tool_call>now</tool_call>", "So.\n", [("now", {})] * 2),
    (GLM, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_val>5</arg_val>\n</tool_call>", "=", []),
    ("phi4_mini", 'functools[{"name": "now", "arguments": {}}]', "", [("now", {})]),
    ("phi4_mini", "Use functools.cache[1] and functools", "=", []),
    (
        "granite",
        '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        "",
        [("add", {"a": 1}), ("now", {})],
    ),
    ("mistral_args", "[TOOL_CALLS]now{}", "", [("now", {})]),
    ("mistral_args", '[TOOL_CALLS]add[CALL_ID]aB3456789[ARGS]{"a": 1}', "", [("add", {"a": 1})]),
    (
        "deepseek_v3",
        f"Hm.{DEEPSEEK[1]}function{DEEPSEEK[2]}now\n```json\n{{}}\n```{DEEPSEEK[3]} Done.",
        "Hm. Done.",
        [("now", {})],
    ),
    ("deepseek_v31", f"{DEEPSEEK[0]}{DEEPSEEK[1]}rm{DEEPSEEK[2]}{{}}{DEEPSEEK[3]}{DEEPSEEK[4]}", "=", []),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1][:40]!r}")
def test_what_models_write(case: Any) -> None:
    name, text, content, calls = case
    for parts in (
        parser_of(name).take(text, "stop"),
        streamed(parser_of(name), text),
        streamed(parser_of(name), text, 5),
    ):
        assert (found(parts), parts.content) == (calls, text if content == "=" else content)


def test_a_value_in_tags_has_the_type_of_its_schema() -> None:
    for schema, values in {
        '{"type": "string"}': {"1": "1", "null": "null", '"q"': '"q"', "": ""},
        '{"type": ["string", "null"]}': {"null": None, "None": None, "x": "x", "1": "1"},
        '{"anyOf": [{"type": "integer"}, {"type": "string"}]}': {"1": 1, "1.5": "1.5", "True": "True"},
        '{"enum": ["1", 2]}': {"1": "1", "2": 2},
        '{"type": "number"}': {"1e3": 1000.0, " 2 ": 2, "x": "x", "NaN": "NaN"},
        "{}": {"1": 1, "true": True, "[1": "[1", '"q"': '"q"'},
        '{"type": "object"}': {'{"a": "\\ud83d"}': {"a": "\ufffd"}, "{": "{"},
        '{"type": "wibble"}': {"1": 1, "x": "x"},
    }.items():
        for text, value in values.items():
            parser = ChatParser(STYLES["glm45"], ["f"], schemas={"f": {"properties": {"v": json.loads(schema)}}})
            call = f"<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
            assert found(parser.take(call, "stop")) == [("f", {"v": value})], (schema, text)


def test_a_long_value_is_read_once() -> None:
    """Parsing a call that arrives in single characters examines each a bounded number of times."""
    text = ONE.replace("=a>\n1", "=s>\n" + "</para" * 20_000)
    ((_, arguments),) = found(streamed(parser_of(CODER), text))
    assert len(arguments["s"]) == 120_000


def test_a_mark_alone_is_no_style() -> None:
    """A template whose calls the style of its marks does not read, and one that asks for Python's syntax."""
    loop = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}!"
    odd = Chat({"default": loop + "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ tools }}"})
    assert choose_style("auto", odd) == (None, "it has the marks of no style that is known")
    assert style_of("{{ tools }} [func_name1(a=1), func_name2()] <|python_tag|>") is None
    assert choose_style("hermes", odd)[0] is STYLES["hermes"]
    assert choose_style("none", odd) == (None, "server.tool_parser=none")


def test_the_configuration_names_every_style() -> None:
    assert set(TOOL_STYLES) == set(STYLES)


@pytest.fixture
def styled(server: Server, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Server]:
    """Return the server with a template that shows tools, and the style of this name."""

    def styled(name: str) -> Server:
        template = "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
        tokenizer = Tokenizer(tiny_tokenizer.backend, eos_ids=tiny_tokenizer.eos_ids, chat_template=template)
        monkeypatch.setattr(server.service, "tokenizer", tokenizer)
        monkeypatch.setattr(server.service, "tool_style", STYLES[name])
        return server

    return styled


@pytest.mark.parametrize("name", sorted(set(STYLES) - {"harmony"}))
def test_calls_over_http(styled: Callable[[str], Server], name: str) -> None:
    """A model that writes two calls, streamed and not."""
    two = [("add", {"a": 1}), ("now", {})]
    server, text = styled(name), written(name, two)
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
    fields = {"structured_outputs": {"grammar": f"start: {json.dumps(text, ensure_ascii=False)}"}}
    message, reason = chat_message(server, stream=True, tools=tools, **fields)
    content, calls = content_of(message)
    assert (content, reason) == ("", "tool_calls")
    assert [(function, json.loads(arguments)) for function, arguments in calls] == two
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    assert content_of_items(response_items(server, stream=False, tools=flat, **fields)) == ("", calls)


# the others: tests/server/test_forced_calls.py, test_harmony.py
@pytest.mark.parametrize("name", sorted(set(STYLES) - {style for _, style in FAMILIES.values()} - {"harmony"}))
def test_a_forced_call_over_http(styled: Callable[[str], Server], name: str) -> None:
    """A model that writes anything writes calls, and the same ones whatever is drafted."""
    server, named = styled(name), {"type": "function", "function": {"name": "pick"}}
    values = {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "k": {"enum": ["x", "yes"]}}
    schema = {"type": "object", "properties": values, "required": ["a", "k"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "pick", "parameters": schema}}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": named, "temperature": 1.0, "seed": 2, "max_tokens": 200}
    fields["logit_bias"] = {str(token): -100 for space in " \n\t\r" for token in server.ids(space)}
    message, reason = chat_message(server, stream=False, **fields)
    content, ((function, arguments),) = content_of(message)
    assert (content, reason, function) == ("", "tool_calls", "pick")
    jsonschema.validate(json.loads(arguments), schema)
    options = {"stream": True, "speculative": {"enabled": False}}
    assert content_of(chat_message(server, **fields, **options)[0]) == ("", [(function, arguments)])


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3"])
def test_a_template_whose_calls_are_not_read_says_so(
    family: str, make_server: MakeServer, tiny_target_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_target_folder, tmp_path / family)
    (folder / "chat_template.jinja").write_text(TEMPLATES[family]["default"], encoding="utf-8")
    tools = [{"type": "function", "function": {"name": "now"}}]
    with make_server(target=folder, proposer="ngram") as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "calls of this template are not read: it shows the model no tools; server.tool_parser=" in message


def test_the_manual_s_table_is_that_of_the_code() -> None:
    manual = (Path(__file__).parents[2] / "infer/server/README.md").read_text(encoding="utf-8")
    rows = ["| `server.tool_parser=` | families | a call |", "|---|---|---|"]
    for name, style in STYLES.items():
        call = written(name, [("f", {"n": 1})]).replace("\n", "↵").replace("|", "\\|")
        rows.append(f"| `{name}` | {style.families} | `{call}` |")
    table = "\n".join(rows)
    assert f"\n\n{table}\n\n" in manual, table
