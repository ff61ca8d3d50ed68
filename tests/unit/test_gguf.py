"""Targets from GGUF files: weights, configuration and logits equal those of their folders; errors name the misfit."""

from __future__ import annotations

import contextlib
import json
import re
import shutil

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from safetensors.torch import load_file, save_file

from infer.options.stored_weights import why_widened
from kernels.cpu.library import library
from models.attention import CausalAttention
from models.checkpoint import fingerprint, open_tensors, read_config
from models.fetching import place_of
from models.gguf.file import CHUNK_WEIGHTS, GgufFile, dequantizes
from models.sharding import Part
from models.targets import check_weights, empty_target, load_target, read_target_config
from models.targets.views import viewed
from models.targets.writing import save_target
from tests.gguf_writing import fuse, write_gguf
from tests.unit.reference import TOLERANCE, randomise_biases_and_norms, relative_error

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
DEEPSEEK_V2 = {**DEEPSEEK, "n_shared_experts": 2, "routed_scaling_factor": 3.0}
LFM2 = {
    "layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-4,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
DELTA_NET = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 2, "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
MAMBA = {"mamba_n_heads": 16, "mamba_d_state": 24, "mamba_chunk_size": 32, "mamba_n_groups": 2}
GRANITE_H = {
    **{**MAMBA, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]},
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    **{"shared_intermediate_size": 96},
}
NEMOTRON = {
    **{"mamba_num_heads": 16, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 32},
    **{"head_dim": 32, "time_step_min": 1e-30, "time_step_floor": 0.5},
}
NEMOTRON_MOE = {
    **{**NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5},
    **{"moe_shared_expert_intermediate_size": 64},
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama head size": ("LlamaConfig", {"head_dim": 32}),
    "llama 3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "llama yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "qwen3moe": ("Qwen3MoeConfig", {"head_dim": 32, **EXPERTS}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 6}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "eos_token_id": 2}),
    "phi3 window, part of the head": (
        "Phi3Config",
        {
            "pad_token_id": 0,
            "eos_token_id": 2,
            "sliding_window": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3 longrope": (
        "Phi3Config",
        {
            **{"pad_token_id": 0, "eos_token_id": 2, "original_max_position_embeddings": 16},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10000.0},
                **{"long_factor": [1.0 + index for index in range(8)], "short_factor": [1.5] * 8},
            },
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "sliding_window": 16},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **{"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 4, "sliding_window": 24},
            "rope_parameters": YARN | {"factor": 32.0, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
        },
    ),
    "deepseek v3": ("DeepseekV3Config", {**DEEPSEEK, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}),
    "deepseek v3, older": (
        "DeepseekV3Config",
        {**DEEPSEEK, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek v2": (
        "DeepseekV2Config",
        {**DEEPSEEK_V2, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek v2 lite, older": (
        "DeepseekV2Config",
        {
            **{**DEEPSEEK_V2, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "lfm2": ("Lfm2Config", LFM2 | {"conv_L_cache": 4}),
    "lfm2 moe": ("Lfm2MoeConfig", LFM2 | EXPERTS | {"num_dense_layers": 1, "tie_word_embeddings": True}),
    "qwen35": ("Qwen3_5TextConfig", DELTA_NET),
    "qwen35 tied, of one value head per key head": (
        "Qwen3_5TextConfig",
        DELTA_NET
        | {"linear_num_value_heads": 2, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    ),
    "qwen35 moe": ("Qwen3_5MoeTextConfig", DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3 next": (
        "Qwen3NextConfig",
        DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 32, "linear_num_value_heads": 6},
    ),
    "granite hybrid": (
        "GraniteMoeHybridConfig",
        GRANITE_H | {"num_local_experts": 0, "num_experts_per_tok": 0, "tie_word_embeddings": True},
    ),
    "granite hybrid with experts, rotary": (
        "GraniteMoeHybridConfig",
        {**GRANITE_H, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "mamba_n_groups": 1}
        | {"position_embedding_type": "rope"},
    ),
    "falcon h1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 128, "head_dim": 32}),
    "falcon h1, norm after the gate": (
        "FalconH1Config",
        {**MAMBA, "mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron h": (
        "NemotronHConfig",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "ssm_state_size": 24},
    ),
    "nemotron h with experts": ("NemotronHConfig", NEMOTRON_MOE),
    "nemotron h with experts of a latent": ("NemotronHConfig", NEMOTRON_MOE | {"moe_latent_size": 32}),
    "starcoder": ("GPTBigCodeConfig", {"n_inner": 96, "bos_token_id": 0, "eos_token_id": 0}),
    "starcoder tied": ("GPTBigCodeConfig", {"n_inner": 96, "tie_word_embeddings": True}),
}
FAMILY_OF_FILE = {"MistralForCausalLM": "LlamaForCausalLM"}  # GGUF has one architecture for both
READ_BY_TRANSFORMERS = ("llama", "llama tied", "mistral", "qwen2", "qwen3")  # it reads the others incompletely
IDS = torch.randint(0, 384, (2, 90), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return `written(family)`, which returns the GGUF file and a folder with the dequantized values of its tensors."""
    cached = {}

    def make(name):
        if name in cached:
            return cached[name]
        import transformers

        kind, options = FAMILIES[name]
        sizes = {
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 6 if name == "gemma3" else 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,
        }
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes | options))
        folder, file = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("file") / "tiny.gguf"
        model.save_pretrained(folder)
        randomise_biases_and_norms(folder)
        tensors = write_gguf(folder, file, older="older" in name)
        tensors = tensors if "next" in name else empty_target(folder).as_stored(tensors)  # which are as stored already
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        cached[name] = file, folder
        return cached[name]

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_holds_what_its_folder_holds(written, name):
    file, folder = written(name)
    target, wanted = empty_target(file), dict(viewed(open_tensors(folder), empty_target(folder), None))
    tensors = viewed(open_tensors(file), target, None)
    assert set(tensors) == set(wanted)
    for key, value in wanted.items():
        if name == "gemma3" and key.endswith("norm.weight"):  # the file holds the weight plus 1
            value = value - 1
        assert torch.equal(tensors[key], value), key


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3"])
def test_logits_equal_those_of_its_folder_in_transformers(written, name):
    import transformers

    file, folder = written(name)
    target, config = load_target(str(file)), read_target_config(folder)
    for checkpoint in (file, folder):
        check_weights(checkpoint, empty_target(checkpoint))
    family = FAMILY_OF_FILE.get(config.architecture, config.architecture)
    assert target.config.architecture == family
    sizes = ("head_dim", "num_kv_heads", "vocab_size", "max_position_embeddings", "rotary_dim")
    for key in (*sizes, "tie_word_embeddings", "experts", "windows", "latent", "mixers", "recurrent", "output_gate"):
        assert getattr(target.config, key) == getattr(config, key), key
    gguf_options = {"gguf_file": file.name} if name in READ_BY_TRANSFORMERS else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent if gguf_options else folder, dtype=torch.float32, **gguf_options
    ).eval()
    with torch.no_grad():
        out = target(IDS, torch.arange(IDS.shape[1]).expand_as(IDS), CausalAttention())
        assert relative_error(target.logits(out.hidden), model(IDS).logits) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen35", "nemotron h with experts"])
def test_modules_of_multi_token_prediction_are_not_the_target_s(written, tmp_path, name):
    """llama.cpp's converter counts them as blocks after the target's."""
    file, plain = tmp_path / "tiny.gguf", load_target(str(written(name)[0]))
    layers = plain.config.num_layers

    def change(writer):
        writer.add_nextn_predict_layers(1)
        keys = writer.kv_data[0]
        keys[f"{writer.arch}.block_count"].value = layers + 1
        for key in ("attention.head_count_kv", "feed_forward_length"):
            if isinstance(numbers := keys.get(f"{writer.arch}.{key}", keys["general.name"]).value, list):
                numbers.append(2)
        for part in ("attn_q", "nextn.eh_proj"):
            writer.add_tensor(f"blk.{layers}.{part}.weight", np.ones((64, 64), np.float32))

    write_gguf(written(name)[1], file, change=change)
    check_weights(file, empty_target(file))
    target = load_target(str(file))
    assert target.config.num_layers == layers
    assert [*dict(target.named_parameters())] == [*dict(plain.named_parameters())]


FUSED = (
    "llama",
    "llama biased",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "granite",
    "gemma3",
    "gpt-oss",
    "deepseek v3",
)


@pytest.mark.parametrize("name", FUSED)
def test_fused_tensors_are_those_of_the_file_that_has_them_apart(written, tmp_path, name):
    files = [tmp_path / "apart.gguf", tmp_path / "fused.gguf"]
    for file in files:
        write_gguf(written(name)[1], file, (Kind.Q8_0,), fused="fused" in file.name)
    attention = "deepseek" not in name
    assert ("blk.0.attn_qkv.weight" in GgufFile(files[1]).tensors) == attention
    mixture = any(word in key for key in FAMILIES[name][1] for word in ("experts_per_tok", "local_experts"))
    assert any("ffn_gate_up_exps" in key for key in GgufFile(files[1]).tensors) == mixture
    apart, fused = (dict(open_tensors(file)) for file in files)
    assert apart.keys() == fused.keys()
    assert all(torch.equal(fused[key], value) for key, value in apart.items())
    assert read_config(files[0]) == read_config(files[1])
    for native in (False, True) if library() is not None else (False,):
        logits = []
        for file in files:
            target = load_target(str(file), native=native)
            with torch.no_grad():
                out = target(IDS, torch.arange(IDS.shape[1]).expand_as(IDS), CausalAttention())
                logits.append(target.logits(out.hidden))
        assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("name", "tensor"), [("llama", "blk.0.attn_qkv.weight"), ("qwen3moe", "blk.1.ffn_gate_up_exps.weight")]
)
def test_fused_tensors_of_other_sizes_are_named(written, tmp_path, name, tensor):
    file = tmp_path / "odd.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.gguf_writing.fuse", lambda stored: odd(fuse(stored), tensor))
        write_gguf(written(name)[1], file, (Kind.F32,), fused=True)
    with pytest.raises(ValueError, match=rf"{re.escape(tensor)} \[.*\]: is no .* one behind another"):
        open_tensors(file)


def odd(stored, name):
    value, kind = stored[name]
    return stored | {name: (value[..., :-1, :] if "exps" in name else value[:-1], kind)}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3moe"])
def test_nvfp4_and_its_scales(written, tmp_path, name):
    """Against the package's dequantization times the scale; queries and keys are scaled before they are reordered."""
    file = tmp_path / "tiny.gguf"
    expected = write_gguf(written(name)[1], file, (Kind.NVFP4,), scaled=True)
    opened = GgufFile(file)
    assert {opened.tensors[f"blk.0.attn_{kind}.weight"].kind for kind in "qkv"} == {Kind.NVFP4}
    assert any(key.endswith(".input_scale") for key in opened.tensors)
    tensors = viewed(open_tensors(file), empty_target(file), None)
    assert set(tensors) == set(expected)
    for key, value in expected.items():
        assert torch.equal(tensors[key], value), key
    check_weights(file, empty_target(file))
    assert torch.isfinite(load_target(str(file)).layers[0].self_attn.qkv_proj.weight).all()


def test_scales_that_fit_no_weight_are_named(written, tmp_path):
    for scale, message in (("blk.0.attn_q.scale", "must be one number"), ("blk.0.attn_x.scale", "is no part of")):
        file = tmp_path / "tiny.gguf"
        change = lambda writer, scale=scale: writer.add_tensor(scale, np.ones(3, np.float32))  # noqa: E731
        write_gguf(written("llama")[1], file, change=change)
        with pytest.raises(ValueError, match=rf"{re.escape(scale)}.*{message}"):
            open_tensors(file)


def test_gemma_is_read_as_its_folder_states(written):
    file, folder = written("gemma3")
    config, reference = read_config(file), json.loads((folder / "config.json").read_text())
    assert config["architectures"] == reference["architectures"]
    assert config["layer_types"] == reference["layer_types"]
    assert config["sliding_window"] == reference["sliding_window"]
    assert config["rope_theta"] == reference["rope_parameters"]["full_attention"]["rope_theta"]
    assert config["rope_local_base_freq"] == reference["rope_parameters"]["sliding_attention"]["rope_theta"]
    assert config["query_pre_attn_scalar"] == 32
    assert config["head_dim"] == 32
    assert config["tie_word_embeddings"]


def test_gemma_gives_the_logits_of_transformers(written, tmp_path):
    import transformers

    file, folder = written("gemma3")
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    norms = {name: value - 1 for name, value in tensors.items() if name.endswith("norm.weight")}
    save_file(tensors | norms, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    target = load_target(str(file))
    with torch.no_grad():
        out = target(IDS, torch.arange(IDS.shape[1]).expand_as(IDS), CausalAttention())
        assert relative_error(target.logits(out.hidden), model(IDS).logits) < TOLERANCE


@pytest.mark.skipif(not place_of("smollm2-135m").is_file(), reason="scripts/fetch_model.py smollm2-135m brings it")
def test_smollm2_gives_the_logits_of_transformers():
    import transformers

    file = place_of("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    ids = torch.arange(128)[None] * 331 % model.config.vocab_size
    with torch.no_grad():
        target = load_target(str(file))
        out = target(ids, torch.arange(128)[None], CausalAttention())
        logits, wanted = target.logits(out.hidden), model(ids).logits
    assert relative_error(logits, wanted) < TOLERANCE
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))


@pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("gpt-oss", ("Q8_0", "int8 in groups of 32")),
        *((name, ("Q8_0",)) for name in ("deepseek v3", "lfm2", "qwen35", "qwen35 moe", "qwen3 next")),
        *((name, ("Q8_0",)) for name in ("granite hybrid", "nemotron h with experts of a latent")),
    ],
)
def test_what_stays_as_published_gives_the_logits_of_what_is_widened(written, tmp_path, name, formats):
    file = tmp_path / "tiny.gguf"
    write_gguf(written(name)[1], file, (Kind.Q8_0,))
    assert why_widened(file, torch.bfloat16, torch.device("cpu"), divided=False) is None
    native, widened = load_target(str(file), native=True), load_target(str(file))
    assert native.ggml_formats == formats
    outputs = [layer.mixer.o_proj for layer in native.layers if hasattr(layer, "mixer")]
    assert all(
        output.packed is not None and output.packed.narrow for output in outputs
    )  # whatever their columns' order
    logits = []
    for target in (native, widened):
        with torch.no_grad():
            out = target(IDS, torch.arange(IDS.shape[1]).expand_as(IDS), CausalAttention())
            logits.append(target.logits(out.hidden))
    assert relative_error(*logits) < TOLERANCE


@pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
def test_a_scale_of_mxfp4_that_is_no_number_is_named(written, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(written("gpt-oss")[1], file)
    stacked = GgufFile(file).tensors["blk.1.ffn_down_exps.weight"]
    content = bytearray(file.read_bytes())
    content[stacked.offset + 3 * stacked.size // 6] = 255  # the exponent of the first group of expert 3
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"tiny\.gguf: blk.1.ffn_down_exps.weight.*: a scale is not a number"):
        load_target(str(file), native=True)


@pytest.mark.parametrize(
    "name",
    [
        *("gpt-oss", "deepseek v3", "deepseek v2 lite, older", "starcoder tied", "lfm2", "qwen35", "qwen3 next"),
        *("granite hybrid", "granite hybrid with experts, rotary", "falcon h1", "nemotron h"),
    ],
)
def test_a_rank_reads_its_rows(written, name):
    file, folder = written(name)
    part = Part(1, 2, lambda x, sizes, *, everywhere=True: x)
    wanted, target = (load_target(str(checkpoint), part=part) for checkpoint in (folder, file))
    for key, parameter in target.named_parameters():
        assert torch.equal(parameter, wanted.get_parameter(key)), key


def test_a_router_in_fp32_is_not_rounded(written):
    file, _ = written("deepseek v3")
    rounded, target = load_target(str(file), dtype=torch.bfloat16), load_target(str(file))
    for kind in ("weight", "e_score_correction_bias"):
        key = f"layers.2.mlp.gate.{kind}"
        assert torch.equal(rounded.get_parameter(key), target.get_parameter(key))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes: some scales are infinite
@pytest.mark.parametrize("kind", [kind for kind in Kind if dequantizes(kind)], ids=lambda kind: kind.name)
def test_every_type_is_widened_as_the_package_widens_it(tmp_path, kind):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = CHUNK_WEIGHTS // 256 + 7, 256  # more than is dequantized at a time
    raw = np.random.default_rng(2).integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "blocks.gguf", "llama")
    writer.add_tensor("blocks", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = {Kind.F64: torch.float64, Kind.I64: torch.int64}.get(kind)  # which the package does not dequantize
    tensor = GgufFile(tmp_path / "blocks.gguf").read("blocks", plain or torch.float32)
    wanted = torch.from_numpy(raw).view(plain).numpy() if plain else quants.dequantize(raw, kind)
    assert tensor.shape == (rows, columns)
    assert np.array_equal(tensor.numpy(), wanted.reshape(rows, columns), equal_nan=True)


def test_each_tensor_is_read_once(written, monkeypatch):
    file, _ = written("llama")
    read, names = GgufFile.read, []

    def counted(self, name, *args, **kwargs):
        names.append(name)
        return read(self, name, *args, **kwargs)

    monkeypatch.setattr(GgufFile, "read", counted)
    load_target(str(file), dtype=torch.bfloat16)
    assert sorted(names) == sorted(GgufFile(file).tensors)


def test_part_of_the_layers_and_a_target_without_weights(written):
    file, _ = written("llama tied")
    target, part = load_target(str(file)), load_target(str(file), layers=[-1])
    parameters = dict(part.named_parameters())
    for name, parameter in target.named_parameters():
        assert (
            parameters[name].is_meta
            if name.startswith("layers.") and ".3." not in name
            else (torch.equal(parameters[name], parameter))
        )
    assert empty_target(file).config == target.config
    assert part.fingerprint == target.fingerprint


def test_fingerprints_tell_files_apart(written, tmp_path):
    file, _ = written("llama")
    copied = shutil.copy(file, tmp_path / "other.gguf")
    assert fingerprint(copied) == fingerprint(file) != fingerprint(written("qwen2")[0])
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    copied.write_bytes(content)
    assert fingerprint(copied) != fingerprint(file)


def test_a_target_of_a_file_is_written_as_a_folder(make_target_folder, tmp_path):
    folder, out = make_target_folder(num_hidden_layers=2), tmp_path / "out"
    write_gguf(folder, tmp_path / "tiny.gguf", tokenizer=True)
    target = load_target(str(tmp_path / "tiny.gguf"))
    out.mkdir()
    save_target(target, out)
    again = load_target(str(out))
    assert again.config == target.config
    assert again.end_tokens == target.end_tokens
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


CHANGES = {
    "soft-cap": (lambda w: w.add_attn_logit_softcapping(50.0), "llama.attn_logit_softcapping=50.0"),
    "scale": (lambda w: w.add_float32("llama.attention.scale", 0.1), "llama.attention.scale=0.1"),
    "experts": (lambda w: w.add_expert_weights_scale(2.5), "llama.expert_weights_scale=2.5"),
    "clamp": (lambda w: w.add_clamp_kqv(8.0), "llama.attention.clamp_kqv=8.0"),
    "layer norm": (lambda w: w.add_layer_norm_eps(1e-5), "llama.attention.layer_norm_epsilon"),
    "part of the head": (lambda w: w.add_rope_dimension_count(8), "llama.rope.dimension_count=8"),
    "scaling": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope.scaling.type='longrope'"),
    "no factor": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), "llama.rope.scaling.factor"),
    "unknown tensor": (lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)), "attn_sinks"),
    "ramp": (lambda w: w.add_float32("llama.rope.scaling.yarn_ext_factor", 1.0), "yarn_ext_factor=1.0"),
    "unknown form": (lambda w: w.add_tensor("extra", np.ones(4, np.float32)), "the tensor extra"),
    "no such layer": (lambda w: w.add_tensor("blk.9.attn_norm.weight", np.ones(64, np.float32)), r"layers\.9\."),
    "frequencies": (lambda w: w.add_tensor("rope_freqs.weight", np.full(8, 3, np.float32)), "rope_freqs.weight"),
    "integers": (lambda w: w.add_tensor("blk.0.extra.weight", np.ones(4, np.int32)), "type I32"),
    "part": (lambda w: w.add_uint16("split.count", 2), "split.count=2"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_change_the_logits_is_an_error_that_names_it(make_target_folder, tmp_path, change):
    folder, file = make_target_folder(num_hidden_layers=2), tmp_path / "tiny.gguf"
    add, message = CHANGES[change]
    write_gguf(folder, file, change=add)
    with pytest.raises(ValueError, match=message) as caught:
        load_target(str(file))
    assert str(file) in str(caught.value)


OF_OTHERS = {
    "granite": (lambda w: w.add_bool("granite.rope.scaling.finetuned", False), "granite.rope.scaling.finetuned=False"),
    "phi3": (
        lambda w: w.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)),
        "rope_factors_short.weight is",
    ),
    "phi3 window, part of the head": (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        "rope_factors_long.weight is missing",
    ),
    "qwen2": (lambda w: w.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)), "rope_factors_long.weight"),
    "deepseek v3": (lambda w: w.add_uint32("deepseek2.nextn_predict_layers", 1), "nextn_predict_layers=1"),
    "granite hybrid": (lambda w: w.add_head_count_kv([0, 2, 2]), r"head_count_kv=\[0, 2, 2\]: must be 4 whole numbers"),
    "nemotron h": (lambda w: w.add_head_count_kv([0, 0, 0]), r"head_count_kv=\[0, 0, 0\]: a layer with such"),
    "nemotron h with experts": (lambda w: w.add_expert_group_count(4), "expert_group_count=4: is not supported"),
    "falcon h1": (lambda w: w.add_ssm_time_step_rank(3), "ssm.time_step_rank=3: must divide ssm.inner_size=128"),
    "falcon h1, norm after the gate": (lambda w: w.add_head_count_kv([2, 0]), r"head_count_kv=\[2, 0\]: layers that"),
    "deepseek v2": (lambda w: w.add_uint32("deepseek2.expert_gating_func", 3), "expert_gating_func=3: .* 1 or 2"),
    "deepseek v3, older": (
        lambda w: w.add_tensor("blk.0.attn_k_b.weight", np.ones((4, 32, 32), np.float32)),
        r"blk.0.attn_k_b.weight \[4, 32, 32\], blk.0.attn_v_b.weight \[\]: must have a matrix for every head",
    ),
    "deepseek v2 lite, older": (
        lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.YARN), w.add_rope_scaling_factor(4.0)),
        "yarn_log_multiplier is missing",
    ),
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_what_other_families_do_not_support_is_named(written, tmp_path, name):
    add, message = OF_OTHERS[name]
    write_gguf(written(name)[1], tmp_path / "tiny.gguf", change=add, older="older" in name)
    with pytest.raises(ValueError, match=message):
        load_target(str(tmp_path / "tiny.gguf"))


