"""scripts/convert.py as a user runs it: the report, what it writes, and what it never does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.weights import fingerprint
from scripts import convert
from tests.formats.sources import SOURCES

ROOT = Path(__file__).resolve().parents[2]
REPORT = """\
eagle head, safeailab-eagle -> headway
from                                      to                                        shape      dtype    note
embed_tokens.weight                       embed_tokens.weight                       [384, 64]  float32
fc.bias                                   fc.bias                                   [64]       float32
fc.weight                                 fc.weight                                 [64, 128]  float32
layers.0.mlp.down_proj.weight             layers.0.mlp.down_proj.weight             [64, 160]  float32
layers.0.mlp.gate_proj.weight             layers.0.mlp.gate_proj.weight             [160, 64]  float32
layers.0.mlp.up_proj.weight               layers.0.mlp.up_proj.weight               [160, 64]  float32
layers.0.post_attention_layernorm.weight  layers.0.post_attention_layernorm.weight  [64]       float32
layers.0.self_attn.k_proj.weight          layers.0.self_attn.k_proj.weight          [16, 64]   float32
layers.0.self_attn.o_proj.weight          layers.0.self_attn.o_proj.weight          [64, 64]   float32
layers.0.self_attn.q_proj.weight          layers.0.self_attn.q_proj.weight          [64, 64]   float32
layers.0.self_attn.v_proj.weight          layers.0.self_attn.v_proj.weight          [16, 64]   float32
note: rope_theta is not stated: 10000, LlamaConfig's default, which old EAGLE heads rely on
note: bias is not stated: true, SafeAILab's default
11 tensors, read back and equal; in {out}
"""


def test_as_a_process_it_reports_every_tensor(tmp_path, tiny_target_folder):
    folder = SOURCES["safeailab-eagle"].write(tmp_path / "in")
    command = [sys.executable, ROOT / "scripts" / "convert.py", "--from", "auto", "--to", "headway"]
    command += ["--verifier", tiny_target_folder, folder, tmp_path / "deep" / "out"]
    result = subprocess.run(command, cwd="/", env={**os.environ}, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr, result.returncode) == (REPORT.format(out=tmp_path / "deep" / "out"), "", 0)
    assert {path.name for path in (tmp_path / "deep" / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "provenance.json",
    }
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_notes_stand_beside_their_tensor(tmp_path, run):
    source = SOURCES["ibm-mlp tied"]
    folder, tensors = source.write(tmp_path / "in"), source.tensors()
    save_file(tensors | {"speculator.emb.1.weight": tensors["speculator.emb.0.weight"].clone()}, folder / source.file)
    report = run("--from", "ibm-mlp", "--to", "ibm-mlp", folder, tmp_path / "out")
    row = next(line for line in report.splitlines() if line.startswith("speculator.emb.1.weight"))
    assert " ".join(row.split()) == "speculator.emb.1.weight - a copy of emb.0.weight, to which it is tied"
    assert "note: vLLM 0.32 reads this config.json but serves no MLP speculator" in report


def test_the_losses_of_a_destination_are_said(tmp_path, run, tiny_target_folder):
    losses = {
        ("safeailab-eagle", "safeailab-eagle"): "vLLM 0.32 builds fc without a bias and refuses fc.bias",
        ("safeailab-eagle3 of SpecForge", "safeailab-eagle3"): "does not know fc_norm, norm_output; vLLM does",
        ("medusa", "medusa"): "FasterDecoding's own loader opens medusa_lm_head.pt alone",
        ("arctic-lstm untied", "arctic-lstm"): "ArcticInference serves no head with tie_lstm_embs=false",
        ("deepspec", "deepspec"): "DeepSpec's loader needs copies of the target's embedding and LM head",
        ("deepspec rnn", "speculators"): "vLLM serves markov_head_type=vanilla only; this head is rnn",
        ("dflash of JetSpec", "speculators"): "causal_head is not known to vLLM and speculators",
    }
    for number, ((name, form), text) in enumerate(losses.items()):
        source = SOURCES[name]
        folder = source.write(tmp_path / f"in{number}")
        words = ["--from", "auto", "--to", form, "--verifier", tiny_target_folder, *source.options]
        assert text in run(*words, folder, tmp_path / f"out{number}")


def test_provenance_binds_the_head_to_the_verifier_that_was_given(tmp_path, run, refusal, tiny_target_folder):
    from models.heads.files import load_head
    from models.targets import load_target

    folder = SOURCES["speculators"].write(tmp_path / "in")
    run("--from", "auto", "--to", "headway", "--verifier", tiny_target_folder, folder, tmp_path / "bound")
    record = json.loads((tmp_path / "bound" / "provenance.json").read_text())
    assert record["converted_from"] == {"format": "speculators", "folder": "in"}
    assert record["target_fingerprint"] == fingerprint(tiny_target_folder)
    load_head(tmp_path / "bound", target=load_target(str(tiny_target_folder)))

    run("--from", "auto", "--to", "headway", folder, tmp_path / "free")  # the source names its verifier
    record = json.loads((tmp_path / "free" / "provenance.json").read_text())
    assert (record["target"], "target_fingerprint" in record) == ("some/target", False)
    load_head(tmp_path / "free", target=load_target(str(tiny_target_folder)))

    # our export keeps its provenance, and is not reported as another target's
    run("--from", "headway", "--to", "headway", tmp_path / "bound", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "provenance.json").read_text())["target_fingerprint"]
    other = tmp_path / "other target"
    other.mkdir()
    for file in ("config.json", "model.safetensors"):
        (other / file).write_bytes((tiny_target_folder / file).read_bytes() + b" " * (file == "config.json"))
    error = refusal(tmp_path / "bound", "--to", "speculators", "--verifier", other)
    assert "trained for another target" in error


def test_a_dry_run_checks_all_and_leaves_nothing(tmp_path, run, capsys):
    folder = SOURCES["speculators"].write(tmp_path / "in")
    before = sorted(tmp_path.rglob("*"))
    report = run("--from", "auto", "--to", "safeailab-eagle3", "--dry-run", folder, tmp_path / "out")
    assert report.endswith("16 tensors, read back and equal; nothing was kept (--dry-run)\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_overwritten(tmp_path, run, capsys):
    folder = SOURCES["speculators"].write(tmp_path / "in")
    words = ["--from", "auto", "--to", "headway", str(folder)]
    for there in ("file", "empty", "link"):
        out = tmp_path / there
        if there == "file":
            out.write_text("mine")
        elif there == "empty":
            out.mkdir()
        else:
            out.symlink_to(tmp_path / "nowhere")
        assert convert.main([*words, str(out)]) == 2
        assert capsys.readouterr().err == f"error: {out}: is there already; remove it, or give another folder\n"
    assert (tmp_path / "file").read_text() == "mine"
    assert convert.main([*words, str(folder)]) == 2
    for out in ("/proc/x", "/dev/null/x"):
        assert convert.main([*words, out]) == 2
        assert f"error: {out}: cannot be written (" in capsys.readouterr().err


def test_heads_and_formats_that_do_not_go_together(tmp_path, refusal):
    folder = SOURCES["medusa"].write(tmp_path / "in")
    assert "speculators holds eagle3, p-eagle, dflash, dspark, dflash2; this head is medusa" in refusal(
        folder, "--to", "speculators"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("safeailab-eagle", "speculators", "speculators p-eagle", "medusa", "ibm-mlp", "arctic-lstm"),
        *("dflash not causal", "speculators dspark", "dflash2"),
    ],
)
def test_our_own_export_states_every_key_and_no_other(tmp_path, run, refusal, tiny_target_folder, name):
    folder = SOURCES[name].write(tmp_path / "in")
    exported = tmp_path / "ours"
    run("--from", "auto", "--to", "headway", "--verifier", tiny_target_folder, folder, exported)
    config = json.loads((exported / "config.json").read_text())
    for key in set(config) - {"torch_dtype", "speculators_version"}:
        (exported / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != key}))
        assert key in refusal(exported, "--from", "headway")
    (exported / "config.json").write_text(json.dumps({**config, "extra": 1}))
    assert "unknown: extra=1" in refusal(exported, "--from", "headway")
    (exported / "config.json").write_text(json.dumps({**config, "initializer_range": 1}))
    assert "unknown: initializer_range=1; Headway writes no such key" in refusal(exported, "--from", "headway")


def test_the_number_of_drafted_tokens(tmp_path, run, refusal):
    folder = SOURCES["medusa"].write(tmp_path / "in")
    words = ["--from", "medusa", "--to", "vllm-medusa"]
    run(*words, "--speculative-tokens", "2", folder, tmp_path / "two")
    assert json.loads((tmp_path / "two" / "config.json").read_text())["num_lookahead_tokens"] == 2
    assert "medusa does not say how many" in refusal(folder, "--to", "medusa", "--speculative-tokens", "2")
    for number, message in (("4", "speculative_tokens=4: this head drafts at most 3"), ("0", "must be at least 1")):
        assert message in refusal(folder, *words, "--speculative-tokens", number)


def test_mixed_dtypes_keep_theirs_and_the_widest_is_stated(tmp_path, run):
    source = SOURCES["ibm-mlp"]
    folder = source.write(tmp_path / "in")
    tensors = {key: value if ".ln." in key else value.bfloat16() for key, value in source.tensors().items()}
    save_file(tensors, folder / source.file)
    run("--from", "auto", "--to", "ibm-mlp", folder, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {key: value.dtype for key, value in written.items()} == {key: value.dtype for key, value in tensors.items()}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_options_that_would_say_nothing_are_refused(tmp_path, refusal):
    folder = SOURCES["speculators"].write(tmp_path / "in")
    for option, value in (("--layer-ids", "outputs"), ("--norm-output", "vllm")):
        assert f"{option} {value}: speculators does not leave that open" in refusal(folder, option, value)


def test_our_own_export_holds_nothing_that_would_have_to_be_converted(tmp_path, run, refusal):
    source = SOURCES["speculators"]
    exported = tmp_path / "ours"
    run("--from", "auto", "--to", "headway", source.write(tmp_path / "in"), exported)
    tensors = load_file(exported / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + torch.arange(96)}, exported / "model.safetensors")
    assert "d2t: target ids in the source, made offsets; Headway would not write that" in refusal(exported)


def test_help_and_wrong_options(capsys):
    with pytest.raises(SystemExit) as stopped:
        convert.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for word in ("--from", "--to", "--verifier", "--dry-run", "safeailab-eagle3  eagle3"):
        assert word in text
    for words in (["--from", "gguf", "--to", "headway", "a", "b"], ["--from", "auto", "--to", "auto", "a", "b"], []):
        with pytest.raises(SystemExit) as stopped:
            convert.main(words)
        assert stopped.value.code == 2
        assert "usage: " in capsys.readouterr().err
