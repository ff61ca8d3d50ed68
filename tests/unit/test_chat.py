"""models/chat.py renders what transformers renders, for published templates and messages of every form."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from models.chat import Chat, normalize_message
from models.tokenizer import Tokenizer
from tests.chats import (
    ANSWER,
    ARGUMENTS,
    CONVERSATIONS,
    LOOK,
    NEEDS_PARTS,
    NEEDS_TEXT_ARGUMENTS,
    PARTS,
    RESULT,
    SHOWS_CALLS,
    SHOWS_DEVELOPER,
    TAKES_PARTS,
    TEMPLATES,
    USER,
    Conversation,
    calling,
    with_templates,
)

TAKES_STRINGS = {("glm4moe", "tool"), ("gemma3", "system")}  # though the family takes parts in other roles
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


@pytest.fixture(scope="module")
def hf_tokenizer(tiny_target_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target_folder)


def for_transformers(conversation: Conversation, family: str) -> list[dict[str, Any]]:
    """Return the messages for `apply_chat_template`: arguments as objects, content in the form the family reads."""
    messages = []
    for message in deepcopy(conversation["messages"]):
        content, role = message.get("content"), message["role"]
        if content is None:
            # no content; DeepSeek's template tests whether it is null, which transformers removes from the message
            message.pop("content", None)
        elif isinstance(content, list):
            texts = [part["text"] for part in content]
            as_parts = family in TAKES_PARTS and (family, role) not in TAKES_STRINGS
            message["content"] = content if as_parts and len(texts) > 1 else "\n".join(texts)
        if isinstance(message.get("content"), str) and family in NEEDS_PARTS:
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
        if role == "developer" and family not in SHOWS_DEVELOPER:
            message["role"] = "system"
        messages.append(message)
    if family == "phi4_mini" and conversation.get(
        "tools"
    ):  # which reads them from its system message, as Microsoft says
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = json.dumps([tool["function"] for tool in conversation["tools"]], ensure_ascii=False)
    return messages


def attempt(render: Any) -> str | None:
    """Return the rendered text, or None if rendering is refused."""
    try:
        return render()
    except Exception:  # transformers passes on whatever the template raises
        return None


@pytest.mark.parametrize("family", sorted(set(TEMPLATES) - NEEDS_TEXT_ARGUMENTS))
def test_every_family_renders_as_in_transformers(family: str, hf_tokenizer: Any, tiny_tokenizer: Tokenizer) -> None:
    ours, rendered = with_templates(tiny_tokenizer, family), 0
    for name, conversation in CONVERSATIONS.items():
        tools, texts = conversation.get("tools"), TEMPLATES[family]
        calls = any(message.get("tool_calls") for message in conversation["messages"])
        template = texts["tool_use"] if tools and "tool_use" in texts else texts["default"]
        if calls and (family not in SHOWS_CALLS or (family == "hermes" and not tools)):
            continue  # the template does not render tool calls: tested below
        for generation_prompt in (True, False):

            def render(template: str = template, tools: Any = tools, prompt: bool = generation_prompt) -> str:
                return hf_tokenizer.apply_chat_template(
                    for_transformers(conversation, family),  # noqa: B023  # called at once
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=prompt,
                    tokenize=False,
                    **SPECIAL,
                )

            expected = attempt(render)
            text = attempt(
                lambda: ours.render_chat(conversation["messages"], tools=tools, generation_prompt=generation_prompt)  # noqa: B023
            )
            assert text == expected, (family, name)
            rendered += expected is not None
            if expected is not None and generation_prompt:
                ids = hf_tokenizer(expected, add_special_tokens=False)["input_ids"]
                assert ours.apply_chat_template(conversation["messages"], tools=tools) == ids
    assert rendered >= 8


def test_calls_that_a_template_does_not_know_are_no_python(tiny_tokenizer: Tokenizer) -> None:
    """Null content is rendered as nothing, not as the word None."""
    for family in sorted(set(TEMPLATES) - SHOWS_CALLS - {"gemma", "gemma3"}):
        text = with_templates(tiny_tokenizer, family).render_chat([USER, calling("{}"), RESULT, ANSWER, USER])
        assert "None" not in text
        assert "Fine." in text


def test_a_template_that_needs_json_text_and_a_null_content(tiny_tokenizer: Tokenizer) -> None:
    """DeepSeek's template is one; transformers passes arguments on unchanged, so its users must pass JSON text."""
    ours = with_templates(tiny_tokenizer, "deepseek")
    expected = (
        f"<|endoftext|><|User|>{USER['content']}<|Assistant|><|call|>function<|sep|>weather\n"
        '```json\n{"city": "Zürich", "days": 2}\n```<|endoftext|><|output|>{"t": 3}'
    )
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        assert ours.render_chat([USER, calling(arguments), RESULT], tools=[LOOK]) == expected


