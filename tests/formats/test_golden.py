"""Every format key by key, in both directions, against the lists of sources.py, and each written config.json."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.formats.checkpoint import formats_of
from models.formats.conversion import FORMATS, ConversionOptions, Verifier, detect, read_checkpoint, write_checkpoint
from models.heads import HEADS
from tests.formats.block_golden import BLOCK_CONFIGS
from tests.formats.sources import SOURCES

TARGET = Verifier("some/target", "LlamaForCausalLM", 384, 64, 8)
LAYER = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": [0],
}
VERIFIER = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
EAGLE3 = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": VERIFIER,
    },
    "transformer_layer_config": LAYER,
    "draft_vocab_size": 96,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "num_aux_hidden_states": 3,
    "target_hidden_size": 64,
    "embed_requires_grad": False,
    "torch_dtype": "float32",
}
PROPOSAL = EAGLE3["speculators_config"]
MTP_CONFIG = {
    "architectures": ["MTPDraftModel"],
    "speculators_model_type": "mtp",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "mtp",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": VERIFIER,
    },
    "transformer_layer_config": {
        **LAYER,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "rope_theta": 1000000.0,
    },
    "num_nextn_predict_layers": 1,
    "hidden_first": False,
    "pre_norm": False,
    "norm_recycled": True,
    "zero_first": False,
    "centered_norms": False,
    "torch_dtype": "float32",
}
MEDUSA_CONFIG = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": 64,
    "vocab_size": 384,
    "num_heads": 3,
    "num_hidden_layers": 2,
    "truncated_vocab_size": None,
    "original_lm_head": False,
    "medusa_fc_bias": True,
    "logit_scale": 1.0,
    "max_paths": 64,
    "topk": 10,
    "num_lookahead_tokens": 3,
    "torch_dtype": "float32",
}
MLP_CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "vocab_size": 384,
    "emb_dim": 64,
    "inner_dim": 40,
    "n_predict": 3,
    "tie_weights": False,
    "scale_input": True,
    "top_k_tokens_per_head": [5, 4, 3],
    "n_candidates": 5,
    "num_lookahead_tokens": 3,
    "torch_dtype": "float32",
}
LSTM_CONFIG = {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "method": "sum_lstm",
    "vocab_size": 384,
    "input_hidden_dim": 64,
    "inner_dim": "40",
    "emb_dim": "40",
    "proj_dim": "40",
    "n_predict": 3,
    "tie_weights": True,
    "tie_lstm_embs": True,
    "scale_input": True,
    "top_k_tokens_per_head": [1, 1, 1],
    "n_candidates": 3,
    "num_lookahead_tokens": 3,
    "base_model_archs": ["LlamaForCausalLM"],
    "torch_dtype": "float32",
}
# (source, format written) -> every key of config.json
CONFIGS = {
    ("safeailab-eagle", "safeailab-eagle"): {**LAYER, "bias": True, "torch_dtype": "float32"},
    ("safeailab-eagle", "headway"): {
        **LAYER,
        "architectures": ["EagleLlamaForCausalLM"],
        "bias": True,
        "own_embedding": True,
        "speculative_tokens": 5,
        "verifier": VERIFIER,
        "torch_dtype": "float32",
    },
    ("safeailab-eagle3", "speculators"): EAGLE3,
    ("safeailab-eagle3", "headway"): EAGLE3,
    ("safeailab-eagle3", "safeailab-eagle3"): {
        **LAYER,
        "draft_vocab_size": 96,
        "target_hidden_size": 64,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "num_aux_hidden_states": 3,
        "torch_dtype": "float32",
    },
    ("speculators p-eagle", "headway"): {
        **EAGLE3,
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_config": {
            **PROPOSAL,
            "algorithm": "peagle",
            "proposal_methods": [{**PROPOSAL["proposal_methods"][0], "speculative_tokens": 3}],
        },
        "transformer_layer_config": {**LAYER, "rope_theta": 500000.0},
        "mask_token_id": 7,
        "num_depths": 3,
    },
    ("speculators-mtp", "speculators-mtp"): MTP_CONFIG,
    ("speculators-mtp", "headway"): MTP_CONFIG,
    ("speculators-mtp with every flag", "headway"): {
        **MTP_CONFIG,
        "transformer_layer_config": {**LAYER, "num_hidden_layers": 2},
        "num_nextn_predict_layers": 2,
        "hidden_first": True,
        "pre_norm": True,
        "norm_recycled": False,
        "zero_first": True,
        "centered_norms": True,
    },
    ("medusa", "medusa"): {
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
        "base_model_name_or_path": "some/target",
        "hidden_size": 64,
        "vocab_size": 384,
        "torch_dtype": "float32",
    },
    ("medusa", "vllm-medusa"): {**MEDUSA_CONFIG, "base_model_name_or_path": "some/target"},
    ("medusa", "headway"): {**MEDUSA_CONFIG, "verifier": VERIFIER},
    ("ibm-mlp", "ibm-mlp"): {**MLP_CONFIG, "base_model_name_or_path": "some/target"},
    ("ibm-mlp", "headway"): {**MLP_CONFIG, "verifier": VERIFIER},
    ("arctic-lstm", "arctic-lstm"): {**LSTM_CONFIG, "base_model_name_or_path": "some/target"},
    ("arctic-lstm", "headway"): {**LSTM_CONFIG, "verifier": VERIFIER},
    ("arctic-lstm stacks", "arctic-lstm"): {
        **LSTM_CONFIG,
        "method": "sum_rnn",
        "inner_dim": "40.48",
        "emb_dim": "40.40",
        "proj_dim": "40.40",
        "tie_weights": False,
        "tie_lstm_embs": False,
        "num_lookahead_tokens": 2,
        "base_model_name_or_path": "some/target",
    },
    **BLOCK_CONFIGS,
}


def options_for(source):
    return ConversionOptions(verifier=TARGET, **source.chosen)


def read(source, folder):
    return read_checkpoint(FORMATS[source.form], source.write(folder), options_for(source))


def embedding():
    return torch.full((384, 64), 0.5)


OF_TARGET = {"embed_tokens.weight": embedding}


@pytest.mark.parametrize("name", SOURCES)
def test_every_tensor_arrives_under_our_name_with_its_bits(tmp_path, name):
    source = SOURCES[name]
    checkpoint = read(source, tmp_path / "in")
    assert checkpoint.head == source.head
    assert checkpoint.sources == {our_name: source_name for source_name, our_name, _ in source.rows}
    tensors = source.tensors()
    for source_name, our_name, shape in source.rows:
        assert tuple(checkpoint.tensors[our_name].shape) == shape
        assert checkpoint.tensors[our_name].dtype == tensors[source_name].dtype
        reordered = "order of halves" in checkpoint.remarks.pop(source_name, "")
        assert reordered == (name == "liquid-dspark" and source_name.rpartition(".self_attn.")[2][:2] in ("q_", "k_"))
        pair = checkpoint.tensors[our_name], tensors[source_name]
        ours, theirs = (x.flatten().sort().values for x in pair) if reordered else pair
        assert torch.equal(ours, theirs)
    assert len(checkpoint.tensors) == len(source.rows)
    assert checkpoint.remarks == dict.fromkeys(source.copies, "the target's, which the head uses in place")


@pytest.mark.parametrize("name", SOURCES)
def test_every_tensor_leaves_under_their_name_with_its_bits(tmp_path, name):
    source, form = SOURCES[name], FORMATS[SOURCES[name].form]
    checkpoint = read(source, tmp_path / "in")
    (tmp_path / "ours").mkdir()
    write_checkpoint(FORMATS["headway"], checkpoint, tmp_path / "ours", of_target=OF_TARGET)
    reloaded = read_checkpoint(FORMATS["headway"], tmp_path / "ours")
    (tmp_path / "out").mkdir()
    write_checkpoint(form, reloaded, tmp_path / "out")
    written = load_file(tmp_path / "out" / source.file)
    wanted = {key: value for key, value in source.tensors().items() if key not in source.copies}
    if "sharing" in name:
        wanted["embed_tokens.weight"] = embedding()
    assert {key: tuple(value.shape) for key, value in written.items()} == {
        key: tuple(value.shape) for key, value in wanted.items()
    }
    assert all(torch.equal(written[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(("name", "form"), CONFIGS)
def test_every_key_of_a_written_config(tmp_path, name, form):
    checkpoint = read(SOURCES[name], tmp_path / "in")
    (tmp_path / "out").mkdir()
    write_checkpoint(FORMATS[form], checkpoint, tmp_path / "out", of_target=OF_TARGET)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIGS[name, form]


def test_every_format_and_head_is_covered():
    # test_gguf_heads.py and tests/unit/test_mtp.py have the others
    folders = {form.name for form in FORMATS.values() if not (form.gguf or form.open)}
    assert {SOURCES[name].form for name in SOURCES} == folders - {"headway"}
    assert {form for _, form in CONFIGS} == folders
    assert {source.head for source in SOURCES.values()} == {name for name, head in HEADS.items() if formats_of(head)}


@pytest.mark.parametrize("name", SOURCES)
def test_a_folder_says_what_it_is(tmp_path, name):
    source = SOURCES[name]
    folder = source.write(tmp_path / "in")
    assert detect(folder).name == source.form
    (tmp_path / "ours").mkdir()
    checkpoint = read_checkpoint(FORMATS[source.form], folder, options_for(source))
    write_checkpoint(FORMATS["headway"], checkpoint, tmp_path / "ours", of_target=OF_TARGET)
    assert detect(tmp_path / "ours").name == "headway"


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("speculators with two layers and input_norm", "safeailab-eagle3", "num_hidden_layers=2.*room for one layer"),
        (
            "speculators 0.9.0",
            "safeailab-eagle3",
            "sliding_window, q_norm, k_norm: only the speculators format has such",
        ),
        ("vllm-medusa shared and truncated", "medusa", "original_lm_head=true: this format has an LM head for every"),
        (
            "safeailab-eagle",
            "speculators",
            "speculators holds eagle3, p-eagle, dflash, dspark, dflash2; this head is eagle",
        ),
        ("speculators p-eagle", "safeailab-eagle3", "this head is p-eagle: one of headway, speculators"),
        ("medusa", "ibm-mlp", "ibm-mlp holds mlp; this head is medusa: one of headway, medusa"),
        ("dflash not causal", "deepspec", "deepspec: holds heads whose rows see all positions and whose anchor's row"),
        ("dflash of JetSpec", "deepspec", "deepspec: holds heads whose rows see all positions and whose anchor's row"),
        ("speculators dspark in place", "deepspec", "deepspec: holds heads whose rows see all positions"),
        ("speculators dspark", "deepspec", "draft_vocab_size=96: deepspec has room for the target's whole vocabulary"),
        ("deepspec", "dflash", "dflash holds dflash; this head is dspark: one of headway, speculators, deepspec, spec"),
        ("dflash2", "deepspec", "deepspec holds dflash, dspark; this head is dflash2: one of headway, speculators, df"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(tmp_path, name, form, message):
    checkpoint = read(SOURCES[name], tmp_path / "in")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=message):
        write_checkpoint(FORMATS[form], checkpoint, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "written", "other"),
    [
        ("ibm-mlp", "speculator.", ""),
        ("arctic-lstm", "", "speculator."),
        ("medusa", "", "medusa_head."),
        ("vllm-medusa", "", "medusa_heads."),
        *((name, "", "model.") for name in ("dflash", "dflash2", "deepspec", "specforge-dspark")),
    ],
)
def test_names_may_bear_a_prefix_or_none(tmp_path, name, written, other):
    source = SOURCES[name]
    folder = source.write(tmp_path / "in")
    changed = {other + key.removeprefix(written): value for key, value in source.tensors().items()}
    assert not set(changed) & set(source.tensors())
    save_file(changed, folder / source.file)
    checkpoint = read_checkpoint(FORMATS[name], folder)
    assert checkpoint.sources == {
        our_name: other + source_name.removeprefix(written) for source_name, our_name, _ in source.rows
    }


def test_tied_copies_are_dropped_and_said(tmp_path):
    source = SOURCES["ibm-mlp tied"]
    folder, tensors = source.write(tmp_path / "in"), source.tensors()
    copies = {
        f"speculator.{part}.{depth}.{kind}": tensors[f"speculator.{part}.{first}.{kind}"].clone()
        for part, first, kind in (
            ("emb", 0, "weight"),
            ("head", 0, "weight"),
            ("ln", 0, "weight"),
            ("ln", 0, "bias"),
            ("proj", 1, "weight"),
        )
        for depth in range(first + 1, 3)
    }
    save_file(tensors | copies, folder / source.file)
    checkpoint = read_checkpoint(FORMATS["ibm-mlp"], folder)
    assert set(checkpoint.tensors) == {our_name for _, our_name, _ in source.rows}
    assert set(checkpoint.remarks) == set(copies)
    copies["speculator.head.2.weight"][0, 0] += 1
    save_file(tensors | copies, folder / source.file)
    with pytest.raises(ValueError, match=r"head\.2\.weight differs from head\.0\.weight.*tie_weights=True"):
        read_checkpoint(FORMATS["ibm-mlp"], folder)


def test_copies_that_arctic_saves_are_dropped_and_tell_nothing_if_unstated(tmp_path):
    """A file of its training holds every name of a tied tensor; older ones do not say whether embeddings are tied."""
    source = SOURCES["arctic-lstm"]
    folder, tensors = source.write(tmp_path / "in"), source.tensors()
    names = ("input_emb.0.weight", "cell_emb.0.weight", "output_emb.0.weight")
    embeddings = {name: tensors["forget_emb.0.weight"].clone() for name in names}
    copies = embeddings | {f"head.{depth}.weight": tensors["head.0.weight"].clone() for depth in (1, 2)}
    save_file(tensors | copies, folder / source.file)
    tied = read_checkpoint(FORMATS["arctic-lstm"], folder)
    assert set(tied.tensors) == {our_name for _, our_name, _ in source.rows}
    assert set(tied.remarks) == set(copies)
    unstated = {key: value for key, value in source.config.items() if key != "tie_lstm_embs"}
    (folder / "config.json").write_text(json.dumps(unstated))
    untied = read_checkpoint(FORMATS["arctic-lstm"], folder)
    assert not untied.config.tie_lstm_embs
    assert untied.tensors.keys() == tied.tensors.keys() | embeddings.keys()
    assert untied.notes == ["tie_lstm_embs is not stated: False, by the embeddings that the file holds"]
    save_file(tensors, folder / source.file)
    assert read_checkpoint(FORMATS["arctic-lstm"], folder).config == tied.config
    save_file(tensors | {"head.2.weight": tensors["head.0.weight"] + 1}, folder / source.file)
    with pytest.raises(ValueError, match=r"head\.2\.weight differs from head\.0\.weight.*tie_weights=True"):
        read_checkpoint(FORMATS["arctic-lstm"], folder)


def test_the_shared_lm_head_may_bear_the_first_ones_name(tmp_path):
    source = SOURCES["vllm-medusa shared and truncated"]
    folder, tensors = source.write(tmp_path / "in"), source.tensors()
    renamed = {("lm_heads.0.weight" if key == "lm_head.weight" else key): value for key, value in tensors.items()}
    save_file(renamed, folder / source.file)
    checkpoint = read_checkpoint(FORMATS["vllm-medusa"], folder)
    assert torch.equal(checkpoint.tensors["lm_head.weight"], tensors["lm_head.weight"])
    assert checkpoint.remarks == {"lm_head.weight": "lm_heads.0.weight in the source"}
    save_file(renamed | {"lm_head.weight": tensors["lm_head.weight"].clone()}, folder / source.file)
    with pytest.raises(ValueError, match=r"lm_head\.weight and lm_heads\.0\.weight: one LM head, doubled"):
        read_checkpoint(FORMATS["vllm-medusa"], folder)


def test_target_ids_in_d2t_become_offsets(tmp_path):
    source = SOURCES["speculators"]
    folder, tensors = source.write(tmp_path / "in"), source.tensors()
    ids = tensors["d2t"] + torch.arange(96)
    save_file(tensors | {"d2t": ids}, folder / source.file)
    checkpoint = read_checkpoint(FORMATS["speculators"], folder)
    assert torch.equal(checkpoint.tensors["d2t"], tensors["d2t"])
    assert checkpoint.remarks == {"d2t": "target ids in the source, made offsets"}


def test_a_vocabulary_that_is_whole_needs_no_maps(tmp_path):
    source = SOURCES["speculators"]
    folder, tensors = source.write(tmp_path / "in"), source.tensors()
    (folder / "config.json").write_text(json.dumps({**source.config, "draft_vocab_size": 384}))
    identity_maps = {"d2t": torch.zeros(384, dtype=torch.int64), "t2d": torch.ones(384, dtype=torch.bool)}
    save_file(tensors | identity_maps | {"lm_head.weight": torch.ones(384, 64)}, folder / source.file)
    checkpoint = read_checkpoint(FORMATS["speculators"], folder)
    assert not {"d2t", "t2d"} & set(checkpoint.tensors)
    assert set(checkpoint.remarks) == {"d2t", "t2d"}


def test_mask_hidden_of_two_dimensions_is_the_same(tmp_path):
    source = SOURCES["speculators p-eagle"]
    folder, tensors = source.write(tmp_path / "in"), source.tensors()
    save_file(tensors | {"mask_hidden": tensors["mask_hidden"][0].clone()}, folder / source.file)
    checkpoint = read_checkpoint(FORMATS["speculators"], folder)
    assert torch.equal(checkpoint.tensors["mask_hidden"], tensors["mask_hidden"])


@pytest.mark.parametrize(
    "name", ["safeailab-eagle3", "speculators", "speculators p-eagle", "speculators dflash", "speculators dspark"]
)
def test_one_map_of_a_draft_vocabulary_says_what_the_other_does(tmp_path, name):
    source = SOURCES[name]
    expected = read(source, tmp_path / "in")
    for missing, present in (("t2d", "d2t"), ("d2t", "t2d")):
        folder, tensors = source.write(tmp_path / f"no {missing}"), source.tensors()
        del tensors[missing]
        save_file(tensors, folder / source.file)
        checkpoint = read_checkpoint(FORMATS[source.form], folder, options_for(source))
        assert all(torch.equal(checkpoint.tensors[key], value) for key, value in expected.tensors.items())
        assert {key: remark for key, remark in checkpoint.remarks.items() if key not in source.copies} == {
            missing: f"follows from {present}"
        }
    ids = tensors_with_target_ids(source)
    save_file(ids, folder / source.file)
    checkpoint = read_checkpoint(FORMATS[source.form], folder, options_for(source))
    assert torch.equal(checkpoint.tensors["d2t"], expected.tensors["d2t"])
    assert torch.equal(checkpoint.tensors["t2d"], expected.tensors["t2d"])


def tensors_with_target_ids(source):
    """Return tensors without t2d, and with target ids in d2t, which as offsets would leave the vocabulary."""
    tensors = source.tensors()
    tensors["d2t"] += torch.arange(96)
    del tensors["t2d"]
    return tensors


@pytest.mark.parametrize(
    ("name", "theirs", "other"),
    [
        ("safeailab-eagle3", "midlayer.", "layers.0."),
        ("speculators", "layers.0.", "midlayer."),
        ("dflash", "layers.0.", "midlayer."),
        ("dflash", "fc.", "encoder.fc."),
        ("dflash2", "hidden_norm.", "encoder.output_norm_enc."),
        ("deepspec", "markov_head.", "logit_head.markov_head."),
    ],
)
def test_some_tensors_have_two_names(tmp_path, name, theirs, other):
    source = SOURCES[name]
    expected, folder = read(source, tmp_path / "in"), source.write(tmp_path / "renamed")
    tensors = {
        key.replace(theirs, other) if key.startswith(theirs) else key: value for key, value in source.tensors().items()
    }
    save_file(tensors, folder / source.file)
    checkpoint = read_checkpoint(FORMATS[source.form], folder, options_for(source))
    assert all(torch.equal(checkpoint.tensors[key], value) for key, value in expected.tensors.items())
    assert set(checkpoint.sources.values()) == set(tensors) - set(
        source.copies
    )  # the report uses the names in the file


def test_a_flat_config_without_a_draft_vocabulary_may_be_of_eagle3(tmp_path):
    source = SOURCES["safeailab-eagle3"]
    folder = source.write(tmp_path / "in")
    config = {key: value for key, value in source.config.items() if key != "draft_vocab_size"}
    (folder / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}))
    assert detect(folder).name == "safeailab-eagle3"
