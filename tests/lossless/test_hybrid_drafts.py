"""Draft models with recurrent layers: what is drafted is what the model says of the text, whatever happened before."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace

import pytest
import torch

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.kvcache.memory import plan_memory
from models.attention import CausalAttention
from models.heads.draft_model.head import DraftModelHead
from models.targets import load_target
from tests.lossless.leftovers import assert_nothing_left
from tests.lossless.plain import Plain, answer_all
from tests.lossless.test_hybrids import DTYPES, GREEDY, HYBRIDS, SAMPLED, make_prompts
from tests.pairwise import parametrize_each, parametrize_pairs
from tests.pools import check_pool
from tests.unit.test_families import make_family_folder  # noqa: F401  a fixture

TREES = {"none": "none", "beam": "beam:3x4", "fixed": [[0], [1], [0, 0], [2], [0, 1], [0, 0, 0]]}


@pytest.fixture(scope="module")
def make_engine(make_family_folder):  # noqa: F811
    """`make(target, draft, dtype)`: families; no draft is plain decoding."""

    def make(target, draft, dtype=torch.float32, *, tree="none", mask_token=None, proposer="draft_model", **config):
        target, drafter = (name and load_target(str(make_family_folder(name)), dtype=dtype) for name in (target, draft))
        head = None if drafter is None else DraftModelHead.of(drafter, 384, mask_token=mask_token)
        drafts = ProposerConfig(name="auto", adaptive=False, tree=tree, max_draft_tokens=4)
        proposer = "none" if head is None else proposer
        return Engine(
            target, draft_model=head, proposer=proposer, config=EngineConfig(**config), proposer_config=drafts
        )

    return make


@pytest.fixture(scope="module")
def plain(make_engine):
    """`plain(name, dtype)`: plain decoding of one request at a time, its prompt in one chunk."""
    made = {}

    def get(name, dtype=torch.float32):
        if (name, dtype) not in made:
            made[name, dtype] = Plain(make_engine(name, None, dtype, max_batch=1, prefix_cache=False))
        return made[name, dtype]

    return get


def spied(engine):
    """Return a list to which the tokens of each request and the tree drafted for it are added."""
    drafts, propose = [], engine.speculator.propose

    def spy(requests, budgets):
        tree = propose(requests, budgets)
        for b, request in enumerate(requests):
            length = int(tree.length[b])
            nodes = zip(tree.token[b, :length].tolist(), tree.parent[b, :length].tolist(), strict=True)
            drafts.append((list(request.tokens), list(nodes)))
        return tree

    engine.speculator.propose = spy
    return drafts


@parametrize_pairs(
    {
        "name": HYBRIDS,
        "dtype": DTYPES,
        "tree": list(TREES),
        "params": [GREEDY, SAMPLED],
        "batch": [1, 8],
        "cached": [True, False],
        "short_of_pages": [True, False],
        "cut": [3, 65],
    }
)
def test_the_target_drafts_for_itself(
    make_engine, plain, name, dtype, tree, params, batch, cached, short_of_pages, cut
):
    """Every token of a chain is accepted: alone, in batches, after pre-emption, in cached pages."""
    pages = {"max_tokens_in_cache": 176 if short_of_pages else 4096}
    config = {"max_batch": batch, "prefix_cache": cached, "prefill_chunk": cut, "max_rows": 512}
    engine, oracle = make_engine(name, name, dtype, tree=TREES[tree], **config, **pages), plain(name, dtype)
    requests = [(prompt, params) for prompt in make_prompts()]
    answers = answer_all(engine, requests, range(11))
    for (prompt, _), answer in zip(requests, answers, strict=True):
        assert answer.token_ids == oracle(prompt, params).token_ids
    stats = engine.stats
    accepted, drafted = stats.speculation.accepted_by_position[0], stats.speculation.drafted_by_position[0]
    assert accepted == drafted > 10
    if tree == "none":
        assert stats.speculation.accepted == stats.speculation.drafted > 100
    if cached:
        assert stats.cached_tokens > 0
    if short_of_pages and batch == 8:
        assert stats.preemptions > 0
    assert stats.proposer_failures == 0
    check_pool(engine._pool, [])


PAIRS = [("qwen3", draft) for draft in HYBRIDS] + [("lfm2", "qwen3.5"), ("qwen3.5", "granite hybrid")]


@parametrize_pairs({"models": PAIRS, "cached": [True, False], "short": [True, False]})
def test_after_rejections_a_chain_is_that_of_the_model_alone(make_engine, plain, models, cached, short):
    (target, draft), pages = models, {"max_tokens_in_cache": 176} if short else {}
    engine = make_engine(target, draft, max_batch=8, prefix_cache=cached, prefill_chunk=48, **pages)
    drafts, oracle, alone = spied(engine), plain(target), plain(draft)
    requests = [(prompt, replace(GREEDY, max_tokens=12)) for prompt in make_prompts()]
    for (prompt, _), answer in zip(requests, answer_all(engine, requests), strict=True):
        assert answer.token_ids == oracle(prompt, GREEDY).token_ids[:12]
    drafts = [(tokens, [token for token, _ in nodes[1:]]) for tokens, nodes in drafts if len(nodes) > 1]
    assert len(drafts) > 60
    for tokens, drafted in drafts[:: len(drafts) // 20]:
        params = replace(GREEDY, max_tokens=len(drafted), logprobs=None)
        assert alone(tokens, params).token_ids == drafted
    assert engine.stats.speculation.accepted < engine.stats.speculation.drafted / 2
    assert not short or engine.stats.preemptions


@parametrize_each({"draft": ["lfm2", "qwen3.5", "granite hybrid"], "tree": ["beam", "fixed"]})
def test_each_node_of_a_tree_follows_its_own_path(make_engine, make_family_folder, draft, tree):  # noqa: F811
    engine, model = make_engine("qwen3", draft, tree=TREES[tree]), load_target(str(make_family_folder(draft)))
    drafts = spied(engine)
    answer_all(engine, [(prompt, GREEDY) for prompt in make_prompts()[:4]])
    deep = [(tokens, nodes) for tokens, nodes in drafts if len(nodes) > 5]
    assert len(deep) > 3
    for tokens, nodes in deep[::15]:
        paths = [[]]
        for token, parent in nodes[1:]:
            paths.append([*paths[parent], token])
        for path in paths[1:]:
            text = torch.tensor([tokens + path[:-1]])
            with torch.no_grad():
                hidden = model(text, torch.arange(text.shape[1])[None], CausalAttention()).hidden
                logits = model.logits(hidden[0, -1])
            assert logits[path[-1]] > logits.topk(4).values[-1] - 1e-3, "among the best three of its parent"


@pytest.mark.parametrize("target", ["qwen3", "qwen3.5"])
def test_a_second_turn_begins_at_a_snapshot(make_engine, plain, target):
    """The draft model reads again what is past it alone, and drafts as well as before."""
    draft = "qwen3.5"
    engine, oracle, read = make_engine(target, draft, max_batch=2, prefill_chunk=32), plain(target), []
    model = engine.draft_model.model
    forward = model.forward
    model.forward = lambda ids, *rest, **more: (read.append(len(ids)), forward(ids, *rest, **more))[1]
    prompt = make_prompts()[7]
    (first,) = answer_all(engine, [(prompt, GREEDY)])
    text = [*prompt, *first.token_ids, 9, 9]
    read.clear()
    (second,) = answer_all(engine, [(text, GREEDY)])
    assert second == oracle(text, GREEDY)
    assert engine.stats.cached_tokens >= 80
    assert max(read) <= len(text) - 64
    if target == draft:
        assert engine.stats.speculation.accepted == engine.stats.speculation.drafted


@pytest.mark.parametrize("draft", ["lfm2", "qwen3.5", "granite hybrid"])
def test_several_outputs_of_one_prompt(make_engine, plain, draft):
    engine, oracle = make_engine(draft, draft, max_batch=4), plain(draft)
    for prompt in make_prompts()[4:8:2]:
        for completion in engine.generate([prompt], replace(SAMPLED, n=3)):
            assert completion.token_ids == oracle(prompt, replace(SAMPLED, seed=completion.seed)).token_ids
    assert engine.stats.speculation.accepted == engine.stats.speculation.drafted > 30


def test_from_plain_to_drafted_and_back(make_engine, plain):
    """What was committed without drafts is read before the next one, a long text in one piece."""
    engine, oracle = make_engine("qwen3.5", "qwen3.5", max_batch=1), plain("qwen3.5")
    prompt, params = make_prompts()[7], replace(GREEDY, max_tokens=150)
    engine.add(prompt, params, request_id="a")
    request, tokens = engine.request("a"), []
    limit, nothing = request.drafter.limit, replace_depth(request.drafter.limit, 0)
    for drafts in itertools.cycle([*[True] * 3, *[False] * 5, *[True] * 2, *[False] * 80]):
        if not engine.has_work:
            break
        request.drafter.limit = limit if drafts else nothing
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == oracle(prompt, params).token_ids
    assert engine.stats.speculation.accepted == engine.stats.speculation.drafted > 20


def replace_depth(budget, depth):
    return budget._replace(nodes=depth, depth=depth)


def test_a_draft_that_fails_is_drafted_again_from_the_same_state(make_engine, plain):
    engine, oracle = make_engine("qwen3.5", "qwen3.5", max_batch=4), plain("qwen3.5")
    model, calls = engine.draft_model.model, itertools.count()
    logits = model.logits

    def failing(hidden):
        if len(hidden) > 1 and next(calls) % 3 == 2:
            raise RuntimeError("a level fails")
        return logits(hidden)

    model.logits = failing
    requests = [(prompt, GREEDY) for prompt in make_prompts()]
    for (prompt, _), answer in zip(requests, answer_all(engine, requests), strict=True):
        assert answer.token_ids == oracle(prompt, GREEDY).token_ids
    assert next(calls) > 20
    assert engine.stats.speculation.accepted == engine.stats.speculation.drafted > 100


def test_a_parallel_hybrid(make_engine, plain):
    """Its mask tokens never get into the state: the first token of every draft is right."""
    engine, oracle = make_engine("qwen3.5", "qwen3.5", mask_token=383, max_batch=4), plain("qwen3.5")
    requests = [(prompt, GREEDY) for prompt in make_prompts()]
    for (prompt, _), answer in zip(requests, answer_all(engine, requests), strict=True):
        assert answer.token_ids == oracle(prompt, GREEDY).token_ids
    stats = engine.stats.speculation
    assert stats.accepted_by_position[0] == stats.drafted_by_position[0] > 50


def test_from_its_folder_with_measured_costs(tiny_target_folder, make_family_folder, tmp_path):  # noqa: F811
    """Drafts of one request are planned by what was profiled, with a tree of 64 inner nodes."""
    shutil.copytree(make_family_folder("qwen3.5"), tmp_path / "draft")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_target_folder / file, tmp_path / "draft")
    model, plain = ModelConfig(name="tiny", path=str(tiny_target_folder), dtype="float32", device="cpu"), None
    for proposer in (
        ProposerConfig(name="none"),
        ProposerConfig(name="draft_model", draft_model=str(tmp_path / "draft"), tree="beam:8x9", adaptive=False),
        ProposerConfig(name="draft_model", draft_model=str(tmp_path / "draft"), max_draft_tokens=3, adaptive=True),
    ):
        engine = Engine.load(model, None, EngineConfig(max_batch=2), proposer)
        answers = [answer.token_ids for answer in answer_all(engine, [(p, GREEDY) for p in make_prompts()[:4]])]
        plain = plain or answers
        assert answers == plain
        assert proposer.adaptive or bool(engine.stats.speculation.drafted) == (proposer.name != "none")
        assert engine.stats.proposer_failures == 0
        assert_nothing_left(engine)


@pytest.mark.parametrize("target", ["qwen3", "lfm2"])
def test_memory_of_its_states_is_planned(make_engine, target):
    engine = make_engine(target, "qwen3.5", torch.bfloat16, max_batch=4, max_tokens_in_cache=512)
    slots, layers, plan = engine._draft_model._states, engine._pool.layers, engine.memory
    tensors = [*slots._tensors, *(layers._tensors if target == "lfm2" else ())]
    assert plan.states.bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert "states" in str(plan)
    models = [engine.target.config, engine.draft_model.config.model]
    with pytest.raises(ValueError, match=r"the \d+ states for engine.max_batch \d+ MiB"):
        plan_memory(
            engine.config, models, engine._shard.layer_shapes, torch.bfloat16,
            sizes=engine.sizes, weights=0, free=2**20,
        )  # fmt: skip
