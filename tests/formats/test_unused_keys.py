"""Keys of a config.json that no forward depends on are accepted and said; those that ask for nothing are silent."""

from __future__ import annotations

import copy
import json
import shutil
from typing import Any

import pytest
import torch

from infer.config import GenerateConfig
from infer.generate import run
from infer.options.cli import compose
from infer.options.exported_heads import with_head
from models.formats.conversion import FORMATS, ConversionOptions, Verifier, interpret
from models.heads.files import load_head
from tests.formats.sources import SOURCES, Source

TARGET = Verifier("some/target", "LlamaForCausalLM", 384, 64, 8)
EAGLE, EAGLE3, MEDUSA = "safeailab-eagle", "safeailab-eagle3", "medusa"


def notes_of(source: Source, config: dict[str, Any], target: Verifier = TARGET) -> list[str]:
    options = ConversionOptions(target, **source.chosen)
    return interpret(FORMATS[source.form], config, source.tensors(), options).notes


@pytest.mark.parametrize("name", SOURCES)
def test_null_and_empty_values_of_unknown_keys_ask_for_nothing(name):
    source = SOURCES[name]
    nothing = {"base_model_ep_plan": None, "transform_config": {}, "hooks": []}
    sections = {key: value | nothing for key, value in source.config.items() if isinstance(value, dict)}
    assert notes_of(source, source.config | sections | nothing) == notes_of(source, source.config)
    for value in (0, "", False, {"a": None}, [None]):
        with pytest.raises(ValueError, match=r"config\.json: unknown: base_model_ep_plan="):
            notes_of(source, source.config | {"base_model_ep_plan": value})


def test_so_they_do_in_a_head_that_we_exported(tiny_head_folder, tiny_target, tmp_path):
    folder = shutil.copytree(tiny_head_folder, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())

    def read(extra: Any, places: tuple[str, ...] = ("", "transformer_layer_config", "speculators_config")) -> Any:
        """Add a key of that value to the file, and to sections of it and a list of sections."""
        changed = copy.deepcopy(config)
        for place in places:
            section = changed[place] if place else changed
            section["bar"] = extra
            if "proposal_methods" in section:
                section["proposal_methods"][0]["bar"] = extra
        (folder / "config.json").write_text(json.dumps(changed))
        return load_head(folder, target=tiny_target)

    for nothing in ({}, None, []):
        assert read(nothing).config == load_head(tiny_head_folder).config
    for place in ("", "transformer_layer_config", "speculators_config"):
        for something in ({"a": 1}, 0, "", [None], {"long": ["words"] * 1000}):
            with pytest.raises(ValueError, match=r"config\.json:.* unknown: bar=.*") as error:
                read(something, (place,))
            assert len(str(error.value)) < 400


@pytest.mark.parametrize("name", [name for name in SOURCES if "medusa" not in name])
def test_a_key_that_nothing_depends_on_is_said(name):
    source = SOURCES[name]
    config = source.config | {"max_sequence_length": 2048}  # EAGLE's head for Vicuna 33B has it
    unused = "max_sequence_length=2048 is not used: nothing that is computed depends on it"
    assert notes_of(source, config) == [*notes_of(source, source.config), unused]
    section = source.config.get("transformer_layer_config")
    if section is not None:
        config = source.config | {"transformer_layer_config": section | {"router_aux_loss_coef": 0.02}}
        assert "router_aux_loss_coef=0.02 is not used: nothing that is computed depends on it" in notes_of(
            source, config
        )


def test_the_start_card_says_what_is_not_used_and_what_was_assumed(tmp_path, capsys, tiny_target_folder):
    folder = SOURCES[EAGLE].write(tmp_path / "in")
    (folder / "config.json").write_text(json.dumps(SOURCES[EAGLE].config | {"max_sequence_length": 2048}))
    words = ["model=demo", f"model.path={tiny_target_folder}", "model.device=cpu", "head=eagle", f"head.path={folder}"]
    run(with_head(compose("generate", GenerateConfig, [*words, "num_prompts=1", "prompt_tokens=8", "max_tokens=4"])))
    card = capsys.readouterr().out
    assert "max_sequence_length=2048 is not used" in card
    assert "bias is not stated: true, SafeAILab's default" in card
    assert load_head(SOURCES["speculators"].write(tmp_path / "other")).notes == ()


