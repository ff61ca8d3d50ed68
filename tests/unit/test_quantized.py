"""Published quantized checkpoints: their dequantized weights, and errors that name settings we do not support."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.config import ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.options.cli import compose
from infer.request import SamplingParams
from models.attention import CausalAttention
from models.heads.config import HeadConfig
from models.quantized import read_scheme
from models.sharding import Part
from models.targets import check_weights, empty_target, load_target
from models.targets.writing import save_target
from models.weights import fingerprint
from tests.unit.quantized_writers import AUTOROUND, AWQ, FP8, GPTQ, KINDS, compressed, gptq, packed, plain8, write
from train.config import TrainConfig
from train.loop import train


@pytest.fixture(scope="module")
def small(make_target_folder: Any) -> Path:
    return make_target_folder(num_hidden_layers=1)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> tuple[Path, Path]:
    """Return the tiny target in GPTQ's format, and the same weights as an ordinary checkpoint."""
    folder = tmp_path_factory.mktemp("published")
    write(tiny_target_folder, *KINDS["gptq"], folder / "quantized", folder / "plain")
    return folder / "quantized", folder / "plain"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_logits_are_those_of_an_independent_dequantization(kind: str, small: Path, tmp_path: Path) -> None:
    write(small, *KINDS[kind], tmp_path / "quantized", tmp_path / "plain")
    check_weights(tmp_path / "quantized", empty_target(tmp_path / "quantized"))
    for dtype in (torch.float32, torch.bfloat16):
        quantized, plain = (load_target(str(tmp_path / name), dtype=dtype) for name in ("quantized", "plain"))
        for (name, parameter), reference in zip(quantized.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter, reference), name
    original = load_target(str(small), dtype=torch.bfloat16)
    ids = torch.randint(0, 384, (1, 24), generator=torch.Generator().manual_seed(1))
    logits = [
        target.logits(target(ids, torch.arange(24)[None], CausalAttention()).hidden)
        for target in (quantized, plain, original)
    ]
    assert torch.equal(logits[0], logits[1])
    assert 0.5 < torch.nn.functional.cosine_similarity(logits[0].float(), logits[2].float(), dim=-1).min() < 1


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_zero_wraps_in_gptq_s_first_format(bits: int) -> None:
    """It stores zero points minus one. Those of weights that are all positive are zero."""
    rng = np.random.default_rng(0)
    parts, weight = gptq(bits, 32, symmetric=False)(rng.random((64, 64)), rng)
    assert set(parts["qzeros"].flatten().tolist()) == {-1}
    scheme = read_scheme({"quantization_config": GPTQ | {"bits": bits, "sym": False}})
    assert scheme is not None
    assert torch.equal(scheme.read("a layer", parts).widened(), torch.from_numpy(weight))


def test_the_log_says_what_was_widened(published: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headway.targets"):
        load_target(str(published[0]), dtype=torch.bfloat16)
    assert "56 linear layers are gptq, 4 bits in groups of 32; dequantized to torch.bfloat16" in caplog.text


def test_a_rank_holds_its_rows_of_what_was_widened(published: tuple[Path, Path]) -> None:
    part = Part(1, 2, gather=lambda x, sizes, everywhere=True: x)
    quantized, plain = (load_target(str(folder), part=part) for folder in published)
    assert all(torch.equal(a, b) for a, b in zip(quantized.parameters(), plain.parameters(), strict=True))


def test_a_written_target_is_no_longer_quantized(published: tuple[Path, Path], tmp_path: Path) -> None:
    save_target(load_target(str(published[0])), tmp_path)
    again, wanted = load_target(str(tmp_path)), load_target(str(published[1]))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), wanted.parameters(), strict=True))