def test_decays_of_mamba2_stay_in_fp32_and_are_negative(written, tmp_path):
    file, folder = written("granite hybrid")
    rounded, target = load_target(str(file), dtype=torch.bfloat16), load_target(str(folder))
    for kind in ("A_log", "D", "dt_bias"):
        value = rounded.get_parameter(f"layers.0.mixer.{kind}")
        assert value.dtype is torch.float32
        assert torch.equal(value, target.get_parameter(f"layers.0.mixer.{kind}"))
    rate = GgufFile(file).tensors["blk.3.ssm_a"]
    content = bytearray(file.read_bytes())
    content[rate.offset : rate.offset + 4] = np.float32(0.5).tobytes()
    (damaged := tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"tiny\.gguf: blk.3.ssm_a: damaged: 0.5 is no negative rate"):
        load_target(str(damaged))


@pytest.mark.parametrize("name", ["granite hybrid with experts, rotary", "falcon h1", "nemotron h with experts"])
def test_the_config_of_a_file_is_one_for_transformers(written, tmp_path, name):
    import transformers

    file, folder = written(name)
    (tmp_path / "config.json").write_text(json.dumps(read_config(file)))
    shutil.copy(folder / "model.safetensors", tmp_path)
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (folder, tmp_path)
    ]
    with torch.no_grad():
        logits, wanted = (model.eval()(IDS).logits for model in models)
    assert relative_error(logits, wanted) < TOLERANCE


