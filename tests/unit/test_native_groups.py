"""Targets whose weights stay in the groups of GPTQ, AWQ and compressed-tensors: logits, tokens, memory, refusals."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.console.card import describe_weights
from infer.engine import Engine
from infer.kvcache.memory import weight_bytes
from infer.options.stored_weights import reads_native, why_widened
from infer.request import SamplingParams
from kernels.cpu.library import library
from models.attention import CausalAttention
from models.layers import Linear
from models.targets import load_target
from tests.heads import make_head
from tests.unit.quantized_writers import AWQ, GPTQ, KINDS, awq, compressed, gptq, packed, write
from tests.unit.reference import relative_error

CPU = torch.device("cpu")
IDS = torch.randint(0, 384, (2, 40), generator=torch.Generator().manual_seed(3))
PROMPTS = [[5, 6, 7] * 8, list(range(30, 60)), [9]]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
DRAFTS = [("ngram", {}), ("head", {}), ("head", {"tree": "beam:3x4:9"})]
ORDERED = "gptq with columns in an order of activations"
UNEVEN = "fp8 in blocks that divide no row"  # the last group of a row is smaller, which no kernel reads
SERVED = (ORDERED, "gptq with zeros, in 8 bits", "awq", "int4 with zeros", "int8 by rows")
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")


@pytest.fixture(scope="module")
def published(make_target_folder, tmp_path_factory):
    """Return `published(name)`: a tiny target of three layers in one of KINDS."""
    source, written = make_target_folder(num_hidden_layers=3, num_key_value_heads=4, seed=6), {}

    def folder(name):
        if name not in written:
            written[name] = tmp_path_factory.mktemp("published") / "tiny"
            write(source, *KINDS[name], written[name], written[name].parent / "dense")
        return written[name]

    return folder


def logits(target):
    with torch.no_grad():
        out = target(IDS, torch.arange(IDS.shape[1]).expand_as(IDS), CausalAttention())
        return target.logits(out.hidden)


def load_engine(folder, weights="native", proposer="none", shape=None, head=None, **config):
    target = load_target(str(folder), native=weights == "native")
    options = ProposerConfig(name="auto", max_draft_tokens=4, **(shape or {}))
    return Engine(target, head=head, proposer=proposer, config=EngineConfig(**config), proposer_config=options)


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {UNEVEN}))
def test_each_weight_is_what_the_format_defines(published, name):
    folder = published(name)
    assert why_widened(folder, torch.bfloat16, CPU, divided=False) is None
    native, widened = load_target(str(folder), native=True), load_target(str(folder))
    packed_layers = {n: m for n, m in native.named_modules() if isinstance(m, Linear) and m.packed is not None}
    assert set(packed_layers) == {n for n, m in widened.named_modules() if isinstance(m, Linear)} - {"lm_head"}
    for module, layer in packed_layers.items():
        weight = layer.packed(torch.eye(layer.in_features)).T
        assert torch.equal(weight, widened.get_submodule(module).weight), module
    assert native.ggml_formats
    assert not widened.ggml_formats
    assert relative_error(logits(native), logits(widened)) < 1e-5
    assert native.fingerprint == widened.fingerprint


def test_groups_of_different_sizes_are_widened(published):
    why = why_widened(published(UNEVEN), torch.float32, CPU, divided=False)
    assert why is not None
    assert why.startswith("no kernel reads groups of different sizes")


@pytest.mark.parametrize("name", SERVED)
def test_drafts_and_widening_change_no_token_in_fp32(published, name):
    folder = published(name)
    widened = [c.token_ids for c in load_engine(folder, "widened").generate(PROMPTS, GREEDY)]
    assert [c.token_ids for c in load_engine(folder).generate(PROMPTS, GREEDY)] == widened
    head = make_head(load_target(str(folder)), "eagle3, whole vocabulary")
    for proposer, shape in DRAFTS:
        engine = load_engine(folder, "native", proposer, shape, head if proposer == "head" else None, prefill_chunk=7)
        completions = engine.generate(PROMPTS, GREEDY)
        assert [c.token_ids for c in completions] == widened
        assert sum(c.stats.drafted for c in completions) > 0


def test_the_default_packs_what_kernels_read_and_the_card_says_so(published, caplog):
    def load(name, weights="same"):
        model = ModelConfig(name="tiny", path=str(published(name)), dtype="float32")
        return Engine.load(model, proposer="none", engine=EngineConfig(weights=weights, max_tokens_in_cache=128))

    form = "gptq, 4 bits in groups of 32"
    for weights, text in (
        ("same", f"{form} as published, in panels of 64 outputs"),
        ("native", f"{form} as published, in panels of 64 outputs"),
        ("widened", f"{form}, dequantized to float32"),
        ("int8", f"{form}, dequantized to float32, then quantized to int8"),
    ):
        with caplog.at_level(logging.INFO, "headway.targets"):
            assert describe_weights(load(ORDERED, weights)) == [("weights", text)]
        use = "as published" if weights in ("same", "native") else "dequantized to torch.float32"
        assert f"21 linear layers are {form}; {use}" in caplog.text
        caplog.clear()


def test_it_takes_the_memory_of_the_file(published):
    folder = published("int4 with zeros")
    target = load_target(str(folder), native=True, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    groups = {"weight_packed": 1, "weight_scale": 1, "weight_zero_point": 2}  # a zero point takes a byte
    expected = sum(factor * t.nbytes for n, t in stored.items() for part, factor in groups.items() if part in n)
    dense = sum(t.numel() * 2 for n, t in stored.items() if n.endswith("norm.weight") or "_proj" not in n)
    assert weight_bytes(target) == expected + dense


def test_layers_that_are_not_quantized_stay_dense(make_target_folder, tmp_path):
    """`ignore`, `modules_to_not_convert`; a merged matrix of which a part is dense is dense."""
    source = make_target_folder(num_hidden_layers=1, seed=6)
    for form, section, quantize in (
        ("ignore", compressed("pack-quantized", num_bits=4, strategy="group", group_size=32), packed(4, 32)),
        ("modules_to_not_convert", AWQ, awq(32)),
    ):
        section = section | {form: ["model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj", "lm_head"]}
        out = tmp_path / form
        write(source, section, quantize, out, tmp_path / f"{form}-dense", dense=("k_proj", "down_proj"))
        native, widened = load_target(str(out), native=True), load_target(str(out))
        packed_layers = {n for n, m in native.named_modules() if isinstance(m, Linear) and m.packed is not None}
        assert packed_layers == {"layers.0.self_attn.o_proj", "layers.0.mlp.gate_up_proj"}
        assert relative_error(logits(native), logits(widened)) < 1e-5
        assert torch.equal(native.layers[0].self_attn.qkv_proj.weight, widened.layers[0].self_attn.qkv_proj.weight)


def test_what_cannot_stay_is_widened_and_an_error_only_if_it_must(published, make_target_folder, tmp_path):
    model = ModelConfig(name="tiny", path=str(published(ORDERED)))
    assert reads_native(model, EngineConfig(weights="native"), torch.bfloat16, CPU)
    assert reads_native(model, EngineConfig(weights="native"), torch.float16, torch.device("cuda"))
    assert not reads_native(model, EngineConfig(weights="int4"), torch.bfloat16, CPU)
    layer = r"\S+: model\.layers\.0\.\S+"
    refused = [
        (model, torch.float16, CPU, False, rf"no kernel reads int4 in groups of 32 \({layer}\) for float16 on cpu"),
        (model, torch.bfloat16, CPU, True, "not divided among ranks"),
    ]
    source = make_target_folder(num_hidden_layers=1, hidden_size=48, intermediate_size=96, seed=6)
    small = tmp_path / "small"
    write(source, GPTQ | {"group_size": 24}, gptq(4, 24), small, tmp_path / "a")
    unequal = tmp_path / "unequal"
    write(source, GPTQ | {"group_size": 48, "desc_act": True}, gptq(4, 48), unequal, tmp_path / "b")
    tensors = load_file(unequal / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.g_idx"][:5] = 1
    save_file(tensors, unequal / "model.safetensors")
    for folder, message in (
        (small, "groups of 24, which is no multiple of 16"),
        (unequal, "groups of different sizes"),
    ):
        odd = ModelConfig(name="odd", path=str(folder))
        refused.append((odd, torch.float32, CPU, False, rf"no kernel reads {message} \({layer}\)"))
        load_target(str(folder))
    for wanted, dtype, device, divided, message in refused:
        assert not reads_native(wanted, EngineConfig(), dtype, device, divided=divided)
        with pytest.raises(ValueError, match=f"engine.weights=native: .*{message}"):
            reads_native(wanted, EngineConfig(weights="native"), dtype, device, divided=divided)


def test_a_damaged_scale_and_a_file_that_is_cut_off_name_tensor_and_place(published, tmp_path):
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in published("awq").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.scales"
    tensors = load_file(file)
    tensors[name][1, 3] = torch.inf
    save_file(tensors, file)
    content, start = file.read_bytes(), re.escape(str(file))
    for native in (True, False):
        with pytest.raises(ValueError, match=rf"{start}: {re.escape(name)}: damaged: ") as raised:
            load_target(str(folder), native=native)
        place = int(re.search(r"at byte ([\d,]+) ", str(raised.value))[1].replace(",", ""))
        assert content[place : place + 2] == torch.tensor([torch.inf]).half().numpy().tobytes()
    for size in (len(content) - 100, len(content) // 2):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match=rf"{start}: cut off: \S+ ends at byte [\d,]+ and .* {size:,};"):
            load_target(str(folder), native=True)
    for size in (4, 100):  # nothing of the header can be read
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match=rf"{start}: cannot be read \(.*copy or download it again"):
            load_target(str(folder), native=True)
