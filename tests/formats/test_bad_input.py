"""The command's error names what is wrong with a checkpoint, and a failed conversion leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.formats.conversion import FORMATS, ConversionOptions, Verifier, interpret
from tests.formats.sources import SOURCES

TARGET = Verifier("some/target", "LlamaForCausalLM", 384, 64, 8)
EAGLE, EAGLE3, SPECULATORS = "safeailab-eagle", "safeailab-eagle3", "speculators"
SMALL, QWEN2 = "vllm-medusa shared and truncated", "safeailab-eagle of Qwen2"
SPECFORGE, MEDUSA, VLLM, MLP = "safeailab-eagle3 of SpecForge", "medusa", "vllm-medusa", "ibm-mlp"
LSTM, STACKS = "arctic-lstm", "arctic-lstm stacks"


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json. None removes a key; `a__b` is key b of section a."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        *parts, last = key.split("__")
        section = config
        for part in parts:
            section = section[int(part) if part.isdigit() else part]
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, file: str, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a file; None removes a tensor."""
    tensors = load_file(folder / file) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / file)


@pytest.fixture
def make_folder(tmp_path):
    def make(name: str, tensors: dict[str, torch.Tensor | None] | None = None, **config: Any) -> Path:
        source = SOURCES[name]
        folder = source.write(tmp_path / "in")
        if name == EAGLE3:
            config = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], **config}
        edit_config(folder, **config)
        edit_tensors(folder, source.file, tensors or {})
        return folder

    return make


# ---------------------------------------------------------------- files


def test_no_folder_no_config_no_weights(tmp_path, refusal):
    assert "no config.json; there is no such folder" in refusal(tmp_path / "nowhere")
    folder = tmp_path / "in"
    folder.mkdir()
    assert f"{folder}: no config.json" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(SOURCES[EAGLE].config))
    assert "no weights; looked for model.safetensors, pytorch_model.bin" in refusal(folder)
    assert "looked for medusa_lm_head.safetensors, medusa_lm_head.pt" in refusal(folder, "--from", "medusa")


@pytest.mark.parametrize("content", ["{", "[]", "\x00", '"text"'])
def test_a_config_that_is_no_json_object(make_folder, refusal, content):
    folder = make_folder(EAGLE)
    (folder / "config.json").write_text(content)
    assert re.search(r"config\.json: (not valid JSON|expected a JSON object)", refusal(folder))


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_file(make_folder, refusal, keep):
    folder = make_folder(SPECULATORS)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    whole_header = keep in (5000, -1)
    reason = r"cut off: \S+ ends at byte [\d,]+ and the file has [\d,]+" if whole_header else r"cannot be read \(.*\)"
    assert re.search(rf"model\.safetensors: {reason}; copy or download it again", refusal(folder))


