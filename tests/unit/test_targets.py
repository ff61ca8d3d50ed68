"""Our reading of a checkpoint against transformers': same logits and hidden states; errors for what does not fit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import TargetConfig
from models.targets import load_target, read_target_config
from tests.unit.reference import assert_equals_reference, randomise_biases_and_norms

VARIANTS = {
    "default": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4},
    "one KV head": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_hidden_states_equal_transformers(make_target_folder, variant):
    folder = make_target_folder(num_hidden_layers=4, **VARIANTS[variant])
    randomise_biases_and_norms(folder)
    assert_equals_reference(folder, torch.randint(0, 384, (2, 200), generator=torch.Generator().manual_seed(3)))


def test_sharded_checkpoints_read_the_same(make_target_folder, tmp_path):
    folder = make_target_folder(num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    names = sorted(tensors)
    weight_map = {}
    for index, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"shard-{index}.safetensors")
        weight_map |= dict.fromkeys(part, f"shard-{index}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    one, two = load_target(str(folder)), load_target(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert one.fingerprint != two.fingerprint  # the files differ, although the weights agree


def test_tensors_that_do_not_fit_are_all_named(make_target_folder, tmp_path):
    folder = make_target_folder(num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    del tensors["model.norm.weight"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)model.norm.weight: missing.*layers.7.mlp.up_proj.weight: not part"):
        load_target(str(tmp_path))
    del tensors["model.layers.7.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.norm.weight \[65\]: expected \[64\]"):
        load_target(str(tmp_path))


def test_wrong_paths_say_what_was_looked_for(tmp_path, make_target_folder):
    with pytest.raises(ValueError, match="no such folder"):
        load_target(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_target(str(tmp_path))
    with pytest.raises(ValueError, match=r"(?s)someone/some-model.*model hub.*model="):
        load_target("someone/some-model")  # conftest sets HF_HUB_OFFLINE
    folder = make_target_folder(num_hidden_layers=2)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no weights; looked for model\.safetensors"):
        load_target(str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "32"}, "vocab_size='32': must be a whole number"),
        ({"num_hidden_layers": 8.5}, "num_hidden_layers=8.5: must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be a whole number, at least 1"),
        ({"max_position_embeddings": "512"}, "max_position_embeddings='512': must be"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]: must be an object"),
    ],
)
def test_config_options_that_would_change_logits_are_errors(change, message):
    base = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
    }
    assert TargetConfig.from_json(base).default_aux_layers == (2, 4, 5)
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_json(base | change)


def test_an_unknown_architecture_lists_the_known_ones(make_target_folder):
    folder = make_target_folder(num_hidden_layers=2)
    stated = json.loads((folder / "config.json").read_text())
    for names, message in (
        (["MambaForCausalLM"], r"MambaForCausalLM.*LlamaForCausalLM"),
        ("LlamaForCausalLM", r"architectures='LlamaForCausalLM': must be a list of names"),
    ):
        (folder / "config.json").write_text(json.dumps(stated | {"architectures": names}))
        with pytest.raises(ValueError, match=message):
            load_target(str(folder))


def test_of_a_target_to_start_from_one_layer_is_read(make_target_folder):
    folder = make_target_folder(tie_word_embeddings=True)
    target, part = load_target(str(folder)), load_target(str(folder), layers=[-1])
    parameters = dict(part.named_parameters())
    last = f"layers.{target.config.num_layers - 1}."
    for name, parameter in target.named_parameters():
        if name.startswith("layers.") and not name.startswith(last):
            assert parameters[name].is_meta
        else:
            assert torch.equal(parameters[name], parameter)
    assert part.fingerprint == target.fingerprint


def test_null_and_empty_values_of_a_config_ask_for_nothing(make_target_folder):
    folder = make_target_folder(num_hidden_layers=1)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    plain = read_target_config(folder)
    nothing = {"hidden_act": None, "rope_scaling": {}, "quantization_config": {}, "mlp_bias": None, "layer_types": []}
    file.write_text(json.dumps(config | nothing))
    assert read_target_config(folder) == plain
    assert load_target(str(folder)).config == plain
    file.write_text(json.dumps(config | {"hidden_size": None}))
    with pytest.raises(ValueError, match="hidden_size is missing"):
        read_target_config(folder)
