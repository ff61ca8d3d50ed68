"""Targets whose weights stay in a GGUF file's blocks: logits, memory, tied matrices, and when that is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.console.card import describe_activations, describe_weights
from infer.engine import Engine
from infer.kvcache.memory import weight_bytes
from infer.options.stored_weights import check_weights, reads_native
from infer.request import SamplingParams
from kernels.cpu.library import library
from kernels.linear import PackedLinear
from kernels.triton.device import Limits
from kernels.weights.ggml import GGML_BLOCK_BYTES
from models.attention import CausalAttention
from models.gguf.file import GgufFile
from models.heads import HEADS
from models.heads.files import load_head, save_head
from models.heads.weights import initialize
from models.layers import PackedEmbedding
from models.targets import load_target
from tests.gguf_writing import write_gguf
from tests.unit.reference import relative_error

IDS = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(3))
CPU = torch.device("cpu")
LEGACY = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
MIXED = (Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.Q8_0, Kind.F16)
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")


@pytest.fixture(scope="module")
def write(make_target_folder, tmp_path_factory):
    """Return `write(kinds, **config)`: the file of a small target."""
    written = {}

    def make(kinds, **config):
        key = (kinds, *config.items())
        if key not in written:
            sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128}
            written[key] = tmp_path_factory.mktemp("file") / "tiny.gguf"
            write_gguf(make_target_folder(seed=2, **sizes, **config), written[key], kinds, tokenizer=False)
        return written[key]

    return make


def logits(target):
    with torch.no_grad():
        out = target(IDS, torch.arange(IDS.shape[1]).expand_as(IDS), CausalAttention())
        return target.logits(out.hidden)


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("kinds", [LEGACY, MIXED])
def test_logits_are_those_of_the_dequantized_target(write, kinds, config):
    file = str(write(kinds, **config))
    native, widened = load_target(file, native=True), load_target(file)
    assert native.ggml_formats
    assert not widened.ggml_formats
    assert relative_error(logits(native), logits(widened)) < 1e-5
    assert torch.equal(native.embed(IDS), widened.embed(IDS))
    assert torch.equal(native.embedding_weight, widened.embedding_weight)
    assert native.fingerprint == widened.fingerprint


def test_a_tied_lm_head_is_the_embeddings_memory(write):
    file = write((Kind.Q5_1,), tie_word_embeddings=True)
    target = load_target(str(file), native=True, dtype=torch.bfloat16)
    assert isinstance(target.embed_tokens, PackedEmbedding)
    assert target.embed_tokens.packed is target.lm_head.packed
    stored = GgufFile(file)
    blocks = sum(info.size for info in stored.tensors.values() if info.kind.name in GGML_BLOCK_BYTES)
    norms = sum(2 * info.shape[0] for info in stored.tensors.values() if info.kind is Kind.F32)
    assert weight_bytes(target) == blocks + norms


def test_the_default_packs_what_kernels_read_and_the_card_says_so(write, monkeypatch):
    def load(kinds, weights="same"):
        model = ModelConfig(name="tiny", path=str(write(kinds)), dtype="float32")
        return Engine.load(model, proposer="none", engine=EngineConfig(weights=weights, max_tokens_in_cache=128))

    monkeypatch.setattr("infer.engine.loading.Tokenizer.load", lambda folder: None)
    for weights, text in (
        ("same", "Q4_0 as published, in panels of 64 outputs"),
        ("native", "Q4_0 as published, in panels of 64 outputs"),
        ("widened", "Q4_0, dequantized to float32"),
        ("int8", "Q4_0, dequantized to float32, then quantized to int8"),
    ):
        assert describe_weights(load((Kind.Q4_0,), weights)) == [("weights", text)]
    engine = load((Kind.F16,))
    assert describe_weights(engine) == []
    assert not engine.target.ggml_formats
    ((_, text),) = describe_weights(load((Kind.TQ1_0, Kind.Q4_0)))
    assert "dequantized to float32: no kernel reads TQ1_0 (" in text


def test_what_cannot_stay_in_blocks_is_an_error_only_if_it_must(write):
    model, native = ModelConfig(name="tiny", path=str(write((Kind.Q4_0,)))), EngineConfig(weights="native")
    assert reads_native(model, native, torch.bfloat16, CPU)
    assert reads_native(model, native, torch.float16, torch.device("cuda"))
    assert not reads_native(model, EngineConfig(weights="int4"), torch.bfloat16, CPU)
    for dtype, divided, message in (
        (torch.float16, False, r"no kernel reads Q4_0 \(\S+\) for float16 on cpu"),
        (torch.bfloat16, True, "not divided among ranks"),
    ):
        assert not reads_native(model, EngineConfig(), dtype, CPU, divided=divided)
        with pytest.raises(ValueError, match=f"engine.weights=native: .*{message}"):
            reads_native(model, native, dtype, CPU, divided=divided)
    floats = ModelConfig(name="tiny", path=str(write((Kind.F16,))))
    with pytest.raises(ValueError, match="holds no weights in blocks"):
        reads_native(floats, native, torch.bfloat16, CPU)


def test_activations_of_8_bits_need_weights_that_are_integers(write, monkeypatch):
    monkeypatch.setattr("infer.engine.loading.Tokenizer.load", lambda folder: None)

    def load(kinds, **config):
        model = ModelConfig(name="tiny", path=str(write(kinds)), dtype="float32")
        config = EngineConfig(activations="int8", max_tokens_in_cache=128, **config)
        return Engine.load(model, proposer="none", engine=config)

    ((_, text),) = describe_activations(load((Kind.Q4_0,)))
    assert "another rounding" in text
    load((Kind.F16,), weights="int4")
    for kind, reason in ((Kind.F16, "holds no weights in blocks"), (Kind.TQ1_0, "no kernel reads TQ1_0")):
        with pytest.raises(ValueError, match=rf"engine.activations=int8: .*{reason}.*; use engine.activations=same"):
            load((kind,))
    with pytest.raises(ValueError, match="engine.activations=int8: no linear layer of this target"):
        Engine(load_target(str(write((Kind.F16,)))), proposer="none", config=EngineConfig(activations="int8"))
    for weights in ("widened", "fp8"):
        with pytest.raises(ValueError, match=rf"engine.activations=int8: .* engine.weights={weights}; use"):
            EngineConfig(weights=weights, activations="int8")


def test_activations_round_by_themselves_where_weights_are_integers(write, monkeypatch):
    monkeypatch.setattr("infer.engine.loading.Tokenizer.load", lambda folder: None)

    def load(kind, **config):
        model = ModelConfig(name="tiny", path=str(write((kind,))), dtype="float32")
        config = EngineConfig(activations="auto", max_tokens_in_cache=128, **config)
        return describe_activations(Engine.load(model, proposer="none", engine=config))

    ((_, text),) = load(Kind.Q4_0)
    assert text.endswith("another rounding; engine.activations=same is without it")
    assert load(Kind.F16, weights="int4")
    assert [load(Kind.Q4_0, weights="widened"), load(Kind.F16), load(Kind.F16, weights="fp8")] == [[], [], []]


def test_a_loaded_target_or_its_gpu_may_not_have_such_weights(tiny_target, monkeypatch):
    with pytest.raises(ValueError, match="engine.weights=native: this target was loaded without its blocks"):
        Engine(tiny_target, proposer="none", config=EngineConfig(weights="native"))
    ampere = SimpleNamespace(ggml_formats=(), norm=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda"))))
    monkeypatch.setattr("infer.options.stored_weights.limits", lambda device: Limits(80, 108, 163 << 10))
    for key, instead in (("weights", "int8"), ("head_weights", "int8"), ("kv_dtype", "same")):
        with pytest.raises(ValueError, match=f"engine.{key}=fp8: .* 8.0, 8.9 is needed.*; use engine.{key}={instead}"):
            check_weights(EngineConfig(**{key: "fp8"}), ampere)
    check_weights(EngineConfig(weights="int8"), ampere)


def test_a_damaged_block_is_an_error_that_names_tensor_and_place(write, tmp_path):
    content, info = bytearray(write((Kind.Q8_0,)).read_bytes()), GgufFile(write((Kind.Q8_0,))).tensors
    place = info["blk.1.ffn_down.weight"].offset + 5 * GGML_BLOCK_BYTES["Q8_0"]
    content[place : place + 2] = np.array([np.inf], np.float16).tobytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=rf"damaged\.gguf: blk\.1\.ffn_down\.weight: .* Q8_0 block at byte {place:,} "):
        load_target(str(damaged), native=True)
    damaged.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"damaged\.gguf: cut off: \S+ ends at byte [\d,]+ and the file has"):
        load_target(str(damaged), native=True)


@pytest.mark.parametrize(
    ("name", "options"), [("eagle", {"own_embedding": False}), ("dflash", {"aux_layers": [1], "num_layers": 1})]
)
def test_a_head_reads_its_targets_embedding_in_blocks(write, name, options, monkeypatch):
    """The drafts are those from the dequantized embedding, which is never made."""
    file, trees = str(write(LEGACY, tie_word_embeddings=True)), []
    for dense in (False, True):
        target = load_target(file, native=True, dtype=torch.bfloat16)
        head = HEADS[name](**options).make(target.config)
        initialize(head, target, from_target=name == "eagle", seed=1)
        if dense:
            head.borrowed.lent = target.lm_head, target.embedding_weight
        else:
            monkeypatch.setattr(PackedLinear, "whole_weight", None)
        drafts = ProposerConfig(name="head", max_draft_tokens=3)
        engine = Engine(target, head=head, proposer="head", config=EngineConfig(max_tokens_in_cache=256))
        engine.set_proposer("head", config=drafts)
        propose, drafted = engine.speculator.propose, []

        def spy(*args, propose=propose, drafted=drafted):
            tree = propose(*args)
            drafted.append(tree.token.tolist())
            return tree

        monkeypatch.setattr(engine.speculator, "propose", spy)
        (completion,) = engine.generate([[5, 6, 7] * 4], SamplingParams(max_tokens=16, ignore_eos=True))
        trees.append((completion.token_ids, drafted))
        monkeypatch.undo()
    assert trees[0] == trees[1]
    assert all(len(row) == 4 for row in trees[0][1][0])


def test_a_head_without_an_embedding_of_its_own_shares_the_targets_blocks(write, tmp_path):
    target = load_target(str(write(LEGACY, tie_word_embeddings=True)), native=True, dtype=torch.bfloat16)
    made = HEADS["eagle3"](aux_layers=[0, 1], own_embedding=False).make(target.config)
    initialize(made, load_target(target.path), from_target=False, seed=1)
    provenance = {"target_fingerprint": target.fingerprint}
    save_head(made, tmp_path, verifier="tiny", verifier_architecture="L", speculative_tokens=4, provenance=provenance)
    head, outcomes = load_head(tmp_path, target=target, dtype=torch.bfloat16), []
    assert head.embed_tokens is target.embed_tokens
    assert weight_bytes(target, head) - weight_bytes(target) == weight_bytes(head) - head.embed_tokens.packed.bytes
    for drafter in (head, made.bfloat16()):
        engine = Engine(target, head=drafter, proposer="head", config=EngineConfig(max_tokens_in_cache=256))
        (completion,) = engine.generate([[5, 6, 7] * 4], SamplingParams(max_tokens=24, ignore_eos=True))
        outcomes.append((completion.token_ids, completion.stats.drafted, completion.stats.accepted))
        assert (engine.head.embed_tokens is target.embed_tokens) == (drafter is head)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] > 0