def test_shards(make_folder, refusal, run, tmp_path):
    folder = make_folder(SPECULATORS)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = sorted(tensors)[:8]
    save_file({name: tensors[name] for name in half}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in tensors if name not in half}, folder / "b.safetensors")
    weight_map = {name: "a.safetensors" if name in half else "b.safetensors" for name in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    run("--from", "auto", "--to", "headway", folder, tmp_path / "whole")
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == tensors.keys()

    save_file({name: tensors[name] for name in [*half, "norm.weight"]}, folder / "a.safetensors")
    assert "norm.weight is doubled, in a.safetensors and in b.safetensors" in refusal(folder)
    (folder / "b.safetensors").unlink()
    assert "names 'b.safetensors', which is not there" in refusal(folder)
    index.write_text("{}")
    assert "weight_map is missing" in refusal(folder)


def test_no_format_fits(make_folder, refusal):
    folder = make_folder(EAGLE, num_hidden_layers=32)
    assert "of no format that we know: headway, " in refusal(folder)


# ---------------------------------------------------------------- tensors


def test_every_tensor_of_every_format_is_needed():
    for source in SOURCES.values():
        options = ConversionOptions(TARGET, **source.chosen)
        tensors = source.tensors()
        for name in tensors:
            rest = {key: value for key, value in tensors.items() if key != name}
            if name == "embed_tokens.weight" or name in source.copies:  # if absent, it is shared with the target
                assert name not in interpret(FORMATS[source.form], source.config, rest, options).tensors
            elif name in ("d2t", "t2d"):  # each follows from the other
                complete = interpret(FORMATS[source.form], source.config, rest, options)
                assert torch.equal(complete.tensors[name], tensors[name])
            else:
                with pytest.raises(ValueError, match=re.escape(name.removeprefix("speculator.")) + ": missing"):
                    interpret(FORMATS[source.form], source.config, rest, options)


DISAGREEMENTS: list[tuple[str, dict[str, Any], dict[str, torch.Tensor | None], list[str]]] = [
    # (source, changes of config.json, changes of the tensors, what the error must name)
    (EAGLE, {"vocab_size": 380}, {}, ["embed_tokens.weight [384, 64]: expected [380, 64]", "vocab_size=380"]),
    (EAGLE, {"hidden_size": 32}, {}, ["fc.weight [64, 128]: expected [32, 64]", "hidden_size=32"]),
    (
        EAGLE,
        {"intermediate_size": 128},
        {},
        ["gate_proj.weight [160, 64]: expected [128, 64]", "intermediate_size=128"],
    ),
    (EAGLE, {"num_key_value_heads": 8}, {}, ["k_proj.weight [16, 64]: expected [64, 64]", "num_key_value_heads=8"]),
    (EAGLE, {"head_dim": 16}, {}, ["q_proj.weight [64, 64]: expected [128, 64]", "head_dim=16"]),
    (EAGLE, {"bias": False}, {}, ["fc.bias: not part of this head", "bias=False"]),
    (EAGLE, {"bias": True}, {"fc.bias": None}, ["fc.bias: missing", "bias=True"]),
    (EAGLE, {}, {"fc.bias": None}, ["fc.bias: missing", "no bias"]),
    (EAGLE, {"attention_bias": True}, {}, ["layers.0.self_attn.q_proj.bias: missing", "attention_bias=True"]),
    (EAGLE, {"qkv_bias": True}, {}, ["layers.0.self_attn.k_proj.bias: missing", "qkv_bias=True"]),
    (QWEN2, {"qkv_bias": False}, {}, ["layers.0.self_attn.v_proj.bias: not part", "qkv_bias=False"]),
    (QWEN2, {"attention_bias": True}, {}, ["layers.0.self_attn.o_proj.bias: missing", "attention_bias=True"]),
    (EAGLE, {"mlp_bias": True}, {}, ["layers.0.mlp.gate_proj.bias: missing", "mlp_bias=True"]),
    (EAGLE, {}, {"layers.0.input_layernorm.weight": torch.ones(64)}, ["input_layernorm.weight: not part"]),
    (EAGLE, {}, {"lm_head.weight": torch.ones(384, 64)}, ["lm_head.weight: not part of this head"]),
    (EAGLE3, {"draft_vocab_size": 100}, {}, ["lm_head.weight [96, 64]: expected [100, 64]", "draft_vocab_size=100"]),
    (EAGLE3, {"draft_vocab_size": 384}, {}, ["lm_head.weight [96, 64]: expected [384, 64]", "d2t: not part"]),
    (EAGLE3, {}, {"lm_head.weight": None}, ["lm_head.weight: missing", "draft_vocab_size=96"]),
    (EAGLE3, {}, {"d2t": None, "t2d": None}, ["d2t: missing", "t2d: missing", "draft_vocab_size=96"]),
    (EAGLE3, {"target_hidden_size": 128}, {"embed_tokens.weight": None}, ["embed_tokens.weight: missing"]),
    (EAGLE3, {"target_hidden_size": 128}, {}, ["fc.weight [64, 192]: expected [64, 384]", "target_hidden_size=128"]),
    (EAGLE3, {"fc_norm": True}, {}, ["fc_norm.0.weight: missing", "fc_norm=True"]),
    (EAGLE3, {}, {"input_norm.weight": torch.ones(192)}, ["input_norm.weight: not part", "no norm_before_fc"]),
    (
        EAGLE3,
        {},
        {"layers.0.hidden_norm.weight": torch.ones(64)},
        ["layers.0.hidden_norm.weight", "midlayer", "doubled"],
    ),
    (EAGLE3, {}, {"fc.bias": torch.ones(64)}, ["fc.bias: not part of this head"]),
    (
        SPECULATORS,
        {"transformer_layer_config__num_hidden_layers": 2},
        {},
        ["layers.1.self_attn.q_proj.weight: missing", "num_hidden_layers=2"],
    ),
    (
        "speculators with two layers and input_norm",
        {"transformer_layer_config__num_hidden_layers": 1},
        {},
        ["layers.1.self_attn.q_proj.weight: not part", "num_hidden_layers=1"],
    ),
    (
        SPECULATORS,
        {"eagle_aux_hidden_state_layer_ids": [2, 4]},
        {},
        ["fc.weight [64, 192]: expected [64, 128]", "[2, 4]"],
    ),
    (
        SPECULATORS,
        {"transformer_layer_config__vocab_size": 400},
        {},
        ["embed_tokens.weight [384, 64]: expected [400, 64]", "t2d [384]: expected [400]", "vocab_size=400"],
    ),
    (SPECULATORS, {}, {"midlayer.hidden_norm.weight": torch.ones(64)}, ["midlayer.hidden_norm.weight", "doubled"]),
    ("speculators p-eagle", {}, {"mask_hidden": None}, ["mask_hidden: missing"]),
    (MEDUSA, {"medusa_num_heads": 4}, {}, ["3.0.linear.weight: missing", "medusa_num_heads=4"]),
    (MEDUSA, {"medusa_num_heads": 1}, {}, ["1.0.linear.weight: not part", "medusa_num_heads=1"]),
    (MEDUSA, {"medusa_num_layers": 1}, {}, ["0.1.weight: missing", "medusa_num_layers=1"]),
    (MEDUSA, {"vocab_size": 400}, {}, ["vocab_size=400: only 384"]),
    (MEDUSA, {}, {"1.0.linear.bias": None}, ["1.0.linear.bias: missing"]),
    (VLLM, {"medusa_fc_bias": False}, {}, ["blocks.0.layers.0.bias: not part", "medusa_fc_bias=False"]),
    (VLLM, {"medusa_fc_bias": None}, {}, ["blocks.0.layers.0.bias: not part", "no medusa_fc_bias"]),
    (VLLM, {"num_hidden_layers": 1}, {}, ["blocks.0.layers.1.weight: not part", "num_hidden_layers=1"]),
    (VLLM, {"truncated_vocab_size": 96}, {}, ["token_map: missing", "truncated_vocab_size=96"]),
    (VLLM, {"original_lm_head": True}, {}, ["lm_heads.1.weight: not part", "original_lm_head=True"]),
    (MLP, {"n_predict": 2, "top_k_tokens_per_head": [5, 4]}, {}, ["emb.2.weight: not part", "n_predict=2"]),
    (MLP, {"inner_dim": 0}, {}, ["emb.0.weight [384, 40]: expected [384, 64]"]),
    (MLP, {"emb_dim": 32}, {}, ["proj.0.weight [40, 64]: expected [40, 32]", "emb_dim=32"]),
    (MLP, {"vocab_size": 300}, {}, ["head.0.weight [384, 40]: expected [300, 40]", "vocab_size=300"]),
    (MLP, {"tie_weights": True}, {}, ["differs from", "tie_weights=True"]),
    (MLP, {}, {"speculator.proj.0.bias": torch.ones(40)}, ["proj.0.bias: not part of this head"]),
    (MLP, {}, {"emb.0.weight": torch.ones(384, 40)}, ["emb.0.weight", "doubled"]),
    (LSTM, {"tie_lstm_embs": False}, {}, ["input_emb.0.weight: missing", "tie_lstm_embs=False"]),
    (LSTM, {"input_hidden_dim": 32}, {}, ["cell_proj.0.weight [40, 64]: expected [40, 32]", "input_hidden_dim=32"]),
    (LSTM, {"method": None}, {}, ["cell_ln.0.bias: not part of this head", "emb.0.0.weight: missing"]),
    (LSTM, {}, {"input_emb.0.weight": torch.ones(384, 40)}, ["input_emb.0.weight differs", "tie_lstm_embs=True"]),
    (STACKS, {"n_predict": 2}, {}, ["emb.2.0.weight: not part of this head", "n_predict=2"]),
    (STACKS, {"emb_dim": "40"}, {}, ["emb.0.1.weight: not part of this head", "emb_dim=40"]),
    # dtypes and values
    (EAGLE, {}, {"fc.weight": torch.ones(64, 128, dtype=torch.int32)}, ["fc.weight is torch.int32: expected floating"]),
    (EAGLE, {}, {"fc.weight": torch.ones(64, 128).to(torch.float8_e4m3fn)}, ["fc.weight is torch.float8_e4m3fn"]),
    (EAGLE3, {}, {"d2t": torch.zeros(96)}, ["d2t is torch.float32: expected whole numbers"]),
    (EAGLE3, {}, {"t2d": torch.ones(384, dtype=torch.uint8)}, ["t2d is torch.uint8: expected torch.bool"]),
    (EAGLE, {}, {"fc.bias": torch.full((64,), float("nan"))}, ["fc.bias holds NaN or infinity"]),
    # the draft vocabulary
    (SPECULATORS, {}, {"d2t": torch.zeros(96, dtype=torch.int64)}, ["d2t and t2d do not describe one vocabulary"]),
    (EAGLE3, {}, {"t2d": torch.ones(384, dtype=torch.bool)}, ["d2t and t2d do not describe one vocabulary"]),
    (EAGLE3, {}, {"d2t": torch.arange(96) * 9, "t2d": None}, ["d2t: neither as offsets nor as target ids", "384"]),
    (SPECULATORS, {}, {"d2t": -torch.ones(96, dtype=torch.int64), "t2d": None}, ["d2t: neither as offsets nor"]),
    (SPECULATORS, {}, {"d2t": None, "t2d": torch.arange(384) < 95}, ["t2d marks 95 tokens", "draft_vocab_size=96"]),
    (SMALL, {}, {"token_map": torch.arange(96) + 300}, ["token_map: must hold distinct tokens of the target's 384"]),
    (SMALL, {}, {"token_map": torch.zeros(96, dtype=torch.int64)}, ["token_map: must hold distinct tokens"]),
]


@pytest.mark.parametrize(("name", "config", "tensors", "named"), DISAGREEMENTS)
def test_config_and_weights_that_disagree_are_both_named(make_folder, refusal, name, config, tensors, named):
    error = refusal(make_folder(name, tensors, **config), "--from", SOURCES[name].form, *SOURCES[name].options)
    for text in named:
        assert text in error


# ---------------------------------------------------------------- config.json

WRONG_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    (EAGLE, {"hidden_size": None}, "hidden_size is missing"),
    (EAGLE, {"hidden_size": "64"}, "hidden_size='64': expected a whole number"),
    (EAGLE, {"hidden_size": True}, "hidden_size=True: expected a whole number"),
    (EAGLE, {"num_key_value_heads": 3}, "num_attention_heads=8 is no multiple of 3"),
    (EAGLE, {"num_hidden_layers": 2}, "num_hidden_layers=2: an EAGLE head has one layer"),
    (EAGLE, {"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu' is supported"),
    (EAGLE, {"sliding_window": 4096}, "sliding_window=4096: only no value"),
    (EAGLE, {"pretraining_tp": 2}, "pretraining_tp=2: only 1"),
    (EAGLE, {"quantization_config": {"bits": 4}}, "quantization_config="),
    (EAGLE, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic': not supported"),
    (EAGLE, {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor: missing"),
    (EAGLE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: only 1.0"),
    (EAGLE, {"layer_types": ["sliding_attention"]}, "layer_types=['sliding_attention']: only ['full_attention']"),
    (EAGLE, {"embedding_multiplier": 12.0}, "unknown: embedding_multiplier=12.0; what changes nothing"),
    (EAGLE3, {"architectures": ["DeepseekV3ForCausalLMEagle3"]}, "architectures=['DeepseekV3ForCausalLMEagle3']"),
    (EAGLE3, {"model_type": "gpt_oss"}, "model_type='gpt_oss': only 'llama'"),
    (EAGLE3, {"num_hidden_layers": 2}, "num_hidden_layers=2: this format has one, midlayer"),
    (EAGLE3, {"logit_scale": 0.5}, "logit_scale=0.5: only 1.0"),
    (EAGLE3, {"bias": True}, "bias=True: only False"),
    (EAGLE3, {"norm_before_fc": True, "fc_norm": True}, "fc_norm=true: excludes"),
    (EAGLE3, {"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config: use_aux_hidden_state=False: only True"),
    (EAGLE3, {"eagle_config": {"gate": 1}}, "eagle_config: unknown: gate=1"),
    (EAGLE3, {"eagle_config": {"use_last_layernorm": False}}, "eagle_config: use_last_layernorm=False: only True"),
    (EAGLE3, {"eagle_config": {"parallel_draft_step": 4}}, "eagle_config: parallel_draft_step=4: only 1"),
    (EAGLE3, {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}, "eagle_config.norm_before_fc=True"),
    (EAGLE3, {"num_aux_hidden_states": 4}, "num_aux_hidden_states=4, but"),
    (EAGLE3, {"draft_vocab_size": 500}, "draft_vocab_size=500: must be 1 to"),
    (EAGLE3, {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "--layer-ids hidden_states or --layer-ids outputs"),
    (
        EAGLE3,
        {"eagle_aux_hidden_state_layer_ids": [4, 2, 5]},
        "eagle_aux_hidden_state_layer_ids=[4, 2, 5]: must ascend",
    ),
    (EAGLE3, {"eagle_aux_hidden_state_layer_ids": []}, "is missing, and its default depends on the target's layers"),
    (
        EAGLE3,
        {
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]},
        },
        "eagle_aux_hidden_state_layer_ids=[2, 4, 5] and eagle_config says [2, 3, 5]",
    ),
    (EAGLE3, {"eagle_aux_hidden_state_layer_ids": None}, "is missing, and its default depends on the target's layers"),
    (SPECULATORS, {"norm_before_residual": None}, "norm_before_residual is missing; vLLM takes it for true and"),
    (SPECULATORS, {"speculators_model_type": "mtp"}, "speculators_model_type='mtp': one of eagle3, peagle, dflash, ds"),
    (SPECULATORS, {"transformer_layer_config": None}, "transformer_layer_config is missing"),
    (SPECULATORS, {"transformer_layer_config__model_type": "mistral"}, "model_type='mistral': only 'llama' or 'qwen3'"),
    (SPECULATORS, {"speculators_config__algorithm": "eagle"}, "speculators_config: algorithm='eagle': only 'eagle3'"),
    (SPECULATORS, {"speculators_config__proposal_methods": []}, "proposal_methods=[]: expected a list of objects"),
    (SPECULATORS, {"layernorms": True}, "unknown: layernorms=True"),
    ("speculators p-eagle", {"mask_token_id": None}, "mask_token_id is missing"),
    ("speculators p-eagle", {"mask_token_id": 384}, "mask_token_id=384: must be a token of the target's 384"),
    (MEDUSA, {"medusa_num_layers": None}, "medusa_num_layers is missing"),
    (MEDUSA, {"version": "3"}, "version='3': only '2'"),
    (VLLM, {"medusa_num_heads": 3}, "num_heads and medusa_num_heads are both taken for num_heads"),
    (VLLM, {"logit_scale": 2.0}, "logit_scale=2.0: only 1.0"),
    (MLP, {"n_predict": 4}, "top_k_tokens_per_head=[5, 4, 3]: must be as many as n_predict=4"),
    (MLP, {"hidden_size": 32}, "emb_dim=64 and its alias hidden_size=32 disagree"),
    (MLP, {"num_lookahead_tokens": 4}, "speculative_tokens=4: this head drafts at most 3"),
    (LSTM, {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]}, "architectures=['ArcticMLPSpeculatorPreTrainedM"),
    (LSTM, {"method": "sum_gru"}, "method='sum_gru': only 'sum_lstm' or 'sum_rnn' is supported"),
    (LSTM, {"tie_weights": False}, "tie_weights=False: the depths of sum_lstm share their weights"),
    (LSTM, {"emb_dim": "24.40"}, "inner_dim=40, emb_dim=24.40, proj_dim=40: must all be 40; Arctic's own modules"),
    (LSTM, {"inner_dim": "wide"}, "inner_dim='wide': expected a width from 1 to 16777216, or up to 8 as"),
    (LSTM, {"proj_dim": None}, "proj_dim is missing"),
]


@pytest.mark.parametrize(("name", "config", "message"), WRONG_CONFIGS)
def test_a_config_that_asks_for_what_we_do_not_have_is_refused(make_folder, refusal, name, config, message):
    error = refusal(make_folder(name, **config), "--from", SOURCES[name].form)
    assert message in error


def test_nothing_but_a_clear_error_comes_of_any_value():
    """Every key of every format's config is set to odd values: each is read, or refused with a ValueError."""
    odd: list[Any] = [None, "x", -1, 0, 3, 10**400, float("nan"), True, [0], {"a": 1}]
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    tried = 0
    blocks = ("dflash with windows", "deepspec", "speculators dspark", "dflash2")
    for name in (EAGLE, EAGLE3, SPECULATORS, "speculators p-eagle", MEDUSA, VLLM, MLP, LSTM, STACKS, *blocks):
        source = SOURCES[name]
        tensors, base_config = source.tensors(), source.config
        if name == EAGLE:
            base_config = {**base_config, "rope_scaling": scaling}
            interpret(FORMATS[source.form], base_config, tensors, ConversionOptions(TARGET))
        for path in paths(base_config):
            for value in odd:
                config = copy.deepcopy(base_config)
                section: Any = config
                for part in path[:-1]:
                    section = section[part]
                section[path[-1]] = value
                with contextlib.suppress(ValueError):
                    interpret(FORMATS[source.form], config, tensors, ConversionOptions(TARGET))
                tried += 1
    assert tried > 1000


def paths(section: Any, before: tuple = ()) -> list[tuple]:
    items = section.items() if isinstance(section, dict) else enumerate(section) if isinstance(section, list) else ()
    collected = []
    for key, value in items:
        collected += [(*before, key), *paths(value, (*before, key))]
    return collected


# ---------------------------------------------------------------- what SpecForge leaves open


def test_what_norm_output_means_is_asked_for(make_folder, refusal, run, tmp_path):
    folder = make_folder(SPECFORGE)
    options = ["--layer-ids", "outputs"]
    assert "--norm-output vllm or --norm-output specforge" in refusal(folder, *options)
    for choice, flag in (("vllm", True), ("specforge", False)):
        report = run(
            *("--from", "auto", "--to", "speculators", "--verifier", tiny(tmp_path), folder, tmp_path / choice),
            *options,
            *("--norm-output", choice),
        )
        assert json.loads((tmp_path / choice / "config.json").read_text())["norm_output"] is flag
        assert ("SpecForge's of before September 2026" in report) is (choice == "specforge")
    edit_config(folder, norm_output=False)
    assert "reads the state without a norm" in refusal(folder, *options, "--norm-output", "specforge")
    edit_config(folder, norm_output=None)  # without the key, both readings agree
    assert "--norm-output vllm: config.json has no norm_output" in refusal(folder, *options, "--norm-output", "vllm")
    run("--from", "auto", "--to", "speculators", "--verifier", tiny(tmp_path), folder, tmp_path / "none", *options)


def test_layer_ids_are_converted(make_folder, run, tmp_path):
    folder = make_folder(SPECFORGE)
    for choice, ids in (("outputs", [2, 4, 5]), ("hidden_states", [1, 3, 4])):
        run(
            *("--from", "auto", "--to", "speculators", "--verifier", tiny(tmp_path), folder, tmp_path / choice),
            *("--norm-output", "vllm", "--layer-ids", choice),
        )
        config = json.loads((tmp_path / choice / "config.json").read_text())
        assert config["eagle_aux_hidden_state_layer_ids"] == ids
        assert config["num_aux_hidden_states"] == 3


# ---------------------------------------------------------------- pickles


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("harm-was-done"),))


@pytest.mark.parametrize(("name", "file"), [(EAGLE, "pytorch_model.bin"), (MEDUSA, "medusa_lm_head.pt")])
def test_a_pickle_is_read_with_a_warning(make_folder, run, tmp_path, caplog, name, file):
    folder, source = make_folder(name), SOURCES[name]
    (folder / source.file).unlink()
    torch.save(source.tensors(), folder / file)
    run("--from", "auto", "--to", source.form, folder, tmp_path / "out", "--verifier", tiny(tmp_path))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{folder / file}: a pickle, of which tensors are read and nothing is run")
    written = load_file(tmp_path / "out" / source.file)
    assert written.keys() == source.tensors().keys()
    assert all(torch.equal(written[key], value) for key, value in source.tensors().items())
    assert [path.suffix for path in (tmp_path / "out").iterdir() if path.suffix != ".json"] == [".safetensors"]


def test_safetensors_come_before_a_pickle(make_folder, run, tmp_path, caplog):
    folder = make_folder(EAGLE)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    run("--from", "auto", "--to", EAGLE, folder, tmp_path / "out", "--verifier", tiny(tmp_path))
    assert "pickle" not in caplog.text


def test_a_pickle_of_anything_else_is_refused_and_runs_nothing(make_folder, refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_folder(EAGLE)
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save({"fc.weight": Harmful()}, file)
    assert "it is broken, or holds more than tensors" in refusal(folder)
    assert not (tmp_path / "harm-was-done").exists()
    torch.save(SOURCES[EAGLE].tensors(), file)
    file.write_bytes(file.read_bytes()[:-200])
    assert "it is broken, or holds more than tensors" in refusal(folder)
    for content, message in (
        ({"model": SOURCES[EAGLE].tensors()}, "'model' is a dict; expected nothing but tensors by name"),
        (torch.ones(3), "holds a Tensor; expected tensors by name"),
        ({"fc.bias": torch.ones(1).expand(2**40)}, "'fc.bias' [1099511627776] has more elements than the file holds"),
        ({"fc.bias": torch.ones(3).to_sparse()}, "'fc.bias' is sparse, quantized or without data"),
        ({"fc.bias": torch.empty(3, device="meta")}, "'fc.bias' is sparse, quantized or without data"),
    ):
        torch.save(content, file)
        assert message in refusal(folder)


def test_a_pickle_of_tensors_that_share_memory(make_folder, run, tmp_path):
    """FasterDecoding's trainer uses the same residual block for every layer of a head."""
    folder, source = make_folder(MEDUSA), SOURCES[MEDUSA]
    tensors = source.tensors()
    for head in range(3):
        tensors[f"{head}.1.linear.weight"] = tensors[f"{head}.0.linear.weight"]
    (folder / source.file).unlink()
    torch.save(tensors, folder / "medusa_lm_head.pt")
    out = tmp_path / "out"
    run("--from", "auto", "--to", "vllm-medusa", folder, out, "--verifier", tiny(tmp_path))
    written = load_file(out / "model.safetensors")
    assert torch.equal(written["blocks.2.layers.1.weight"], tensors["2.0.linear.weight"])


# ---------------------------------------------------------------- the target


def tiny(tmp_path: Path, **changes: Any) -> Path:
    """Write the config.json of a target, which is all that most conversions need of it."""
    folder = tmp_path / "target"
    folder.mkdir(exist_ok=True)
    sizes = {"vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 8}
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 400}, "the head's vocab_size is 384, the target's is 400; it is another target's"),
        ({"hidden_size": 128}, "the head's target_hidden_size is 64, the target's is 128"),
        ({"num_hidden_layers": 4}, "the head reads layer 5, the target has 4"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"architectures": []}, "architectures is missing"),
    ],
)
def test_a_head_of_another_target_is_refused(make_folder, refusal, tmp_path, changes, message):
    assert message in refusal(make_folder(SPECULATORS), "--verifier", tiny(tmp_path, **changes))