def test_biases_of_a_qwen2_head_follow_from_its_tensors_too(tiny_target_folder, tmp_path):
    source = SOURCES["safeailab-eagle of Qwen2"]
    config = {key: value for key, value in source.config.items() if key != "qkv_bias"}
    assert "qkv_bias is not stated: true, as the file holds biases of q, k and v" in notes_of(source, config)
    folder = source.write(tmp_path / "in")
    stated = load_head(folder).config
    (folder / "config.json").write_text(json.dumps(config))
    assert load_head(folder).config == stated


def test_a_window_that_is_not_used_is_none():
    source = SOURCES["safeailab-eagle of Qwen2"]
    with pytest.raises(ValueError, match="sliding_window=131072: only no value"):
        notes_of(source, source.config | {"use_sliding_window": None})


def test_a_head_for_mixtral_is_read_and_its_target_named():
    source = SOURCES[EAGLE]
    experts = {"num_experts_per_tok": 2, "num_local_experts": 8}
    training = {"output_router_logits": False, "router_aux_loss_coef": 0.02}
    config = source.config | experts | training | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    notes = notes_of(source, config, Verifier("some/target", "MixtralForCausalLM", 384, 64, 8))
    assert "num_local_experts=8 is the target's: the head's layer has no experts" in notes
    with pytest.raises(ValueError, match="a head for Mixtral, not for LlamaForCausalLM"):
        notes_of(source, config)
    with pytest.raises(ValueError, match="unknown: num_local_experts=8"):
        notes_of(source, source.config | {"num_local_experts": 8})


def test_published_medusa_files_hold_more_heads_than_they_state():
    source = SOURCES[MEDUSA]
    checkpoint = interpret(
        FORMATS["medusa"], source.config | {"medusa_num_heads": 2}, source.tensors(), ConversionOptions()
    )
    assert checkpoint.config.max_depth == 3
    assert checkpoint.notes == ["medusa_num_heads=2, and the file holds 3: all are used, as in FasterDecoding's code"]


def test_default_layers_that_are_counted_as_outputs_need_no_option():
    source = SOURCES[EAGLE3]
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    options = ConversionOptions(TARGET)
    checkpoint = interpret(FORMATS[source.form], source.config | {"eagle_config": ids}, source.tensors(), options)
    assert checkpoint.config.aux_layers == TARGET.default_aux_layers
    assert "auxiliary layers [1, 3, 4] are 0-based outputs: [2, 4, 5] as hidden_states" in checkpoint.notes
    ids["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]  # as SpecForge states them for gpt-oss: 1, N/2 - 1 and N - 3
    checkpoint = interpret(FORMATS[source.form], source.config | {"eagle_config": ids}, source.tensors(), options)
    assert checkpoint.config.aux_layers == (2, 4, 6)
    deeper = Verifier("some/target", "LlamaForCausalLM", 384, 64, 12)
    with pytest.raises(ValueError, match="Convert with --layer-ids hidden_states or --layer-ids outputs"):
        notes_of(source, source.config | {"eagle_config": ids}, deeper)


def test_a_buffer_of_old_exporters_is_left_out():
    source = SOURCES[EAGLE]
    name = "layers.0.self_attn.rotary_emb.inv_freq"
    tensors = source.tensors() | {name: torch.ones(4)}
    checkpoint = interpret(FORMATS[source.form], source.config, tensors, ConversionOptions(TARGET))
    assert checkpoint.remarks == {name: "follows from config.json"}
    assert len(checkpoint.tensors) == len(source.tensors())
