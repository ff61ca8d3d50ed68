"""Training on drafts of the head: the target's states on a branch are those of the branch's sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.attention import CausalAttention
from models.targets import load_target
from models.targets.llama import LlamaTarget
from tests.train.conftest import write_family
from tests.train.test_family_heads import FAMILIES
from train.data.sequences import Batch, Sequences
from train.features.online import branch_states, compute_features, features_in_context
from train.objectives import alignment


@pytest.fixture(scope="module")
def batches(responses: Sequences) -> list[Batch]:
    """Two rows with padding, and rows of several documents."""
    return [responses.batch([0, 5]), responses.packed([[0, 3], [5]])]


def sequence_of(batch: Batch, row: int, slot: int, drafted: Tensor) -> Tensor:
    """Return the document of a slot up to the token that it reads, and the tokens drafted behind it, `[1, L]`."""
    first = 0 if batch.starts is None else int(batch.starts[row, slot])
    return torch.cat([batch.ids[row, first : slot + 2], drafted])[None]


def last_state(target: LlamaTarget, ids: Tensor) -> Tensor:
    return target(ids, torch.arange(ids.shape[1])[None], CausalAttention()).hidden[0, -1]


@pytest.mark.parametrize("family", [None, "gemma", "gpt oss", "deepseek v3", "opt"])
@torch.no_grad()
def test_the_target_on_a_branch_is_the_target_on_its_sequence(
    family: str | None, tiny_target: LlamaTarget, batches: list[Batch], tmp_path: Path
) -> None:
    target = tiny_target
    if family is not None:  # windows, sinks, latents, learned positions
        kind, options = FAMILIES[family]
        target = load_target(str(write_family(kind, tmp_path, **options)))
    for batch in batches:
        features = features_in_context(target, batch, (2,))
        expected = compute_features(target, batch, (2,))
        assert torch.equal(features.aux[0], expected.aux[0])
        assert torch.equal(features.hidden, expected.hidden)
        slots = torch.stack([served.nonzero()[[0, 7, -4], 0] for served in alignment.served(batch.assistant)])
        tokens = torch.randint(1, 384, (*slots.shape, 3), generator=torch.Generator().manual_seed(0))
        assert features.context is not None
        hidden = branch_states(features.context, batch, slots, tokens)
        for row, column, depth in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(3)).tolist():
            ids = sequence_of(batch, row, int(slots[row, column]), tokens[row, column, : depth + 1])
            assert torch.allclose(hidden[row, column, depth], last_state(target, ids), atol=2e-5), (row, column, depth)
