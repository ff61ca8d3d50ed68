"""A draft model behind the interface of heads, so that the loops that draft with heads draft with it.

It reads no features of the target. Slot i holds token t[i+1], at position i + 1, and its state is the model's hidden
state there. Token ids outside are the target's; models/token_map.py says which of its own each of them is. A parallel
one (PARD, arXiv 2504.18583) drafts K tokens in one forward, from the last token and K - 1 rows of its mask token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.shape import FORBIDDEN
from kernels.weights.quantize import WeightFormat
from models.attention import Attention
from models.heads.base import Head, MaskHead, Readout, RecurrentHead
from models.heads.draft_model.config import DraftModelConfig
from models.heads.weights import HeadModule, Layout, draw_matrices, pack_layers
from models.layers import Linear
from models.targets import ARCHITECTURES
from models.targets.llama import LlamaTarget
from models.token_map import TokenMap, same_ids


class DraftModelHead(Head):
    """`target_ids`: of the draft model's ids; those that it must not draft are marked in `undrafted` `[Vd]`."""

    config: DraftModelConfig
    read: Tensor  # [V + 1] the draft model's id of each of the target's, after them the mask token
    drafted_ids: Tensor
    undrafted: Tensor | None

    def __init__(
        self, config: DraftModelConfig, model: LlamaTarget | None = None, tokens: TokenMap | None = None
    ) -> None:
        """`model`: the weights, if they are loaded; `tokens`: the maps, by default those of one vocabulary."""
        super().__init__()
        self.config = config
        self.model = ARCHITECTURES[config.model.architecture](config.model) if model is None else model
        for module in (self.model.embed_tokens, self.model.lm_head):
            module.requires_grad_(config.embed_requires_grad)
        tokens = tokens or same_ids(config.vocab_size, config.model.vocab_size)
        read = torch.cat([tokens.read, tokens.read.new_tensor([config.mask_token or 0])])
        buffers = {"read": read, "drafted_ids": tokens.target_ids, "undrafted": tokens.undrafted}
        for name, values in buffers.items():
            values = None if values is None else values.to(self.model.norm.weight.device)
            self.register_buffer(name, values, persistent=False)

    @classmethod
    def of(
        cls, model: LlamaTarget, vocab_size: int, tokens: TokenMap | None = None, mask_token: int | None = None
    ) -> DraftModelHead:
        """Return a loaded model as the draft model of a target with `vocab_size` rows; parallel with a `mask_token`."""
        config = DraftModelConfig(model.config, vocab_size, 0, mask_token)
        return (RecurrentDraftModel if mask_token is None else MaskDraftModel)(config, model, tokens)

    @property
    def target_ids(self) -> Tensor:
        return self.drafted_ids

    @property
    def num_drafted(self) -> int:
        """Number of tokens that it may draft."""
        return len(self.drafted_ids) - (0 if self.undrafted is None else int(self.undrafted.sum()))

    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        (features,) = aux
        return features[..., :0]

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        # In a batch, rows of a request whose context ends are computed as deep as those of others, and not used.
        positions = (positions + 1).clamp(max=self.config.model.max_position_embeddings - 1)
        return self.model(self.read[ids], positions, attention).hidden

    def readout(self, depth: int) -> Readout:
        return Readout(self.model.lm_head)

    def logits(self, state: Tensor, depth: int) -> Tensor:
        logits = self.model.logits(state)
        return logits if self.undrafted is None else logits.masked_fill(self.undrafted, FORBIDDEN)


class RecurrentDraftModel(DraftModelHead, RecurrentHead):
    """One that drafts token by token."""


class MaskDraftModel(DraftModelHead, MaskHead):
    def mask_slot(self) -> tuple[int, Tensor]:
        return self.config.vocab_size, self.model.norm.weight[:0]


def pack(head: DraftModelHead, *, exact: bool, weight_format: WeightFormat) -> None:
    """As of other heads. Weights that were loaded in blocks or groups stay so, and their rows are quantized too."""
    for module in head.modules():
        if isinstance(module, Linear) and module.packed is not None:
            module.packed.quantize_rows()
    try:
        pack_layers(head, exact=exact, weight_format=weight_format)
    except ValueError as error:
        raise ValueError(str(error).replace("engine.head_weights", "engine.draft_weights")) from error


def initialize(head: DraftModelHead, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """Initialize with the target's embedding, first layers, norm and LM head, or at random."""
    if not from_target:
        return draw_matrices(head, seed)
    donor = dict(target.named_parameters())
    for name, parameter in head.model.named_parameters():
        parameter.copy_(donor[name])


def layout(head: DraftModelHead) -> Layout:
    """Return the names of a target's tensors."""
    names = head.model.checkpoint_layout()
    return {name: names[name.removeprefix("model.")] for name, _ in head.named_parameters()}


HEAD = HeadModule(RecurrentDraftModel, initialize, pack, layout)
