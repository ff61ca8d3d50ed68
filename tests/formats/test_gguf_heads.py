"""EAGLE-3 heads as GGUF files of llama.cpp: keys and tensors as its own converter writes them, and the way back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.config import GenerateConfig
from infer.generate import run as generate
from infer.options.cli import compose
from infer.options.exported_heads import with_head
from infer.options.model_names import read_head_config
from kernels.weights.ggml import GGML_FORMATS
from models.config import RopeConfig
from models.formats.conversion import FORMATS, ConversionOptions, Verifier, detect, read_checkpoint, write_checkpoint
from models.heads.files import check_exported, load_head
from models.targets import load_target
from scripts import convert
from scripts.benchmarks.comparison.servers import head_file
from scripts.benchmarks.config import CompareConfig
from tests.formats.sources import SOURCES
from tests.formats.test_round_trips import DTYPES, configs, random_checkpoint
from tests.gguf_writing import _llama3_factors, write_gguf

FORM = FORMATS["llama.cpp"]
TARGET = Verifier("some/target", "LlamaForCausalLM", 384, 64, 8)
KEYS = {
    "general.architecture": ("STRING", "eagle3"),
    "general.type": ("STRING", "model"),
    "general.quantization_version": ("UINT32", 2),
    "general.file_type": ("UINT32", 0),
    "eagle3.block_count": ("UINT32", 1),
    "eagle3.context_length": ("UINT32", 16),
    "eagle3.embedding_length": ("UINT32", 64),
    "eagle3.feed_forward_length": ("UINT32", 160),
    "eagle3.attention.head_count": ("UINT32", 8),
    "eagle3.attention.head_count_kv": ("UINT32", 2),
    "eagle3.attention.key_length": ("UINT32", 8),
    "eagle3.attention.value_length": ("UINT32", 8),
    "eagle3.attention.layer_norm_rms_epsilon": ("FLOAT32", float(np.float32(1e-5))),
    "eagle3.rope.dimension_count": ("UINT32", 8),
    "eagle3.rope.freq_base": ("FLOAT32", 10000.0),
    "eagle3.vocab_size": ("UINT32", 384),
    "eagle3.target_layers": ("ARRAY", [2, 4, 5]),
    "eagle3.target_hidden_size": ("UINT32", 64),
    "eagle3.norm_before_residual": ("BOOL", False),
    "eagle3.norm_before_fc": ("BOOL", False),
    "tokenizer.ggml.model": ("STRING", "none"),
}
NAMES = {  # in the file: in the source
    "token_embd.weight": "embed_tokens.weight",
    "fc.weight": "fc.weight",
    "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
    "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
    "blk.0.attn_q.weight": "midlayer.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "midlayer.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "midlayer.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "midlayer.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "midlayer.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "midlayer.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "midlayer.mlp.down_proj.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "d2t": "d2t",
}


def source(tmp_path, name="safeailab-eagle3"):
    return read_checkpoint(FORMATS[SOURCES[name].form], SOURCES[name].write(tmp_path / "in"), ConversionOptions(TARGET))


def as_pairs(rows, heads):
    """Return the rows of a projection in the order of ggml, one by one: those half a head apart become neighbours."""
    size = len(rows) // heads
    order = [head * size + i + half * size // 2 for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def in_file(tensors, name):
    """Return a tensor of the source as the file has it."""
    value = tensors[NAMES[name]]
    if name == "d2t":
        return value + torch.arange(len(value))
    return as_pairs(value, {"q": 8, "k": 2}[name[11]]) if name[11:12] in ("q", "k") else value


def test_every_key_and_tensor(tmp_path):
    written = write_checkpoint(FORM, source(tmp_path), tmp_path / "head.gguf")
    reader = GGUFReader(tmp_path / "head.gguf")
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert {key: (field.types[0].name, field.contents()) for key, field in fields.items()} == KEYS
    assert fields["eagle3.target_layers"].types[1].name == "INT32"
    tensors = SOURCES["safeailab-eagle3"].tensors()
    assert {tensor.name for tensor in reader.tensors} == set(NAMES)
    for tensor in reader.tensors:
        expected = in_file(tensors, tensor.name)
        assert tensor.tensor_type is (Kind.I64 if tensor.name == "d2t" else Kind.F32)
        assert tuple(reversed(tensor.shape.tolist())) == tuple(expected.shape)
        assert torch.equal(torch.from_numpy(tensor.data.copy()).view(expected.shape), expected)
    assert "t2d" not in written.names


@pytest.mark.parametrize("dtype", ["f16", "bf16", *GGML_FORMATS])
def test_matrices_are_stored_as_asked_and_vectors_in_fp32(tmp_path, dtype):
    write_checkpoint(FORM, source(tmp_path), tmp_path / "head.gguf", dtype=dtype)
    tensors, reader = SOURCES["safeailab-eagle3"].tensors(), GGUFReader(tmp_path / "head.gguf")
    for tensor in reader.tensors:
        if tensor.name != "d2t":
            kind, value = Kind[dtype.upper()], in_file(tensors, tensor.name)
            kind = kind if value.ndim == 2 else Kind.F32
            assert tensor.tensor_type is kind
            assert np.array_equal(tensor.data.ravel(), quants.quantize(value.numpy(), kind).ravel())
    expected = {"f16": 1, "bf16": 32, "q8_0": 7, "q5_1": 9, "q5_0": 8, "q4_1": 3, "q4_0": 2}[dtype]
    assert reader.fields["general.file_type"].contents() == expected


@st.composite
def held(draw):
    """Return a head that llama.cpp can run."""
    config = draw(configs("eagle3"))
    plain = {"architecture": "LlamaForCausalLM", "qk_norm": False, "windows": ()}
    layer = replace(config.layer, num_layers=1, attention_bias=False, output_bias=False, mlp_bias=False, **plain)
    if layer.rope.rope_type == "llama3":  # of too few frequencies to tell its factor: test_rotary_scaling
        layer = replace(layer, rope=RopeConfig())
    flags = dict.fromkeys(("fc_norm", "norm_output", "embed_requires_grad"), False)
    return replace(config, layer=layer, aux_layers=(1, 4, 5), **flags)


@settings(max_examples=25, deadline=None)
@given(config=held(), seed=st.integers(0, 9), dtype=st.sampled_from(DTYPES))
def test_there_and_back_keeps_the_values(tmp_path_factory, config, seed, dtype):
    file, checkpoint = tmp_path_factory.mktemp("head") / "head.gguf", random_checkpoint("eagle3", config, seed, dtype)
    write_checkpoint(FORM, checkpoint, file)
    back = read_checkpoint(detect(file), file, ConversionOptions())
    layer = replace(config.layer, rms_norm_eps=float(np.float32(config.layer.rms_norm_eps)))
    assert back.config == replace(config, layer=replace(layer, bos_token_id=None, eos_token_ids=()))
    assert back.tensors.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(back.tensors[name], tensor.float() if tensor.ndim == 1 and dtype is tensor.dtype else tensor)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("linear", {"factor": 2.0}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64.0}),
        ("yarn", {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0}),
        *(
            (
                "llama3",
                {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0, **f},
            )
            for f in ({"factor": 32.0}, {"factor": 7.3})
        ),
    ],
)
def test_rotary_scaling(tmp_path, kind, numbers):
    checkpoint = source(tmp_path)
    rope = RopeConfig(500000.0, kind, tuple(sorted(numbers.items())))
    layer = replace(checkpoint.config.layer, rope=rope, head_dim=32, num_heads=2, num_kv_heads=1)
    config = replace(checkpoint.config, layer=layer)
    write_checkpoint(FORM, random_checkpoint("eagle3", config, 0, torch.float32), tmp_path / "head.gguf")
    reader = GGUFReader(tmp_path / "head.gguf")
    if kind == "llama3":
        (factors,) = (tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
        expected = _llama3_factors({"rope_theta": 500000.0, **numbers}, 32)
        assert np.allclose(factors, expected, rtol=1e-6)
        assert factors.max() == np.float32(numbers["factor"])
    else:
        assert reader.fields["eagle3.rope.scaling.type"].contents() == kind
    back = read_checkpoint(FORM, tmp_path / "head.gguf").config.layer.rope
    assert (back.rope_type, dict(back.parameters)) == (kind, pytest.approx(numbers))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2}, "num_hidden_layers=2: llama.cpp has room for one layer"),
        ({"aux_layers": (2, 4)}, r"aux_layers=\[2, 4\]: llama.cpp feeds a head 3"),
        ({"fc_norm": True}, "fc_norm=true: llama.cpp has no norm per feature"),
        ({"norm_output": True}, "norm_output=true: llama.cpp feeds the state back without a norm"),
        ({"attention_bias": True, "output_bias": True}, "llama.cpp has no biases in a head"),
        ({"mlp_bias": True}, "llama.cpp has no biases in a head"),
        (
            {"rope": RopeConfig(1e4, "yarn", (("attention_factor", 1.5), ("factor", 2.0)))},
            "rope_scaling: {'attention_factor': 1.5}: has no place in a GGUF file",
        ),
        (
            {
                "rope": RopeConfig(
                    1e4, "llama3", (*(("factor", 8.0), ("high_freq_factor", 2.0)), ("low_freq_factor", 1.0))
                )
            },
            "rope_scaling: {'high_freq_factor': 2.0, 'low_freq_factor': 1.0}: a GGUF file has .*factor=8.0",
        ),
    ],
)
def test_what_llama_cpp_has_no_forward_for_is_refused(tmp_path, changes, message):
    config = source(tmp_path).config
    outer = {key: value for key, value in changes.items() if hasattr(config, key)}
    inner = {key: value for key, value in changes.items() if key not in outer}
    config = replace(config, layer=replace(config.layer, **inner), **outer)
    with pytest.raises(ValueError, match=message):
        write_checkpoint(FORM, random_checkpoint("eagle3", config, 0, torch.float32), tmp_path / "head.gguf")
    assert not (tmp_path / "head.gguf").exists()


def rewritten(file: Path, tensors=None, **changes) -> Path:
    """Write a copy with other keys, and with `tensors` in place of those of its tensors; None leaves one out."""
    reader, copy = GGUFReader(file), file.with_name("changed.gguf")
    writer = GGUFWriter(copy, changes.pop("architecture", "eagle3"))
    for key, field in reader.fields.items():
        if key.startswith("eagle3.") and changes.get(key.removeprefix("eagle3."), field) is not None:
            value = changes.get(key.removeprefix("eagle3."), field.contents())
            writer.add_key_value(key, value, field.types[0])
    for key in changes.keys() - {key.removeprefix("eagle3.") for key in reader.fields}:
        writer.add_uint32(f"eagle3.{key}", changes[key])
    stored = {tensor.name: tensor.data for tensor in reader.tensors} | (tensors or {})
    for name, value in stored.items():
        if value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "llama"}, "general.architecture='llama': of heads only eagle3 is supported"),
        ({"vocab_size": None}, "the key eagle3.vocab_size is missing"),
        ({"target_layers": None}, "the key eagle3.target_layers is missing"),
        ({"attention.sliding_window": 9}, "eagle3.attention.sliding_window=9: is not supported, and may change"),
        ({"rope.dimension_count": 4}, "eagle3.rope.dimension_count=4: must be the size of a head, 8"),
        ({"block_count": 2}, "num_hidden_layers=2"),
        ({"tensors": {"output_norm.weight": None}}, "output_norm.weight: missing"),
        ({"tensors": {"blk.0.attn_q.weight": np.ones((9, 128), np.float32)}}, r"blk.0.attn_q.weight \[9, 128\]: exp"),
        ({"tensors": {"blk.1.attn_q.weight": np.ones((9, 128), np.float32)}}, "blk.1.attn_q.weight: not part of this"),
        ({"tensors": {"d2t": np.full(96, 500)}}, "d2t"),
    ],
)
def test_a_file_that_is_no_such_head_is_an_error_that_names_it(tmp_path, refusal, changes, message):
    write_checkpoint(FORM, source(tmp_path), tmp_path / "head.gguf")
    file = rewritten(tmp_path / "head.gguf", changes.pop("tensors", None), **changes)
    error = refusal(file)
    assert str(file) in error
    with pytest.raises(ValueError, match=message):
        read_checkpoint(FORM, file)


def test_a_truncated_file_and_none(tmp_path, refusal):
    write_checkpoint(FORM, source(tmp_path), tmp_path / "head.gguf")
    content = (tmp_path / "head.gguf").read_bytes()
    (tmp_path / "head.gguf").write_bytes(content[:-1000])
    assert "cut off: " in refusal(tmp_path / "head.gguf")
    assert "cannot be read" in refusal(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match=r"none.gguf: no exported head \(no such file\)"):
        check_exported(tmp_path / "none.gguf")


def test_the_command_writes_a_file_and_reads_one(tmp_path, run, capsys, make_target_folder):
    folder, target = SOURCES["speculators"].write(tmp_path / "in"), tmp_path / "target.gguf"
    write_gguf(make_target_folder(), target, (Kind.F32,), tokenizer=True)
    capsys.readouterr()  # the progress bar of the target's folder
    out = tmp_path / "deep" / "head.gguf"
    words = ["--from", "auto", "--to", "llama.cpp", "--verifier", target]
    report = run(*words, "--dtype", "q8_0", folder, out)
    rows = {" ".join(line.split()) for line in report.splitlines()}
    assert "lm_head.weight output.weight [96, 64] Q8_0" in rows
    assert "norm.weight output_norm.weight [64] F32" in rows
    assert "t2d - follows from the others" in rows
    assert f"15 tensors, read back and equal; in {out}" in rows
    assert [path.name for path in out.parent.iterdir()] == ["head.gguf"]
    tokenizers = [
        {key: (field.types, field.contents()) for key, field in GGUFReader(path).fields.items() if "tokenizer." in key}
        for path in (target, out)
    ]
    assert tokenizers[0] == tokenizers[1]
    assert len(tokenizers[0]["tokenizer.ggml.tokens"][1]) == 384
    assert "no tokenizer is in it" in run(*words[:4], folder, tmp_path / "other.gguf")
    run("--from", "auto", "--to", "speculators", "--verifier", target, tmp_path / "other.gguf", tmp_path / "back")
    first, last = (read_checkpoint(FORMATS["speculators"], path) for path in (folder, tmp_path / "back"))
    assert first.tensors.keys() == last.tensors.keys()
    assert all(torch.equal(first.tensors[name], last.tensors[name]) for name in first.tensors)
    before = sorted(tmp_path.rglob("*"))
    run(*words, "--dry-run", folder, tmp_path / "dry.gguf")
    assert sorted(tmp_path.rglob("*")) == before


def test_words_that_do_not_go_together(tmp_path, refusal, capsys):
    folder = SOURCES["speculators"].write(tmp_path / "in")
    assert "out: llama.cpp is one file; end its name in .gguf" in refusal(folder, "--to", "llama.cpp")
    assert "--dtype f16: headway keeps the dtype of every tensor" in refusal(folder, "--dtype", "f16")
    assert convert.main(["--from", "auto", "--to", "headway", str(folder), str(tmp_path / "x.gguf")]) == 2
    assert "x.gguf: headway is a folder; give it another name" in capsys.readouterr().err


def test_rows_that_are_no_whole_blocks_are_an_error(tmp_path):
    config = source(tmp_path).config
    config = replace(config, layer=replace(config.layer, intermediate_size=150))
    with pytest.raises(
        ValueError, match="--dtype q4_0: blk.0.ffn_down.weight has rows of 150, no multiple of a block of"
    ):
        write_checkpoint(FORM, random_checkpoint("eagle3", config, 0, torch.float32), tmp_path / "x.gguf", dtype="q4_0")


def test_comparisons_keep_a_converted_head(tmp_path, tiny_target_folder):
    checkpoint = source(tmp_path)
    (tmp_path / "ours").mkdir()
    write_checkpoint(FORMATS["headway"], checkpoint, tmp_path / "ours")
    write_gguf(tiny_target_folder, tmp_path / "tiny.gguf", tokenizer=True)
    words = [f"model.path={tmp_path / 'tiny.gguf'}", "model.dtype=bfloat16", f"head.path={tmp_path / 'ours'}"]
    words += [f"peers={tmp_path / 'peers'}", "engine.head_weights=same"]
    files = [head_file(compose("bench", CompareConfig, words)) for _ in range(2)]
    assert files[0] == files[1] == next((tmp_path / "peers" / "gguf").iterdir())
    back = read_checkpoint(FORM, files[0]).tensors
    assert torch.equal(back["fc.weight"], checkpoint.tensors["fc.weight"].bfloat16())


def test_it_is_served_as_the_head_that_it_was(tmp_path, capsys, tiny_target_folder):
    target, name = load_target(str(tiny_target_folder)), "safeailab-eagle3 sharing the embedding"
    write_checkpoint(FORM, source(tmp_path, name), tmp_path / "head.gguf")
    assert read_head_config(str(tmp_path / "head.gguf")).name == "eagle3"
    config = json.loads((tmp_path / "in" / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    first, second = (load_head(tmp_path / path, target=target).state_dict() for path in ("in", "head.gguf"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    words = ["model=demo", f"model.path={tiny_target_folder}", "model.device=cpu", "head=auto", "ignore_eos=true"]
    words += [f"head.path={tmp_path / 'head.gguf'}", "compare=true", "num_prompts=1", "prompt_tokens=8", "max_tokens=8"]
    generate(with_head(compose("generate", GenerateConfig, words)))
    assert "acceptance" in capsys.readouterr().out
