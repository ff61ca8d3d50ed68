"""What makes the host wait for a GPU: one element written from the host, reads and uploads that one of each would do.

Without a GPU these are seen as operations: writing one element is a copy from a tensor of the host, for which the host
waits, while filling a slice passes the number as an argument of a launch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infer.request import SamplingParams
from infer.sampling import choose
from tests.lossless.plain import ids
from tests.pools import check_pool

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 17, list(range(10, 50)), [8], [5, 6, 7] * 4]

SCORED = [
    replace(GREEDY, logprobs=0),
    replace(GREEDY, logprobs=5, temperature=0.9, seed=1),
    replace(GREEDY, logprobs=2, logprobs_of="processed", temperature=0.9, top_k=7, seed=2),
    replace(GREEDY, logprobs=1, logprobs_of="processed", presence_penalty=0.5),
    GREEDY,
]


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
    check_pool(engine._pool, [])


@pytest.mark.parametrize("proposer", ["none", "head"])
def test_no_copy_to_the_device_is_waited_for(make_small_engine, proposer):
    """By steps of the host, by rounds, and where rounds begin."""
    engine = make_small_engine(proposer=proposer, max_batch=6, graphs="on", threads=1)
    scored = [replace(params, max_tokens=4) for params in SCORED[:2]]  # until they have ended, the host runs all steps
    params = [*scored, *[replace(GREEDY, temperature=0.7, top_p=0.9, seed=5)] * 3]
    engine.generate(PROMPTS, params)  # builds what is built once
    waited, sent, to = Counter[str](), 0, torch.Tensor.to

    def watched(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal sent
        if any(isinstance(x, torch.device) for x in (*args, *options.values())):
            sent += 1
            if not options.get("non_blocking"):
                waited[sys._getframe(1).f_code.co_qualname] += 1
        return to(self, *args, **options)

    with patch.object(torch.Tensor, "to", watched):
        engine.generate(PROMPTS, params)
    assert sent > 8
    assert waited == {}


READS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__")


@contextmanager
def host_reads(*folders: str) -> Iterator[Counter[str]]:
    """Count by function the reads of tensors by code in these folders, but those of draft trees, which the host has."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            path = Path(frame.f_code.co_filename)
            trees = path.name == "tree.py" or frame.f_code.co_name == "drafted_paths"
            if any(path.match(f"{folder}/*.py") for folder in folders) and not trees:
                counts[frame.f_code.co_name] += 1
            return original(self, *args, **options)

        return read

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(patch.object(torch.Tensor, name, counted(name)))
        yield counts


@pytest.mark.parametrize("proposer", ["none", "head"])
def test_a_step_reads_the_log_probabilities_of_all_requests_at_once(make_small_engine, monkeypatch, proposer):
    uploads = []
    upload = choose.upload
    engine = make_small_engine(proposer=proposer, max_batch=6, graphs="off", threads=1)
    alone = [engine.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, SCORED, strict=True)]
    names = [engine.add(prompt, params) for prompt, params in zip(PROMPTS, SCORED, strict=True)]
    requests = [engine.request(name) for name in names]
    while not all(request.output_length for request in requests):
        engine.step()
    monkeypatch.setattr(choose, "upload", lambda *args: (uploads.append(args), upload(*args))[1])
    with host_reads("infer/batch", "infer/sampling") as reads:
        engine.step()
    assert reads == {"token_logprobs": 1}
    assert len(uploads) == 2  # these rows, and those with processed logits
    while engine.has_work:
        engine.step()
    for request, expected in zip(requests, alone, strict=True):
        assert request.output_ids == expected.token_ids
        assert request.logprobs == expected.logprobs
        assert {len(entry.top) for entry in request.logprobs} <= {request.params.logprobs}


def test_more_rows_than_are_copied_at_once_are_scored_alike(make_small_engine, monkeypatch):
    outputs = []
    for most in (64, 2):
        monkeypatch.setattr(choose, "MOST_ROWS", most)
        engine = make_small_engine(proposer="head", max_batch=6, graphs="off", threads=1)
        outputs.append([completion.logprobs for completion in engine.generate(PROMPTS, SCORED)])
    assert outputs[0] == outputs[1]
    assert [len(logprobs) for logprobs in outputs[0]] == [20, 20, 20, 20, 0]


@pytest.mark.parametrize("rule", ["typical", "block"])
def test_acceptance_rules_read_no_rows_back(make_small_engine, rule):
    """Which rows have processed logits is known to the host, which has sent the rows."""
    engine = make_small_engine(proposer="head", max_batch=6, graphs="off", threads=1)
    params = replace(GREEDY, temperature=0.9, seed=3, acceptance=rule, presence_penalty=0.4)
    requests = [engine.request(engine.add(prompt, params)) for prompt in PROMPTS]
    while not all(request.output_length for request in requests):
        engine.step()
    with host_reads("infer/batch", "infer/sampling") as reads, host_reads("infer/speculation/proposers") as drafting:
        engine.step()
    assert reads == {}
    assert drafting["adjust"] == 0  # a draft's tokens are read by grammars only
    assert sum(request.stats.drafted for request in requests) > 0
