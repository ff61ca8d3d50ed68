"""What tests/gpu_check times with CUDA graphs, on a simulated device: that it can be captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infer.batch.tree import DraftTree
from tests.kernels.triton import measure_learning, measure_scaling, targets
from tests.kernels.triton.measure_engines import TOKENS
from tests.kernels.triton.measure_scaling import RATES, SYSTEMS, Coins
from tests.simulated_cuda.machine import Machine

HOST, DEVICE = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def on_device(cuda: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are made on the host, and served on the device."""
    made = targets.randomised
    monkeypatch.setattr(
        targets, "randomised", lambda kind, config, dtype, _: made(kind, config, dtype, HOST).to(DEVICE)
    )
    for module in (measure_learning, measure_scaling):
        monkeypatch.setattr(module, "DEVICE", DEVICE)


@pytest.mark.parametrize("exact", [True, False])
def test_coins_are_captured_with_and_without_exactness(on_device: None, exact: bool) -> None:
    with measure_scaling.made_pair() as pair:
        served = pair.serves(exact=exact)
        assert served.products == ("Triton" if exact else "torch")
        pair.coins.set(1.0)
        for system in SYSTEMS if exact else ("plain", "chain"):
            found = served.tokens_per_s(system, 1)
            assert served.engine.graphs is not None
            assert served.engine.stats.proposer_failures == 0
            assert found["tau"] == TOKENS - 1 or system != "chain"  # all but that of the prompt in one round


@pytest.mark.parametrize("rate", RATES.values())
def test_coins_fall_at_the_rate(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    monkeypatch.setattr(measure_scaling, "CHOOSE", lambda rows, tree, *_: torch.full_like(tree.token, -1))
    coins, slots, depth = Coins(HOST), torch.arange(1, 65), 63
    coins.set(rate)
    token = torch.arange(64 * depth).view(64, depth)
    tree = DraftTree.chain(slots, token, torch.full_like(slots, depth))
    rows: Any = SimpleNamespace(slots=slots)
    choice = coins.choose(rows, tree, slots, (torch.arange(depth + 1) + 7 * slots[:, None]).flatten())
    agreed = choice[:, :-1] == token
    assert (choice[:, -1] == -1).all()
    assert agreed.float().mean() == pytest.approx(rate, abs=0.03)
    both = (agreed[:, 1:] & agreed[:, :-1]).float().mean()
    assert both == pytest.approx(rate**2, abs=0.03)  # one after another they are independent


def test_learning_is_refused_with_graphs_and_goes_on_without(on_device: None) -> None:
    lines = []
    with measure_learning.made_engine() as engine:
        measure_learning.measure_refusal(engine, lambda place, line: lines.append(line))
        for graphs in ("on", "off"):
            measure_learning.measure_recorded_rounds(engine, lambda place, line: lines.append(line), graphs, 1)
        measure_learning.measure_take_over(engine, lambda place, line: lines.append(line))
    assert [line["graphs"] for line in lines[:3]] == ["on", "on", "off"]
    assert lines[3]["head_bytes"] > 0
