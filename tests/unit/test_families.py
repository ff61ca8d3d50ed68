"""Every target family against transformers, and in the paged engine with drafts."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from kernels.cpu.library import library
from models.attention import CausalAttention
from models.checkpoint import open_tensors
from models.config import LAST, UNNORMED, read_json
from models.heads import HEADS
from models.heads.eagle3.config import Eagle3Options
from models.heads.eagle3.head import Eagle3Head
from models.heads.files import load_head, save_head
from models.heads.weights import initialize, set_vocabulary
from models.layers import pack
from models.sharding import Part
from models.targets import ARCHITECTURES, check_weights, empty_target, load_target
from models.targets.writing import save_target
from models.vocab import build_draft_vocab
from tests.heads import make_head
from tests.pairwise import parametrize_each
from tests.unit.quantized_writers import FP8, GPTQ, compressed, fp8_blocks, gptq, packed, write
from tests.unit.reference import (
    TOLERANCE,
    assert_equals_reference,
    randomise_biases_and_norms,
    reference_outputs,
    relative_error,
)

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LOCAL, LINEAR = {"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
GEMMA = {"head_dim": 32, "sliding_window": 24, "tie_word_embeddings": True, "sliding_window_pattern": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# a large eps, which the residual multiplier changes
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
    "rms_norm_eps": 0.01,
}
PHI = {"pad_token_id": 0, "eos_token_id": 2}
PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(16)],
    "long_factor": [1.0 + 1.5 * index for index in range(16)],
    "original_max_position_embeddings": 16,
}
PHI_LONG = {
    **{**PHI, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    **{"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
}
OPT, OPT_350M = {"ffn_dim": 96, "init_std": 0.2}, {"word_embed_proj_dim": 32, "do_layer_norm_before": False}
BIGCODE = {"n_inner": 96, "bos_token_id": 0, "eos_token_id": 0}
# sinks as large as scores, experts that reach the limit of their gate
GPT_OSS = {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 4, "sliding_window": 24, "swiglu_limit": 0.5}
UNTRUNCATED = {**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
DEEPSEEK = {
    "head_dim": 16, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1},
}  # fmt: skip
DEEPSEEK_V3 = {**DEEPSEEK, "n_shared_experts": 1, "bos_token_id": 0, "eos_token_id": 1}
DEEPSEEK_V2 = {**DEEPSEEK, "n_shared_experts": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0}
LFM2 = {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 32, "bos_token_id": 0}
QWEN3_5 = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "rms_norm_eps": 1e-3, "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
# P != N, decays from exp(-1) to below 1e-9, chunks shorter than the prompts
MAMBA = {"mamba_n_heads": 16, "mamba_d_state": 12, "mamba_chunk_size": 32, "mamba_n_groups": 2}
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
GRANITE_H = {**GRANITE, **MAMBA, "layer_types": KINDS, "shared_intermediate_size": 96}
FALCON = {
    **{**MAMBA, "mamba_d_ssm": 128, "key_multiplier": 0.4, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7},
    **{"attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9, "lm_head_multiplier": 0.05},
    **{"embedding_multiplier": 0.7, "mlp_multipliers": [0.6, 0.3], "ssm_multipliers": [0.5, 0.7, 0.2, 0.4, 0.3]},
}
# transformers limits the time step by time_step_min in its chunk form alone
NEMOTRON = {
    "head_dim": 32, "mamba_num_heads": 16, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 32,
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "full_attention"],
    "time_step_min": 1e-30, "time_step_floor": 0.5,
}  # fmt: skip
NEMOTRON_MOE = {
    **{**NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5},
    **{"moe_shared_expert_intermediate_size": 48, "n_groups": 1},
}
FAMILIES = {
    "nemotron h": ("NemotronHConfig", NEMOTRON),
    "nemotron h, biased": ("NemotronHConfig", {**NEMOTRON, "use_bias": True, "mlp_bias": True, "use_conv_bias": False}),
    "nemotron h with experts": ("NemotronHConfig", NEMOTRON_MOE),
    "nemotron h with experts of a latent, in groups": (
        "NemotronHConfig",
        {**NEMOTRON_MOE, "moe_latent_size": 24, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
    "falcon h1": ("FalconH1Config", {**FALCON, "tie_word_embeddings": True}),
    "falcon h1, norm after the gate": (
        "FalconH1Config",
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": 96, "mamba_n_groups": 1},
    ),
    "falcon h1, norm before the gate, biased, multiplied by one": (
        "FalconH1Config",
        {**MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True}
        | {"mlp_bias": True, "attention_bias": True, "head_dim": 32},
    ),
    "granite hybrid without recurrence": (
        "GraniteMoeHybridConfig",
        GRANITE_H
        | {"layer_types": ["full_attention"] * 4, "num_local_experts": 0, "position_embedding_type": "rope"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "granite hybrid": ("GraniteMoeHybridConfig", GRANITE_H | {"num_local_experts": 0, "tie_word_embeddings": True}),
    "granite hybrid with experts, one group, rotary": (
        "GraniteMoeHybridConfig",
        {**GRANITE_H, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "mamba_n_groups": 1}
        | {"position_embedding_type": "rope", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        | {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True},
    ),
    "lfm2": (  # heads as large as the fused decoder's
        "Lfm2Config",
        LFM2 | {"eos_token_id": 1, "norm_eps": 1e-5, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "lfm2 of seven taps": (
        "Lfm2Config",
        LFM2 | {"eos_token_id": 1, "conv_L_cache": 7, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False},
    ),
    "qwen3.5": (  # sizes that the fused decoder takes
        "Qwen3_5TextConfig",
        QWEN3_5
        | {"head_dim": 64, "linear_value_head_dim": 32}
        | {"rope_parameters": QWEN3_5["rope_parameters"] | {"partial_rotary_factor": 0.5}},
    ),
    "qwen3.5 of odd sizes": ("Qwen3_5TextConfig", QWEN3_5),
    "qwen3.5 of one value head per key head, two taps": (
        "Qwen3_5TextConfig",
        QWEN3_5
        | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True}
        | {"layer_types": None, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    ),
    "qwen3.5 moe": ("Qwen3_5MoeTextConfig", QWEN3_5 | EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3 next": ("Qwen3NextConfig", QWEN3_5 | EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3 next of three value heads per key head, weights as they are": (
        "Qwen3NextConfig",
        QWEN3_5
        | EXPERTS
        | {"linear_num_value_heads": 6, "norm_topk_prob": False, "shared_expert_intermediate_size": 40},
    ),
    "lfm2 moe": (
        "Lfm2MoeConfig",
        LFM2 | EXPERTS | {"eos_token_id": 1, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral window": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3 biased, yarn": ("Qwen3Config", {"head_dim": 32, "attention_bias": True, "rope_parameters": YARN}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "query_pre_attn_scalar": 24}),
    "gemma3 of heads of 256, linear": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "head_dim": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
        },
    ),
    "opt": ("OPTConfig", {**OPT, "tie_word_embeddings": True}),
    "opt as 350m": ("OPTConfig", {**OPT, **OPT_350M, "tie_word_embeddings": True}),
    "opt without biases, norms after": ("OPTConfig", {**OPT, "enable_bias": False, "do_layer_norm_before": False}),
    "gpt bigcode": ("GPTBigCodeConfig", {**BIGCODE, "tie_word_embeddings": True}),
    "gpt bigcode, exact gelu, unscaled": (
        "GPTBigCodeConfig",
        {**BIGCODE, "activation_function": "gelu", "scale_attn_weights": False},
    ),
    "qwen3 moe": ("Qwen3MoeConfig", {"head_dim": 32, "norm_topk_prob": True, **EXPERTS}),
    "qwen3 moe, weights as they are": ("Qwen3MoeConfig", {"head_dim": 32, "norm_topk_prob": False, **EXPERTS}),
    "granite": ("GraniteConfig", GRANITE),
    "granite tied, biased": (
        "GraniteConfig",
        {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "gpt oss": ("GptOssConfig", {**GPT_OSS, "rope_parameters": UNTRUNCATED}),
    "gpt oss without biases, all windows": (
        "GptOssConfig",
        {**GPT_OSS, "attention_bias": False, "layer_types": ["sliding_attention"] * 4, "swiglu_alpha": 1.0},
    ),
    "deepseek v3": ("DeepseekV3Config", DEEPSEEK_V3),
    "deepseek v3 without ranks of queries and groups, biased, not interleaved": (
        "DeepseekV3Config",
        {**DEEPSEEK_V3, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}
        | {"norm_topk_prob": False, "attention_bias": True, "rope_interleave": False, "rope_parameters": None},
    ),
    "deepseek v2": ("DeepseekV2Config", DEEPSEEK_V2),
    "deepseek v2 lite": ("DeepseekV2Config", {**DEEPSEEK_V2, "q_lora_rank": None, "topk_method": "greedy"}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "mixtral window": ("MixtralConfig", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 24}),
    "phi3": ("Phi3Config", PHI),
    "phi3 window, part of the head": ("Phi3Config", {**PHI, "sliding_window": 24, "rope_parameters": PART}),
    "phi3 longrope": ("Phi3Config", PHI_LONG),
    "phi3 longrope, part of the head": (
        "Phi3Config",
        PHI_LONG
        | {
            "rope_parameters": LONGROPE
            | {"partial_rotary_factor": 0.75, "short_factor": [1.5] * 12, "long_factor": list(range(2, 14))}
            | {"attention_factor": 1.25}
        },
    ),
}
HYBRIDS = [name for name in FAMILIES if name.startswith(("lfm2", "granite hybrid", "falcon", "nemotron"))]


@pytest.fixture(scope="session")
def make_family_folder(tmp_path_factory):
    folders = {}

    def make(name, **changes):
        key = (name, *sorted(changes.items()))
        if key in folders:
            return folders[key]
        import transformers

        kind, options = FAMILIES[name]
        sizes = {
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,  # so that logits differ by more than rounding
        }
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes | options | changes))
        folder = tmp_path_factory.mktemp("family")
        model.save_pretrained(folder)
        randomise_biases_and_norms(folder)
        folders[key] = folder
        return folder

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_hidden_states_equal_transformers(make_family_folder, name):
    ids = torch.randint(0, 384, (2, 90), generator=torch.Generator().manual_seed(3))
    assert_equals_reference(make_family_folder(name), ids)


@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize("name", HYBRIDS)
def test_texts_shorter_than_a_window_and_a_little_longer_than_a_chunk(make_family_folder, name, length):
    ids = torch.randint(0, 384, (2, length), generator=torch.Generator().manual_seed(3))
    assert_equals_reference(make_family_folder(name), ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_in_16_bits_only_operands_of_products_are_rounded(make_family_folder, name, dtype):
    """The residual stream is fp32, in the layers of a trainer and in packed ones; features have the model's dtype."""
    ids = torch.randint(0, 384, (1, 60), generator=torch.Generator().manual_seed(3))
    streams = []

    def run(target):
        out = target(ids, torch.arange(60)[None], CausalAttention(), aux_layers=(UNNORMED, 2, LAST))
        return [target.logits(out.hidden), *out.aux]

    wanted = run(load_target(str(make_family_folder(name)), dtype=dtype).float())
    target = load_target(str(make_family_folder(name)), dtype=dtype)
    for layer in target.layers:
        layer.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    for _ in range(2):
        logits, *features = run(target)
        for actual, true in zip((logits, *features), wanted, strict=True):
            errors = (actual.float() - true).norm(dim=-1) / true.norm(dim=-1)
            assert errors.median() < 16 * torch.finfo(dtype).eps  # a few rows may have other experts
        assert {feature.dtype for feature in features} == {dtype}
        pack(target)
    assert {stream.dtype for stream in streams} == {torch.float32}
    summed = [stream for index, stream in enumerate(streams) if index % len(target.layers)]  # not the embedding
    assert all((stream != stream.to(dtype)).float().mean() > 0.9 for stream in summed)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_target_that_is_written_is_read_as_it_was(make_family_folder, name, tmp_path):
    target = load_target(str(make_family_folder(name)))
    save_target(target, tmp_path)
    before, after = (dict(open_tensors(folder)) for folder in (target.folder, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    again = load_target(str(tmp_path))
    assert again.config == target.config
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in target.folder.iterdir()}


def test_of_a_model_that_reads_images_the_language_model_is_loaded(make_family_folder, tmp_path, caplog):
    import transformers

    text = json.loads((make_family_folder("qwen3.5") / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    for tied in (False, True):
        stated = {"tie_word_embeddings": tied}
        config = transformers.Qwen3_5Config(text_config=text | stated, vision_config=vision, **stated)
        folder = tmp_path / f"{tied}"
        transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3_5ForConditionalGeneration"]
        check_weights(folder, empty_target(folder))
        with caplog.at_level("INFO", "headway.targets"):
            assert_equals_reference(folder, torch.arange(80).view(2, 40))
        assert "tensors are not loaded: only text is read" in caplog.text
        target = load_target(str(folder), dtype=torch.bfloat16)
        assert target.config.tie_word_embeddings == tied
        (written := folder / "written").mkdir()
        save_target(target, written)
        assert read_json(written / "config.json")["architectures"] == ["Qwen3_5ForCausalLM"]
        assert transformers.AutoModelForCausalLM.from_pretrained(written).config.model_type == "qwen3_5_text"
        for key, parameter in load_target(str(written), dtype=torch.bfloat16).named_parameters():
            assert torch.equal(parameter, target.get_parameter(key)), key


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe", "granite hybrid with experts, one group, rotary"])
def test_experts_in_one_tensor_are_those_of_separate_ones(make_family_folder, name, tmp_path):
    """Newer versions of transformers can write them so."""
    from transformers import AutoModelForCausalLM

    folder = make_family_folder(name)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, save_original_format=False)
    assert any(key.endswith(".experts.gate_up_proj") for key in open_tensors(tmp_path))
    check_weights(tmp_path, empty_target(tmp_path))
    for part in (None, *(Part(rank, 2, lambda x, sizes, *, everywhere=True: x) for rank in range(2))):
        wanted, target = (load_target(str(each), part=part) for each in (folder, tmp_path))
        for key, parameter in target.named_parameters():
            assert torch.equal(parameter, wanted.get_parameter(key)), key


def in_mxfp4(folder, quantized, widened):
    """Write a gpt-oss checkpoint with random experts in MXFP4, and as transformers widens them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).float().contiguous()
    edit(folder, widened)
    edit(folder, quantized, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    for each, content in ((quantized, tensors), (widened, plain)):
        save_file(content, each / "model.safetensors", metadata={"format": "pt"})


def test_experts_in_mxfp4(make_family_folder, tmp_path):
    """Widened they are transformers'; kept as they are they compute the same; a damaged scale is named."""
    quantized, widened = tmp_path / "quantized", tmp_path / "widened"
    for folder in (quantized, widened):
        folder.mkdir()
    in_mxfp4(make_family_folder("gpt oss"), quantized, widened)
    check_weights(quantized, empty_target(quantized))
    ids = torch.randint(0, 384, (1, 40), generator=torch.Generator().manual_seed(3))
    assert_equals_reference(widened, ids)
    for part in (None, Part(1, 2, lambda x, sizes, *, everywhere=True: x)):
        target, wanted = (load_target(str(folder), part=part) for folder in (quantized, widened))
        for key, parameter in target.named_parameters():
            assert torch.equal(parameter, wanted.get_parameter(key)), key
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    loaded = [load_target(str(quantized), native=True), load_target(str(widened))]
    assert loaded[0].ggml_formats == ("int8 in groups of 32",)
    kept, plain = ([a.token_ids for a in Engine(each).generate(ids.tolist(), params)] for each in loaded)
    assert kept == plain
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.2.down_proj.scales: damaged: a scale is not a number"):
        load_target(str(quantized))


@parametrize_each({"name": list(FAMILIES), "dtype": [torch.float32, torch.bfloat16]})
def test_drafts_change_no_token(make_family_folder, name, dtype):
    folder = make_family_folder(name)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 384, (n,), generator=generator).tolist() for n in (3, 40, 61)] + [[5, 6, 7] * 12]
    token_ids = {}
    headless = load_target(str(folder)).config.embedding_size is not None
    proposers = ("none", "ngram") if headless else ("none", "ngram", "head")
    for proposer in proposers:
        target, head = load_target(str(folder), dtype=dtype), None
        if not headless:
            head = Eagle3Head(Eagle3Options(draft_vocab_size=200, aux_layers=[0, 1, 3]).for_target(target.config))
            set_vocabulary(head, *build_draft_vocab(torch.arange(384) % 11, 200, [0]))
            initialize(head, target, from_target=True)
        small = EngineConfig(max_batch=1 if proposer == "none" else 3, prefill_chunk=32, max_rows=128)
        drafting = ProposerConfig(name="auto", tree="beam:3x3")
        engine = Engine(target, head=head, proposer=proposer, config=small, proposer_config=drafting)
        for seed, temperature in ((0, 0.0), (7, 0.8)):
            params = SamplingParams(max_tokens=24, ignore_eos=True, seed=seed, temperature=temperature)
            completions = engine.generate(prompts, params)
            token_ids[proposer, seed] = [completion.token_ids for completion in completions]
            if proposer == "head":
                assert sum(completion.stats.drafted for completion in completions) > 0
    for proposer in proposers:
        for seed in (0, 7):
            assert token_ids[proposer, seed] == token_ids["none", seed], proposer


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_decodes_what_transformers_decodes(make_family_folder, name):
    """With heads of 32 or more the fused decoder runs the layers of a CPU, from what their `parts` say."""
    from transformers import AutoModelForCausalLM

    larger = {} if "head_dim" in FAMILIES[name][1] else {"num_attention_heads": 2, "num_key_value_heads": 1}
    folder = make_family_folder(name, **larger)
    prompt = torch.randint(1, 384, (1, 30), generator=torch.Generator().manual_seed(8))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = model.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 30:]
    engine = Engine(load_target(str(folder)), proposer="ngram")
    (completion,) = engine.generate(prompt.tolist(), SamplingParams(max_tokens=30, ignore_eos=True))
    assert completion.token_ids == wanted.tolist()


