"""Makes a head of the tensors that a trainer sends, checked against the head that is served."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from infer.engine import Engine
from models.heads.base import Head
from models.heads.files import head_of
from models.heads.weights import checkpoint_tensors, module_of

MOST_NAMED = 8  # tensors that an error lists


def read_candidate(engine: Engine, tensors: Mapping[str, Tensor]) -> Head:
    """Return the head of `engine` with these tensors of its checkpoint in place of its weights, on the CPU, not packed.

    An embedding that it shares with the target stays the target's. Raises ValueError for a tensor that is missing, of
    no part of the head, of another shape or dtype, or not finite.
    """
    served = engine.head
    assert served is not None
    with torch.device("meta"):
        layout = checkpoint_tensors(module_of(served.config.name).kind(served.config))
    wrong = sorted(layout.keys() ^ tensors.keys()) or [
        name
        for name, value in tensors.items()
        if (value.shape, value.dtype) != (layout[name].shape, layout[name].dtype) or not value.isfinite().all()
    ]
    if wrong:
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise ValueError(f"{', '.join(wrong[:MOST_NAMED])}{more}: not as this {served.config.name} head has them")
    where = {"dtype": engine.dtype, "device": "cpu", "target": engine.target}
    head = head_of(served.config, dict(tensors), source="candidate", **where)
    if getattr(served, "embed_tokens", None) is engine.target.embed_tokens:
        head.embed_tokens = engine.target.embed_tokens
    return head
