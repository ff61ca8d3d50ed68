"""Text decoded in pieces equals text decoded at once; chat templates do what they do in transformers, and no more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from models.tokenizer import Tokenizer

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "é <b>\n{{ 1 }}"}]
TEXT = 'def wrap(text, width=70):\n    """Wrap — naïve café 🎉 日本語."""\n'


@st.composite
def chunked_ids(draw: st.DrawFn) -> list[list[int]]:
    ids = st.integers(0, 383) | st.integers(1, 256)  # half of them raw bytes, so that characters are often split
    return draw(st.lists(st.lists(ids, max_size=6), max_size=30))


@settings(max_examples=200, deadline=None)
@given(chunks=chunked_ids())
def test_pieces_make_up_the_text(tiny_tokenizer: Tokenizer, chunks: list[list[int]]) -> None:
    stream = tiny_tokenizer.stream()
    pieces = [stream.push(chunk) for chunk in chunks]
    assert "".join(pieces) + stream.flush() == tiny_tokenizer.decode([token for chunk in chunks for token in chunk])


def test_only_whole_characters_come_out(tiny_tokenizer: Tokenizer) -> None:
    stream = tiny_tokenizer.stream()
    pieces = [stream.push([token]) for token in tiny_tokenizer.encode(TEXT)]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert stream.flush() == ""
    party = tiny_tokenizer.encode("🎉")
    assert len(party) > 1
    stream = tiny_tokenizer.stream()
    assert stream.push(party[:-1]) == ""
    assert stream.flush() == "\ufffd"


def test_special_tokens_are_no_text(tiny_tokenizer: Tokenizer) -> None:
    (end,) = tiny_tokenizer.eos_ids
    assert tiny_tokenizer.special_ids == {end}
    ids = [end, *tiny_tokenizer.encode("ab"), end]
    assert tiny_tokenizer.decode(ids) == "ab"
    stream = tiny_tokenizer.stream()
    assert stream.push(ids) + stream.flush() == "ab"


def test_a_byte_that_spoils_a_shown_character() -> None:
    """Byte-fallback vocabularies decode a run of bytes as a whole; the stream continues after what it has shown."""
    vocab = {"<unk>": 0, "a": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = Tokenizer(backend).stream()
    pieces = [stream.push([byte + 2]) for byte in "é".encode()] + [stream.push([0xE2 + 2]), stream.push([1])]
    assert "".join(pieces) + stream.flush() == "é\ufffda"


def test_the_template_renders_as_in_transformers(tiny_target_folder: Path, tiny_tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    hf_tokenizer = AutoTokenizer.from_pretrained(tiny_target_folder)
    expected = hf_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert tiny_tokenizer.apply_chat_template(MESSAGES) == expected


TEMPLATES = [
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "{{ bos_token }}{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['role'] | title }}\n{% endfor %}",
    "{% for m in messages %}\n  {% generation %}{{ m.content | trim }}{% endgeneration %}\n{% endfor %}",
    "{%- for m in messages -%}<|start|>{{ m['content'] + eos_token }}{%- endfor %}{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_in_the_wild(tiny_target_folder: Path, template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = copy_tokenizer(tiny_target_folder, tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    hf_tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = hf_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert Tokenizer.load(folder).render_chat(MESSAGES) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}{{ ns._x }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.strip() }}",
        "{{ 'x' | nonsense }}",
        "{% for %}",
    ],
)
def test_a_template_cannot_reach_out_and_its_refusal_is_a_value_error(
    tiny_target_folder: Path, template: str, tmp_path: Path
) -> None:
    folder = copy_tokenizer(tiny_target_folder, tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="chat template"):
        Tokenizer.load(folder).render_chat(MESSAGES)


def test_no_template_says_what_to_use_instead(tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = copy_tokenizer(tiny_target_folder, tmp_path, chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"no chat template.*/v1/completions"):
        Tokenizer.load(folder).apply_chat_template(MESSAGES)


def test_where_templates_and_end_tokens_are_written(tiny_target_folder: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = copy_tokenizer(
        tiny_target_folder, tmp_path, chat_template=named, eos_token={"content": "<|endoftext|>", "special": True}
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render_chat(MESSAGES) == "yes"
    assert tokenizer.eos_ids == (7, 0, 9)
    assert tokenizer.special_tokens["eos_token"] == "<|endoftext|>"


def test_texts_begin_as_the_checkpoint_says_and_chats_as_the_template_says(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"<s>": 0, "a": 1, "b": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(backend, chat_template="{{ bos_token }}b", special_tokens={"bos_token": "<s>"})
    assert tokenizer.encode("a") == [0, 1]
    assert tokenizer.apply_chat_template(MESSAGES) == [0, 2]


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def copy_tokenizer(source: Path, target: Path, **changes: Any) -> Path:
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target / file.name)
    settings_file = target / "tokenizer_config.json"
    content = json.loads(settings_file.read_text()) | changes
    settings_file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return target


def test_the_bytes_of_tokens(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode(TEXT)
    assert b"".join(tiny_tokenizer.token_bytes[token] for token in ids) == TEXT.encode()
    assert tiny_tokenizer.token_bytes[tiny_tokenizer.eos_ids[0]] == b"<|endoftext|>"


def test_the_bytes_of_tokens_with_byte_fallback() -> None:
    vocab = {"<unk>": 0, "▁a": 1, "日": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>"])
    table = Tokenizer(backend).token_bytes
    assert (table[1], table[2], table[3 + 0xE6], table[-1]) == (b" a", "日".encode(), b"\xe6", b"<s>")