@pytest.mark.parametrize("name", ["phi3 longrope", "phi3 longrope, part of the head"])
def test_longrope_within_the_original_context(make_family_folder, name):
    folder = make_family_folder(name)
    ids = torch.randint(0, 384, (2, 16), generator=torch.Generator().manual_seed(3))
    expected, target = reference_outputs(folder, ids), load_target(str(folder), context=16)
    with torch.no_grad():
        out = target(ids, torch.arange(16).expand_as(ids), CausalAttention())
    assert relative_error(target.logits(out.hidden), expected.logits) < TOLERANCE


def test_an_engine_s_context_decides_longrope_s_divisors(make_family_folder, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("infer.engine.loading.Tokenizer.load", lambda folder: None)
    folder, texts = make_family_folder("phi3 longrope"), {}
    prompt = torch.randint(1, 384, (1, 8), generator=torch.Generator().manual_seed(8))
    for context in (16, 17, None):
        model = ModelConfig(name="tiny", path=str(folder), dtype="float32")
        engine = Engine.load(model, proposer="ngram", engine=EngineConfig(max_model_len=context))
        assert engine.context == (context or 512)
        (completion,) = engine.generate(prompt.tolist(), SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0))
        texts[context] = completion.logprobs
        if context == 16:
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            wanted = reference.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert completion.token_ids == wanted[0, 8:].tolist()
    assert texts[16] != texts[17] == texts[None]


