"""Elementwise operations of torch on a row's path: a number's bits depend neither on its place nor on the threads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels.elementwise import activate, gate_mul, layer_norm, rms_norm, uniform
from models.config import ExpertsConfig
from models.targets.deepseek import DeepseekExperts
from models.targets.experts import MixtureOfExperts

ROWS, SIZE = 700, 61  # more than 32,768 numbers, which torch divides among threads; no row is whole vectors
THREADS = (1, 3, 6, 7)
THROUGH = {
    "sigmoid": partial(uniform, torch.sigmoid),
    "SiLU": partial(uniform, F.silu),
    "GELU": partial(activate, activation="gelu"),
    "GELU (tanh)": partial(activate, activation="gelu_pytorch_tanh"),
    "gate, SiLU": partial(gate_mul, gate="silu"),
    "gate, GELU": partial(gate_mul, gate="gelu"),
}
BY_VECTORS = {  # which torch itself computes alike, as `uniform` says
    "exp": torch.exp,
    "log": lambda x: x.abs().log(),
    "tanh": torch.tanh,
    "log of the sigmoid": F.logsigmoid,
    "cosine": torch.cos,
    "sine": torch.sin,
    "softmax": partial(torch.softmax, dim=-1),
    "logsumexp": partial(torch.logsumexp, dim=-1),
    "RMS norm": lambda x: rms_norm(x, torch.ones(SIZE, dtype=x.dtype), 1e-5),
    "layer norm": lambda x: layer_norm(x, torch.ones(SIZE, dtype=x.dtype), torch.ones(SIZE, dtype=x.dtype), 1e-5),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def check(operation, x):
    torch.set_num_threads(1)
    alone = torch.cat([operation(x[row : row + 1]) for row in range(len(x))])
    for count in THREADS:
        torch.set_num_threads(count)
        assert torch.equal(operation(x), alone), f"{count} threads"
        assert torch.equal(operation(x[5:]), alone[5:]), f"{count} threads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*THROUGH, *BY_VECTORS])
def test_a_row_has_the_bits_that_it_has_alone(name, dtype):
    size = 2 * SIZE if name.startswith("gate") else SIZE
    check((THROUGH | BY_VECTORS)[name], torch.randn(ROWS, size).to(dtype))


def test_torch_alone_gives_other_bits():
    """Or `uniform` would not be needed."""
    x = torch.randn(ROWS, SIZE)
    assert not torch.equal(torch.sigmoid(x), torch.cat([torch.sigmoid(row) for row in x.split(1)]))


@pytest.mark.parametrize(
    ("kind", "sigmoid"), [(DeepseekExperts, True), (DeepseekExperts, False), (MixtureOfExperts, False)]
)
def test_a_routers_weights_and_choice(kind, sigmoid):
    """Of 61 experts, of the logits that `rows` are."""
    config = ExpertsConfig(count=SIZE, active=6, intermediate_size=8, normalize=True, sigmoid=sigmoid)
    experts = kind(SIZE, config)
    experts.gate.weight.copy_(torch.eye(SIZE))
    x = torch.randn(ROWS, SIZE)
    check(lambda rows: experts.route(rows)[0], x)
    check(lambda rows: experts.route(rows)[1], x)
