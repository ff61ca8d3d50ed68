"""Known mismatches between a head's training and its serving: one test for each, over all heads.

The numbers are those under which they were collected from the bugs of other trainers and engines.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.batch.tree import Budget
from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams, SpeculationStats
from infer.speculation.proposers.draft_loops.base import Chains
from infer.speculation.proposers.head import HeadProposer
from models.attention import CausalAttention, WriteKeys
from models.config import LAST, UNNORMED
from models.heads import HEADS
from models.heads.base import Head, MaskHead
from models.heads.block import Attend, BlockHead
from models.heads.files import load_head, save_head
from models.heads.weights import initialize, set_vocabulary
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from models.vocab import target_ids
from tests.conftest import MakeTarget
from tests.heads import ONE_OF_EACH, VARIANTS, WINDOWED, keeps_kv, kind_of, make_head, make_objective, memorise
from tests.train.conftest import STEPS
from train.config import FilesDataConfig
from train.data import alignment
from train.data.dialogue import first_prompt
from train.data.examples import parse_row
from train.data.sequences import Batch, Sequences
from train.evaluation import simulate
from train.features.online import Features, compute_features
from train.features.teacher import teach
from train.objectives.base import StepSums

WITH_ATTENTION = [name for name in ONE_OF_EACH if keeps_kv(name)]
BLOCKS = [name for name in ONE_OF_EACH if issubclass(kind_of(name), BlockHead)]
STEPPING = [name for name in WITH_ATTENTION if name not in BLOCKS]
GREEDY = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def head_of(engine: Engine, tiny_target: LlamaTarget, responses: Sequences) -> Callable[[str], Head]:
    """Return a function that returns the head of a variant, trained to memorise `responses`."""
    heads: dict[str, Head] = {}

    def get(variant: str) -> Head:
        if variant not in heads:
            heads[variant] = memorise(make_head(tiny_target, variant), engine.target, responses, STEPS, rounds=50)
        return heads[variant]

    return get


@pytest.fixture
def prompts(responses: Sequences) -> list[list[int]]:
    rows = [responses.row(index) for index in range(len(responses))]
    return [ids[~assistant].tolist() for ids, assistant in rows]


@pytest.fixture(scope="module")
def hidden_states(tiny_target_folder: Path, responses: Sequences) -> Sequence[Tensor]:
    """Return HF's hidden states of the first prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32).eval()
    ids, assistant = responses.row(0)
    with torch.no_grad():
        return model(ids[~assistant][None], output_hidden_states=True).hidden_states


@pytest.fixture
def batch(responses: Sequences) -> Batch:
    return responses.batch(range(len(responses)))


def features_of(head: Head, engine: Engine, batch: Batch) -> Features:
    return compute_features(engine.target, batch, head.config.aux_layers)


def serve(engine: Engine, head: Head, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list:
    engine.set_proposer("head", head)
    try:
        return engine.generate([list(prompt) for prompt in prompts], params)
    finally:
        engine.set_proposer("none")


def total(completions: Sequence) -> SpeculationStats:
    stats = SpeculationStats()
    for completion in completions:
        stats.merge(completion.stats)
    return stats


def export(head: Head, folder: Path, target: LlamaTarget) -> Path:
    facts = {"verifier": target.path, "verifier_architecture": "LlamaForCausalLM", "speculative_tokens": STEPS}
    save_head(head, folder, provenance={"target_fingerprint": target.fingerprint}, **facts)  # type: ignore[arg-type]
    return folder


def spy(head: Head, calls: list[tuple[list[int], list[int], int]]) -> Head:
    """Return a copy of the head that records tokens, positions and depth of every row; copies of it record too."""
    kind = type(head)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: object, depth: int) -> Tensor:
            calls.append((ids.flatten().tolist(), positions.flatten().tolist(), depth))
            return super().step(ids, state, positions, attention, depth)

    watched = Watched(head.config)
    watched.load_state_dict(head.state_dict())
    if hasattr(head, "borrowed"):
        watched.borrowed = head.borrowed
    return watched


