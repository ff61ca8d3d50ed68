"""Draft models of other vocabularies, in trees, in parallel and in fewer bits change no token, and draft what they can.

A draft model that is the target itself, whatever its ids are called, is right about every token.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.console.card import describe_draft_model
from infer.engine import Engine
from kernels.cpu.library import library
from models.attention import CausalAttention
from models.targets import load_target
from models.tokenizer import Tokenizer
from tests.gguf_writing import write_gguf
from tests.lossless.plain import LONG_GREEDY as GREEDY
from tests.lossless.plain import LONG_SAMPLED as SAMPLED
from tests.lossless.plain import ids
from tests.pairwise import parametrize_each
from tests.pools import check_pool
from tests.unit.quantized_writers import gptq, gptq_config, write
from tests.vocabularies import write_tokenizer

V = 384
TREES = {"none": "none", "beam": "beam:4x3", "fixed": [[0], [1], [0, 0], [2], [0, 1], [0, 0, 0]]}
SMALL = {"max_batch": 4, "max_tokens_in_cache": 384, "prefill_chunk": 40, "page_size": 8}


def with_vocabulary(source, folder, kept, rows=None):
    """Write a copy of a target in which token i is token `kept[i]` of the source, and rows without a token follow."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    new = {old: index for index, old in enumerate(kept)}
    rows, tensors = rows or len(kept), load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weight = tensors[name]
        spare = torch.randn(rows - len(kept), weight.shape[1], generator=torch.Generator().manual_seed(5)) * 0.1
        tensors[name] = torch.cat([weight[kept], spare])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "generation_config.json"):
        content = json.loads((folder / file).read_text()) | {"bos_token_id": new[0], "eos_token_id": new[0]}
        (folder / file).write_text(json.dumps(content | ({"vocab_size": rows} if file == "config.json" else {})))
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: new[old] for token, old in vocabulary.items() if old in new}
    parts = ([*merge] if isinstance(merge, list) else merge.split(" ") for merge in content["model"]["merges"])
    left = content["model"]["vocab"]
    content["model"]["merges"] = [pair for pair in parts if {*pair, "".join(pair)} <= left.keys()]
    for token in content["added_tokens"]:
        token["id"] = new[token["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def load(target, draft=None, tree="none", engine=SMALL, dtype="float32", **proposer):
    name = "none" if draft is None else "draft_model"
    drafts = {} if draft is None else {"draft_model": str(draft), "tree": tree, "max_draft_tokens": 4} | proposer
    model = ModelConfig(name="tiny", path=str(target), dtype=dtype, device="cpu")
    return Engine.load(model, None, EngineConfig(**engine), ProposerConfig(name=name, **drafts))


def spied(engine):
    """Return a list to which the tokens of every drafted node are added."""
    drafted, propose = [], engine.speculator.propose

    def spy(requests, budgets):
        tree = propose(requests, budgets)
        inside = tree.inside.clone()
        inside[:, 0] = False
        drafted.extend(tree.token[inside].tolist())
        return tree

    engine.speculator.propose = spy
    return drafted


def first_tokens(engine):
    """Return how many drafts began with a token that was accepted, and how many there were."""
    stats = engine.stats.speculation
    return stats.accepted_by_position[0], stats.drafted_by_position[0]


@pytest.fixture(scope="module")
def plain(tiny_target_folder, prompts):
    engine = load(tiny_target_folder)
    return {params: [ids(engine.generate([prompt], params))[0] for prompt in prompts] for params in (GREEDY, SAMPLED)}


def order_of(seed):
    return torch.randperm(V, generator=torch.Generator().manual_seed(seed)).tolist()


@parametrize_each({"tree": list(TREES), "params": [GREEDY, SAMPLED]})
def test_the_target_under_other_ids_is_right_about_every_token(
    tiny_target_folder, tmp_path, prompts, plain, params, tree
):
    draft = with_vocabulary(tiny_target_folder, tmp_path / "draft", order_of(1))
    engine = load(tiny_target_folder, draft, TREES[tree])
    completions = engine.generate(prompts, params)
    assert ids(completions) == plain[params]
    stats = engine.stats.speculation
    assert stats.accepted_by_position[0] == stats.drafted_by_position[0] > 50
    if tree == "none":
        assert stats.accepted == stats.drafted
    else:  # a beam may leave the path of best tokens
        assert 0.9 * sum(stats.drafted_by_position) < stats.accepted < stats.drafted
    assert engine.stats.preemptions > 0
    assert engine.stats.proposer_failures == 0
    check_pool(engine._pool, [])


@pytest.mark.parametrize(("target_rows", "draft_rows", "tree"), [(V, V + 16, "beam"), (V + 16, V, "none")])
def test_vocabularies_padded_to_other_sizes_are_one(
    tiny_target_folder, tmp_path, prompts, target_rows, draft_rows, tree
):
    target, draft = (
        with_vocabulary(tiny_target_folder, tmp_path / name, range(V), rows)
        for name, rows in (("target", target_rows), ("draft", draft_rows))
    )
    prompts = [*prompts[:6], list(range(target_rows - 20, target_rows))]  # ids that the draft model may not have
    alone, engine = load(target), load(target, draft, TREES[tree])
    drafted = spied(engine)
    for params in (GREEDY, SAMPLED):
        assert ids(engine.generate(prompts, params)) == ids(alone.generate(prompts, params))
    assert 0 <= min(drafted) < max(drafted) < V
    stats = engine.stats.speculation
    if tree == "none" and target_rows < draft_rows:
        assert stats.accepted == stats.drafted
    assert stats.accepted_by_position[0] > stats.drafted_by_position[0] / 5, "chance gives at most 4 of 384"
    assert engine.stats.proposer_failures == 0


@pytest.mark.parametrize("tree", ["none", "beam"])
def test_what_cannot_be_mapped_is_not_drafted(tiny_target_folder, tmp_path, prompts, plain, tree):
    kept = [token for token in order_of(2) if token < 257 or token % 3]  # all bytes, and two thirds of the merges
    draft = with_vocabulary(tiny_target_folder, tmp_path / "draft", kept, len(kept) + 5)
    engine = load(tiny_target_folder, draft, TREES[tree])
    drafted = spied(engine)
    for params in (GREEDY, SAMPLED):
        assert ids(engine.generate(prompts, params)) == plain[params]
    assert set(drafted) <= set(kept)
    ((_, text),) = describe_draft_model(engine)
    assert text.endswith(f"draft, has {len(kept)} of the target's 384 tokens and drafts no other")
    accepted, drafted = first_tokens(engine)
    assert accepted > drafted / 5, "chance gives at most 4 of 384"
    assert engine.stats.proposer_failures == 0


@pytest.mark.parametrize("kind", ["llama", "gemma", "unigram", "word_piece"])
def test_tokenizers_of_other_kinds(tiny_target_folder, make_target_folder, tmp_path, prompts, plain, kind):
    source = make_target_folder(seed=11, num_hidden_layers=1, vocab_size=512)
    draft = write_tokenizer(kind, tmp_path / "draft", source=source)
    engine = load(tiny_target_folder, draft)
    drafted = spied(engine)
    for params in (GREEDY, SAMPLED):
        assert ids(engine.generate(prompts[:6], params)) == plain[params][:6]
    tokens, other = Tokenizer.load(tiny_target_folder), Tokenizer.load(draft)
    shared = {token for token in set(drafted) if tokens.token_bytes[token] in other.token_bytes}
    assert shared == set(drafted) - {tokens.eos_id}
    assert len(shared) > 10


def test_a_tokenizer_that_shares_no_token_is_an_error(tiny_target_folder, tmp_path):
    shutil.copytree(tiny_target_folder, tmp_path / "draft")
    words = {chr(0x2600 + index): index for index in range(V)}
    Backend(WordLevel(words, unk_token="☀")).save(str(tmp_path / "draft/tokenizer.json"))
    (tmp_path / "draft/tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"proposer\.draft_model=\S+draft: its tokenizer has no token of the target's"):
        load(tiny_target_folder, tmp_path / "draft")


def test_block_verification_takes_chains_of_a_tree_drafter(tiny_target_folder, make_target_folder, prompts):
    other = make_target_folder(seed=11, num_hidden_layers=1)
    engine = load(tiny_target_folder, other, "beam:4x3")
    block = replace(SAMPLED, acceptance="block")
    completions = engine.generate(prompts[:4], [block, SAMPLED, block, GREEDY])
    assert all(completion.stats.drafted > 0 for completion in completions)
    assert engine.stats.proposer_failures == 0
    assert ids(completions)[1] == ids(load(tiny_target_folder).generate(prompts[1:2], SAMPLED))[0]


def test_a_measured_tree_is_for_heads(tiny_target_folder):
    with pytest.raises(ValueError, match=r"proposer\.tree=measured: heads are measured; a draft model takes a beam"):
        load(tiny_target_folder, tiny_target_folder, "measured")


# ---- parallel draft models -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parallel_folder(tiny_target_folder, tmp_path_factory):
    """The target with one further row, the mask token's, under other ids."""
    folder = with_vocabulary(tiny_target_folder, tmp_path_factory.mktemp("pard"), order_of(3), V + 1)
    config = json.loads((folder / "config.json").read_text()) | {"pard_token": V}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("tree", TREES)
def test_a_parallel_draft_model_changes_no_token(tiny_target_folder, parallel_folder, prompts, plain, tree):
    engine = load(tiny_target_folder, parallel_folder, TREES[tree])
    for params in (GREEDY, SAMPLED):
        assert ids(engine.generate(prompts, params)) == plain[params]
    by_position = engine.stats.speculation.acceptance_by_position
    assert by_position[0] == 1 if tree == "none" else by_position[0] > 0.9, "the first token needs no mask"
    assert engine.stats.preemptions > 0
    assert engine.stats.proposer_failures == 0


def test_a_parallel_draft_is_one_forward_over_mask_tokens(tiny_target_folder, parallel_folder, prompts):
    engine, model = load(tiny_target_folder, parallel_folder), load_target(str(parallel_folder))
    order, rounds = order_of(3), []
    propose, forward, calls = engine.speculator.propose, engine.draft_model.model.forward, []

    def spy(requests, budgets):
        before = len(calls)
        tree = propose(requests, budgets)
        if int(tree.length[0]) == 1:  # the answer has room for the bonus token alone
            return tree
        assert len(calls) == before + 1
        rounds.append((list(requests[0].tokens), tree.token[0, 1 : int(tree.length[0])].tolist()))
        return tree

    engine.speculator.propose = spy
    engine.draft_model.model.forward = lambda *parts, **more: (calls.append(1), forward(*parts, **more))[1]
    engine.generate([prompts[3]], GREEDY)
    for tokens, drafted in rounds:
        ids_ = torch.tensor([[*map(order.index, tokens), *[V] * (len(drafted) - 1)]])
        with torch.no_grad():
            hidden = model(ids_, torch.arange(ids_.shape[1])[None], CausalAttention()).hidden
            logits = model.logits(hidden)[0, -len(drafted) :, :V]
        assert [order[token] for token in logits.argmax(-1).tolist()] == drafted
    assert len(rounds) > 5


def test_parallel_drafting_is_as_config_json_says_unless_a_key_says_otherwise(tiny_target_folder, parallel_folder):
    assert load(tiny_target_folder, parallel_folder).draft_model.config.mask_token is not None
    assert describe_draft_model(load(tiny_target_folder, parallel_folder))[0][1].endswith("pard0, in parallel")
    for folder, options in ((parallel_folder, {"parallel_drafting": False}), (tiny_target_folder, {})):
        assert load(tiny_target_folder, folder, **options).draft_model.config.mask_token is None
    with pytest.raises(ValueError, match=r"proposer\.parallel_drafting=true: \S+ names no mask token \(pard_token or"):
        load(tiny_target_folder, tiny_target_folder, parallel_drafting=True)


@pytest.mark.parametrize("token", [V + 1, -1, "mask", True])
def test_a_mask_token_without_a_row_is_an_error(tiny_target_folder, parallel_folder, tmp_path, token):
    shutil.copytree(parallel_folder, tmp_path / "draft")
    config = json.loads((tmp_path / "draft/config.json").read_text()) | {"pard_token": token}
    (tmp_path / "draft/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"config\.json: pard_token={token!r}: must be a token of its {V + 1}"):
        load(tiny_target_folder, tmp_path / "draft")


# ---- fewer bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["int8", "int4", "q8_0"])
def test_a_draft_model_in_fewer_bits(tiny_target_folder, prompts, plain, weights):
    engine = load(tiny_target_folder, tiny_target_folder, engine=SMALL | {"draft_weights": weights})
    assert ids(engine.generate(prompts, GREEDY)) == plain[GREEDY]
    accepted, drafted = first_tokens(engine)
    assert drafted * (0.3 if weights == "int4" else 0.8) < accepted < drafted
    assert ("draft weights", weights) in describe_draft_model(engine)


@pytest.fixture(scope="module")
def quantized(tiny_target_folder, tmp_path_factory):
    """The target as files in blocks and in groups, by format."""
    folder = tmp_path_factory.mktemp("quantized")
    write_gguf(tiny_target_folder, folder / "tiny.gguf", (Kind.Q8_0,), tokenizer=True)
    write(tiny_target_folder, gptq_config(32), gptq(4, 32), folder / "gptq", folder / "dense")
    return {"Q8_0": folder / "tiny.gguf", "GPTQ": folder / "gptq"}


@pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize(("name", "least"), [("Q8_0", 0.8), ("GPTQ", 0.3)])
def test_a_quantized_draft_model_stays_in_its_bits(tiny_target_folder, quantized, prompts, plain, name, least):
    for weights in ("same", "auto", "int8"):
        engine = load(tiny_target_folder, quantized[name], engine=SMALL | {"draft_weights": weights})
        assert ids(engine.generate(prompts, GREEDY)) == plain[GREEDY]
        (accepted, drafted), formats = first_tokens(engine), engine.draft_model.model.ggml_formats
        assert drafted * least < accepted < drafted
        assert bool(formats) == (weights != "int8")
        ((_, path), (_, text)) = describe_draft_model(engine)
        assert path == str(quantized[name])
        assert text == ("int8" if weights == "int8" else f"{formats[0]} as published")


# ---- several ranks ---------------------------------------------------------------------------------------------------


def test_two_ranks_draft_on_the_first(tiny_target_folder, tmp_path, prompts, plain):
    draft = with_vocabulary(tiny_target_folder, tmp_path / "draft", order_of(4))
    engine = load(tiny_target_folder, draft, TREES["beam"], SMALL | {"tensor_parallel": 2})
    try:
        for params in (GREEDY, SAMPLED):
            assert ids(engine.generate(prompts[:6], params)) == plain[params][:6]
        accepted, drafted = first_tokens(engine)
        assert accepted == drafted > 50
        assert engine.draft_model.model.heads == (4, 2, 16), "whole on rank 0"
    finally:
        engine.close()
