"""Any head, converted to every format that can hold it and back: same config and bits, for random sizes and flags."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
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
from models.heads.dflash.config import DFlashConfig
from models.heads.dflash2.config import DFlash2Config
from models.heads.draft_model.config import MODEL_TYPES, DraftModelConfig
from models.heads.dspark.config import MARKOV_KINDS, DSparkConfig
from models.heads.eagle.config import EagleConfig
from models.heads.eagle3.config import Eagle3Config
from models.heads.medusa.config import MedusaConfig
from models.heads.mlp.config import MlpConfig
from models.heads.p_eagle.config import PEagleConfig
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


@st.composite
def eagle3_configs(draw, kind: type[Eagle3Config]) -> Eagle3Config:
    layer = draw(layers(num_layers=draw(st.integers(1, 2))))
    norm = draw(st.sampled_from([{}, {"norm_before_fc": True}, {"fc_norm": True}]))
    extra = (
        {}
        if kind is Eagle3Config
        else {"mask_token_id": draw(st.integers(0, 4)), "num_depths": draw(st.integers(1, 9))}
    )
    return kind(
        layer=layer,
        draft_vocab_size=draw(st.integers(1, layer.vocab_size)),
        aux_layers=tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4)))),
        target_hidden_size=draw(st.sampled_from([4, 12])),
        norm_before_residual=draw(st.booleans()),
        norm_output=draw(st.booleans()),
        **norm,
        **extra,
    )


@st.composite
def medusa_configs(draw) -> MedusaConfig:
    vocabulary = draw(st.integers(2, 30))
    return MedusaConfig(
        vocab_size=vocabulary,
        target_hidden_size=draw(st.integers(1, 6)),
        num_heads=draw(st.integers(1, 3)),
        num_layers=draw(st.integers(1, 3)),
        draft_vocab_size=draw(st.sampled_from([1, vocabulary])),
        shared=draw(st.booleans()),
        bias=draw(st.booleans()),
    )


@st.composite
def mlp_configs(draw) -> MlpConfig:
    depth = draw(st.integers(1, 4))
    return MlpConfig(
        vocab_size=draw(st.integers(2, 30)),
        target_hidden_size=draw(st.integers(1, 6)),
        inner_dim=draw(st.integers(1, 6)),
        n_predict=depth,
        tie_weights=draw(st.booleans()),
        scale_input=draw(st.booleans()),
        top_k_tokens_per_head=tuple(draw(st.lists(st.integers(1, 5), min_size=depth, max_size=depth))),
        n_candidates=draw(st.integers(1, 5)),
    )


@st.composite
def block_configs(draw, kind: type[DFlashConfig]) -> DFlashConfig:
    count = draw(st.integers(1, 3))
    layer = draw(layers(num_layers=count))
    window, windowed = draw(st.integers(1, 9)), draw(st.lists(st.booleans(), min_size=count, max_size=count))
    windows = tuple(window if used else None for used in windowed) if any(windowed) else ()
    layer = replace(layer, architecture="Qwen3ForCausalLM", qk_norm=True, windows=windows)
    reduced = draw(st.integers(2, layer.vocab_size))
    markov = {
        "markov_rank": draw(st.integers(1, 5)),
        "markov_head_type": draw(st.sampled_from(MARKOV_KINDS)),
        "enable_confidence_head": draw(st.booleans()),
        "confidence_head_with_markov": draw(st.booleans()),
    }
    selector = {
        "conv_group_size": draw(st.sampled_from([1, 2, 4])),
        "selector_rank": draw(st.integers(1, 5)),
        "selector_top_k": draw(st.integers(1, 2)),
    }
    return kind(
        layer=layer,
        draft_vocab_size=draw(st.sampled_from([layer.vocab_size, reduced])),
        aux_layers=tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4)))),
        block_size=draw(st.integers(2, 9)),
        mask_token_id=draw(st.integers(0, 4)),
        causal_layers=causal_layers(layer, full=draw(st.booleans()), windowed=draw(st.booleans())),
        sample_from_anchor=draw(st.booleans()),
        **(markov if kind is DSparkConfig else selector if kind is DFlash2Config else {}),
    )


@st.composite
def draft_model_configs(draw) -> DraftModelConfig:
    family = draw(st.sampled_from(list(MODEL_TYPES)))
    layer = draw(layers(num_layers=draw(st.integers(1, 3))))
    biased = layer.attention_bias if family in ("LlamaForCausalLM", "Qwen3ForCausalLM") else False
    model = replace(
        layer,
        architecture=family,
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=biased or family == "Qwen2ForCausalLM",
        output_bias=biased,
        mlp_bias=layer.mlp_bias and family in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        qk_norm=family == "Qwen3ForCausalLM",
    )
    return DraftModelConfig(model, model.vocab_size, model.hidden_size, embed_requires_grad=draw(st.booleans()))


CONFIGS = {
    "eagle": st.builds(EagleConfig, layers(), st.booleans(), st.booleans()),
    "eagle3": eagle3_configs(Eagle3Config),
    "p-eagle": eagle3_configs(PEagleConfig),
    "medusa": medusa_configs(),
    "mlp": mlp_configs(),
    "dflash": block_configs(DFlashConfig),
    "dspark": block_configs(DSparkConfig),
    "dflash2": block_configs(DFlash2Config),
    "draft-model": draft_model_configs(),
}


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

    GGUF files have other dtypes than the head: test_gguf_heads.py.
    """
    config = checkpoint.config
    if FORMATS[form].gguf:
        return False
    if isinstance(config, DFlashConfig):
        return holds_block(form, config)
    if form == "medusa":
        return config.bias and not config.shared and config.draft_vocab_size == config.vocab_size
    return form != "safeailab-eagle3" or config.layer.num_layers == 1


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


@pytest.mark.parametrize("head", CONFIGS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_there_and_back_keeps_config_and_bits(head, data):
    config = data.draw(CONFIGS[head])
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