def changed(section: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return `section` with `changes`; keys of a compressed-tensors group are `group_...` and `weights_...`."""
    section = json.loads(json.dumps(section))
    for key, value in changes.items():
        prefix, _, rest = key.partition("_")
        group = section.get("config_groups", {}).get("group_0", {})
        nested = {"group": group, "weights": group.get("weights")}.get(prefix) if group else None
        if nested is None:
            section[key] = value
        else:
            nested[rest] = value
    return section


PACKED = compressed("pack-quantized")


EIGHT = compressed("pack-quantized")["config_groups"]["group_0"]
FLOATS = compressed("float-quantized", type="float")["config_groups"]["group_0"]
LINEAR = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)["config_groups"]["group_0"]
DOWN, PATTERN = "model.layers.0.mlp.down_proj", "re:.*down_proj$"
# groups in the order of the file, of which `down_proj` has the one in 8 bits
PRECEDENCE = {
    "a pattern before a class": [(["Linear"], LINEAR), ([PATTERN], EIGHT)],
    "the same, the other way round": [([PATTERN], EIGHT), (["Linear"], LINEAR)],
    "a name before a pattern": [(["Linear", PATTERN], LINEAR), ([DOWN], EIGHT)],
    "a name that comes later in the alphabet": [(["Linear", "re:.*mlp.*"], LINEAR), ([DOWN], EIGHT)],
    "of two patterns the first in the alphabet": [(["re:.*mlp.*", "Linear"], LINEAR), ([PATTERN], EIGHT)],
    "the last of two groups of one target": [(["Linear"], LINEAR), ([DOWN], LINEAR), ([DOWN], EIGHT)],
}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("case", PRECEDENCE)
def test_the_most_exact_target_counts(case: str, native: bool, small: Path, tmp_path: Path) -> None:
    groups = {
        f"group_{number}": {**group, "targets": targets} for number, (targets, group) in enumerate(PRECEDENCE[case])
    }
    section = compressed("pack-quantized") | {"config_groups": groups}
    otherwise = {"down_proj": packed(8, None)}
    write(small, section, packed(4, 32), tmp_path / "quantized", tmp_path / "plain", otherwise=otherwise)
    check_same(tmp_path, native=native)


def test_groups_of_several_formats(small: Path, tmp_path: Path) -> None:
    groups = {
        "a": {**LINEAR, "format": "pack-quantized"},
        "b": {**FLOATS, "format": "float-quantized", "targets": [PATTERN]},
    }
    section = compressed("mixed-precision") | {"config_groups": groups}
    otherwise = {"down_proj": plain8("float")}
    write(small, section, packed(4, 32), tmp_path / "quantized", tmp_path / "plain", otherwise=otherwise)
    check_same(tmp_path, native=True)


def check_same(folder: Path, *, native: bool) -> None:
    """Assert that the quantized target is the plain one: to the bit if it is widened, else up to the order of sums."""
    check_weights(folder / "quantized", empty_target(folder / "quantized"))
    ids, logits = torch.arange(24)[None] + 7, []
    for name in ("quantized", "plain"):
        target = load_target(str(folder / name), native=native and name == "quantized")
        logits.append(target.logits(target(ids, torch.arange(24)[None], CausalAttention()).hidden))
    assert torch.allclose(*logits, atol=1e-4 if native else 0, rtol=0)


@pytest.mark.parametrize("section", [GPTQ, AWQ, PACKED])
def test_null_and_empty_values_of_unknown_keys_ask_for_nothing(section: dict[str, Any]) -> None:
    """As llm-compressor writes them today."""
    nothing = {"transform_config": {}, "moe_sparsity_config": None, "sparsity_config": {}, "hooks": []}
    scheme, plain = (read_scheme({"quantization_config": keys}) for keys in (section | nothing, section))
    assert scheme is not None
    assert plain is not None
    assert (scheme.name, scheme.parts) == (plain.name, plain.parts)
    with pytest.raises(ValueError, match=r"unknown: transform_config=.*; what changes nothing that is computed"):
        read_scheme({"quantization_config": section | {"transform_config": {"R1": {}}}})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"bits": 4}, "quant_method is missing"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quant_method='bitsandbytes': only compressed-tensors",
        ),
        ({"quant_method": "fbgemm_fp8"}, "quant_method='fbgemm_fp8'"),
        (changed(FP8, weight_block_size=None), r"weight_block_size=\[\]: must be the rows and the columns"),
        (changed(FP8, weight_block_size=[128, 0]), r"weight_block_size=\[128, 0\]: must be the rows and the columns"),
        (changed(FP8, activation_scheme="static"), "activation_scheme='static': only 'dynamic'"),
        (changed(FP8, scale_fmt="ue8m0"), "scale_fmt='ue8m0': only 'float'"),
        (changed(FP8, expert_dtype="fp4"), "unknown: expert_dtype='fp4'"),
        (changed(GPTQ, bits=3), "bits=3: only 4 and 8"),
        (changed(GPTQ, checkpoint_format="marlin"), "checkpoint_format='marlin'"),
        (changed(GPTQ, dynamic={"-:.*down.*": {}}), "dynamic="),
        (changed(GPTQ, lm_head=True), "lm_head=True"),
        (changed(GPTQ, rotation="hadamard"), "unknown: rotation='hadamard'"),
        (changed(AWQ, version="gemv"), "version='gemv': only 'gemm'"),
        (changed(AWQ, bits=8), "bits=8: only 4"),
        (changed(AWQ, data_type="int_asym_dq"), "data_type='int_asym_dq': only 'int'"),
        (changed(GPTQ, data_type="fp"), "data_type='fp': only 'int'"),
        (changed(GPTQ, act_bits=8), "unknown: act_bits=8"),
        (changed(AUTOROUND, packing_format="auto_round:fp8"), "packing_format='auto_round:fp8': only auto_round:auto_"),
        (changed(AUTOROUND, packing_format="auto_round", extra_config={"x": {"bits": 8}}), "unknown: extra_config="),
        (changed(PACKED, format="mixed-precision"), "group_0: format is missing"),
        (changed(PACKED, format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
        (changed(PACKED, format="marlin-24"), "format='marlin-24'"),
        (changed(PACKED, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme="),
        (changed(PACKED, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config="),
        (changed(PACKED, config_groups={}), "names no group"),
        (changed(PACKED, group_input_activations={"num_bits": 8, "dynamic": True}), "input_activations: quantized act"),
        (changed(PACKED, weights_num_bits=2), "type='int', num_bits=2: not supported in pack-quantized"),
        (changed(PACKED, weights_type="float"), "type='float', num_bits=8: not supported in pack-quantized"),
        (changed(PACKED, weights_strategy="block"), "strategy='block'"),
        (changed(PACKED, weights_strategy="group"), "group_size=None"),
        (changed(PACKED, weights_dynamic=True), "dynamic=True"),
        (changed(PACKED, weights_actorder="random"), "actorder='random': only"),
        (changed(PACKED, transform_config={"R1": {}}), "unknown: transform_config="),
        (changed(compressed("int-quantized"), weights_symmetric=False), "symmetric=false: only supported in pack-"),
    ],
)
def test_what_is_not_supported_is_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_scheme({"quantization_config": section})


QUERY = "model.layers.0.self_attn.q_proj"
ORDER = torch.arange(64) % 2
FULL_OF_6 = torch.full((2, 8), 0x66666666, dtype=torch.int32)


@pytest.mark.parametrize(
    ("kind", "section", "change", "message"),
    [
        ("gptq", {}, {f"{QUERY}.scales": None}, f"{QUERY}: gptq, 4 bits in groups of 32: scales: missing"),
        ("gptq", {}, {f"{QUERY}.scales": torch.ones(4, 64)}, r"scales \[4, 64\]: expected \[2, 64\]"),
        ("gptq", {"group_size": 48}, {}, "columns are no multiple of group_size=48"),
        ("gptq", {}, {f"{QUERY}.g_idx": torch.full((64,), 2)}, "g_idx: must name one of 2 groups"),
        ("gptq", {}, {f"{QUERY}.weight": torch.ones(64, 64)}, f"{QUERY}.weight: is there beside {QUERY}.qweight"),
        ("gptq", {}, {f"{QUERY}.extra": torch.ones(1)}, f"{QUERY}.extra: not part of this architecture"),
        ("awq", {"quant_method": "gptq", "zero_point": None, "version": None}, {}, "qzeros|expected|unknown"),
        ("int8 by rows", {"ignore": ["re:.*q_proj"]}, {}, f"{QUERY}: .*is quantized, and named under `ignore`"),
        ("int8 by rows", {"group_targets": ["re:.*mlp.*"]}, {}, "no group of `config_groups` names it"),
        ("int8 by rows", {}, {f"{QUERY}.weight": torch.ones(64, 64)}, "weight: torch.float32, expected torch.int8"),
        (
            "fp8 in blocks",
            {},
            {f"{QUERY}.weight_scale_inv": torch.ones(2, 3)},
            r"_inv \[2, 3\]: expected \[2, 4",
        ),
        ("fp8 in blocks", {}, {f"{QUERY}.weight": torch.ones(64, 64)}, r"weight: torch.float32 \[64, 64\], expected a"),
        ("int4 in groups", {}, {f"{QUERY}.weight_shape": torch.tensor([64, 72])}, "weight_packed .*: expected"),
        ("gptq", {}, {f"{QUERY}.qzeros": FULL_OF_6}, "qzeros: hold 6 to 6, and sym=true says 8"),
        ("gptq", {}, {f"{QUERY}.g_idx": ORDER}, "g_idx: reorders the columns, and desc_act=false"),
        ("gptq", {"desc_act": True}, {f"{QUERY}.g_idx": None}, "g_idx: missing, and desc_act=true"),
        ("gptq", {}, {f"{QUERY}.g_idx": ORDER - 1}, "g_idx: must name one of 2 groups"),
        ("int4 in groups", {"weights_actorder": "weight"}, {f"{QUERY}.weight_g_idx": ORDER}, "weight_g_idx: reorders"),
        ("int4 in groups", {"weights_actorder": "group"}, {}, "weight_g_idx: missing, and actorder says"),
        ("int4 in groups", {}, {f"{QUERY}.weight_zero_point": FULL_OF_6}, "weight_zero_point: is not zero everywhere"),
    ],
)
def test_tensors_that_contradict_the_scheme_are_named(
    kind: str, section: dict[str, Any], change: dict[str, Any], message: str, small: Path, tmp_path: Path
) -> None:
    base_section, quantize = KINDS[kind]
    write(small, changed(base_section, **section), quantize, tmp_path / "quantized", tmp_path / "plain")
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(ValueError, match=message):
        load_target(str(tmp_path / "quantized"))


def test_a_checkpoint_without_quantized_layers_is_refused(small: Path, tmp_path: Path) -> None:
    write(
        small, GPTQ, lambda weight, rng: ({"weight": torch.from_numpy(weight)}, weight), tmp_path / "a", tmp_path / "b"
    )
    with pytest.raises(ValueError, match=r"no tensor is called \*\.qweight"):
        load_target(str(tmp_path / "a"))


def test_a_head_is_trained_for_and_served_with_the_target_as_it_is_served(
    published: tuple[Path, Path], tmp_path: Path
) -> None:
    """Training on an ordinary checkpoint of the dequantized weights yields the same head, bit for bit."""
    settings = [
        "head.draft_vocab_size=128", "data.num_sequences=8", "data.max_new_tokens=12", "data.prompt_tokens=8",
        "sequence_length=24", "batch_size=4", "steps=4", "minutes=null", "eval_every=100", "eval_prompts=2",
        "eval_max_tokens=12", "tracker=none", "engine.max_tokens_in_cache=1024", "precision=fp32",
    ]  # fmt: skip
    heads = []
    for folder in published:
        overrides = [*settings, f"model.path={folder}", f"output_dir={tmp_path / folder.name}"]
        result = train(compose("train", TrainConfig, overrides), overrides)
        assert result is not None
        heads.append(Path(result["export"]))
    weights = [load_file(head / "model.safetensors") for head in heads]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())
    trained_for = json.loads((heads[0] / "provenance.json").read_text())["target_fingerprint"]
    assert trained_for == fingerprint(published[0])

    model = ModelConfig(name="demo", path=str(published[0]))
    engine = Engine.load(model, HeadConfig(name="eagle3", path=str(heads[0])), proposer=ProposerConfig(name="head"))
    with_drafts = engine.generate(["def f(x):"], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.set_proposer("none")
    assert (
        with_drafts[0].token_ids
        == engine.generate(["def f(x):"], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    )
