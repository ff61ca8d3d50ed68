"""Tensor parallelism that changes no bit: which rows of which tensor a rank holds.

Every linear layer is divided by its output rows, never along the sum: a dot product runs over the whole of K in the
order of one process, and what the ranks computed is put side by side. (Megatron-LM, arXiv 1909.08053, divides every
second layer along the sum, which halves the traffic and changes the order of additions.) Embedding, norms and a
router are on every rank whole. Knows no processes: `Part.gather` is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from kernels.elementwise import LANES

BLOCK = 64  # rows; library kernels like whole blocks, and vectorised tails stay where they are in one process


class Gather(Protocol):
    def __call__(self, x: Tensor, sizes: Sequence[int], *, everywhere: bool = True) -> Tensor:
        """x `[..., sizes[rank]]` of every rank -> `[..., sum(sizes)]`, on rank 0 alone unless `everywhere`."""
        ...


@dataclass(frozen=True)
class Part:
    """Which of how many ranks this is, and how it sees what the others computed."""

    rank: int
    ranks: int
    gather: Gather

    def rows(self, name: str, total: int) -> tuple[int, int] | None:
        """First and last + 1 of the `total` rows of checkpoint tensor `name` that this rank holds; None: all."""
        sizes = sizes_of(name, total, self.ranks)
        if sizes is None:
            return None
        ends = list(accumulate(sizes, initial=0))
        return ends[self.rank], ends[self.rank + 1]


def sizes_of(name: str, total: int, ranks: int) -> list[int] | None:
    """How many of the `total` rows of checkpoint tensor `name` each rank holds; None: every rank holds them all."""
    kind = name.rpartition(".")[0].rpartition(".")[2]  # model.layers.0.self_attn.q_proj.weight
    if kind in ("q_proj", "k_proj", "v_proj"):
        return even(total, ranks)
    if kind in ("gate_proj", "up_proj"):
        return inner(total, ranks)
    return split(total, ranks) if kind in ("o_proj", "down_proj", "lm_head") else None


def even(total: int, ranks: int) -> list[int]:
    """Whole heads, once `check_heads` has passed."""
    return [total // ranks] * (ranks - 1) + [total - total // ranks * (ranks - 1)]


def inner(total: int, ranks: int) -> list[int]:
    """An MLP's inner rows: in whole vectors, or the gate's activation would take another path than in one process."""
    if total % LANES or total < LANES * ranks:
        raise ValueError(
            f"engine.tensor_parallel={ranks}: {total} inner rows of an MLP cannot be divided in multiples of {LANES}; "
            + (f"use at most {total // LANES}" if total % LANES == 0 else "use 1")
        )
    return split(total, ranks, smallest=LANES)


def split(total: int, ranks: int, smallest: int = 2) -> list[int]:
    """`ranks` parts of `total`, as even as whole blocks allow, what is left over in the last one.

    Blocks are of 64 where every rank gets one, else of the largest power of two that allows it. No part is of one row:
    libraries multiply a single column by other means.
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


def check_heads(num_kv_heads: int, ranks: int) -> None:
    """Raises ValueError unless every rank gets the same number of KV heads, with all the query heads that read them."""
    if num_kv_heads % ranks:
        fitting = [count for count in range(1, num_kv_heads + 1) if num_kv_heads % count == 0]
        raise ValueError(
            f"engine.tensor_parallel={ranks}: the target's {num_kv_heads} KV heads cannot be shared evenly by so many "
            f"ranks; use one of {', '.join(map(str, fitting))}"
        )
