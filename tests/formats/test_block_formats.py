"""What the formats of block drafters leave to a rule: masks, alignment, windows, layer ids; and what they refuse."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from models.attention import CausalAttention
from models.formats.checkpoint import Checkpoint
from models.formats.conversion import FORMATS, ConversionOptions, Verifier, interpret, render
from models.heads.files import load_head
from models.targets import load_target
from tests.formats.block_sources import BLOCK_SOURCES

TARGET = Verifier("some/target", "LlamaForCausalLM", 384, 64, 8)
FULL, SLIDING = "full_attention", "sliding_attention"
DFLASH, WINDOWS, DEEPSPEC, SPECFORGE, DFLASH2 = (
    "dflash",
    "dflash with windows",
    "deepspec",
    "specforge-dspark",
    "dflash2",
)
SPECULATORS, SPECULATORS_DSPARK = "speculators dflash", "speculators dspark"
SPECULATORS_WINDOWS, SPECULATORS_DFLASH2 = "speculators dflash with windows", "speculators dflash2"


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """Return a source's config.json. None removes a key; `a__b` is key b of section a."""
    config = copy.deepcopy(BLOCK_SOURCES[name].config)
    for key, value in changes.items():
        *parts, last = key.split("__")
        section = config
        for part in parts:
            section = section[part]
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return config


def read(name: str, tensors: dict[str, torch.Tensor | None] | None = None, **changes: Any) -> Checkpoint:
    """Read a source with other keys and tensors; None removes one."""
    source = BLOCK_SOURCES[name]
    present = {key: value for key, value in (source.tensors() | (tensors or {})).items() if value is not None}
    return interpret(FORMATS[source.form], changed(name, **changes), present, ConversionOptions(TARGET))


# ---------------------------------------------------------------- masks

WINDOWED = {"layer_types": [SLIDING, FULL], "sliding_window": 9, "use_sliding_window": True}
MASKS: list[tuple[str, dict[str, Any], tuple[int | None, ...], tuple[bool, bool]]] = [
    # (source, changes of config.json, windows, whether the layers are block-causal)
    (DFLASH, {}, (), (False, False)),
    (DFLASH, WINDOWED, (9, None), (True, False)),
    (DFLASH, {"is_causal": True}, (), (True, True)),
    (DFLASH, {"is_causal": False, **WINDOWED}, (9, None), (False, False)),
    (DFLASH, {"is_causal": False, "dflash_config__causal": True}, (), (False, False)),
    (DFLASH, {"dflash_config__causal": False, **WINDOWED}, (9, None), (False, False)),
    (DFLASH, {"dflash_config__causal": True}, (), (True, True)),
    (DFLASH, {"dflash_config__causal_head": True}, (), (True, True)),
    (DFLASH, {"dflash_config__causal_head": True, **WINDOWED}, (9, None), (True, True)),
    (DFLASH, {"dflash_config__use_swa": True, "dflash_config__swa_window_size": 6}, (6, 6), (False, False)),
    (DFLASH, {"dflash_config__use_swa": True, "sliding_window": 6, "layer_types": None}, (6, 6), (False, False)),
    (
        DFLASH,
        {"dflash_config__use_swa": True, "dflash_config__swa_window_size": 9, **WINDOWED},
        (9, None),
        (True, False),
    ),
    (
        DFLASH,
        {"dflash_config__use_swa": True, "dflash_config__swa_window_size": 6, "dflash_config__causal": True},
        (6, 6),
        (True, True),
    ),
    (DFLASH, {"layer_types": None}, (), (False, False)),
    (DFLASH, {"sliding_window": 2048}, (), (False, False)),  # of the target's config, and unused
    (DEEPSPEC, {}, (), (False, False)),
    (SPECFORGE, {"is_causal": True}, (), (True, True)),
    (DFLASH2, {}, (9, 9), (False, False)),
    (DFLASH2, {"is_causal": None}, (9, 9), (True, True)),
    (SPECULATORS, {"transformer_layer_config__layer_types": [FULL, FULL]}, (), (False, False)),
    (SPECULATORS_WINDOWS, {}, (None, 9), (False, False)),
    (SPECULATORS_WINDOWS, {"sliding_window_non_causal": False}, (None, 9), (False, True)),
    (SPECULATORS_WINDOWS, {"sliding_window_non_causal": None}, (None, 9), (False, True)),
    (SPECULATORS_WINDOWS, {"causal_head": True}, (None, 9), (True, False)),
    (SPECULATORS_DFLASH2, {"sliding_window_non_causal": None}, (9, 9), (False, False)),
]