@pytest.mark.parametrize("variant", ["eagle3", "eagle", "p-eagle, one layer", "dflash", "draft-model"])
def test_item_01_layer_j_is_hidden_state_j(
    variant: str, engine: Engine, hidden_states: Sequence[Tensor], head_of: Callable[[str], Head],
    prompts: list[list[int]],
) -> None:  # fmt: skip
    """Features in training and in the engine are HF's hidden_states[j]: the input of layer j, before any norm."""
    head = head_of(variant)
    ids = torch.tensor([prompts[0]])
    expected = torch.cat([hidden_states[layer][0] for layer in head.config.aux_layers], dim=-1)
    trained = torch.cat(features_of(head, engine, Batch(ids, ids > 0, (0,))).aux, dim=-1)[0]
    assert torch.allclose(trained, expected, atol=1e-4)

    engine.set_proposer("head", head)
    proposer = engine._head
    assert proposer is not None
    committed = []
    real = proposer.commit

    def commit(requests: Sequence, states: Sequence, features: Sequence[Tensor]) -> None:
        committed.extend(features)
        real(requests, states, features)

    proposer.commit = commit  # type: ignore[method-assign]
    engine.generate([prompts[0]], SamplingParams(max_tokens=2))
    engine.set_proposer("none")
    assert torch.allclose(committed[0], expected, atol=1e-4)


