"""Heads of other trainers: the logits that speculators 0.9.0 computes of its heads, and kinds that are refused by name.

`python -m tests.trainers --record FILE` computes the logits anew with speculators' own classes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from infer.options.exported_heads import kind_of
from models.attention import CausalAttention
from models.config import LAST, UNNORMED
from models.heads.config import Facts
from models.heads.files import load_head, save_head
from models.targets import load_target
from tests.formats.source import H, V
from tests.formats.trained_sources import TRAINED_SOURCES
from tests.heads import ONE_OF_EACH, keeps_kv, make_head
from train.objectives.draft_states import draft_states

RECORDED = Path(__file__).with_name("speculators_logits.safetensors")
LENGTH, SLOTS = 40, (3, 20, 28)  # of the text, and those whose logits are recorded: in the first window and past it


def inputs() -> tuple[Tensor, list[Tensor]]:
    """Return the text `[1, T]` and three features of the target `[1, T, H]`."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, V, (1, LENGTH), generator=generator)
    return ids, [torch.randn(1, LENGTH, H, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("name", TRAINED_SOURCES)
@torch.no_grad()
def test_logits_are_those_of_speculators(tmp_path, name):
    head, (ids, features) = load_head(TRAINED_SOURCES[name].write(tmp_path / "head")), inputs()
    expected = load_file(RECORDED)[name]
    states = draft_states(head, ids, features, expected.shape[1])
    logits = torch.stack([head.logits(state, depth)[0] for depth, state in enumerate(states)], dim=1)[list(SLOTS)]
    assert expected.isfinite().all()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculators_model_type": "xpress", "architectures": ["XPressDraftModel"]}, "speculators' XPress"),
        ({"architectures": ["DominoDraftModel"], "model_type": "qwen3"}, "SpecForge's Domino"),
        ({"architectures": ["DSpineDraftModel"]}, "; it states 'DSpineDraftModel'"),
        ({"speculators_model_type": "medusa"}, "; it states 'medusa'"),
        ({}, "config.json is of no format"),
    ],
)
def test_a_head_that_no_module_computes_is_named(tmp_path, refusal, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refusal(tmp_path)
    assert message in error
    assert " is of no format that we know: headway, " in error
    with pytest.raises(ValueError, match="is of no format that we know"):
        kind_of(tmp_path)


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_whole_numbers_and_flags_of_a_rotary_embedding_stay_such(make_target_folder, tmp_path, variant):
    """transformers wants original_max_position_embeddings as a whole number, and 0.0 is no false."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4, "original_max_position_embeddings": 64}
    target = load_target(str(make_target_folder(rope_parameters=rope | {"truncate": False})))
    facts = {"verifier": target.path, "verifier_architecture": "LlamaForCausalLM", "speculative_tokens": 4}
    save_head(make_head(target, variant), tmp_path, provenance={"target_fingerprint": target.fingerprint}, **facts)
    text = (tmp_path / "config.json").read_text()
    if keeps_kv(variant):
        stated = {key: re.search(f'"{key}": ([^,\\n]+)', text)[1] for key in (*rope, "truncate") if key != "rope_theta"}
        expected = rope | {"truncate": False}
        assert stated == {key: json.dumps(expected[key]) for key in stated}
    else:
        assert "original_max_position_embeddings" not in text
    assert load_head(tmp_path, target=target).config.to_json(Facts("", "", 4))


def test_an_export_of_mtp_modules_states_no_draft_vocabulary(tiny_target, tmp_path):
    """In speculators' class it is a property that cannot be set. Our older exports state it."""
    facts = {"verifier": tiny_target.path, "verifier_architecture": "LlamaForCausalLM", "speculative_tokens": 4}
    head = make_head(tiny_target, "mtp")
    save_head(head, tmp_path, provenance={"target_fingerprint": tiny_target.fingerprint}, **facts)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "draft_vocab_size" not in config
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": V}))
    assert load_head(tmp_path, target=tiny_target).config == head.config
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": V - 1}))
    with pytest.raises(ValueError, match=f"draft_vocab_size={V - 1}: only {V} is supported"):
        load_head(tmp_path, target=tiny_target)


def test_the_layer_past_the_last_is_the_stream_before_the_final_norm(tiny_target):
    ids = torch.arange(9)[None]
    end, parts = len(tiny_target.layers), {"aux_layers": (len(tiny_target.layers), UNNORMED, LAST)}
    output = tiny_target(ids, ids, CausalAttention(), **parts)
    assert torch.equal(output.aux[0], output.aux[1])
    assert torch.equal(tiny_target.norm(output.aux[0]), output.aux[2])
    assert make_head(tiny_target, "eagle3, the final state").config.aux_layers[-1] == end
