"""The exported head: a round trip, the keys other engines read, and refusal of what does not fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.heads.eagle3.config import FLAGS, Eagle3Options
from models.heads.eagle3.head import Eagle3Head
from models.heads.files import load_head
from models.heads.weights import checkpoint_layout
from models.targets import load_target


@pytest.fixture
def folder(tiny_head_folder, tmp_path):
    return shutil.copytree(tiny_head_folder, tmp_path / "head")


def edit(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def test_round_trip_keeps_every_bit(tiny_head_folder, tiny_target):
    from models.heads.files import save_head

    head = load_head(tiny_head_folder, target=tiny_target)
    again = tiny_head_folder.parent / "again"
    again.mkdir(exist_ok=True)
    provenance = {"target_fingerprint": tiny_target.fingerprint}
    save_head(
        head,
        again,
        verifier=tiny_target.path,
        verifier_architecture="LlamaForCausalLM",
        speculative_tokens=4,
        provenance=provenance,
    )
    assert (again / "config.json").read_text() == (tiny_head_folder / "config.json").read_text()
    first, second = load_file(tiny_head_folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_files_are_what_vllm_reads(tiny_head_folder, tiny_target):
    config = json.loads((tiny_head_folder / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"]["name_or_path"] == tiny_target.path
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert all(isinstance(config[flag], bool) for flag in FLAGS)
    tensors = load_file(tiny_head_folder / "model.safetensors")
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    assert shapes == {
        "embed_tokens.weight": (384, 64),
        "fc.weight": (64, 192),
        "layers.0.input_layernorm.weight": (64,),
        "layers.0.hidden_norm.weight": (64,),
        "layers.0.post_attention_layernorm.weight": (64,),
        "layers.0.self_attn.q_proj.weight": (64, 128),
        "layers.0.self_attn.k_proj.weight": (32, 128),
        "layers.0.self_attn.v_proj.weight": (32, 128),
        "layers.0.self_attn.o_proj.weight": (64, 64),
        "layers.0.mlp.gate_proj.weight": (128, 64),
        "layers.0.mlp.up_proj.weight": (128, 64),
        "layers.0.mlp.down_proj.weight": (64, 128),
        "norm.weight": (64,),
        "lm_head.weight": (128, 64),
        "d2t": (128,),
        "t2d": (384,),
    }
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    used = torch.arange(128) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], used)
    assert torch.equal(tensors["lm_head.weight"], tiny_target.lm_head.weight[used])  # as `from_target` initialises it


def test_a_full_draft_vocabulary_writes_no_maps(tiny_target):
    head = Eagle3Head(Eagle3Options(draft_vocab_size=10**6).for_target(tiny_target.config))
    assert head.config.draft_vocab_size == 384
    assert not {"d2t", "t2d"} & set(checkpoint_layout(head))
    assert torch.equal(head.target_ids, torch.arange(384))


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_left_out_is_an_error(folder, flag):
    edit(folder, **{flag: None})
    with pytest.raises(ValueError, match=f"{flag} is missing"):
        load_head(folder)


def test_layer_ids_are_read_from_either_place(folder):
    (folder / "provenance.json").unlink()  # no longer our export, which has them at the top level
    edit(folder, eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    assert load_head(folder).config.aux_layers == (2, 4, 5)
    edit(folder, eagle_config={})
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids is missing"):
        load_head(folder)


def test_tensors_are_strict(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: value for name, value in tensors.items() if name != "fc.weight"}, path)
    with pytest.raises(ValueError, match=r"fc\.weight: missing"):
        load_head(folder)
    save_file(tensors | {"fc.bias": torch.zeros(64)}, path)
    with pytest.raises(ValueError, match=r"fc\.bias: not part"):
        load_head(folder)
    save_file(tensors | {"lm_head.weight": torch.zeros(100, 64)}, path)
    with pytest.raises(ValueError, match=r"lm_head.weight \[100, 64\]: expected \[128, 64\]"):
        load_head(folder)


def test_a_head_of_another_target_is_refused_and_can_be_forced(folder, make_target_folder):
    other = load_target(str(make_target_folder(seed=5)))
    with pytest.raises(ValueError, match=r"another target.*head\.allow_mismatch=true"):
        load_head(folder, target=other)
    load_head(folder, target=other, allow_mismatch=True)
    narrow = load_target(str(make_target_folder(hidden_size=32)))
    with pytest.raises(ValueError, match="target_hidden_size is 64, the target's is 32"):
        load_head(folder, target=narrow, allow_mismatch=True)


def test_an_absent_head_says_how_to_get_one(tmp_path):
    with pytest.raises(ValueError, match=r"train/run\.py"):
        load_head(tmp_path)


def test_draft_vocab_and_layer_ids_are_checked(tiny_target):
    with pytest.raises(ValueError, match=r"head\.aux_layers=\[1, 8\]"):
        Eagle3Options(aux_layers=[1, 8]).for_target(tiny_target.config)
    with pytest.raises(ValueError, match="fc_norm"):
        Eagle3Options(norm_before_fc=True, fc_norm=True)
