"""Tensor parallelism with bitwise the results of one process: which rows of which tensor a rank holds.

Every linear layer is split by output rows, never along the reduction: each dot product runs over all of K in the same
order as in one process, and the outputs of the ranks are concatenated. (Megatron-LM, arXiv 1909.08053, splits every
second layer along the reduction, which halves the communication but changes the order of additions.) Embedding, norms
and a router are replicated on every rank. Does no communication itself: the caller supplies `Part.gather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from kernels.elementwise import LANES

BLOCK = 64  # rows; suits library kernels, and puts vectorised tails at the same rows as in one process


class Gather(Protocol):
    def __call__(self, x: Tensor, sizes: Sequence[int], *, everywhere: bool = True) -> Tensor:
        """Gather x `[..., sizes[rank]]` of every rank into `[..., sum(sizes)]`, on rank 0 only unless `everywhere`."""
        ...


@dataclass(frozen=True)
class Part:
    """This process's tensor parallel rank, the number of ranks, and the function that gathers their outputs.

    `whole`: names of tensors and of modules whose rows every rank holds, though `sizes_of` would divide them.
    """

    rank: int
    ranks: int
    gather: Gather
    whole: tuple[str, ...] = ()

    def rows(self, name: str, total: int) -> tuple[int, int] | None:
        """Return first and last + 1 of the `total` rows of checkpoint tensor `name` that this rank holds; None: all."""
        sizes = sizes_of(name, total, self.ranks)
        if sizes is None or name in self.whole or module_of(name) in self.whole:
            return None
        ends = list(accumulate(sizes, initial=0))
        return ends[self.rank], ends[self.rank + 1]


def module_of(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]  # model.layers.0.self_attn.q_proj.weight


def sizes_of(name: str, total: int, ranks: int) -> list[int] | None:
    """Return how many of the `total` rows of checkpoint tensor `name` each rank holds; None: every rank holds all."""
    kind = module_of(name)
    if kind in ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj") or name.endswith(".sinks"):
        return even(total, ranks)
    if kind in ("gate_proj", "up_proj", "w1", "w3", "fc1", "c_fc"):
        return inner(total, ranks)
    outputs = ("o_proj", "down_proj", "w2", "lm_head", "out_proj", "output_linear", "fc2", "c_proj")
    return split(total, ranks) if kind in outputs else None


def even(total: int, ranks: int) -> list[int]:
    """Split `total` evenly, which gives whole heads once `check_heads` has passed."""
    return [total // ranks] * (ranks - 1) + [total - total // ranks * (ranks - 1)]


def inner(total: int, ranks: int) -> list[int]:
    """Split an MLP's inner rows in whole vectors, so that the activation takes the code path of one process.

    Raises ValueError where that is impossible.
    """
    if total % LANES or total < LANES * ranks:
        raise ValueError(
            f"engine.tensor_parallel={ranks}: {total} inner rows of an MLP cannot be divided in multiples of {LANES}; "
            + (f"use at most {total // LANES}" if total % LANES == 0 else "use 1")
        )
    return split(total, ranks, smallest=LANES)


def split(total: int, ranks: int, smallest: int = 2) -> list[int]:
    """Split `total` into `ranks` parts, as even as whole blocks allow, with the remainder in the last part.

    Blocks have 64 rows if every rank gets one, else the largest power of two that allows that. No part has a single
    row, because libraries use another code path to multiply a single column. Raises ValueError for too few rows.
    """
    block = BLOCK
    while block > smallest and total // block < ranks:
        block //= 2
    blocks, rest = divmod(total, block)
    if blocks < ranks:
        raise ValueError(f"engine.tensor_parallel={ranks}: {total} rows are too few to divide")
    sizes = [(blocks // ranks + (rank < blocks % ranks)) * block for rank in range(ranks)]
    sizes[-1] += rest
    return sizes


def check_heads(num_heads: int, num_kv_heads: int, ranks: int) -> None:
    """Raise ValueError unless every rank gets the same number of KV heads, with all the query heads that read them.

    A single KV head is on every rank, with its part of the query heads.
    """
    count, kind = (num_heads, "query heads") if num_kv_heads == 1 else (num_kv_heads, "KV heads")
    if count % ranks:
        divisors = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
        raise ValueError(
            f"engine.tensor_parallel={ranks}: the target's {count} {kind} cannot be shared evenly by so many "
            f"ranks; use one of {', '.join(map(str, divisors))}"
        )
