"""Any head, converted to every format that can hold it and back: same config and bits, for random sizes and flags."""

from __future__ import annotations

import tempfile
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from models.config import RopeConfig, TargetConfig
from models.formats.conversion import (
    FORMATS,
    Checkpoint,
    ConversionOptions,
    Verifier,
    read_checkpoint,
    write_checkpoint,
)
from models.formats.dflash import causal_layers
from models.formats.matching import expected_tensors
from models.heads import HEADS
from models.heads.config import NewHeadConfig
from models.heads.dflash.config import DFlashConfig
from tests.formats.sources import SOURCES

ROPES = [
    RopeConfig(),
    RopeConfig(500000.0),
    RopeConfig(10000.0, "linear", (("factor", 2.0),)),
    RopeConfig(
        500000.0,
        "llama3",
        (
            ("factor", 8.0),
            ("high_freq_factor", 4.0),
            ("low_freq_factor", 1.0),
            ("original_max_position_embeddings", 8192.0),
        ),
    ),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def layers(draw, *, num_layers: int = 1) -> TargetConfig:
    kv_heads, groups, head_dim = (
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([4])),
    )
    bias = draw(st.booleans())
    return TargetConfig(
        architecture="LlamaForCausalLM",
        vocab_size=draw(st.integers(5, 40)),
        hidden_size=draw(st.sampled_from([4, 8])),
        intermediate_size=draw(st.integers(1, 12)),
        num_layers=num_layers,
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        max_position_embeddings=draw(st.sampled_from([64, 2048])),
        tie_word_embeddings=False,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=draw(st.booleans()),
        rope=draw(st.sampled_from(ROPES)),
        bos_token_id=draw(st.sampled_from([None, 0])),
        eos_token_ids=draw(st.sampled_from([(), (1,), (1, 2)])),
    )


NOT_DRAWN = {*(field.name for field in fields(NewHeadConfig)), "head_dim"}
PLAIN = {"attention_bias": False, "output_bias": False, "mlp_bias": False}
FAMILIES = [  # of targets that a draft model is made of
    {"architecture": "LlamaForCausalLM"},
    {"architecture": "MistralForCausalLM"} | PLAIN,
    {"architecture": "Qwen2ForCausalLM"} | PLAIN | {"attention_bias": True},
    {"architecture": "Qwen3ForCausalLM", "qk_norm": True},
]


@st.composite
def configs(draw, name: str) -> Any:
    """Draw the shape of a head: any options, for any target that they fit."""
    target, family = draw(layers(num_layers=8)), draw(st.sampled_from(FAMILIES)) if HEADS[name].is_target else {}
    target = replace(target, tie_word_embeddings=draw(st.booleans()), **family)
    drawn = {key.name: draw(values_of(key)) for key in fields(HEADS[name]) if key.name not in NOT_DRAWN}
    shape = shape_of(HEADS[name], drawn, target)
    follows = {key.name: key.default for key in fields(shape) if not key.compare and key.default is not MISSING}
    shape = replace(shape, **follows)  # from the tensors of a file, which holds all of them
    if isinstance(shape, DFlashConfig):  # other programs' heads have windows in some layers
        size, windowed = draw(st.integers(1, 9)), draw(st.lists(st.booleans(), min_size=8, max_size=8))
        windows = tuple(size if used else None for used in windowed[: shape.layer.num_layers])
        layer = replace(shape.layer, windows=windows if any(windows) else ())
        masks = causal_layers(layer, full=draw(st.booleans()), windowed=draw(st.booleans()))
        shape = replace(shape, layer=layer, causal_layers=masks)
    return shape


def shape_of(head: type[NewHeadConfig], options: dict[str, Any], target: TargetConfig) -> Any:
    """Return the shape; options that do not fit the target, or exclude each other, are drawn anew."""
    try:
        return head(**options).for_target(target)
    except ValueError:
        reject()


def values_of(field: Field[Any]) -> st.SearchStrategy[Any]:
    """Return what an option may be, as its bound says."""
    wanted, holds = field.metadata.get("bound", ("", lambda value: True))
    optional = st.none() if "None" in str(field.type) else st.nothing()
    if wanted.startswith("must be one of"):
        return st.sampled_from(wanted.removeprefix("must be one of ").split(", "))
    if "bool" in str(field.type):
        return st.one_of(optional, st.booleans())
    if "list" in str(field.type):
        return st.one_of(optional, st.sets(st.integers(0, 7), min_size=1, max_size=4).map(sorted))
    return st.one_of(optional, st.integers(0, 6).filter(holds))


