"""A target on two tensor parallel ranks gives the bits of one process: equal token ids and log-probabilities."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from infer.batch.tree import Budget
from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.processes.comm import RankLost
from infer.request import SamplingParams
from models.heads import HEADS
from models.heads.config import HeadConfig
from models.heads.files import save_head
from models.heads.weights import initialize
from tests.lossless.oracles import Thicket, WrongThenRight
from tests.pools import check_pool
from tests.unit.test_targets import randomise_biases_and_norms

PAGE, TOKENS = 8, 16
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=2, temperature=0.9, top_k=60, seed=7)
SEVERAL = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0, temperature=1.0, seed=11, n=2)
SCORED = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2, prompt_logprobs=1)
# A small KV cache, so that requests are pre-empted and recomputed; small pages, so that prompts share them.
SMALL = {"page_size": PAGE, "max_batch": 4, "max_tokens_in_cache": 104, "prefill_chunk": 24, "max_rows": 80}


def make_requests():
    generator = torch.Generator().manual_seed(4)
    base = torch.randint(1, 384, (40,), generator=generator).tolist()
    others = torch.randint(1, 384, (3, 5), generator=generator).tolist()
    prompts = [base, base[: 2 * PAGE + 1] + others[0], [5, 6, 7] * 8, others[1], base[:30] + others[2]]
    return prompts, [GREEDY, SEVERAL, GREEDY, SCORED, SEEDED]


def load(folder, dtype, ranks, proposer, head=None, **drafting):
    return Engine.load(
        ModelConfig(name="tiny", path=str(folder), dtype=dtype, device="cpu"),
        head,
        EngineConfig(tensor_parallel=ranks, **SMALL),
        ProposerConfig(name=proposer, **drafting),
    )


def generate_twice(engine):
    """Generate for all requests at once, twice: the second time prompts are in the prefix cache."""
    completions = [*engine.generate(*make_requests()), *engine.generate(*make_requests())]
    check_pool(engine._pool, [])
    return [(a.token_ids, a.logprobs, a.prompt_logprobs) for a in completions]


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", {"tree": "beam:4x3"}), ("bfloat16", {})], ids=["tree", "chain"]
)
def test_two_ranks_answer_like_one(tiny_target_folder, tiny_head_folder, dtype, shape):
    expected = generate_twice(load(tiny_target_folder, dtype, 1, "none"))
    head = HeadConfig(name="eagle3", path=str(tiny_head_folder))
    engine = load(tiny_target_folder, dtype, 2, "head", head, **shape)
    try:
        with counted(engine) as calls:
            assert generate_twice(engine) == expected
        assert calls["copy"] == 2, "each time one of the two answers began with the other's pages"
        assert (calls["move"] > 0) == bool(shape), "accepted paths of trees, and only these, are moved"
        assert calls["rows of prompts"] < 2 * sum(map(len, make_requests()[0])), "known pages were shared"
        assert engine.stats.preemptions > 0
        assert engine.stats.speculation.accepted > 0
        assert engine.stats.speculation.drafted > engine.stats.speculation.accepted
    finally:
        engine.close()


def test_a_head_that_borrows_the_lm_head(tiny_target, tiny_target_folder, tmp_path):
    head = HEADS["eagle"]().make(tiny_target.config)
    initialize(head, tiny_target, from_target=True)
    provenance = {"target_fingerprint": tiny_target.fingerprint}
    metadata = {"verifier": tiny_target.path, "verifier_architecture": "LlamaForCausalLM"}
    save_head(head, tmp_path, **metadata, speculative_tokens=4, provenance=provenance)
    config = HeadConfig(name="eagle", path=str(tmp_path))
    wanted = generate_twice(load(tiny_target_folder, "float32", 1, "head", config))
    engine = load(tiny_target_folder, "float32", 2, "head", config)
    try:
        assert generate_twice(engine) == wanted
        assert engine.stats.speculation.drafted > 0
    finally:
        engine.close()


@contextmanager
def counted(engine):
    """Count how often KV is moved and copied, and how many rows of prompts are computed."""
    calls: Counter[str] = Counter()
    layers, runner = engine._pool.layers, engine._runner

    def count(name, call):
        return lambda *arguments: (calls.update([name]), call(*arguments))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("move", "copy"):
            patch.setattr(layers, name, count(name, getattr(layers, name)))
        prefill = runner.prefill

        def counting(requests, chunks, aux):
            calls["rows of prompts"] += sum(chunks)
            return prefill(requests, chunks, aux)

        patch.setattr(runner, "prefill", counting)
        yield calls


TIED = {"tie_word_embeddings": True}  # repeats itself, so that drafts are accepted
LATENT = {
    **TIED,
    "intermediate_size": 96,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
FAMILIES = {
    "qwen2, tied, uneven": ("Qwen2Config", {"tie_word_embeddings": True, "vocab_size": 397, "intermediate_size": 208}),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 32, "intermediate_size": 96, "sliding_window": 8, "sliding_window_pattern": 2},
    ),
    "granite": (
        "GraniteConfig",
        {
            **TIED,
            "intermediate_size": 96,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 2.0,
        },
    ),
    "mixtral": ("MixtralConfig", {"intermediate_size": 48, "num_local_experts": 4}),
    "phi3": (
        "Phi3Config",
        {
            **TIED,
            "intermediate_size": 208,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
    ),
    "deepseek v3": (
        "DeepseekV3Config",
        {
            **LATENT,
            "q_lora_rank": 48,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 48,
        },
    ),
    "deepseek v2, keys of 576": (
        "DeepseekV2Config",
        {
            **LATENT,
            **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": None, "n_routed_experts": 3},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 48},
        },
    ),
    "opt": ("OPTConfig", {"ffn_dim": 96, "init_std": 0.2}),
    "gpt oss": ("GptOssConfig", {**TIED, "head_dim": 32, "intermediate_size": 48, "num_local_experts": 4}),
    "gpt bigcode": ("GPTBigCodeConfig", {**TIED, "n_inner": 96, "bos_token_id": 0, "eos_token_id": 0}),
    "gemma3, one KV head": (
        "Gemma3TextConfig",
        {
            **{"num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96},
            **{"sliding_window": 8, "sliding_window_pattern": 2},
        },
    ),
    "opt as 350m": (
        "OPTConfig",
        {"ffn_dim": 96, "init_std": 0.2, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
GRANITE = {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 96}
DELTA_NET = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32, "pad_token_id": 0}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "head_dim": 32}
HYBRIDS = {  # with the sizes of states that kernels in C have, and others
    "lfm2": ("Lfm2Config", TIED | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}),
    "qwen3.5": (
        "Qwen3_5TextConfig",
        DELTA_NET
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 24},
    ),
    "qwen3 next": (
        "Qwen3NextConfig",
        DELTA_NET
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        | {"linear_key_head_dim": 32, "linear_value_head_dim": 16}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"shared_expert_intermediate_size": 48},
    ),
    "falcon h1": ("FalconH1Config", MAMBA | {"intermediate_size": 96, "mamba_d_ssm": 128}),
    "falcon h1, a norm of both ranks before the gate": (
        "FalconH1Config",
        {**MAMBA, "intermediate_size": 96, "mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": True},
    ),
    "granite hybrid": ("GraniteMoeHybridConfig", {**GRANITE, **MAMBA, "num_local_experts": 0}),
    "granite hybrid, a norm of both ranks": (
        "GraniteMoeHybridConfig",
        {**GRANITE, "mamba_n_heads": 16, "mamba_d_state": 12, "intermediate_size": 48}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron h": (
        "NemotronHConfig",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "full_attention", "mlp"], "intermediate_size": 96},
    ),
}
DTYPES = ("float32", "bfloat16", "bfloat16", *("float32", "bfloat16") * 4, *("bfloat16", "float32"))


@pytest.mark.parametrize(("family", "dtype"), [*zip(FAMILIES, DTYPES, strict=True)])
def test_other_families(tiny_target_folder, tmp_path, family, dtype):
    folder = make_family(family, tiny_target_folder, tmp_path)
    wanted = generate_twice(load(folder, dtype, 1, "none"))
    # the second time suffix decoding finds what the first has answered
    engine = load(folder, dtype, 2, "suffix", adaptive=False)
    try:
        assert generate_twice(engine) == wanted
        speculation = engine.stats.speculation
        repeats = FAMILIES[family][0] not in ("OPTConfig", "GptOssConfig")
        assert (speculation.accepted if repeats else speculation.drafted) > 0
    finally:
        engine.close()


@pytest.mark.parametrize(("family", "dtype"), [*zip(HYBRIDS, ("float32", "bfloat16") * 4, strict=True)])
def test_ranks_keep_their_parts_of_states(tiny_target_folder, tmp_path, family, dtype):
    """Through chains and trees of wrong and right tokens, forks, pre-emption and cached prefixes."""
    folder = make_family(family, tiny_target_folder, tmp_path)
    alone = load(folder, dtype, 1, "none")
    answers = [(a.prompt_ids, a.token_ids) for a in alone.generate(*make_requests())]
    wanted, alone = generate_twice(alone), alone.memory

    def answer_of(request):
        return next(ids for prompt, ids in answers if [*prompt, *ids][: len(request.tokens)] == request.tokens)

    engine = load(folder, dtype, 2, "none")
    try:
        for oracle, budget in ((WrongThenRight, Budget(4, 4)), (partial(Thicket, seed=3), Budget(16, 6))):
            engine.add_proposer(oracle(answer_of), budget)
            assert generate_twice(engine) == wanted
            speculation = engine.stats.speculation
            assert 50 < speculation.accepted < speculation.drafted
        assert engine.stats.preemptions > 0
        assert engine.stats.cached_tokens > 0
        slots, kept, _ = engine.memory.states
        assert kept == sum(tensor.numel() * tensor.element_size() for tensor in engine._pool.layers._tensors)
        share = kept / slots / (alone.states.bytes / alone.states.slots)
        assert share == 0.5 or ("of both ranks" in family and 0.5 < share < 0.55)  # B and C of one group, on both
    finally:
        engine.close()


def make_family(name, tokenizer, folder):
    import transformers

    kind, options = (FAMILIES | HYBRIDS)[name]
    sizes = {
        "vocab_size": 384,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes | options))
    model.save_pretrained(folder)
    randomise_biases_and_norms(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    return folder


def test_a_killed_rank_is_an_error_that_says_so(tiny_target_folder, started_here):
    engine = load(tiny_target_folder, "float32", 2, "none")
    (other,) = started_here()
    os.kill(other, signal.SIGKILL)
    with pytest.raises(RankLost, match=r"engine\.tensor_parallel=2: rank 1 has ended \(signal 9\)"):
        engine.generate([[1, 2, 3]], GREEDY)
    with pytest.raises(RankLost, match="make a new engine"):
        engine.generate([[1, 2, 3]], GREEDY)
    assert started_here() == []


def test_no_process_outlives_its_engine(tiny_target_folder, started_here):
    with pytest.raises(ValueError, match=r"engine\.tensor_parallel=3: .* 2 KV heads .* use one of 1, 2"):
        load(tiny_target_folder, "float32", 3, "none")
    assert started_here() == []
    engine = load(tiny_target_folder, "float32", 2, "none")
    assert len(started_here()) == 1
    assert engine.memory.ranks == 2
    del engine
    gc.collect()
    assert started_here() == []
