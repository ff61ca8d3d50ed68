"""P-EAGLE head (arXiv 2602.01469): EAGLE-3's layers, drafting all tokens in one forward.

The row of depth 0 is EAGLE-3's: token t[i+1] and the fused features f[i], at rotary position i. The row of each further
depth d holds the mask token and a learnt state, at position i + d. It attends to what the rows before it attend to, and
to those rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.heads.base import MaskHead
from models.heads.eagle3 import head as eagle3
from models.heads.p_eagle.config import PEagleConfig
from models.heads.weights import HeadModule
from models.targets.llama import LlamaTarget


class PEagleHead(eagle3.Eagle3Layers, MaskHead):
    """`mask_hidden` `[1, 1, A * Ht]` stands in for the target features, which rows past depth 0 do not have."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))

    def mask_slot(self) -> tuple[int, Tensor]:
        state = self.fuse(self.mask_hidden.chunk(len(self.config.aux_layers), dim=-1))
        return self.config.mask_token_id, state[0, 0]


def initialize(head: PEagleHead, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    eagle3.initialize(head, target, from_target=from_target, seed=seed)
    head.mask_hidden.normal_(generator=torch.Generator().manual_seed(seed + 1))


HEAD = HeadModule(PEagleHead, initialize)
