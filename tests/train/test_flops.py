"""FLOPs of a head, compared with a count from its sizes."""

from __future__ import annotations

import pytest

from models.targets.llama import LlamaTarget
from tests.heads import make_head
from train.step_clock import head_flops

H, F, V, VD = 64, 128, 384, 200  # of the tiny target and its draft vocabulary
ATTENTION = 2 * 64 * 2 * 2  # scores and values of one key: counted too, but negligible here


@pytest.mark.parametrize(
    ("variant", "once", "layer", "speech"),
    [
        # fc once; then at each of three depths qkv (4 heads and 2 + 2 of 16), o, gate, up and down
        ("eagle3", 3 * H * H, 2 * H * 128 + H * H + 3 * H * F, H * VD),
        ("eagle", 0, 2 * H * H + H * 128 + H * H + 3 * H * F, H * V),
        ("medusa", 0, 0, H * H + H * V),
    ],
)
def test_a_token_and_a_slot(variant: str, once: int, layer: int, speech: int, tiny_target: LlamaTarget) -> None:
    """Later depths run on slots that are compared with the teacher, not on every token."""
    flops = head_flops(make_head(tiny_target, variant), 3)
    slack = 3 * 4 * ATTENTION * bool(layer)
    assert flops.per_slot == pytest.approx(3 * 2 * (speech + layer * 2 / 3), abs=slack)
    assert flops.per_token == pytest.approx(3 * 2 * (once + layer), abs=slack)
    assert flops.step(10, 4) == 10 * flops.per_token + 4 * flops.per_slot