@torch.no_grad()
def test_item_02_the_last_feature_is_post_norm(engine: Engine, tiny_target: LlamaTarget, batch: Batch) -> None:
    """The feature of heads that fuse no layers, which also gives the teacher's logits, is the LM head's input."""
    for variant in (name for name in ONE_OF_EACH if not HEADS[VARIANTS[name][0]].fuses_layers):
        head = make_head(tiny_target, variant)
        assert head.config.aux_layers == (LAST,)
        features = features_of(head, engine, batch)
        assert torch.equal(features.aux[0], features.hidden)
    # its argmax is the token that the engine emitted next
    served = alignment.served(batch.assistant)
    following = alignment.shift_left(batch.ids, 1)
    assert torch.equal(engine.target.logits(features.hidden).argmax(-1)[served], following[served])
    positions = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    (raw,) = engine.target(batch.ids, positions, CausalAttention(), aux_layers=(UNNORMED,)).aux
    assert torch.equal(engine.target.norm(raw), features.hidden)
    assert not torch.allclose(raw, features.hidden, atol=0.1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_item_03_every_flag_is_written(variant: str, tiny_target: LlamaTarget, tmp_path: Path) -> None:
    """Flags are read back, so that no reader's default decides; `compare=False` fields follow from a file's tensors."""
    head = make_head(tiny_target, variant)
    folder = export(head, tmp_path, tiny_target)
    written = json.loads((folder / "config.json").read_text())
    written |= written.get("dflash_config", {})
    names = {"shared": "original_lm_head"} | ({"bias": "medusa_fc_bias"} if head.config.name == "medusa" else {})
    for field in dataclasses.fields(head.config):
        if field.compare and isinstance(getattr(head.config, field.name), bool):
            assert written[names.get(field.name, field.name)] is getattr(head.config, field.name)
    assert load_head(folder, target=tiny_target).config == head.config


@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_item_04_rotary_embedding_and_context_are_the_targets(
    variant: str, make_target_folder: MakeTarget, tmp_path: Path
) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    target = load_target(str(make_target_folder(rope_parameters=rope, max_position_embeddings=300)))
    loaded = load_head(export(make_head(target, variant), tmp_path, target), target=target)
    is_target = variant == "draft-model"
    layer = loaded.config.model if is_target else loaded.config.layer
    assert layer.rope == target.config.rope
    assert layer.max_position_embeddings == 300
    drafting, rotary = loaded.model.rotaries[0] if is_target else loaded.rotary, target.rotaries[0]
    actual, expected = (embedding.rows(torch.arange(300), torch.float32) for embedding in (drafting, rotary))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("variant", STEPPING)
def test_item_05_positions_are_the_features(
    variant: str, engine: Engine, head_of: Callable[[str], Head], prompts: list[list[int]]
) -> None:
    """The row of slot i, which holds token t[i+1], has position i; a drafted row at depth d has position i + d."""
    calls: list[tuple[list[int], list[int], int]] = []
    watched = spy(head_of(variant), calls)
    (completion,) = serve(engine, watched, prompts[:1], SamplingParams(max_tokens=12))
    text = prompts[0] + completion.token_ids
    mask = watched.mask_slot() if isinstance(watched, MaskHead) else None
    slot, read = -1, []
    for ids, positions, depth in calls:
        if depth:
            assert positions == [slot + depth]
            continue
        assert positions == list(range(positions[0], positions[0] + len(positions)))
        count = len(ids)
        while mask is not None and count > 1 and len(ids) - count < STEPS - 1 and ids[count - 1] == mask[0]:
            count -= 1
        assert ids[:count] == text[positions[0] + 1 : positions[0] + 1 + count]
        slot = positions[count - 1]
        read += positions[:count]
    assert read == list(range(slot + 1))
    assert slot >= len(prompts[0]) + 4
    assert alignment.draft_positions(torch.arange(9), 2)[3].item() == 3 + 2


@pytest.mark.parametrize("variant", BLOCKS)
def test_item_05_positions_of_a_block(
    variant: str, engine: Engine, head_of: Callable[[str], Head], prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Keys of slot i's features have position i; a block follows its slot, with the slot's token as its anchor."""
    head = head_of(variant)
    assert isinstance(head, BlockHead)
    read: list[int] = []
    kind = type(head)
    write_context, block_states = kind.write_context, kind.block_states

    def watch_context(self: Any, state: Tensor, positions: Tensor, write: WriteKeys) -> None:
        read.extend(positions.tolist())
        write_context(self, state, positions, write)

    blocks: list[tuple[int, list[int], list[int]]] = []

    def watch_block(self: Any, ids: Tensor, positions: Tensor, attend: Attend, rows: int) -> Tensor:
        blocks.append((len(read), ids.tolist(), positions.tolist()))
        return block_states(self, ids, positions, attend, rows)

    monkeypatch.setattr(kind, "write_context", watch_context)
    monkeypatch.setattr(kind, "block_states", watch_block)
    (completion,) = serve(engine, head, prompts[:1], SamplingParams(max_tokens=12))
    text, size = prompts[0] + completion.token_ids, head.config.block_size
    assert read == list(range(len(read)))
    assert len(blocks) >= 2
    for slots, ids, positions in blocks:
        assert ids == [text[slots], *[head.config.mask_token_id] * (size - 1)]
        assert positions == list(range(slots, slots + size))


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_item_06_training_serves_the_slots_that_the_engine_drafts_from(
    variant: str, engine: Engine, tiny_target: LlamaTarget, responses: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first slot, the one before the response, is served; the slot of the end of text is not."""
    ids, assistant = responses.row(0)
    drafted: list[int] = []
    engine.set_proposer("head", make_head(tiny_target, variant))
    proposer = engine._head
    assert proposer is not None
    real = proposer.propose

    def propose(requests: Sequence, states: Sequence, budgets: Sequence[Budget]) -> object:
        if budgets[0].depth:
            drafted.append(len(requests[0].tokens) - 2)
        return real(requests, states, budgets)

    chain = proposer.loop.chain

    def wrong(*args: Any) -> Chains:
        chains = chain(*args)
        return chains._replace(token=torch.full_like(chains.token, 383))

    monkeypatch.setattr(proposer, "propose", propose)
    monkeypatch.setattr(proposer.loop, "chain", wrong)
    (completion,) = engine.generate([ids[~assistant].tolist()], GREEDY)
    engine.set_proposer("none")
    assert completion.token_ids == ids[assistant].tolist()
    assert 383 not in completion.token_ids
    served = alignment.served(assistant).nonzero()[:, 0].tolist()
    # after the last of them only the bonus token can come, so that the engine does not draft from it
    assert drafted == served[:-1]
    assert served[0] == int((~assistant).sum()) - 1
    assert served[-1] == len(ids) - 3


@pytest.mark.parametrize("variant", ["eagle3", "p-eagle, one layer", "medusa, truncated"])
def test_item_07_accuracy_is_over_the_whole_vocabulary_and_maps_are_checked(
    variant: str, engine: Engine, tiny_target: LlamaTarget, batch: Batch, tmp_path: Path
) -> None:
    name, options = VARIANTS[variant]
    head = HEADS[name](**options | {"draft_vocab_size": 40}).make(tiny_target.config)
    used = torch.arange(40) * 9
    set_vocabulary(head, used - torch.arange(40), torch.isin(torch.arange(384), used))
    initialize(head, tiny_target, from_target=False)
    objective = make_objective(head, {"eagle3": "ttt", "p-eagle": "p-eagle", "medusa": "medusa"}[name], steps=1)
    features = features_of(head, engine, batch)
    teacher = teach(engine.target, features.hidden, batch, head.target_ids)
    outside = ~torch.isin(teacher.choice, used)
    assert 0 < int(outside.sum()) < len(outside)
    # a head that always predicts the teacher's choice within its vocabulary is wrong where the choice is outside
    perfect = torch.nn.functional.one_hot(teacher.draft_choice, 40) * 50.0
    object.__setattr__(head, "logits", lambda state, depth: perfect)
    sums: StepSums = objective(batch, features, teacher, objective.denominators(batch))[1]
    assert int(sums.correct) == int((~outside).sum())
    assert int(sums.count) == len(outside)
    object.__delattr__(head, "logits")

    folder = export(head, tmp_path, tiny_target)
    assert torch.equal(load_head(folder).target_ids, used)
    if name != "medusa":
        assert torch.equal(target_ids(load_head(folder).d2t), used)
        for wrong in (used, torch.zeros(40, dtype=torch.int64)):  # ids read as offsets; a map of another vocabulary
            head.d2t.copy_(wrong)
            with pytest.raises(ValueError, match="d2t"):
                load_head(export(head, tmp_path, tiny_target))


@pytest.mark.parametrize("variant", [*ONE_OF_EACH, *WINDOWED])
def test_item_08_forced_tokens_say_what_drafted_ones_do(
    variant: str, engine: Engine, head_of: Callable[[str], Head], prompts: list[list[int]], batch: Batch
) -> None:
    """Training forces the text's tokens; acceptance simulated this way still equals the engine's, count by count."""
    head = head_of(variant)
    completions = serve(engine, head, prompts)
    simulated = simulate(head, batch, features_of(head, engine, batch), STEPS)
    assert simulated == total(completions)
    assert simulated.acceptance_length > 1.3
    assert 0 < simulated.accepted < simulated.drafted


def test_item_09_chats_are_written_alike(tiny_tokenizer: Tokenizer) -> None:
    """Training's prompt is the server's: one template, one generation prompt, no second begin-of-text token."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f(x):"}]
    conversation = [*messages, {"role": "assistant", "content": "the answer in the data"}]
    _, example = parse_row({"messages": conversation}, FilesDataConfig(name="files", path="x"), tiny_tokenizer)
    trained = first_prompt(example, tiny_tokenizer, 400)
    served = tiny_tokenizer.encode(tiny_tokenizer.render_chat(messages), add_special_tokens=False)
    assert trained == served
    assert tiny_tokenizer.decode(trained).endswith("# assistant:")
    assert trained.count(0) == 0  # this template writes none


@pytest.mark.parametrize(
    "variant", ["eagle", "eagle3", "medusa", "mlp", "p-eagle, one layer", "dflash", "dspark", "draft-model"]
)
def test_item_10_a_tree_holds_the_chain_and_no_draft_is_deeper_than_the_head(
    variant: str, engine: Engine, head_of: Callable[[str], Head], prompts: list[list[int]]
) -> None:
    """Simulated acceptance is a chain's; a tree of the same depth accepts at least as much."""
    head = head_of(variant)
    chain = total(serve(engine, head, prompts))
    before = engine.proposer_config
    trees: list[set[tuple[int, ...]]] = []
    try:
        engine.set_proposer("none", config=replace(before, tree=f"beam:3x{before.max_draft_tokens}"))
        tree = total(serve(engine, head, prompts))
        for config in (before, replace(before, tree=f"beam:3x{before.max_draft_tokens}")):
            engine.set_proposer("head", head, config=config)
            proposer = engine._head
            assert proposer is not None
            paths: set[tuple[int, ...]] = set()
            real = proposer.propose

            def propose(*parts: Any, real=real, paths=paths) -> object:  # type: ignore[no-untyped-def]
                drafted = real(*parts)
                for node in range(1, int(drafted.length[0])):
                    paths.add(tuple(drafted.token[0, drafted.path(0, node)].tolist()))
                return drafted

            proposer.propose = propose  # type: ignore[method-assign]
            engine.generate([prompts[0]], SamplingParams(max_tokens=3))
            trees.append(paths)
    finally:
        engine.set_proposer("none", config=before)
    assert trees[0]
    assert {path for path in trees[0] if len(path) <= 3} <= trees[1]
    assert tree.acceptance_length >= chain.acceptance_length
    if head.config.max_depth is not None:
        deeper = ProposerConfig(name="head", max_draft_tokens=head.config.max_depth + 1)
        with pytest.raises(ValueError, match=f"drafts {head.config.max_depth} tokens at most"):
            HeadProposer(head, deeper)


def test_a_head_may_follow_one_that_drafts_less_far(engine: Engine, head_of: Callable[[str], Head]) -> None:
    """A length of drafts that only the next head supports is no error when it is set together with that head."""
    before = engine.proposer_config
    try:
        engine.set_proposer("head", head_of("medusa"), config=replace(before, max_draft_tokens=5))
        deep = replace(before, max_draft_tokens=9)
        with pytest.raises(ValueError, match="medusa head drafts 5 tokens at most, not 9"):
            engine.set_proposer("head", config=deep)
        engine.set_proposer("head", head_of("eagle"), config=deep)
        assert engine.head is not None
    finally:
        engine.set_proposer("none", config=before)


@pytest.mark.parametrize("variant", [*WITH_ATTENTION, *WINDOWED])
def test_item_11_accepted_positions_are_read_again_with_the_targets_features(
    variant: str, tiny_target_folder: Path, head_of: Callable[[str], Head], prompts: list[list[int]]
) -> None:
    """After many verify steps the head's KV cache equals what a prefill of the whole text writes."""
    caches = []
    text = prompts[0]
    for speculative in (True, False):
        target = load_target(str(tiny_target_folder))
        drafts = ProposerConfig(name="head", max_draft_tokens=STEPS)
        config = EngineConfig(max_tokens_in_cache=512, max_batch=1, prefix_cache=False)
        engine = Engine(target, head=head_of(variant), proposer="head", config=config, proposer_config=drafts)
        if speculative:
            request_id = engine.add(text, SamplingParams(max_tokens=40))
            while len(engine._requests[request_id].tokens) < len(text) + 25:
                engine.step()
            request = engine._requests[request_id]
            text, computed = list(request.tokens), request.computed
            assert request.stats.accepted > 0
        else:
            request_id = engine.add(text[: computed + 1], SamplingParams(max_tokens=4))
            engine.step()
            request = engine._requests[request_id]
        engine.speculator.propose([request], [Budget(1, 1)])  # computes the pending rows
        slots = engine._pool.rows([request], [1], [computed]).slots
        caches.append([cache[:, :, slots].clone() for cache in engine._pool.layers.caches[8:]])
    for actual, fresh in zip(*caches, strict=True):
        assert torch.allclose(actual, fresh, atol=1e-4)


@pytest.mark.parametrize("variant", [name for name in STEPPING if name != "draft-model"])
def test_item_12_a_targets_sliding_window_is_not_its_heads(variant: str, tiny_target: LlamaTarget) -> None:
    """In training and in serving a head sees all positions, unless its own config says otherwise."""
    windowed = replace(tiny_target.config, architecture="MistralForCausalLM", windows=(4,) * 8)
    name, options = VARIANTS[variant]
    head = HEADS[name](**options).make(windowed)
    initialize(head, tiny_target, from_target=False)
    windows: list[int | None] = []

    def attention(
        layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        windows.append(window)
        return CausalAttention()(layer, q, k, v)

    ids = torch.arange(9)[None]
    head.step(ids, torch.zeros(1, 9, head.config.hidden_size), ids, attention, 0)
    assert windows == [None] * head.config.layer.num_layers


def test_item_12_a_target_with_windows_makes_no_draft_model(tiny_target: LlamaTarget) -> None:
    windowed = replace(tiny_target.config, architecture="MistralForCausalLM", windows=(4,) * 8)
    with pytest.raises(ValueError, match="head=draft-model: .* without sliding windows, and this one is Mistral"):
        HEADS["draft-model"]().make(windowed)
    with pytest.raises(ValueError, match=r"head.num_layers=9: the target has 8 layers"):
        HEADS["draft-model"](num_layers=9).make(tiny_target.config)


@pytest.mark.parametrize("variant", BLOCKS)
def test_item_12_a_block_drafter_has_the_window_of_its_own_config(variant: str, tiny_target: LlamaTarget) -> None:
    windowed = replace(tiny_target.config, architecture="MistralForCausalLM", windows=(4,) * 8)
    name, options = VARIANTS[variant]
    assert HEADS[name](**options).make(windowed).config.layer.windows == ()
    assert HEADS[name](**options, window=9).make(windowed).config.layer.windows == (9,) * options["num_layers"]


@pytest.mark.parametrize("variant", ["eagle3", "mtp", "medusa", "p-eagle, one layer", "dspark"])
def test_item_13_the_dtype_that_is_measured_is_the_one_that_serves(
    variant: str, tiny_target_folder: Path, head_of: Callable[[str], Head], prompts: list[list[int]]
) -> None:
    """bf16 target and head: features are the served target's; norms and probabilities are fp32 on both sides."""
    target = load_target(str(tiny_target_folder), dtype=torch.bfloat16)
    drafts = ProposerConfig(name="head", max_draft_tokens=STEPS)
    config = EngineConfig(max_tokens_in_cache=2048, max_batch=8)
    engine = Engine(target, proposer="none", config=config, proposer_config=drafts)
    params = replace(GREEDY, max_tokens=100)  # enough verifies that ties weigh little
    plain = engine.generate(prompts, params)
    rows = [(a.prompt_ids + a.token_ids, [False] * len(a.prompt_ids) + [True] * len(a.token_ids)) for a in plain]
    batch = Sequences.of(rows).batch(range(len(rows)))
    head = copy.deepcopy(head_of(variant)).to(torch.bfloat16)
    completions = serve(engine, head, prompts, params)
    assert [c.token_ids for c in completions] == [a.token_ids for a in plain]
    simulated = simulate(head, batch, features_of(head, engine, batch), STEPS)
    served = total(completions)
    # bf16 rounds a batch of training and a row of serving differently in its last bits, so that a tie may be broken
    # differently
    assert simulated.acceptance_length == pytest.approx(served.acceptance_length, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_item_14_a_borrowed_lm_head_is_the_served_one(tied: bool, make_target_folder: MakeTarget) -> None:
    """Packed or not, tied or not; and training a head never touches the target's own weights."""
    target = load_target(str(make_target_folder(tie_word_embeddings=tied)))
    state = torch.randn(3, 64)
    expected = target.logits(state).clone()
    head = make_head(target, "eagle, the target's embedding")
    assert torch.equal(head.logits(state, 0), expected)
    served = Engine(target, head=head)._head
    assert served is not None
    assert torch.equal(served.module.logits(state, 0), target.logits(state))
    assert torch.allclose(served.module.logits(state, 0), expected, atol=1e-5)
    fresh = load_target(target.path)
    for variant in ONE_OF_EACH:
        trained = make_head(fresh, variant)
        pointers = {p.data_ptr() for p in fresh.parameters()}
        assert not pointers & {p.data_ptr() for p in trained.parameters() if p.requires_grad}


@pytest.mark.parametrize("variant", ["eagle3", "mlp", "p-eagle, one layer", "dspark", "draft-model", *WINDOWED])
def test_item_15_cached_prefixes_and_chunks_draft_alike(
    variant: str, tiny_target_folder: Path, head_of: Callable[[str], Head], prompts: list[list[int]]
) -> None:
    """The feature of the last cached position is kept: a request with a cached prefix accepts what a cold one does."""
    results = []
    long = [prompts[0] * 5, prompts[0] * 5 + prompts[1]]
    for config in ({"prefill_chunk": 7, "max_rows": 64}, {"prefix_cache": False}):
        target = load_target(str(tiny_target_folder))
        drafts = ProposerConfig(name="head", max_draft_tokens=STEPS)
        options = EngineConfig(max_tokens_in_cache=1024, max_batch=1, page_size=8, **config)
        current = Engine(target, head=head_of(variant), proposer="head", config=options, proposer_config=drafts)
        for _ in range(2):  # the second time with the prefix cache
            results.append([(c.token_ids, c.stats) for c in current.generate(long, SamplingParams(max_tokens=12))])
    assert all(current == results[0] for current in results)
    assert sum(stats.drafted for _, stats in results[0]) > 0


def test_item_16_acceptance_length_counts_the_bonus_over_all_verifies() -> None:
    """Tokens over verify steps of all requests together, not a mean of means; rates by position are not conditional."""
    first, second = SpeculationStats(), SpeculationStats()
    first.record(drafted=3, accepted=3, emitted=4)
    for _ in range(3):
        second.record(drafted=3, accepted=0, emitted=1)
    second.record(drafted=1, accepted=1, emitted=2)
    merged = SpeculationStats()
    for stats in (first, second):
        merged.merge(stats)
    assert (first.acceptance_length, second.acceptance_length) == (4.0, 1.25)
    assert merged.acceptance_length == 9 / 5
    assert merged.acceptance_by_position == [2 / 5, 1 / 4, 1 / 4]
