"""The draft loops: one for each kind of head."""

from __future__ import annotations

from typing import Any

from infer.speculation.proposers.draft_loops.base import DraftLoop, RecurrentLoop
from infer.speculation.proposers.draft_loops.block import BlockLoop
from infer.speculation.proposers.draft_loops.mask import MaskLoop
from models.heads.base import Head, MaskHead, RecurrentHead
from models.heads.block import BlockHead

LOOPS: dict[type[Head], Any] = {RecurrentHead: RecurrentLoop, MaskHead: MaskLoop, BlockHead: BlockLoop}


def draft_loop(head: Head) -> DraftLoop:
    """Return the loop that drafts with a head, packed for serving."""
    return next(loop(head) for kind, loop in LOOPS.items() if isinstance(head, kind))