def test_keys_that_change_nothing_are_left_out(make_target_folder, tmp_path):
    folder, file = make_target_folder(num_hidden_layers=2), tmp_path / "tiny.gguf"

    def add(writer):
        writer.add_expert_count(0)
        writer.add_final_logit_softcapping(0.0)
        writer.add_author("someone")
        writer.add_string("quantize.imatrix.file", "imatrix.dat")

    write_gguf(folder, file, change=add)
    assert load_target(str(file)).config.vocab_size == 384


def test_sizes_are_held_against_the_tensors(make_target_folder, tmp_path):
    folder, file = make_target_folder(num_hidden_layers=2), tmp_path / "tiny.gguf"
    config = json.loads((folder / "config.json").read_text())
    write_gguf(folder, file)
    good = file.read_bytes()
    for key, value, message in (
        ("llama.feed_forward_length", 96, r"(?s)down_proj.weight \[64, 128\]: expected \[64, 96\]"),
        ("llama.block_count", 3, r"layers\.2\..*missing"),
        ("llama.vocab_size", 400, "vocab_size=400, but token_embd.weight has 384 rows"),
        ("llama.attention.head_count", 3, r"tiny\.gguf: llama.attention.head_count=3: is no multiple"),
        ("llama.attention.head_count_kv", 0, "head_count_kv=0"),
    ):
        place = good.index(key.encode()) + len(key) + 4  # after the key comes the value's type, 4 bytes
        file.write_bytes(good[:place] + value.to_bytes(4, "little") + good[place + 4 :])
        with pytest.raises(ValueError, match=message):
            load_target(str(file))
    assert config["num_key_value_heads"] == 2


def test_damaged_files_are_errors_that_name_them(written, tmp_path):
    good, file = written("llama")[0].read_bytes(), tmp_path / "damaged.gguf"
    header = GgufFile(written("llama")[0]).data_start
    contents = [b"", b"GGU", b"PK\x03\x04" + good, good[:4] + (3).to_bytes(4, "big") + good[8:], good[:-1]]
    contents += [good[:end] for end in range(5, header, 61)]
    for content in contents:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged\.gguf"):
            load_target(str(file))
    generator = np.random.default_rng(4)
    for place in generator.integers(4, header, 150):  # a flipped bit is an error or changes nothing that is checked
        file.write_bytes(good[:place] + bytes([good[place] ^ (1 << int(generator.integers(8)))]) + good[place + 1 :])
        with contextlib.suppress(ValueError):
            empty_target(file)
    with pytest.raises(ValueError, match=r"nowhere\.gguf: no such file"):
        load_target(str(tmp_path / "nowhere.gguf"))
