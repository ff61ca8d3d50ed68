"""The exported EAGLE-3 head: the keys that other engines read, and its draft vocabulary."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from models.heads.eagle3.config import FLAGS, Eagle3Options
from models.heads.eagle3.head import Eagle3Head
from models.heads.files import load_head
from models.heads.weights import checkpoint_layout


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
    assert torch.equal(tensors["lm_head.weight"], tiny_target.lm_head.weight[used])  # as `from_target` initializes it


def test_a_full_draft_vocabulary_writes_no_maps(tiny_target):
    head = Eagle3Head(Eagle3Options(draft_vocab_size=10**6).for_target(tiny_target.config))
    assert head.config.draft_vocab_size == 384
    assert not {"d2t", "t2d"} & set(checkpoint_layout(head))
    assert torch.equal(head.target_ids, torch.arange(384))


def test_layer_ids_are_read_from_either_place(folder):
    (folder / "provenance.json").unlink()  # no longer our export, which has them at the top level
    edit(folder, eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    assert load_head(folder).config.aux_layers == (2, 4, 5)
    edit(folder, eagle_config={})
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids is missing"):
        load_head(folder)


def test_an_absent_head_says_how_to_get_one(tmp_path):
    with pytest.raises(ValueError, match=r"train/run\.py"):
        load_head(tmp_path)


def test_draft_vocab_and_layer_ids_are_checked(tiny_target):
    with pytest.raises(ValueError, match=r"head\.aux_layers=\[1, 9\]"):
        Eagle3Options(aux_layers=[1, 9]).for_target(tiny_target.config)
    with pytest.raises(ValueError, match="fc_norm"):
        Eagle3Options(norm_before_fc=True, fc_norm=True)
