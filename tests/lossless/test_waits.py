"""What makes the host wait for a GPU: one element written from the host, reads and uploads that one of each would do.

Without a GPU these are seen as operations: writing one element is a copy from a tensor of the host, for which the host
waits, while filling a slice passes the number as an argument of a launch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infer.request import SamplingParams
from tests.lossless.plain import ids

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 17, list(range(10, 50)), [8], [5, 6, 7] * 4]


class Writes(TorchDispatchMode):
    """Counts by name the operations that write to one of `tensors`, or to a part of one."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args[0].untyped_storage().data_ptr() in self._memory:
            name = func._schema.name.removeprefix("aten::")
            self.counts["one element" if name == "copy_" and args[0].ndim == 0 else name] += 1
        return out


def test_rounds_write_pages_and_limits_as_arguments_of_launches(make_small_engine):
    engine = make_small_engine(proposer="head", max_batch=6, graphs="on", threads=1, page_size=4)
    params = [replace(GREEDY, max_tokens=tokens) for tokens in (20, 9, 33, 12, 20)]
    expected = ids(engine.generate(PROMPTS, params))
    states = [graphs._state for graphs in engine.graphs.graphs]
    with Writes(engine._pool.table, *(state._numbers for state in states)) as writes:
        assert ids(engine.generate(PROMPTS, params)) == expected
    assert writes.counts["fill_"] > 20
    assert writes.counts["one element"] == 0
    engine._pool.invariants([])