def test_several_parts_have_one_rule(tiny_tokenizer: Tokenizer) -> None:
    for family in TEMPLATES:
        text = with_templates(tiny_tokenizer, family).render_chat([PARTS])
        joined = {"vision": " one two", "gemma3": "onetwo"}.get(family, "onetwo")
        assert (joined if family in TAKES_PARTS else "one\ntwo") in text
        assert "'type'" not in text


# Everything that transformers provides to every template.
SNIPPETS = [
    "{% if tools is not none %}TOOLS {% endif %}{% if documents is not none %}DOCUMENTS{% endif %}x",
    "{{ tools is defined }}{{ documents is defined }}{{ add_generation_prompt }}{{ enable_thinking is defined }}",
    "{{ messages | tojson(ensure_ascii=False) }}{{ messages | tojson(ensure_ascii=True) }}",
    "{{ messages | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}",
    "{{ dict(a=1) }}{{ dict.fromkeys(['a'], 2) }}{{ strftime_now('%Y') }}",
    "{% for m in messages %}{% generation %}{% set seen = 1 %}{{ m.content }}{% endgeneration %}{{ seen }}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{{ messages[0].content | items if messages[0].content is mapping else 'é<&>' | tojson }}",
]


@pytest.mark.parametrize("template", SNIPPETS)
@pytest.mark.parametrize("tools", [None, [LOOK]])
def test_the_environment_is_transformers_own(template: str, tools: Any, hf_tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "naïve <b>"}, {"role": "user", "content": "日本 & 'x'"}]
    expected = hf_tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
    text = Chat({"default": template}).render(messages, tools=tools, generation_prompt=False)
    assert text == expected


