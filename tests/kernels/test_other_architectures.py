"""The C kernels compiled for aarch64 and run in its emulator: layers, attention and recurrences match float64."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import attention, linear, recurrence
from kernels.attention import LayerShape, plan_attention
from kernels.cpu.library import library
from kernels.linear import PackedLinear
from kernels.recurrent_rows import RecurrentRows
from kernels.rows import AttentionRows
from kernels.weights.ggml import FORMATS, GgmlMatrix
from kernels.weights.groups import GroupedMatrix
from kernels.weights.quantize import quantize, widen
from tests.kernels.emulated import AARCH64, build, emulate, missing
from tests.kernels.grouped import make_groups
from tests.kernels.recurrent_tokens import equal, make_tokens, picked
from tests.kernels.reference.attention import paged_attention
from tests.kernels.test_blocks import TOLERANCE, error, make, states
from tests.kernels.test_integer_linear import quantized

pytestmark = [
    pytest.mark.sources("kernels", "tests/kernels"),
    pytest.mark.skipif(library() is None, reason="no C compiler on this machine"),
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())} (scripts/setup_env.sh dev)"),
]

DTYPES = (torch.float32, torch.bfloat16)
# every format with one dtype: how weights are read and rows are widened are two things
LAYERS = [("same", DTYPES[0]), *zip(("same", "int8", "fp8", "int4", *FORMATS, "groups"), cycle(DTYPES[::-1]))]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("aarch64"))


@pytest.fixture
def aarch64(program: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels called in this test compute as on aarch64. Tensors made before it are not looked at."""
    structures = {
        "linear": linear.LinearArguments, "paged_attention": attention.AttentionArguments,
        "convolve": recurrence.ConvolveArguments, "scan": recurrence.ScanArguments,
    }  # fmt: skip
    for name, structure in structures.items():
        monkeypatch.setattr(library(), name, emulate(name, structure, program, AARCH64[1:]))
    monkeypatch.setattr(library(), "linear_takes_bf16", lambda: 0)  # there rows are widened, which takes more scratch
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("aarch64")
@pytest.mark.parametrize(("name", "dtype"), LAYERS)
def test_layers_match_float64_in_any_number_of_rows(name: Any, dtype: torch.dtype) -> None:
    outputs, inputs = 70, 256
    weight, x = states(outputs, inputs, dtype) * inputs**-0.5, states(20, inputs, dtype)
    if name in FORMATS:
        rows, stored = make(name, outputs, inputs)
        layer = PackedLinear(GgmlMatrix([rows], dtype))
    elif name == "groups":
        groups = make_groups(outputs, inputs, "int4", 64, torch.float16, True, True)
        layer, stored = PackedLinear(GroupedMatrix([groups], dtype)), groups.widened()
    else:
        layer = PackedLinear(weight, weight_format=name)
        stored = weight.float() if name == "same" else widen(*quantize(weight, name))
    if layer.native is None:
        pytest.skip("this processor has no such kernel")
    out = layer(x)
    assert error(out, x, stored) < TOLERANCE[dtype]
    for count in (1, 5):
        assert torch.equal(layer(x[:count]), out[:count])
    if name in FORMATS:
        assert layer.quantize_rows()
        out = layer(x)
        assert error(out, quantized(x), stored) < TOLERANCE[dtype]
        assert torch.equal(layer(x[:1]), out[:1])


@pytest.mark.usefixtures("aarch64")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_attention_matches_the_oracle_alone_and_among_others(dim: int, dtype: torch.dtype, tolerance: float) -> None:
    committed, heads, page = 90, 4, 16
    table = 1 + torch.arange(7)[None]
    cache = states(2 * 2 * 8 * page, dim, dtype).view(2, 2, 8 * page, dim)
    q, k, v = (states(8 * count + 1, dim, dtype)[1:].view(8, count, dim) for count in (heads, 2, 2))

    def attend(count: int) -> torch.Tensor:
        rows = AttentionRows.blocks(table, [committed], [count], page_size=page)
        return plan_attention(rows, heads, LayerShape(2, dim), dtype)(q[:count], k[:count], v[:count], cache, dim**-0.5)

    out = attend(8)
    expected = paged_attention(q, cache, table, [committed], [8], page_size=page, scale=dim**-0.5)
    assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()
    for count in (1, 3):
        assert torch.equal(attend(count), out[:count])


@pytest.mark.usefixtures("aarch64")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("delta", [True, False])
def test_recurrent_layers_match_the_oracle_in_trees_and_steps(
    delta: bool, dtype: torch.dtype, tolerance: float
) -> None:
    parents = [-1, 0, 0, 1, 2, 3, 2]
    tokens = make_tokens(len(parents), dtype, delta=delta)
    slots, advance = torch.tensor([3]), torch.tensor([False])
    rows = RecurrentRows((len(parents),), slots, advance, torch.tensor(parents, dtype=torch.int32))
    outputs, expected = tokens.run(range(len(parents)), rows), tokens.true(range(len(parents)), 3, parents)
    torch.testing.assert_close(outputs[0].double(), expected[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(outputs[1].double(), expected[1], atol=1e-5, rtol=1e-4)
    assert equal(tokens.plain([0, 1, 3], 3), picked(outputs, [0, 1, 3]))
    torch.testing.assert_close(tokens.states[3].double(), expected[2][3], atol=1e-5, rtol=1e-4)