@pytest.mark.parametrize(("name", "changes", "windows", "causal"), MASKS)
def test_masks_follow_the_readers_rule(name, changes, windows, causal):
    config = read(name, **changes).config
    assert config.layer.windows == windows
    assert config.causal_layers == causal


def test_what_is_not_stated_of_masks_is_said():
    unstated = "whether blocks are causal is not stated"
    assert any(note.startswith(unstated) for note in read(WINDOWS).notes)
    assert not any(note.startswith(unstated) for note in read(DFLASH).notes + read(DFLASH2).notes)


def test_a_window_that_is_counted_otherwise_is_said():
    """Of two formats, one counts back from each row and one from the anchor; a layer of ours does one of them."""

    def said(checkpoint: Checkpoint, form: str) -> tuple[bool, bool]:
        notes = checkpoint.notes, render(FORMATS[form], checkpoint).notes
        return notes[0] != [] and "windows: " in notes[0][-1], any("windows: " in note for note in notes[1])

    assert said(read("dflash not causal"), "dflash") == (True, True)
    assert said(read("dflash not causal"), "speculators") == (True, False)
    assert said(read(WINDOWS), "dflash") == (False, False)
    assert said(read(WINDOWS), "speculators") == (False, True)
    assert said(read(SPECULATORS_WINDOWS), "speculators") == (False, False)
    assert said(read(SPECULATORS_WINDOWS, sliding_window_non_causal=False), "dflash") == (True, False)
    assert "up to 5 positions more" in read("dflash not causal").notes[-1]
    assert "up to 5 positions fewer" in read(SPECULATORS_WINDOWS, sliding_window_non_causal=False).notes[-1]


# ---------------------------------------------------------------- alignment


@pytest.mark.parametrize(
    ("name", "changes", "from_anchor", "noted"),
    [
        (DFLASH, {}, False, True),
        (DFLASH, {"dflash_config__sample_from_anchor": True}, True, False),
        (DFLASH, {"dflash_config__shift_label": True}, True, False),
        (DEEPSPEC, {}, True, True),
        ("deepspec dflash", {}, True, True),
        (DEEPSPEC, {"sample_from_anchor": False}, False, False),
        (SPECFORGE, {}, True, True),
        (SPECFORGE, {"dflash_config__shift_label": False}, False, False),
        (DFLASH2, {}, False, True),
        (SPECULATORS, {}, False, False),
        (SPECULATORS, {"sample_from_anchor": None}, False, True),
        (SPECULATORS_DSPARK, {}, True, False),
        (SPECULATORS_DSPARK, {"sample_from_anchor": None}, True, True),
        (SPECULATORS_DFLASH2, {"sample_from_anchor": None}, False, True),
    ],
)
def test_alignment_is_the_formats_where_a_file_does_not_state_it(name, changes, from_anchor, noted):
    checkpoint = read(name, **changes)
    assert checkpoint.config.sample_from_anchor is from_anchor
    assert any(note.startswith("sample_from_anchor is not stated") for note in checkpoint.notes) is noted


# ---------------------------------------------------------------- layer ids


def test_either_convention_of_layer_ids_finds_the_same_features(tmp_path, tiny_target_folder):
    target = load_target(str(tiny_target_folder))
    ids, positions = torch.arange(1, 13)[None], torch.arange(12)[None]
    fused = []
    for number, name in enumerate((DFLASH, DEEPSPEC, SPECFORGE, SPECULATORS, DFLASH2)):
        head = load_head(BLOCK_SOURCES[name].write(tmp_path / str(number)), target=target)
        assert head.config.aux_layers == (2, 4, 6)
        head.fc.weight.fill_(0.01)
        head.hidden_norm.weight.fill_(1.0)
        with torch.no_grad():
            fused.append(head.fuse(target(ids, positions, CausalAttention(), aux_layers=head.config.aux_layers).aux))
    assert all(torch.equal(one, fused[0]) for one in fused)


def test_the_embedding_is_a_layer():
    assert read(DFLASH, dflash_config__target_layer_ids=[-1, 2, 6]).config.aux_layers == (0, 3, 7)
    assert read(SPECULATORS, aux_hidden_state_layer_ids=[0, 3, 7]).config.aux_layers == (0, 3, 7)


def test_keys_may_stand_at_the_top_or_in_the_section():
    section = BLOCK_SOURCES[DFLASH].config["dflash_config"]
    moved = read(DFLASH, dflash_config={"block_size": 5}, block_size=None, **section)
    assert moved.config == read(DFLASH).config
    assert read(DFLASH, dflash_config__block_size=5).config == moved.config


