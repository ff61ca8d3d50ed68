"""MTP modules of a target's own kind of layer, with latent attention or experts, change no token that is served."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import DrafterState, SamplingParams
from models.heads.base import Head
from models.targets import load_target
from tests.heads import make_head, memorise
from tests.lossless.test_controller import Switch
from tests.pairwise import parametrize_each
from tests.pools import check_pool
from tests.train.conftest import write_family
from train.data.sequences import Sequences

LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2,
    "moe_intermediate_size": 32, "num_hidden_layers": 3,
}  # fmt: skip
V2 = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False, "q_lora_rank": None}
QWEN = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {  # config of transformers, options, number of modules
    "deepseek v3": ("DeepseekV3Config", {**LATENT, "first_k_dense_replace": 1}, 2),
    "deepseek v3, dense": ("DeepseekV3Config", {**LATENT, "first_k_dense_replace": 9}, 1),
    "deepseek v2": ("DeepseekV2Config", {**LATENT, **V2, "first_k_dense_replace": 1}, 1),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_hidden_layers": 3}, 1),
    "qwen3 moe": ("Qwen3MoeConfig", QWEN, 2),
    "gpt oss": ("GptOssConfig", {"head_dim": 32, "num_local_experts": 4, "num_hidden_layers": 3}, 1),
}
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"tree": "beam:3x3"}}
PAGE = 8


class Served(NamedTuple):
    folder: str
    head: Head
    prompts: list[list[int]]
    plain: dict[bool, list[list[int]]]  # ids by whether they are sampled


def params(*, sampled: bool = False, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8 if sampled else 0.0, seed=3, **more)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A target, and modules that have memorised its greedy responses to prompts with common prefixes."""
    kind, options, modules = FAMILIES[request.param]
    folder = str(write_family(kind, tmp_path_factory.mktemp("family"), **options))
    generator = torch.Generator().manual_seed(2)
    base = torch.randint(1, 384, (40,), generator=generator).tolist()
    prompts = [[*base[:length], length + 1] for length in (0, PAGE - 1, PAGE, 17, 33)] + [base]
    engine = Engine(load_target(folder), proposer="none", config=EngineConfig(max_tokens_in_cache=1024))
    plain = {sampled: [c.token_ids for c in engine.generate(prompts, params(sampled=sampled))] for sampled in (0, 1)}
    rows = [(a + b, [False] * len(a) + [True] * len(b)) for a, b in zip(prompts, plain[False], strict=True)]
    torch.manual_seed(1)
    head = make_head(load_target(folder), "mtp", num_modules=modules)
    memorise(head, engine.target, Sequences.of(rows), 3, rounds=60)
    return Served(folder, head, prompts, plain)


def engine_for(served: Served, shape: str, **config: Any) -> Engine:
    drafts = ProposerConfig(name="head", max_draft_tokens=3, adaptive=False, **SHAPES[shape])
    limits = EngineConfig(**{"page_size": PAGE, "max_batch": 6, "max_tokens_in_cache": 1024} | config)
    return Engine(load_target(served.folder), head=served.head, proposer="head", config=limits, proposer_config=drafts)


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_change_no_token(served: Served, shape: str) -> None:
    engine = engine_for(served, shape)
    for sampled in (False, True, False):  # the last time from cached pages
        completions = engine.generate(served.prompts, params(sampled=sampled))
        assert [c.token_ids for c in completions] == served.plain[sampled]
    accepted = sum(c.stats.accepted for c in completions)
    assert accepted > 6 * 5
    cold = engine_for(served, shape, prefix_cache=False).generate(served.prompts, params())
    assert sum(c.stats.accepted for c in cold) == accepted, "with known pages modules draft as well as without"
    forks = engine.generate([served.prompts[-1]], params(n=3))
    assert [c.token_ids for c in forks] == [served.plain[False][-1]] * 3
    check_pool(engine._pool, [])
    layers = engine._pool.layers.caches  # the modules' last, which hold of a token what the target's do
    assert len(layers) == engine.target.config.num_layers + served.head.config.layer.num_layers
    assert len({(cache.shape, cache.dtype) for cache in layers}) == 1


@parametrize_each({"served": list(FAMILIES), "shape": list(SHAPES)}, indirect=["served"])
def test_pre_empted_requests_take_up_what_they_had(served: Served, shape: str) -> None:
    engine = engine_for(served, shape, max_tokens_in_cache=120)
    completions = engine.generate(served.prompts, params())
    assert [c.token_ids for c in completions] == served.plain[False]
    assert engine.stats.preemptions > 0
    assert sum(c.stats.accepted for c in completions) > 0
    check_pool(engine._pool, [])


@parametrize_each({"served": list(FAMILIES), "shape": list(SHAPES)[::-1]}, indirect=["served"])
def test_modules_begin_within_a_text(served: Served, shape: str) -> None:
    engine, long = engine_for(served, shape), SamplingParams(max_tokens=80, ignore_eos=True)
    engine.speculator.planner = planner = Switch()
    requests = [engine.request(engine.add(prompt, long)) for prompt in served.prompts]
    for _ in range(12):
        engine.step()
    planner.pays = True
    while engine.has_work:
        engine.step()
    assert [request.drafter.state for request in requests] == [DrafterState.PARTIAL] * 6
    assert all(request.stats.drafted > 0 for request in requests)
    assert engine.stats.proposer_failures == 0
    engine.set_proposer("none")
    assert [r.output_ids for r in requests] == [c.token_ids for c in engine.generate(served.prompts, long)]
