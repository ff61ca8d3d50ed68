"""The assembler fuses no product with a sum that kernels round apart; where it does, an engine does not start."""

from __future__ import annotations

import pytest

from infer.processes.exactness import probe_exactness
from kernels.triton import assembler
from tests.device import DEVICE
from tests.kernels.triton.compiled import NEWEST, OLDEST, compile_in_new_process
from tests.kernels.triton.rounding_launches import PROBE

MODULE = "tests.kernels.triton.rounding_launches"
# Each Triton brings two assemblers, one of them for Blackwell (from 100 on). CUDA 12.9's fuses on packed numbers.
ASSEMBLERS = {(OLDEST, 80): False, (OLDEST, 100): True, (OLDEST, 120): True, (NEWEST, 90): False, (NEWEST, 100): False}


@pytest.mark.sources("kernels", "tests/kernels/triton/compiled.py", "tests/kernels/triton/launches.py")
@pytest.mark.parametrize(("triton", "capability"), ASSEMBLERS)
def test_nothing_that_rounds_twice_is_fused_unless_the_probe_is(triton, capability):
    """Counted in machine code, as PTX does not show it."""
    compiled = compile_in_new_process(MODULE, capability, triton=triton)
    counts = {(case, kernel["kernel"]): kernel["fused"] for case, launched in compiled.items() for kernel in launched}
    probed = counts.pop((PROBE, "multiply_add"))
    assert len(counts) >= 18
    assert (probed > 0) == ASSEMBLERS[triton, capability]
    assert {place: count for place, count in counts.items() if count and not probed} == {}
    assert not probed or sum(map(bool, counts.values())) >= 8, "what the probe is asked for"


@pytest.mark.gpu
def test_this_machines_assembler_rounds_twice(in_triton):
    assert not assembler.contracts(DEVICE)


def test_an_engine_does_not_start_on_an_assembler_that_fuses(in_triton, monkeypatch):
    """The device's answer is that of a fused instruction; everything else is as at a start."""

    def fused(x, factor, summand):
        return (x.double() * factor + summand).float()

    monkeypatch.setattr(assembler, "launch_multiply_add", fused)
    with pytest.raises(ValueError, match=r"engine.exact=true: ptxas [\d.]+, .* fuses .*'triton>=3.7'.*exact=false"):
        assembler.assert_not_contracted(DEVICE)
    shard = type("Shard", (), {"device": DEVICE})
    with pytest.raises(ValueError, match="TRITON_PTXAS_BLACKWELL_PATH"):
        probe_exactness(shard, None)  # pyright: ignore