# ---------------------------------------------------------------- what vLLM loads

# the tensors that vLLM's models of DFlash and DSpark have, as its loader receives them; read in its sources
VLLM = re.compile(
    r"(layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qkvo]_proj|self_attn\.[qk]_norm"
    r"|mlp\.(gate|up|down)_proj)|fc|hidden_norm|norm|lm_head|markov_head\.markov_w[12]|confidence_head\.proj)"
    r"\.(weight|bias)|d2t|t2d"
)


@pytest.mark.parametrize("name", [DFLASH, WINDOWS, DEEPSPEC, "deepspec dflash", SPECULATORS, SPECULATORS_DSPARK])
def test_vllms_loader_knows_every_tensor_that_is_written(name):
    checkpoint = read(name)
    written = render(FORMATS["speculators"], checkpoint)
    assert all(VLLM.fullmatch(tensor) for tensor in written.names.values())
    if checkpoint.config.draft_vocab_size < checkpoint.config.vocab_size:  # it must then find these two
        assert {"lm_head.weight", "d2t"} <= set(written.names.values())


# ---------------------------------------------------------------- what is refused

WRONG_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    (DFLASH, {"dflash_config": None}, "dflash_config is missing"),
    (DFLASH, {"dflash_config__mask_token_id": None}, "dflash_config: mask_token_id is missing"),
    (DFLASH, {"dflash_config__mask_token_id": 384}, "mask_token_id=384: must be a token of the target's 384"),
    (DFLASH, {"block_size": None}, "dflash_config: block_size is missing"),
    (DFLASH, {"dflash_config__block_size": 8}, "dflash_config: block_size=8, but 5 at the top; which was trained?"),
    (DFLASH, {"block_size": 1}, "block_size=1: must be 2 to 64"),
    (DFLASH, {"dflash_config__target_layer_ids": None}, "dflash_config: target_layer_ids is missing"),
    (DFLASH, {"dflash_config__target_layer_ids": [3, 1, 5]}, "target_layer_ids=[3, 1, 5]: expected whole numbers that"),
    (DFLASH, {"dflash_config__target_layer_ids": [1, 1, 5]}, "target_layer_ids=[1, 1, 5]: expected whole numbers that"),
    (DFLASH, {"dflash_config__target_layer_ids": [-2, 1, 5]}, "target_layer_ids=[-2, 1, 5]: expected whole numbers"),
    (
        DFLASH,
        {"dflash_config__target_layer_ids": []},
        "target_layer_ids=[]: expected whole numbers that ascend from -1",
    ),
    (DFLASH, {"dflash_config__target_layer_ids": [1, 3, 7]}, "the head reads layer 8, the target has 8"),
    (DFLASH, {"model_type": "llama"}, "model_type='llama': only 'qwen3'"),
    (DFLASH, {"head_dim": None}, "head_dim is missing; Qwen3Config takes it for 128"),
    (DFLASH, {"rope_theta": None}, "rope_theta is missing; vLLM takes it for 1000000 and transformers for 10000"),
    (DFLASH, {"is_neox_style": False}, "is_neox_style=False: only True"),
    (DFLASH, {"layer_types": [SLIDING, FULL]}, "sliding_window=None, use_sliding_window=False: no window, though"),
    (DFLASH, {"layer_types": [SLIDING, FULL], "use_sliding_window": True}, "sliding_window=None"),
    (DFLASH, {"layer_types": [FULL]}, "layer_types=['full_attention']: must name full or sliding attention for each"),
    (DFLASH, {"layer_types": ["chunked_attention", FULL]}, "must name full or sliding attention for each layer"),
    (DFLASH, {"layer_types": None, "use_sliding_window": True}, "layer_types must say which layers have a window"),
    (DFLASH, {"dflash_config__use_swa": True}, "sliding_window is missing"),
    (WINDOWS, {"dflash_config__swa_window_size": 8}, "swa_window_size=8, but sliding_window=9 at the top"),
    (DFLASH, {"dflash_config__causal_head": True, "is_causal": False}, "causal_head=True, though is_causal or causal"),
    (DFLASH, {"dflash_config__attention_sink_bias": True}, "attention_sink_bias=True: only False"),
    (DFLASH, {"dflash_config__target_hidden_size": 128}, "target_hidden_size=128: only 64"),
    (DFLASH, {"dflash_config__projector_type": "domino"}, "projector_type='domino': only 'dflash'"),
    (DFLASH, {"dflash_config__emb_dim": 256}, "dflash_config: unknown: emb_dim=256"),
    (DFLASH, {"logit_scale": 0.5}, "unknown: logit_scale=0.5"),
    (
        DFLASH,
        {"dflash_config__sample_from_anchor": False, "dflash_config__shift_label": True},
        "sample_from_anchor=False, shift_label=True: must agree",
    ),
    (DEEPSPEC, {"mask_token_id": None}, "mask_token_id is missing"),
    (DEEPSPEC, {"block_size": None}, "block_size is missing"),
    (DEEPSPEC, {"target_layer_ids": [5, 3, 1]}, "target_layer_ids=[5, 3, 1]: expected whole numbers that ascend"),
    (DEEPSPEC, {"markov_rank": 0}, "markov_rank=0, enable_confidence_head=True: no head has only the latter"),
    (DEEPSPEC, {"markov_rank": None}, "markov_rank is missing"),
    (DEEPSPEC, {"markov_rank": -1}, "markov_rank=-1: must be 0 to"),
    (DEEPSPEC, {"markov_head_type": None}, "markov_head_type is missing, though markov_rank=24"),
    (DEEPSPEC, {"markov_head_type": "lstm"}, "markov_head_type=lstm: must be one of vanilla, gated, rnn"),
    (DEEPSPEC, {"enable_confidence_head": None}, "enable_confidence_head is missing"),
    (DEEPSPEC, {"confidence_head_with_markov": None}, "confidence_head_with_markov is missing, though"),
    (DEEPSPEC, {"model_type": "gemma4"}, "model_type='gemma4': only 'qwen3'"),
    (DEEPSPEC, {"is_causal": True}, "is_causal=True: only False"),
    (DEEPSPEC, WINDOWED, "blocks are causal for vLLM and not for DeepSpec"),
    (DEEPSPEC, {"dspark_block_size": 4}, "unknown: dspark_block_size=4"),
    (SPECFORGE, {"dflash_config__attention_mode": "mha"}, "attention_mode='mha': only 'gqa'"),
    (SPECFORGE, {"dflash_config__projector_type": "dflash"}, "projector_type='dflash': only 'dspark'"),
    (SPECFORGE, {"dflash_config__enable_confidence_head": None}, "enable_confidence_head is missing"),
    (DFLASH2, {"dflash_config__conv_kernel_size": 4}, "conv_kernel_size=4: only 2"),
    (DFLASH2, {"dflash_config__conv_group_size": 24}, "conv_group_size=24: must divide the hidden size, 64"),
    (DFLASH2, {"dflash_config__selector_rank": None}, "selector_rank is missing"),
    (DFLASH2, {"dflash_config__selector_top_k": 500}, "selector_top_k=500: must be 1 to 384"),
    (DFLASH2, {"dflash_config__final_logit_softcapping": 20.0}, "final_logit_softcapping=20.0: only no value"),
    (DFLASH2, {"output_multiplier": 0.2}, "output_multiplier=0.2: only 1.0 or 1"),
    (DFLASH2, {"dflash_config__input_embedding_scale": 8.0}, "input_embedding_scale=8.0: only 1.0 or 1"),
    (SPECULATORS, {"mask_token_id": None}, "mask_token_id is missing"),
    (SPECULATORS, {"draft_vocab_size": None}, "draft_vocab_size is missing"),
    (SPECULATORS, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
    (SPECULATORS, {"aux_hidden_state_layer_ids": [4, 2, 6]}, "aux_hidden_state_layer_ids=[4, 2, 6]: expected whole"),
    (SPECULATORS, {"aux_hidden_state_layer_ids": [-1, 2, 6]}, "that ascend from 0, the embedding"),
    (SPECULATORS, {"transformer_layer_config__model_type": "llama"}, "model_type='llama': only 'qwen3'"),
    (SPECULATORS, {"transformer_layer_config__layer_types": [SLIDING, SLIDING]}, "no window, though layer_types has"),
    (SPECULATORS, {"target_hidden_size": 128}, "target_hidden_size=128: only 64"),
    (SPECULATORS, {"projector_type": "domino"}, "projector_type='domino': only 'dflash'"),
    (SPECULATORS, {"sample_from_anchor": False, "shift_label": True}, "must agree"),
    (SPECULATORS, {"markov_rank": 256}, "unknown: markov_rank=256"),
    (SPECULATORS, {"speculators_config__algorithm": "dspark"}, "algorithm='dspark': only 'dflash'"),
    (SPECULATORS_DSPARK, {"markov_rank": 0}, "no head has only the latter"),
    (SPECULATORS_DSPARK, {"markov_rank": None}, "markov_rank is missing"),
    (SPECULATORS_DFLASH2, {"conv_kernel_size": 3}, "conv_kernel_size=3: only 2"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG_CONFIGS)
def test_a_config_that_is_incomplete_or_contradictory_is_refused(name, changes, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read(name, **changes)
    assert message in str(error.value)


DISAGREEMENTS: list[tuple[str, dict[str, Any], dict[str, torch.Tensor | None], list[str]]] = [
    (DFLASH, {"num_hidden_layers": 1, "layer_types": [FULL]}, {}, ["layers.1.mlp.down_proj.weight: not part of this"]),
    (DFLASH, {"head_dim": 8}, {}, ["q_proj.weight [128, 64]: expected [64, 64]", "head_dim=8"]),
    (
        DFLASH,
        {"dflash_config__target_layer_ids": [1, 3]},
        {},
        ["fc.weight [64, 192]: expected [64, 128]", "target_layer_ids=[1, 3]"],
    ),
    (DFLASH, {"draft_vocab_size": 96}, {}, ["lm_head.weight: missing", "d2t: missing", "draft_vocab_size=96"]),
    (DFLASH, {}, {"mask_embedding": torch.ones(64)}, ["mask_embedding: not part of this head"]),
    (DFLASH, {}, {"embed_tokens.weight": torch.ones(400, 64)}, ["embed_tokens.weight: not part", "vocab_size=384"]),
    (DFLASH, {}, {"encoder.fc.weight": torch.ones(64, 192)}, ["fc.weight", "one tensor, doubled"]),
    (DEEPSPEC, {"markov_rank": 32}, {}, ["markov_w1.weight [384, 24]: expected [384, 32]", "markov_rank=32"]),
    (DEEPSPEC, {"markov_head_type": "gated"}, {}, ["gate_proj.weight: missing", "markov_head_type=gated"]),
    (DEEPSPEC, {"enable_confidence_head": False}, {}, ["proj.weight: not part", "enable_confidence_head=False"]),
    (
        DEEPSPEC,
        {"confidence_head_with_markov": False},
        {},
        ["confidence_head.proj.weight [1, 88]: expected [1, 64]", "confidence_head_with_markov=False"],
    ),
    (
        DEEPSPEC,
        {"markov_rank": 0, "enable_confidence_head": False},
        {},
        ["markov_w1.weight: not part", "markov_rank=0"],
    ),
    (
        SPECULATORS_DSPARK,
        {},
        {"markov_head.markov_w1.weight": torch.ones(96, 24)},
        ["markov_w1.weight [96, 24]: expected [384, 24]", "vocab_size=384"],
    ),
    (SPECULATORS_DSPARK, {}, {"d2t": None, "t2d": None}, ["d2t: missing", "t2d: missing"]),
    (DFLASH2, {"dflash_config__conv_group_size": 8}, {}, ["weight [16, 64]: expected [32, 64]", "conv_group_size=8"]),
    (DFLASH2, {"dflash_config__selector_rank": 32}, {}, ["codebook [384, 24]: expected [384, 32]", "selector_rank=32"]),
    (SPECULATORS_DFLASH2, {"selector_rank": 32}, {}, ["codebook [384, 24]: expected [384, 32]", "selector_rank=32"]),
]


@pytest.mark.parametrize(("name", "changes", "tensors", "named"), DISAGREEMENTS)
def test_config_and_weights_that_disagree_are_both_named(name, changes, tensors, named):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read(name, tensors, **changes)
    for text in named:
        assert text in str(error.value)


def test_formats_are_told_apart_where_they_name_one_architecture():
    """The older files of speculators name z-lab's classes."""
    for name, architecture in ((SPECULATORS, "DFlashDraftModel"), (SPECULATORS_DFLASH2, "DFlash2DraftModel")):
        config = changed(name, architectures=[architecture])
        assert [form.name for form in FORMATS.values() if form.matches(config, ())] == ["speculators"]
        assert read(name, architectures=[architecture]).head == BLOCK_SOURCES[name].head


def test_what_speculators_dflash2_cannot_hold_is_refused():
    whole = read(DFLASH2)
    render(FORMATS["speculators"], whole)
    anchored = read(DFLASH2, dflash_config__sample_from_anchor=True)
    with pytest.raises(ValueError, match=r"sample_from_anchor=True: speculators' dflash2"):
        render(FORMATS["speculators"], anchored)
