"""Which rows of which tensor a rank holds: the shards add up to the tensor, and a rank reads only its shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import models.weights
from infer.config import EngineConfig
from infer.engine import Engine
from infer.kvcache.memory import weight_bytes
from infer.processes.exactness import probe_division
from infer.processes.target_worker import Shard
from kernels.dispatch import LANES
from kernels.linear import PackedLinear
from models.config import RECURRENT, RecurrentConfig
from models.mixers.sharding import Mixer, part_of, unit_rows
from models.sharding import BLOCK, Part, check_heads, even, inner, sizes_of, split
from models.targets import load_target
from models.targets.tensor_parallel import ShardedLinear
from tests.unit.quantized_writers import compressed, packed, write
from tests.unit.test_families import make_family_folder  # noqa: F401  a fixture
from tests.unit.test_targets import randomise_biases_and_norms


def no_gather(x, sizes, *, everywhere=True):
    raise AssertionError("nothing is computed here")


@given(total=st.integers(1, 3000), ranks=st.integers(1, 16))
def test_parts_make_up_the_whole_in_whole_blocks(total, ranks):
    if total < 2 * ranks:
        with pytest.raises(ValueError, match=f"tensor_parallel={ranks}"):
            split(total, ranks)
        return
    sizes = split(total, ranks)
    assert sum(sizes) == total
    assert min(sizes) >= 2
    assert total < BLOCK * ranks or not any(size % BLOCK for size in sizes[:-1])
    assert max(sizes) - min(sizes) < 2 * BLOCK


@given(vectors=st.integers(1, 300), ranks=st.integers(1, 16), odd=st.integers(0, LANES - 1))
def test_an_mlp_is_divided_in_whole_vectors(vectors, ranks, odd):
    total = vectors * LANES + odd
    if odd or vectors < ranks:
        with pytest.raises(ValueError, match=f"tensor_parallel={ranks}: {total} inner rows"):
            inner(total, ranks)
        return
    sizes = inner(total, ranks)
    assert sum(sizes) == total
    assert min(sizes) > 0
    assert all(size % LANES == 0 for size in sizes)


@given(kv_heads=st.integers(1, 16), group=st.integers(1, 8), ranks=st.integers(1, 8), dim=st.sampled_from([16, 64]))
def test_every_rank_gets_kv_heads_with_the_queries_that_read_them(kv_heads, group, ranks, dim):
    count, kind = (group, "query heads") if kv_heads == 1 else (kv_heads, "KV heads")
    if count % ranks:
        with pytest.raises(ValueError, match=rf"tensor_parallel={ranks}: .* {count} {kind} .* use one of 1"):
            check_heads(kv_heads * group, kv_heads, ranks)
        return
    check_heads(kv_heads * group, kv_heads, ranks)
    if kv_heads == 1:  # on every rank
        return
    head_of_row = torch.arange(kv_heads * group * dim) // dim
    kv_head_of_row = torch.arange(kv_heads * dim) // dim
    queries = head_of_row.split(even(len(head_of_row), ranks))
    keys = kv_head_of_row.split(even(len(kv_head_of_row), ranks))
    for own_queries, own_keys in zip(queries, keys, strict=True):
        assert set((own_queries // group).tolist()) == set(own_keys.tolist())


@given(
    kind=st.sampled_from(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]),
    total=st.integers(8, 64).map(lambda n: n * LANES),
    ranks=st.integers(1, 8),
)
def test_rows_of_the_ranks_follow_one_another(kind, total, ranks):
    parts = [Part(rank, ranks, no_gather).rows(f"model.layers.3.{kind}.weight", total) for rank in range(ranks)]
    assert [row for first, last in parts for row in range(first, last)] == list(range(total))


def test_the_rest_is_whole_on_every_rank():
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight", "d2t"):
        assert sizes_of(name, 64, 2) is None


SHAPES = {
    "llama": {},
    "biases, uneven": {"vocab_size": 397, "intermediate_size": 208, "attention_bias": True, "mlp_bias": True},
    "tied": {"vocab_size": 397, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_the_ranks_hold_together_is_the_target(make_target_folder, name):
    folder = make_target_folder(num_hidden_layers=2, **SHAPES[name])
    randomise_biases_and_norms(folder)
    target = load_target(str(folder))
    parts = [load_target(str(folder), part=Part(rank, 2, no_gather)) for rank in range(2)]
    assert all(part.fingerprint == target.fingerprint for part in parts)
    assert all(part.heads == (2, 1, 16) for part in parts)
    for path, module in target.named_modules():
        modules = [part.get_submodule(path) for part in parts]
        if not isinstance(modules[0], ShardedLinear):
            for key, value in module.named_parameters(recurse=False):
                assert all(torch.equal(part.get_parameter(f"{path}.{key}"), value) for part in parts)
            continue
        # merged tensors: each rank holds its rows of q, k and v, of gate and up
        merged = {"qkv_proj": [64, 32, 32], "gate_up_proj": [target.config.intermediate_size] * 2}
        groups = merged.get(path.rpartition(".")[2], [module.out_features])
        for key, value in module.named_parameters(recurse=False):
            pieces = [
                part.get_parameter(f"{path}.{key}").split([sizes[rank] for sizes in map(rank_sizes(path), groups)])
                for rank, part in enumerate(parts)
            ]
            together = torch.cat([piece for group in zip(*pieces, strict=True) for piece in group])
            assert torch.equal(together, value), path


def rank_sizes(path):
    kind = {"qkv_proj": "q_proj", "gate_up_proj": "up_proj"}.get(path.rpartition(".")[2], path.rpartition(".")[2])
    return lambda total: sizes_of(f"{kind}.weight", total, 2)


NUMBERS = {"ba_proj": [4, 4], "A_log": [4], "dt_bias": [4]}
DELTA_NETS = [{**NUMBERS, **dict.fromkeys(("in_proj", "conv"), (32, 32, size)), "z_proj": [size]} for size in (128, 96)]
STEPS = {"A_log": [16], "D": [16], "dt_bias": [16]}
MAMBA2 = {**STEPS, "in_proj": [128, 128, 48, 48, 16], "conv": [128, 48, 48], "norm": [128]}
ONE_GROUP = {**STEPS, "in_proj": [128, 128, -12, -12, 16], "conv": [128, -12, -12]}
HYBRIDS = {  # the sizes, in rows of a recurrent layer's tensors, of what is divided; if negative every rank holds it
    "lfm2": ({}, {"in_proj": [64] * 3, "conv": [64]}),
    "qwen3.5": ({}, DELTA_NETS[0]),
    "qwen3 next": ({"shared_expert_intermediate_size": 48}, DELTA_NETS[1]),
    "falcon h1": ({"mamba_d_state": 24}, MAMBA2),
    "falcon h1, norm before the gate, biased, multiplied by one": ({"mamba_d_state": 24}, MAMBA2),
    "granite hybrid with experts, one group, rotary": ({}, ONE_GROUP),
    "nemotron h": ({"ssm_state_size": 24}, MAMBA2),
}


@pytest.mark.parametrize("stored", ["plain", "in groups"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_rank_holds_groups_with_their_heads(make_family_folder, tmp_path, monkeypatch, name, stored):  # noqa: F811
    changes, divided = HYBRIDS[name]
    folder = make_family_folder(name, **changes)
    if stored == "in groups":
        monkeypatch.setattr("tests.unit.quantized_writers.LAYER", "in_proj")
        section = compressed("pack-quantized", num_bits=4, group_size=32, strategy="group")
        write(folder, section, packed(4, 32), tmp_path / "quantized", tmp_path / "plain", ("bias",))
        folder = tmp_path / "quantized"
    target = load_target(str(folder))
    parts = [load_target(str(folder), part=Part(rank, 2, no_gather)) for rank in range(2)]
    mixers = [path for path, module in target.named_modules() if isinstance(module, Mixer)]
    assert len(mixers) == target.config.count(RECURRENT)
    for path in mixers:
        for key, value in target.get_submodule(path).named_parameters():
            kind = key.partition(".")[0]
            pieces = value.split([abs(size) for size in divided.get(kind, [-len(value)])])
            for rank, part in enumerate(parts if kind != "o_proj" else ()):
                halves = (size > 0 for size in divided.get(kind, [-1]))
                held = [p.chunk(2)[rank] if half else p for p, half in zip(pieces, halves, strict=True)]
                assert torch.equal(part.get_parameter(f"{path}.{key}"), torch.cat(held)), key
        convolution = parts[0].get_parameter(f"{path}.conv.weight")
        assert len(convolution) == parts[0].recurrent.channels == part_of(target.recurrent, 2).channels


@given(
    heads=st.integers(1, 64), groups=st.integers(1, 16), ranks=st.integers(1, 8),
    key_size=st.sampled_from([12, 16]), value_size=st.sampled_from([8, 16]),
)  # fmt: skip
def test_every_rank_gets_heads_with_the_groups_that_they_read(heads, groups, ranks, key_size, value_size):
    heads -= heads % groups
    assume(heads)
    whole = RecurrentConfig(heads * value_size + 2 * groups * key_size, 4, heads, groups, key_size, value_size)
    own = heads // ranks * value_size, max(groups // ranks, 1) * 2 * key_size
    vectors = all(
        (n % LANES == 0) == (m % LANES == 0) for n, m in ((heads * value_size, own[0]), (whole.channels, sum(own)))
    )
    if heads % ranks or (groups % ranks and ranks % groups) or not vectors:
        wrong = rf"tensor_parallel={ranks}: .* {heads} heads in {groups} groups .*; use [1-7]$"
        with pytest.raises(ValueError, match=wrong):
            part_of(whole, ranks)
        return
    part = part_of(whole, ranks)
    assert part.channels == sum(own)
    held = []
    for rank in range(ranks):
        (first_group, end_group), (first, end) = (unit_rows([(n, 1)], rank, ranks)[0] for n in (groups, heads))
        assert (end_group - first_group, end - first) == (part.groups, part.heads)
        for place, head in enumerate(range(first, end)):
            assert first_group + place // (part.heads // part.groups) == head // (heads // groups)
        held += range(first, end)
    assert held == list(range(heads))


def test_channels_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match=r"tensor_parallel=3: a recurrence of 64 channels .*of 16; use 2$"):
        part_of(RecurrentConfig(64, 3), 3)


def test_a_rank_reads_its_own_rows_only(tiny_target_folder, monkeypatch):
    read = []

    class Recording:
        def __init__(self, *arguments, **options):
            self.file = safe_open(*arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return self.file.get_slice(name)

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(models.weights, "safe_open", Recording)
    part = load_target(str(tiny_target_folder), part=Part(1, 2, no_gather))
    assert read
    assert not [name for name in read if "proj" in name or "lm_head" in name]
    target = load_target(str(tiny_target_folder))
    shared = sum(p.numel() for n, p in target.named_parameters() if "proj" not in n and "lm_head" not in n) * 4
    assert weight_bytes(part) - shared == (weight_bytes(target) - shared) / 2


def test_a_tensor_of_another_size_is_refused(make_target_folder):
    folder = make_target_folder(num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(448, 64)  # rank 1's shard would fit: 192 rows of 448 as of 384
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight \[256, 64\]: expected \[192, 64\]"):
        load_target(str(folder), part=Part(0, 2, no_gather))


def test_a_whole_target_is_not_served_by_ranks_that_are_not_there(tiny_target_folder):
    with pytest.raises(ValueError, match=r"engine\.tensor_parallel=2: .*Engine\.load"):
        Engine(load_target(str(tiny_target_folder)), config=EngineConfig(tensor_parallel=2))
    with pytest.raises(ValueError, match=r"engine\.tensor_parallel=0: must be at least 1"):
        EngineConfig(tensor_parallel=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_that_depend_on_the_number_of_columns_are_found_out(tiny_target_folder, monkeypatch, dtype):
    shard = Shard(load_target(str(tiny_target_folder), dtype=dtype, part=Part(0, 2, no_gather)))
    shard.ranks = 2
    probe_division(shard, 1)

    class Fickle(PackedLinear):
        def __call__(self, x):
            return super().__call__(x) * (1.01 if self.out_features == 192 else 1)

    monkeypatch.setattr("infer.processes.exactness.PackedLinear", Fickle)  # 192: half of the LM head's 384 rows
    with pytest.raises(
        ValueError, match=r"64 inputs .*\[192, 192\]; engine\.tensor_parallel=1, or engine\.exact=false"
    ):
        probe_division(shard, 1)
