"""A target under tensor parallelism: the decoder of llama.py with its linear layers split among the ranks.

The layers' code stays as it is. A rank computes its own heads of an attention, its own heads or channels of a
recurrence, whose states it keeps, and its own inner rows of an MLP; the projections back to the hidden state gather
their input from all ranks, and then their output, so that every rank has the whole hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from kernels.linear import PackedLinear
from models.config import RecurrentConfig
from models.decoder import SelfAttention
from models.layers import GatedMLP, Linear, PlainMLP
from models.mixers.layers import GatedAttention
from models.mixers.mamba2 import GroupNorm, SpanningNorm
from models.mixers.sharding import Mixer, part_of, unit_rows
from models.sharding import Part, check_heads, even, inner, split
from models.targets.latent import LatentAttention
from models.targets.llama import LlamaTarget


class ShardedLinear(Linear):
    """This rank's output rows of a linear layer, `sizes[rank]` of them.

    With `reads` the input is split as well, `reads[rank]` features on each rank, and is gathered first. `returns`:
    whether the output is this rank's part, the whole on every rank, or the whole on rank 0 only.
    """

    def __init__(
        self,
        linear: Linear,
        part: Part,
        sizes: Sequence[int],
        *,
        reads: Sequence[int] | None = None,
        returns: Literal["part", "whole", "leader"] = "part",
    ) -> None:
        assert returns == "part" or sum(sizes) == linear.out_features
        super().__init__(linear.in_features, sizes[part.rank], bias=linear.bias is not None)
        self.out_dtype, self.narrows = linear.out_dtype, linear.narrows
        self.part, self.sizes, self.returns = part, tuple(sizes), returns
        self.reads = None if reads is None else tuple(reads)

    @property
    def fusible(self) -> PackedLinear | None:
        return self.packed if self.reads is None and self.returns == "part" else None

    def forward(self, input: Tensor) -> Tensor:
        if self.reads is not None:
            input = self.part.gather(input, self.reads)
        out = super().forward(input)
        if self.returns == "part":
            return out
        return self.part.gather(out, self.sizes, everywhere=self.returns == "whole")


def divide(target: LlamaTarget, part: Part) -> None:
    """Replace the linear layers by this rank's part of them. Raises ValueError where sizes cannot be divided.

    Call before weights are loaded, best on the meta device.
    """
    check_heads(target.config.num_heads, target.config.num_kv_heads, part.ranks)
    if target.recurrent is not None:
        target.recurrent = part_of(target.recurrent, part.ranks)
    for module in list(target.modules()):
        if isinstance(module, SelfAttention):
            _divide_attention(module, part)
        elif isinstance(module, LatentAttention):
            _divide_latent(module, part)
        elif isinstance(module, GatedMLP | PlainMLP):
            _divide_mlp(module, part)
        elif isinstance(module, Mixer):
            assert target.recurrent is not None
            _divide_mixer(module, target.recurrent, part)
    target.lm_head = ShardedLinear(target.lm_head, part, split(target.config.vocab_size, part.ranks), returns="leader")


def _divide_attention(attention: SelfAttention, part: Part) -> None:
    qkv, ranks = attention.qkv_proj, part.ranks
    attention.num_heads //= ranks
    attention.num_kv_heads = max(attention.num_kv_heads // ranks, 1)
    if attention.sinks is not None:
        attention.sinks = nn.Parameter(attention.sinks[: attention.num_heads])
    queries = attention.num_heads * (1 + isinstance(attention, GatedAttention))
    rows = (queries + 2 * attention.num_kv_heads) * attention.head_dim
    attention.qkv_proj = ShardedLinear(qkv, part, (rows,) * ranks)
    attention.o_proj = _divide_output(attention.o_proj, part)


def _divide_latent(attention: LatentAttention, part: Part) -> None:
    """Divide the heads; every rank computes and caches the whole latent."""
    name, ranks = "q_proj" if attention.latent.query_rank is None else "q_b_proj", part.ranks
    queries = getattr(attention, name)
    setattr(attention, name, ShardedLinear(queries, part, even(queries.out_features, ranks)))
    attention.num_heads //= ranks
    attention.kv_b_proj = attention.kv_b_proj.heads_of(attention.num_heads)
    attention.o_proj = _divide_output(attention.o_proj, part)


def _divide_mixer(mixer: Mixer, config: RecurrentConfig, part: Part) -> None:
    norm, ranks = getattr(mixer, "norm", None), part.ranks
    mixer.config, mixer.o_proj = config, _divide_output(mixer.o_proj, part)
    if isinstance(norm, GroupNorm) and norm.groups % ranks:
        mixer.norm = SpanningNorm(norm, part)
        mixer.rows.pop("norm")
        if not norm.inside:
            mixer.o_proj.reads = None
    for name, parameter in list(mixer.named_parameters()):
        path, _, key = name.rpartition(".")
        owner, rows = mixer.get_submodule(path), unit_rows(mixer.rows.get(path or key, ()), part.rank, ranks)
        size = sum(end - first for first, end in rows)
        if rows and type(owner) is Linear:
            setattr(mixer, path, ShardedLinear(owner, part, (size,) * ranks))
        elif rows and not isinstance(owner, Linear):
            setattr(owner, key, nn.Parameter(parameter[:size]))


def _divide_output(output: Linear, part: Part) -> ShardedLinear:
    sizes, reads = split(output.out_features, part.ranks), even(output.in_features, part.ranks)
    return ShardedLinear(output, part, sizes, reads=reads, returns="whole")


def _divide_mlp(mlp: GatedMLP | PlainMLP, part: Part) -> None:
    down, ranks = mlp.down_proj, part.ranks
    sizes = inner(down.in_features, ranks)
    if isinstance(mlp, PlainMLP):
        mlp.up_proj = ShardedLinear(mlp.up_proj, part, sizes)
    else:
        mlp.gate_up_proj = ShardedLinear(mlp.gate_up_proj, part, [2 * size for size in sizes])
    mlp.down_proj = ShardedLinear(down, part, split(down.out_features, ranks), reads=sizes, returns="whole")
