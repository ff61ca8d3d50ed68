"""The fused decoder: the bits of the separate operations, close to float64, and row-invariant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from infer.kvcache.tensors import KVLayers, PooledAttention
from infer.processes.target_worker import Shard
from kernels.attention import LayerShape
from kernels.cpu.library import library
from kernels.rows import AttentionRows
from kernels.weights.ggml import GgmlMatrix, GgmlRows
from kernels.weights.groups import GroupedMatrix
from models.attention import CausalAttention
from models.config import ATTENTION, RECURRENT, UNNORMED, ExpertsConfig, RecurrentConfig, RopeConfig, TargetConfig
from models.decoder import FusedDecoder
from models.heads import HEADS
from models.heads.borrowing import borrow
from models.layers import Linear, pack
from models.targets.gemma3 import Gemma3Target
from models.targets.lfm2 import Lfm2Target
from models.targets.llama import LlamaTarget
from models.targets.qwen3_5 import Qwen35Target
from models.targets.qwen3_moe import Qwen3MoeTarget
from tests.drafts import checked_tree
from tests.gguf_writing import random_blocks
from tests.kernels.grouped import make_groups
from tests.pairwise import parametrize_pairs

PAGE, LENGTH, LAYERS = 16, 90, 3
READ = [0, 2, UNNORMED]
GROUPS = (
    ("int4", 16, torch.float16, True, True),
    ("int8", 32, torch.bfloat16, False, False),
    ("int4", 32, torch.float32, False, True),
)
PLAIN = TargetConfig(
    architecture="LlamaForCausalLM",
    vocab_size=130,
    hidden_size=80,
    intermediate_size=144,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    rope=RopeConfig(),
    bos_token_id=0,
    eos_token_ids=(0,),
)
CONFIGS = {
    "plain": PLAIN,
    "biases": replace(PLAIN, attention_bias=True, output_bias=True, mlp_bias=True),
    "qk norm": replace(PLAIN, qk_norm=True, num_heads=6, num_kv_heads=3, head_dim=64),
    "window": replace(PLAIN, windows=(None, 7, 40), num_heads=8, num_kv_heads=1, head_dim=128),
    "gemma": replace(
        PLAIN,
        architecture="Gemma3ForCausalLM",
        qk_norm=True,
        head_dim=256,
        num_kv_heads=1,
        windows=(7, None, 40),
        activation="gelu_pytorch_tanh",
        centered_norms=True,
        attention_scale=0.05,
        embedding_scale=9.0,
        local_rope=RopeConfig(theta=200.0),
    ),
    "granite": replace(PLAIN, embedding_scale=9.0, stream_scale=0.3, attention_scale=0.05, logits_scaling=8.0),
    "long sums": replace(PLAIN, hidden_size=1104, intermediate_size=1600, num_heads=3, num_kv_heads=3, head_dim=96),
}
MIXERS = (RECURRENT, ATTENTION, RECURRENT)
HYBRIDS = {
    "lfm2": (Lfm2Target, replace(PLAIN, qk_norm=True, mixers=MIXERS, recurrent=RecurrentConfig(PLAIN.hidden_size, 3))),
    "qwen3.5": (
        Qwen35Target,
        replace(
            PLAIN,
            qk_norm=True,
            output_gate=True,
            centered_norms=True,
            head_dim=64,
            rotary_dim=32,
            mixers=MIXERS,
            recurrent=RecurrentConfig(2 * 2 * 48 + 6 * 32, 4, heads=6, groups=2, key_size=48, value_size=32),
        ),
    ),
}
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")


def make(config, family=None):
    torch.manual_seed(0)
    target = (family or (Gemma3Target if config.centered_norms else LlamaTarget))(config)
    for name, parameter in target.named_parameters():
        scale, offset = (0.1, 1.0) if "norm" in name else (parameter.shape[-1] ** -0.5, 0.0)
        torch.nn.init.normal_(parameter, offset, scale)
    return target.eval().requires_grad_(False)


def serve(config, dtype, **options):
    shard = Shard(make(config).to(dtype), **options)
    shard.allocate(2 * (LENGTH // PAGE + 6), PAGE)
    return shard


def forward(shard, start, count, tokens, *, request=0, tree_mask=None, depths=None):
    """Run `count` rows from place `start` on; return their states. The pages of two requests are interleaved.

    The rows of a tree leave the request's recurrent state as it is, others advance it.
    """
    table = 1 + request + 2 * torch.arange(LENGTH // PAGE + 5)[None]
    rows = AttentionRows.blocks(table, [start], [count], page_size=PAGE, tree_mask=tree_mask)
    rows.states = ((request, int(tree_mask is None)),)
    positions = rows.places if depths is None else rows.committed + depths
    out = shard.forward(tokens, positions, rows, READ)
    return [out.hidden, *out.aux]


def tokens_of(config):
    return torch.randint(config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))


def tree_rows(shard, tokens):
    """Run the last four positions as the deepest path of a tree, root included; return the rows of that path."""
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2, 5]])
    tree = checked_tree(torch.arange(7)[None], parents, torch.tensor([7]))
    path, start = [0, 2, 5, 6], LENGTH - 4
    filled = torch.full((7,), 5)
    filled[path] = tokens[start:]
    outputs = forward(shard, start, 7, filled, tree_mask=tree.ancestors[0], depths=tree.depth[0].long())
    return [x[path] for x in outputs]


def fused_decoder(target):
    return FusedDecoder().decoder(target.layers, target.norm, packed=target.lm_head.packed is not None)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@parametrize_pairs({"name": list(CONFIGS), "dtype": DTYPES, "weights": ["same", "int8", "int4", "fp8"]})
def test_it_gives_the_bits_of_the_operations_that_it_joins(name, dtype, weights, monkeypatch):
    config = CONFIGS[name]
    if weights == "int4":  # groups of 32
        config = replace(config, hidden_size=96, intermediate_size=160)
    shard, tokens = serve(config, dtype, weights=weights), tokens_of(config)
    if fused_decoder(shard.target) is None:
        pytest.skip(f"no kernel reads {weights} weights for rows of {dtype} on this processor")
    outputs = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr("infer.kvcache.tensors.attention_class_for", lambda plan: PooledAttention)
        hidden = forward(shard, 0, LENGTH - 1, tokens[:-1]) + forward(shard, LENGTH - 1, 1, tokens[-1:])
        caches = [cache.clone() for cache in shard.kv.caches]
        outputs.append([*hidden, *caches])
        for cache in shard.kv.caches:
            cache.zero_()
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert outputs[0][0].abs().max() > 0.1


@pytest.mark.parametrize("activations", ["same", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["biases", "gemma"])
@pytest.mark.parametrize("stored", ["blocks", "groups"])
def test_weights_stored_in_several_formats_give_the_bits_of_the_operations_too(
    name, dtype, stored, activations, threads, monkeypatch
):
    config = replace(CONFIGS[name], hidden_size=96, intermediate_size=160)
    target, make_part, matrix = make(config).to(dtype), make_blocks, GgmlMatrix
    kinds = ("Q4_1", "Q8_0", "Q5_0")
    if stored == "groups":
        # groups of 16 are read in floating point only
        kinds = [(name, max(group, 32) if activations == "int8" else group, *rest) for name, group, *rest in GROUPS]
        make_part, matrix = (lambda kind, *sizes: make_groups(*sizes, *kind)), GroupedMatrix
    for layer in (module for module in target.modules() if isinstance(module, Linear)):
        parts = zip(kinds, split_sizes(layer.out_features), strict=True)
        layer.pack_ggml(matrix([make_part(kind, rows, layer.in_features) for kind, rows in parts], dtype))
    shard, tokens, outputs = Shard(target, activations=activations), tokens_of(config), []
    shard.allocate(2 * (LENGTH // PAGE + 6), PAGE)
    if fused_decoder(target) is None:
        pytest.skip(f"no kernel reads weights in blocks for rows of {dtype} on this processor")
    for fused, count in ((True, 1), (True, 2), (False, 2)):
        threads(count)
        if not fused:
            monkeypatch.setattr("infer.kvcache.tensors.attention_class_for", lambda plan: PooledAttention)
        outputs.append(forward(shard, 0, LENGTH - 1, tokens[:-1]) + forward(shard, LENGTH - 1, 1, tokens[-1:]))
    assert all(torch.equal(a, b) for other in outputs[1:] for a, b in zip(outputs[0], other, strict=True))


@parametrize_pairs(
    {"name": list(HYBRIDS), "dtype": DTYPES, "weights": ["same", "int8"], "before": [1, 2, 64], "count": [1, 2, 3]}
)
def test_recurrent_layers_have_the_bits_of_the_operations_too(
    name, dtype, weights, before, count, threads, monkeypatch
):
    family, config = HYBRIDS[name]
    shard, tokens = Shard(make(config, family).to(dtype), weights=weights), tokens_of(config)
    assert fused_decoder(shard.target) is not None
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2, 5]])
    tree = checked_tree(torch.arange(7)[None], parents, torch.tensor([7]))
    outputs = []
    for fused in (True, False):
        threads(count if fused else 1)
        if not fused:
            monkeypatch.setattr("infer.kvcache.tensors.attention_class_for", lambda plan: PooledAttention)
        layers = shard.allocate(2 * (LENGTH // PAGE + 6), PAGE, state_slots=2)
        outputs.append(forward(shard, 0, before, tokens[:before]))
        verified = forward(shard, before, 7, tokens[:7], tree_mask=tree.ancestors[0], depths=tree.depth[0].long())
        unchanged = [tensor.clone() for tensor in layers._tensors]
        layers.replay([[0, 2, 5]])
        outputs[-1] += [*verified, *unchanged, *layers._tensors, *forward(shard, before + 3, 1, tokens[:1])]
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert not torch.equal(unchanged[0], layers.windows)


def split_sizes(outputs):
    return outputs // 2, outputs // 4, outputs - outputs // 2 - outputs // 4


def make_blocks(kind, rows, inputs):
    return GgmlRows(kind, torch.from_numpy(random_blocks(Kind[kind], rows, inputs, inputs**-0.5, rows)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_matches_a_dense_forward_in_float64(name, dtype, tolerance):
    config = CONFIGS[name]
    shard, tokens = serve(config, dtype), tokens_of(config)
    wide = make(config).to(dtype).double()
    expected = wide(tokens[None], torch.arange(LENGTH)[None], CausalAttention(), aux_layers=READ)
    for actual, reference in zip(forward(shard, 0, LENGTH, tokens), [expected.hidden, *expected.aux], strict=True):
        assert ((actual.double() - reference[0]).norm() / reference.norm()) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["biases", "qk norm", "window", "gemma", "long sums"])
def test_a_rows_bits_depend_neither_on_the_rows_beside_it_nor_on_threads(name, dtype, threads):
    config = CONFIGS[name]
    shard, tokens = serve(config, dtype), tokens_of(config)
    threads(1)
    expected = forward(shard, 0, LENGTH, tokens)
    for count, widths in ((1, range(1, 71)), (2, (1, 2, 5, 7, 13, 70))):
        threads(count)
        for rows in widths:
            actual = forward(shard, LENGTH - rows, rows, tokens[LENGTH - rows :])
            assert all(torch.equal(a, b[LENGTH - rows :]) for a, b in zip(actual, expected, strict=True)), rows
        second = forward(shard, 0, LENGTH, tokens, request=1)
        assert all(torch.equal(a, b) for a, b in zip(second, expected, strict=True))
        if not config.windows:  # a window counts places, of which a tree has more than its path
            actual = tree_rows(shard, tokens)
            assert all(torch.equal(a, b[-4:]) for a, b in zip(actual, expected, strict=True))
            forward(shard, LENGTH - 4, 4, tokens[-4:])


def test_what_no_kernel_takes_runs_operation_by_operation():
    target = serve(PLAIN, torch.float32).target
    assert fused_decoder(target) is not None
    assert fused_decoder(make(PLAIN)) is None  # not packed
    for config in (replace(PLAIN, hidden_size=88), replace(PLAIN, head_dim=80), replace(PLAIN, intermediate_size=136)):
        assert fused_decoder(serve(config, torch.float32).target) is None
    assert fused_decoder(serve(PLAIN, torch.float16).target) is None
    experts = replace(PLAIN, experts=ExpertsConfig(4, 2, 32, normalize=True))
    assert fused_decoder(Shard(make(experts, Qwen3MoeTarget)).target) is None


def make_head(name, dtype, **options):
    """Return a packed head that has borrowed from a target."""
    target = make(PLAIN)
    head = HEADS[name](**options).make(PLAIN)
    torch.manual_seed(1)
    for parameter_name, parameter in head.named_parameters():
        scale, offset = (0.1, 1.0) if "norm" in parameter_name else (parameter.shape[-1] ** -0.5, 0.0)
        torch.nn.init.normal_(parameter, offset, scale)
    borrow(head, target.to(dtype))
    head = head.eval().requires_grad_(False).to(dtype)
    pack(head)
    return head


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle", {}),
        ("eagle3", {"aux_layers": [0, 1], "norm_output": False, "norm_before_residual": False}),
        ("eagle3", {"aux_layers": [1], "norm_output": True, "norm_before_residual": True, "num_layers": 2}),
    ],
)
def test_a_heads_layers_give_the_bits_of_the_operations_too(name, options, dtype, count, threads, monkeypatch):
    threads(count)
    head = make_head(name, dtype, **options)
    shape = head.config.attention
    shapes = [LayerShape(shape.num_kv_heads, shape.head_dim)] * shape.layers
    kv = KVLayers(shapes, tree_layers=0, num_pages=8, page_size=PAGE, dtype=dtype, device=torch.device("cpu"))
    tokens, generator = tokens_of(PLAIN)[:40], torch.Generator().manual_seed(2)
    features = torch.randn(40, PLAIN.hidden_size, generator=generator).to(dtype)
    original, table, outputs = features.clone(), 1 + torch.arange(4)[None], []
    calls = 0
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr("infer.kvcache.tensors.attention_class_for", lambda plan: PooledAttention)
        states = []
        for start, end in ((0, 37), (37, 38), (38, 40)):
            rows = AttentionRows.blocks(table, [start], [end - start], page_size=PAGE)
            attention = kv.attention(rows, shape.num_heads)
            calls += hasattr(attention, "decode")
            states.append(head.step(tokens[start:end], features[start:end], rows.places, attention, 0))
        outputs.append([*states, head.logits(states[-1], 0), *(cache.clone() for cache in kv.caches)])
        for cache in kv.caches:
            cache.zero_()
    assert calls == 3
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert torch.equal(features, original)  # unchanged: other drafts read the same state
    assert outputs[0][0].abs().max() > 0.1