def random_checkpoint(head: str, config, seed: int, dtype: torch.dtype) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, template in expected_tensors(config).items():
        tensors[name] = torch.randn(template.shape, generator=generator).to(dtype)
    if config.draft_vocab_size < config.vocab_size:
        used = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        marks = torch.zeros(config.vocab_size, dtype=torch.bool)
        marks[used] = True
        maps = {"d2t": used - torch.arange(len(used)), "t2d": marks, "token_map": used}
        tensors |= {name: value for name, value in maps.items() if name in tensors}
    verifier = Verifier("a/target", "LlamaForCausalLM")
    return Checkpoint(head, config, tensors, {}, {}, verifier, None, [])


def holds(form: str, checkpoint: Checkpoint) -> bool:
    """Return whether the format can hold the head; test_golden.py shows that it is refused otherwise.

    GGUF files have other dtypes than the head: test_gguf_heads.py. A part of a target: tests/unit/test_mtp.py.
    """
    config = checkpoint.config
    if FORMATS[form].gguf or FORMATS[form].open:
        return False
    if isinstance(config, DFlashConfig):
        return holds_block(form, config)
    if form == "medusa":
        return config.bias and not config.shared and config.draft_vocab_size == config.vocab_size
    if form != "safeailab-eagle3":
        return True
    layer = config.layer
    return layer.num_layers == 1 and not (config.embed_requires_grad or layer.windows or layer.qk_norm)


def holds_block(form: str, config: DFlashConfig) -> bool:
    whole = config.draft_vocab_size == config.vocab_size
    one_mask = len(set(config.causal_layers)) == 1
    flat = one_mask or all(
        causal == (config.layer.window(i) is not None) for i, causal in enumerate(config.causal_layers)
    )
    if form == "deepspec":
        return whole and not config.layer.windows and not any(config.causal_layers) and config.sample_from_anchor
    if config.name == "dflash2":
        return (
            (whole and not config.sample_from_anchor)
            if form == "speculators"
            else flat and (whole or form != "dflash2")
        )
    return form in ("headway", "speculators") or flat


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.head == other.head
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name])


@pytest.mark.parametrize("head", HEADS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_there_and_back_keeps_config_and_bits(head, data):
    config = data.draw(configs(head))
    checkpoint = random_checkpoint(head, config, data.draw(st.integers(0, 9)), data.draw(st.sampled_from(DTYPES)))
    verifier = Verifier("a/target", "LlamaForCausalLM")
    written = {"layer_ids": "hidden_states", "norm_output": "vllm"}
    with tempfile.TemporaryDirectory() as root:
        current = checkpoint
        for form in (form for form in FORMATS.values() if head in form.heads):
            if holds(form.name, checkpoint):
                folder = Path(root) / form.name
                folder.mkdir()
                write_checkpoint(form, current, folder)
                options = ConversionOptions(verifier, **{option: written[option] for option in form.asks})
                current = read_checkpoint(form, folder, options)  # the next format converts this result
                assert_same(current, checkpoint)


@pytest.mark.parametrize("name", [name for name in SOURCES if "sharing" not in name])
def test_a_source_comes_back_through_every_other_format(tmp_path, name):
    source = SOURCES[name]
    verifier = Verifier("a/target", "LlamaForCausalLM", 384, 64, 8)
    first = read_checkpoint(
        FORMATS[source.form], source.write(tmp_path / "in"), ConversionOptions(verifier, **source.chosen)
    )
    visited = 0
    for form in (form for form in FORMATS.values() if source.head in form.heads and holds(form.name, first)):
        (tmp_path / form.name).mkdir()
        (tmp_path / f"{form.name} back").mkdir()
        write_checkpoint(form, first, tmp_path / form.name)
        away = read_checkpoint(form, tmp_path / form.name, ConversionOptions(verifier))
        write_checkpoint(FORMATS[source.form], away, tmp_path / f"{form.name} back")
        back = read_checkpoint(FORMATS[source.form], tmp_path / f"{form.name} back", ConversionOptions(verifier))
        assert_same(back, first)
        assert back.sources == first.sources
        visited += 1
    assert visited >= 2


def test_what_a_format_cannot_say_of_a_head_is_reported(tmp_path):
    source = SOURCES["safeailab-eagle3"]
    checkpoint = read_checkpoint(
        FORMATS[source.form],
        source.write(tmp_path / "in"),
        ConversionOptions(Verifier("a/target", "LlamaForCausalLM", 384, 64, 8), **source.chosen),
    )
    trained = replace(checkpoint, config=replace(checkpoint.config, embed_requires_grad=True))
    (tmp_path / "out").mkdir()
    form = FORMATS["safeailab-eagle3"]
    write_checkpoint(form, trained, tmp_path / "out")
    options = ConversionOptions(Verifier("a/target", "LlamaForCausalLM"), layer_ids="hidden_states", norm_output="vllm")
    assert_same(read_checkpoint(form, tmp_path / "out", options), checkpoint)
    assert any("embed_requires_grad" in note for note in form.losses(trained))
