"""Penalties, bias and masks in Triton's interpreter have the bits of torch; packed masks against plain sets."""

from __future__ import annotations

import pytest
import torch

from infer.sampling.logits_processors import allowed_words
from kernels.operands import Shaping
from kernels.shape import packed, shape, unpacked

V, ROWS = 2500, 3  # more than a block
GENERATOR = torch.Generator().manual_seed(0)
OUTPUT = torch.randint(0, 3, (V,), generator=GENERATOR).float()
PROMPT = torch.rand(V, generator=GENERATOR) < 0.1
DRAFTED = torch.tensor([[-1, -1, -1], [7, -1, -1], [7, 2400, 7]])
BIAS = torch.randn(V, generator=GENERATOR)
ALLOWED = packed(torch.rand(ROWS, V, generator=GENERATOR) < 0.4)
EVERYTHING = {
    "repetition": 1.3,
    "presence": 0.7,
    "frequency": -0.4,
    "prompt": PROMPT,
    "output": OUTPUT,
    "drafted": DRAFTED,
    "bias": BIAS,
    "allowed": ALLOWED,
}
SETS = [
    (),
    ("allowed",),
    ("bias",),
    ("presence", "output", "drafted"),
    ("frequency", "output"),
    ("repetition", "prompt", "output", "drafted", "allowed"),
    tuple(EVERYTHING),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", SETS)
def test_every_row_is_shaped_as_in_torch(monkeypatch, dtype, fields):
    logits = (3 * torch.randn(ROWS, V, generator=torch.Generator().manual_seed(1))).to(dtype)
    logits[0, :4] = torch.tensor([0.0, -0.0, -torch.inf, 1e30])
    shaping = Shaping(**{name: EVERYTHING[name] for name in fields})
    outputs = {}
    for switch in ("torch", "triton"):
        monkeypatch.setenv("HEADWAY_KERNELS", switch)
        outputs[switch] = shape(logits, shaping)
    assert outputs["triton"].dtype is torch.float32
    assert torch.equal(outputs["triton"], outputs["torch"])
    changed = (outputs["torch"] != logits.float()).any(0).float().mean()
    assert bool(changed > 0.1) == bool(fields)


def test_words_of_a_mask():
    allowed = torch.rand(4, 100, generator=GENERATOR) < 0.5
    assert torch.equal(unpacked(packed(allowed), 100), allowed)
    assert packed(torch.ones(32, dtype=torch.bool)).tolist() == [-1]
    grammar = packed(torch.arange(100).expand(2, -1) % 3 != 0)
    packed_mask = allowed_words(100, (0, 31, 32, 64, 65, 95, 97), [[31, 97], []], grammar)
    assert [row.nonzero().flatten().tolist() for row in unpacked(packed_mask, 100)] == [
        [32, 64, 65, 95],
        [31, 32, 64, 65, 95, 97],
    ]
    assert allowed_words(100, (3,), [[], []], None).is_contiguous()  # as the kernel reads it