def test_longrope_is_read_as_older_files_state_it(make_family_folder, tmp_path):
    folder = make_family_folder("phi3 longrope")
    section = {key: LONGROPE[key] for key in ("short_factor", "long_factor")} | {"type": "su"}
    edit(folder, tmp_path, rope_parameters=None, rope_scaling=section, original_max_position_embeddings=16)
    assert empty_target(tmp_path).config == empty_target(folder).config
    edit(folder, tmp_path, max_position_embeddings=16)
    assert empty_target(tmp_path).config.rope.divisors == tuple(LONGROPE["short_factor"])


def test_layers_of_hybrids_are_read_as_older_files_state_them(make_family_folder, tmp_path):
    older = {"linear_attention": "mamba", "full_attention": "attention"}
    limits = {"time_step_limit": [0.0, float("inf")]}  # written as Infinity
    for name, changes in (
        ("granite hybrid", {"layers_block_type": [older[kind] for kind in KINDS], "position_embedding_type": "nope"}),
        ("nemotron h with experts", {"hybrid_override_pattern": "ME*EM"}),
        ("falcon h1", {"mamba_d_head": "auto"}),
    ):
        folder = make_family_folder(name)
        none = {"layer_types": None} | ({} if "layers_block_type" in changes else {"layers_block_type": None})
        edit(folder, tmp_path, **none, **changes, **limits)
        assert "Infinity" in (tmp_path / "config.json").read_text()
        assert empty_target(tmp_path).config == empty_target(folder).config