def test_a_verifier_that_is_not_there(make_folder, refusal, tmp_path):
    folder = make_folder(SPECULATORS)
    assert "no such folder (a hub id would be written owner/name)" in refusal(folder, "--verifier", tmp_path / "none")
    assert "neither a local folder nor reachable" in refusal(folder, "--verifier", "no-such-owner/no-such-model")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "the folder has no config.json" in refusal(folder, "--verifier", empty)


def test_what_a_format_says_of_the_target_must_be_known(make_folder, refusal, tmp_path):
    assert "the head's target is part of this format and not known; give --verifier" in refusal(make_folder(EAGLE))
    shutil.rmtree(tmp_path / "in")
    folder = make_folder(MEDUSA, base_model_name_or_path=None)
    assert "base_model_name_or_path: not known" in refusal(folder, "--to", "medusa")


def test_a_shared_embedding_is_copied_from_the_target(make_folder, refusal, run, tmp_path, tiny_target_folder):
    folder = make_folder("safeailab-eagle3 sharing the embedding")
    assert "no weights" in refusal(folder, "--verifier", tiny(tmp_path))
    report = run("--from", "auto", "--to", "headway", "--verifier", tiny_target_folder, folder, tmp_path / "out")
    assert re.search(r"^the verifier's +embed_tokens\.weight +\[384, 64\] +float32$", report, re.MULTILINE)
    written = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(written, load_file(tiny_target_folder / "model.safetensors")["model.embed_tokens.weight"])
    # a format in which the embedding is optional omits it
    run("--from", "auto", "--to", "speculators", "--verifier", tiny_target_folder, folder, tmp_path / "shared")
    assert "embed_tokens.weight" not in load_file(tmp_path / "shared" / "model.safetensors")