@pytest.mark.parametrize(
    "template",
    ["{{ dict.mro() }}", "{{ messages[0].update(role='x') }}", "{{ 1 // messages[1:] | length }}",
     "{{ range(10**9) | list }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"],
)  # fmt: skip
def test_whatever_a_template_raises_is_a_refusal(template: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        Chat({"default": template}).render([USER])


def test_arguments_and_calls_in_every_form() -> None:
    wanted = normalize_message(calling(ARGUMENTS))
    call = wanted["tool_calls"][0]
    for form in (
        calling(json.dumps(ARGUMENTS)),
        {**calling({}), "tool_calls": json.dumps([call])},
        {**calling({}), "tool_calls": [{"id": call["id"], **call["function"]}]},
        {**calling({}), "tool_calls": [{**call, "index": 0, "function": {**call["function"], "extra": 1}}]},
        {**wanted, "function_call": None, "audio": None},
    ):
        assert normalize_message(form) == wanted
    assert normalize_message(wanted) == wanted
    assert "content" not in wanted

    def arguments(value: Any) -> Any:
        return normalize_message(calling(value))["tool_calls"][0]["function"]["arguments"]

    assert [arguments(value) for value in (None, "", "{}", {})] == [{}] * 4
    assert [arguments(value) for value in ("[1]", "no JSON", '{"a": ')] == ["[1]", "no JSON", '{"a": ']
    assert "tool_calls" not in normalize_message({**ANSWER, "tool_calls": []})
    for wrong in (5, "text", [5], [{"function": {"arguments": "{}"}}]):
        with pytest.raises(ValueError, match="tool_calls"):
            normalize_message({**ANSWER, "tool_calls": wrong})


def test_content_and_reasoning_in_every_form() -> None:
    assert normalize_message({"role": "user", "content": [{"type": "text", "text": "hi"}]}) == {
        "role": "user",
        "content": "hi",
    }
    assert normalize_message({"role": "user", "content": ["a", {"text": "b", "cache_control": None}]}) == {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    assert normalize_message({"role": "assistant", "content": []}) == {"role": "assistant"}
    for name in ("reasoning_content", "reasoning", "thinking"):
        message = normalize_message({**ANSWER, name: "hm"})
        assert message["reasoning_content"] == message["thinking"] == "hm"
    with pytest.raises(ValueError, match="content has parts that are no text"):
        normalize_message({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})


def test_the_schema_of_a_tool_is_printed_as_it_came(tiny_tokenizer: Tokenizer) -> None:
    """The null default that pydantic writes for an optional field is kept; a null description is left out."""
    tool = deepcopy(LOOK)
    tool["function"]["parameters"]["properties"]["days"]["default"] = None
    shown = with_templates(tiny_tokenizer, "qwen2_5").render_chat([USER], tools=[tool])
    assert json.dumps(tool, ensure_ascii=False) in shown
    tool["function"]["description"] = None
    assert '"description": null' not in with_templates(tiny_tokenizer, "qwen2_5").render_chat([USER], tools=[tool])


def write_tokenizer(source: Path, folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    shutil.copy(source / "tokenizer.json", folder)
    shutil.copy(source / "config.json", folder)
    config = json.loads((source / "tokenizer_config.json").read_text()) | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


NAMED = {"default": "plain", "tool_use": "with {{ tools | length }}"}


@pytest.mark.parametrize("where", ["settings", "files"])
def test_named_templates(where: str, tiny_target_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_tokenizer(tiny_target_folder, tmp_path / "model")
    if where == "settings":
        entries = [{"name": name, "template": text} for name, text in NAMED.items()]
        folder = write_tokenizer(tiny_target_folder, tmp_path / "named", chat_template=entries)
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
        (folder / "chat_template.jinja").write_text(NAMED["default"])
    tokenizer, reference = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for tools, text in ((None, "plain"), ([], "plain"), ([LOOK], "with 1")):
        assert tokenizer.render_chat([USER], tools=tools) == text
        assert reference.apply_chat_template([USER], tools=tools or None, tokenize=False) == text
    assert tokenizer.chat.text_for(tools=True) == NAMED["tool_use"]
    assert tokenizer.chat_template == NAMED["default"]


def test_named_templates_without_a_default(tiny_target_folder: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "yes"}, {"name": "rag", "template": "no"}]
    tokenizer = Tokenizer.load(write_tokenizer(tiny_target_folder, tmp_path / "a", chat_template=named))
    assert tokenizer.render_chat([USER], tools=[LOOK]) == "yes"
    with pytest.raises(ValueError, match=r"chat templates \(rag, tool_use\) none is named 'default'; write the one"):
        tokenizer.render_chat([USER])
    broken = write_tokenizer(tiny_target_folder, tmp_path / "b", chat_template=[{"name": "default"}])
    with pytest.raises(ValueError, match="chat_template must be a text or a list of"):
        Tokenizer.load(broken)


def test_special_tokens_are_variables_of_the_template(tiny_target_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    names = ("bos_token", "eos_token", "pad_token", "image_token", "boi_token")
    folder = write_tokenizer(
        tiny_target_folder,
        tmp_path / "model",
        pad_token="<|endoftext|>",
        image_token="<|endoftext|>",
        extra_special_tokens={"boi_token": "<|endoftext|>"},
        chat_template="|".join(f"{{{{ {name} }}}}" for name in names),
    )
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template([USER], tokenize=False)
    assert Tokenizer.load(folder).render_chat([USER]) == expected == "|".join(["<|endoftext|>"] * 5)