LONG = {
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 2048},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("scaling", LONG)
def test_rotary_scaling_at_long_positions(make_target_folder, scaling):
    folder = make_target_folder(rope_parameters=LONG[scaling], max_position_embeddings=32768)
    positions = torch.tensor([[0, 1, 2000, 9000, 16000, 30000, 32766, 32767]])
    ids = torch.arange(8)[None] + 3
    expected = reference_outputs(folder, ids, position_ids=positions)
    target = load_target(str(folder))
    with torch.no_grad():
        logits = target.logits(target(ids, positions, CausalAttention()).hidden)
    assert relative_error(logits, expected.logits) < TOLERANCE


def edit(folder, tmp_path, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3 moe", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("qwen3 moe", {"num_local_experts": None}, "num_experts is missing"),
        ("qwen3 moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["round_attention"] * 4}, "layer_types"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: soft caps"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: soft caps"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters="),
        ("gemma3", {"layer_types": ["sliding_attention"]}, "layer_types="),
        ("gemma3", {"sliding_window": None}, "sliding_window=None"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text model alone"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier=0.0: must be a positive number"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling='8': expected a number"),
        ("granite hybrid", {"layer_types": ["mamba"] * 4}, "layer_types=.*each mamba or .*, and attention once"),
        ("granite hybrid", {"layer_types": ["mamba", "attention"]}, "layer_types=.*must name 4 layers"),
        ("granite hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi': only 'rope' or"),
        ("granite hybrid", {"time_step_limit": [0.001, 0.1]}, "time_step_limit=.*only"),
        ("granite hybrid", {"mamba_d_head": 9}, "mamba_n_heads=16: mamba_d_head=9 times it must be 128"),
        ("granite hybrid", {"mamba_n_groups": 3}, "mamba_n_groups=3: must divide mamba_n_heads=16"),
        ("granite hybrid", {"mamba_d_conv": 0}, "mamba_d_conv=0: must be 1 to"),
        ("granite hybrid", {"normalization_function": "layernorm"}, "normalization_function='layernorm': only"),
        ("granite hybrid", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("granite hybrid with experts, one group, rotary", {"num_experts_per_tok": 7}, "num_experts_per_tok=7: must"),
        ("falcon h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers=.*must be 5 positive numbers"),
        ("falcon h1", {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers=.*must be 2 positive numbers"),
        ("falcon h1", {"key_multiplier": -1.0}, "key_multiplier=-1.0: must be a positive number"),
        ("falcon h1", {"attention_bias": True}, "attention_in_multiplier=0.8: beside attention_bias only 1.0"),
        ("falcon h1", {"mamba_proj_bias": True}, "ssm_in_multiplier=1.3: beside mamba_proj_bias only 1.0"),
        ("falcon h1", {"mamba_use_mlp": False}, "mamba_use_mlp=False: only True"),
        ("falcon h1", {"attn_layer_indices": [1]}, r"attn_layer_indices=\[1\]: only no value"),
        ("falcon h1", {"time_step_limit": [0.0, 0.1]}, "time_step_limit="),
        ("falcon h1", {"mamba_d_ssm": 100}, "mamba_n_heads=16: mamba_d_head=8 times it must be 100"),
        ("nemotron h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu': only 'relu2'"),
        ("nemotron h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu': only 'silu'"),
        ("nemotron h", {"sliding_window": 64}, "sliding_window=64: only no value"),
        ("nemotron h", {"attention_head_dim": 16}, "attention_head_dim=16: only 32"),
        ("nemotron h", {"attention_bias": True}, "attention_bias=True: only False"),
        ("nemotron h", {"mamba_proj_bias": True}, "mamba_proj_bias=True: only False"),
        ("nemotron h", {"time_step_limit": [0.01, 1.0]}, "time_step_limit="),
        ("nemotron h", {"layers_block_type": ["mamba", "conv", "attention"]}, "layer_types=.*each mamba or"),
        ("nemotron h", {"layers_block_type": None, "hybrid_override_pattern": "M-X"}, "hybrid_override_pattern='M-X'"),
        ("nemotron h", {"layers_block_type": None}, "hybrid_override_pattern is missing"),
        ("nemotron h with experts", {"n_shared_experts": 2}, "n_shared_experts=2: only 1"),
        ("nemotron h with experts", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: must be 1 to 8"),
        ("nemotron h with experts", {"n_group": 8}, "n_group=8: must divide the 8 experts"),
        ("gpt oss", {"sliding_window": 0}, "sliding_window=0: must be 1 to"),
        ("gpt oss", {"swiglu_limit": -7.0}, "swiglu_limit=-7.0: must be a positive number"),
        ("gpt oss", {"layer_types": ["sliding_attention"]}, "layer_types="),
        ("gpt oss", {"quantization_config": {"quant_method": "mxfp5"}}, "quant_method='mxfp5': only .*mxfp4"),
        ("deepseek v3", {"topk_method": "greedy"}, "topk_method='greedy': only 'noaux_tc'"),
        ("deepseek v3", {"scoring_func": "softmax"}, "scoring_func='softmax': only 'sigmoid'"),
        ("deepseek v3", {"num_key_value_heads": 2}, "num_key_value_heads=2: must be num_attention_heads=4"),
        ("deepseek v3", {"n_group": 3}, "n_group=3: must divide the 8 experts"),
        ("deepseek v3", {"n_group": 8}, "n_group=8: must divide the 8 experts"),
        ("deepseek v3", {"topk_group": 5}, "topk_group=5: must be 1 to 4"),
        ("deepseek v3", {"num_experts_per_tok": 5}, "num_experts_per_tok=5: must be 1 to 4"),
        ("deepseek v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("deepseek v3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim=15: must be even"),
        ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob=True: only False"),
        ("deepseek v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc': only 'greedy' or 'group_limited_greedy'"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok=7: must be 1 to 6"),
        ("phi3", {"rope_parameters": PART | {"rope_type": "longrope"}}, "config.json: short_factor is missing"),
        ("phi3 longrope", {"rope_parameters": LONGROPE | {"long_factor": [1.0] * 15}}, "long_factor=.*must be 16 pos"),
        ("phi3 longrope", {"rope_parameters": LONGROPE | {"short_factor": [0.0] * 16}}, "short_factor=.*must be 16"),
        ("phi3 longrope", {"rope_parameters": LONGROPE | {"long_mscale": 1.2}}, "long_mscale=1.2: only no value"),
        ("mistral", {"rope_parameters": LONGROPE}, "rope_type='longrope': not supported"),
        ("phi3", {"rope_parameters": PART | {"partial_rotary_factor": 0.2}}, "partial_rotary_factor=0.2: must give"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "layer_types=.*: must name 4 layers, each full_attention or conv, and"),
        ("lfm2", {"conv_bias": True}, "conv_bias=True: only False"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache=0: must be 1 to"),
        ("lfm2 moe", {"use_expert_bias": False}, "use_expert_bias=False: only True"),
        ("lfm2 moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7: must be 1 to 6"),
        (
            "qwen3.5",
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types=.*each full_attention or linear_attention",
        ),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate=False: only True"),
        ("qwen3.5", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid': only 'swish'"),
        ("qwen3.5", {"linear_num_value_heads": 3}, "linear_num_value_heads=3: must be a multiple of 2 key heads"),
        ("qwen3.5", {"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim=17: must be 1 to 16"),
        (
            "qwen3.5",
            {"rope_parameters": {"partial_rotary_factor": 0.3}},
            "partial_rotary_factor=0.3: must give an even",
        ),
        ("qwen3.5 moe", {"num_experts": None}, "num_experts is missing"),
        ("qwen3 next", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]: only no value"),
        ("qwen3 next", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: only 1"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False: only True"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True: only False"),
        ("opt", {"activation_function": "gelu"}, "activation_function='gelu': only 'relu'"),
        ("opt", {"word_embed_proj_dim": -1}, "word_embed_proj_dim=-1"),
        ("opt", {"num_attention_heads": 5}, "hidden_size=64 is no multiple of 5 heads"),
        ("gpt bigcode", {"multi_query": False}, "multi_query=false"),
        ("gpt bigcode", {"add_cross_attention": True}, "add_cross_attention=true"),
        ("gpt bigcode", {"activation_function": "gelu_fast"}, "activation_function='gelu_fast': only"),
        ("qwen2", {"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(make_family_folder, tmp_path, name, changes, message):
    with pytest.raises(ValueError, match=message):
        load_target(edit(make_family_folder(name), tmp_path, **changes))


def test_every_architecture_is_tested():
    import transformers

    kinds = {getattr(transformers, kind).model_type for kind, _ in FAMILIES.values()}
    assert {"llama", *kinds} == {
        *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"),
        *("granitemoehybrid", "falcon_h1", "nemotron_h"),
        *("granite", "mixtral", "phi3", "opt", "gpt_bigcode", "gpt_oss", "deepseek_v2", "deepseek_v3"),
        *("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    }
    assert len(ARCHITECTURES) == 23  # MiMo's is Qwen2's: test_mtp.py


def test_layers_for_multi_token_prediction_are_not_the_target_s(make_family_folder, tmp_path):
    folder = make_family_folder("deepseek v3")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    names = ("model.layers.4.self_attn.kv_a_proj_with_mqa.weight", "model.layers.5.shared_head.norm.weight")
    tensors = dict(open_tensors(folder)) | {name: torch.ones(2, 2) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.layers.5.shared_head.norm.weight: not part of this architecture"):
        check_weights(tmp_path, empty_target(tmp_path))  # the config states one of them
    edit(folder, tmp_path, num_nextn_predict_layers=2)
    check_weights(tmp_path, empty := empty_target(tmp_path))
    target = load_target(str(tmp_path))
    assert dict(target.named_parameters()).keys() == dict(empty.named_parameters()).keys()
    head = HEADS["mtp"]().make(target.config)
    with pytest.raises(ValueError, match=r"mtp_layers.0.input_layernorm.weight: missing"):
        initialize(head, target, from_target=True)
    with pytest.raises(ValueError, match=r"mtp_layers.0.input_layernorm.weight: missing"):
        load_head(tmp_path, name="mtp", target=target)


def test_modules_of_nemotron_are_left_out_and_refused_by_name(make_family_folder, tmp_path):
    folder = make_family_folder("nemotron h with experts")
    tensors = dict(open_tensors(folder)) | {"mtp.layers.0.eh_proj.weight": torch.ones(64, 128)}
    save_file(tensors, tmp_path / "model.safetensors")
    edit(folder, tmp_path, num_nextn_predict_layers=1)
    check_weights(tmp_path, empty_target(tmp_path))
    target = load_target(str(tmp_path))
    with pytest.raises(ValueError, match=r"mtp\.\* are of Nemotron's blocks, of which head=mtp has none"):
        load_head(tmp_path, name="mtp", target=target)


def test_deepseek_is_served_in_blocks_of_fp8_as_published(make_family_folder, tmp_path):
    write(make_family_folder("deepseek v3"), FP8, fp8_blocks(48, 16), tmp_path / "fp8", tmp_path / "plain")
    check_weights(tmp_path / "fp8", empty_target(tmp_path / "fp8"))
    native, plain = (load_target(str(tmp_path / name), native=name == "fp8") for name in ("fp8", "plain"))
    assert native.ggml_formats == ("fp8 in groups of 16",)
    widened = load_target(str(tmp_path / "fp8"))
    for (name, parameter), reference in zip(widened.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, reference), name
    prompts = torch.randint(1, 384, (2, 30), generator=torch.Generator().manual_seed(8)).tolist()
    engines = [Engine(target, proposer=name) for target, name in ((native, "none"), (native, "ngram"), (plain, "none"))]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    ids = [[c.token_ids for c in engine.generate(prompts, params)] for engine in engines]
    assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize(
    ("name", "quantized", "count"),
    [
        ("granite hybrid", "_proj", 8),
        ("granite hybrid", "_linear", 8),  # gate and up are stored merged, and stay in groups all the same
        ("granite hybrid with experts, one group, rotary", "shared_mlp.output", 4),
        ("falcon h1", "_proj", 24),
        ("nemotron h", "_proj", 10),
    ],
)
def test_quantized_hybrids(make_family_folder, tmp_path, monkeypatch, name, quantized, count):
    """Convolutions and decays are as they were; so are experts in one tensor, which quantizers leave alone."""
    monkeypatch.setattr("tests.unit.quantized_writers.LAYER", quantized)
    section = compressed("pack-quantized", num_bits=4, group_size=32, strategy="group")
    write(make_family_folder(name), section, packed(4, 32), tmp_path / "int4", tmp_path / "plain")
    check_weights(tmp_path / "int4", empty_target(tmp_path / "int4"))
    widened, plain = (load_target(str(tmp_path / folder)) for folder in ("int4", "plain"))
    for (key, parameter), reference in zip(widened.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, reference), key
    native = load_target(str(tmp_path / "int4"), native=True)
    assert sum(getattr(module, "packed", None) is not None for module in native.modules()) == count


def test_block_drafters_do_not_start_from_layers_with_latents(make_family_folder, caplog):
    target = load_target(str(make_family_folder("deepseek v3")))
    head = HEADS["dflash"](num_layers=1, aux_layers=[1, 3]).make(target.config)
    weights = []
    for from_target in (True, False):
        initialize(head, target, from_target=from_target)
        weights.append(head.layers[0].self_attn.qkv_proj.weight.clone())
    assert torch.equal(*weights)
    assert caplog.text.count("the head starts at random") == 1


@pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3 next"])
def test_what_decides_the_decay_of_delta_nets_is_not_quantized(make_family_folder, name, tmp_path):
    """Neither by engine.weights= nor in a checkpoint in groups, whose other projections stay in them, in any order."""
    target = load_target(str(make_family_folder(name)), dtype=torch.bfloat16)
    wide = {key for key, value in target.layers[0].named_parameters() if value.dtype is torch.float32}
    assert wide == {"mixer.A_log", "mixer.dt_bias"}
    pack(target, weight_format="int8")
    assert not target.layers[0].mixer.ba_proj.packed.narrow
    assert target.layers[0].mixer.in_proj.packed.narrow
    quantized = write_gptq(make_family_folder(name), tmp_path)
    check_weights(quantized, empty_target(quantized))
    native, plain = load_target(str(quantized), native=True), load_target(str(tmp_path / "plain"))
    assert native.layers[0].mixer.in_proj.packed is not None
    assert native.layers[0].mixer.ba_proj.packed is None
    prompts = torch.randint(1, 384, (2, 30), generator=torch.Generator().manual_seed(8)).tolist()
    engines = [Engine(each, proposer=name) for each, name in ((native, "none"), (native, "ngram"), (plain, "none"))]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    ids = [[c.token_ids for c in engine.generate(prompts, params)] for engine in engines]
    assert ids[0] == ids[1] == ids[2]


def test_ranks_divide_heads_with_their_gates(make_family_folder):
    folder = str(make_family_folder("qwen3.5"))
    whole, ranks = load_target(folder), []
    for rank in range(2):
        ranks.append(load_target(folder, part=Part(rank, 2, lambda x, sizes, *, everywhere=True: x)))
    divided = [target.layers[1].self_attn.qkv_proj.weight.split([4 * 64, 64, 64]) for target in ranks]
    together = torch.cat([torch.cat(pieces) for pieces in zip(*divided, strict=True)])
    assert torch.equal(together, whole.layers[1].self_attn.qkv_proj.weight)


def write_gptq(folder, place):
    dense = "in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert.down_proj"
    write(folder, GPTQ, gptq(4, 32), place / "quantized", place / "plain", tuple(f"{name}." for name in dense))
    return place / "quantized"


def test_routers_stay_in_fp32(make_family_folder):
    target = load_target(str(make_family_folder("deepseek v3")), dtype=torch.bfloat16)
    wide = {name for name, parameter in target.named_parameters() if parameter.dtype is torch.float32}
    assert wide == {f"layers.{n}.mlp.gate.{kind}" for n in (1, 2, 3) for kind in ("weight", "e_score_correction_bias")}


@pytest.mark.parametrize("name", ["deepseek v3", "deepseek v2 lite"])
def test_the_cache_holds_one_latent_per_token_and_layer(make_family_folder, name):
    engine = Engine(load_target(str(make_family_folder(name))), proposer="ngram")
    caches = engine._pool.layers.caches
    assert [tuple(cache.shape[:2]) + tuple(cache.shape[3:]) for cache in caches] == [(1, 1, 32 + 16)] * 4
    slots = (engine.memory.pages + 1) * engine.config.page_size
    assert engine.memory.kv == slots * sum(cache[:, :, 0].nbytes for cache in caches)


@pytest.mark.parametrize("name", ["opt", "opt as 350m", "gpt bigcode"])
def test_a_context_ends_with_the_learned_positions(make_family_folder, name):
    from transformers import AutoModelForCausalLM

    folder = make_family_folder(name)
    engine = Engine(load_target(str(folder)), proposer="ngram")
    assert engine.context == 512
    prompt = torch.randint(1, 384, (1, 500), generator=torch.Generator().manual_seed(8))
    (completion,) = engine.generate(prompt.tolist(), SamplingParams(max_tokens=12, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 500:]
    assert completion.token_ids == wanted.tolist()
    with pytest.raises(ValueError, match="engine.max_model_len=513: .* 512 tokens, .*learned a vector"):
        Engine(load_target(str(folder)), proposer="ngram", config=EngineConfig(max_model_len=513))


def test_heads_read_embedding_and_lm_head_through_their_projections(make_family_folder, tmp_path):
    target = load_target(str(make_family_folder("opt as 350m")))
    (lm_head, embedding), ids = target.lend(), torch.arange(384)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    for ours, theirs in (
        (embedding, target.embed(ids)),
        (target.embedding_weight, target.embed(ids)),
        (lm_head(hidden), target.logits(hidden)),
        (hidden @ target.lm_head_rows(ids[7:90]).T, target.logits(hidden)[:, 7:90]),
    ):
        assert (ours - theirs).abs().max() / theirs.abs().max() < 1e-6
    head = make_head(target, "eagle3, the target's embedding")
    facts = {"verifier": "x", "verifier_architecture": "OPTForCausalLM", "speculative_tokens": 3}
    save_head(head, tmp_path, provenance={"target_fingerprint": target.fingerprint}, **facts)
    assert torch.equal(load_head(tmp_path, target=target).embed_tokens.weight, embedding)


def test_what_learned_families_cannot_do_is_named(make_family_folder, tmp_path):
    part = Part(0, 2, lambda x, sizes, *, everywhere=True: x)
    divided = load_target(str(make_family_folder("opt as 350m")), part=part)
    with pytest.raises(ValueError, match=r"\(word_embed_proj_dim\), which engine.tensor_parallel= divides, or a"):
        divided.lend()
    rounded = load_target(str(make_family_folder("opt as 350m")))
    pack(rounded, weight_format="int8")
    with pytest.raises(ValueError, match=r"\(word_embed_proj_dim\), which .* a quantization rounds"):
        rounded.lend()
    with pytest.raises(ValueError, match="engine.tensor_parallel=3: the target's 4 query heads cannot be shared"):
        empty_target(make_family_folder("gpt bigcode"), Part(0, 3, lambda x, sizes, *, everywhere=True: x))


@pytest.mark.parametrize(
    ("name", "section", "stated", "context"),
    [
        ("qwen3 biased, yarn", {**YARN, "original_max_position_embeddings": 64}, 64, 256),  # as its authors advise
        ("qwen3 biased, yarn", {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}, 64, 256),
        ("qwen3 biased, yarn", YARN, 512, 512),  # stated extended
        ("qwen3 biased, yarn", YARN, 2048, 2048),
        ("qwen3", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 64, 64),
    ],
)
def test_yarn_extends_a_context_that_was_left_as_it_was(make_family_folder, tmp_path, name, section, stated, context):
    from transformers import AutoModelForCausalLM

    folder = make_family_folder(name)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit(folder, tmp_path, rope_parameters=section, rope_scaling=None, max_position_embeddings=stated)
    engine = Engine(load_target(str(tmp_path)), proposer="ngram")
    assert engine.context == context
    prompt = torch.randint(1, 384, (1, context - 4), generator=torch.Generator().manual_seed(8))
    (completion,) = engine.generate(prompt.tolist(), SamplingParams(max_tokens=3, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted = model.generate(prompt, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert completion.token_ids == wanted[0, context - 4 :].tolist()
