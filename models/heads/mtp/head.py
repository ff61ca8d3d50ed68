"""MTP modules (DeepSeek-V3, arXiv 2412.19437): EAGLE-1 with a norm of each input and the target's kind of layer.

A step takes, at slot i, the embedding of token t[i+1] and the target's hidden state at position i or, deeper in a
draft, the state of the step before. Embedding and LM head are the target's. Of several modules each depth uses one;
the others only keep keys and values of what it reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.draft import DraftParts
from models.attention import Attention
from models.decoder import DecoderLayer, draft_parts_of
from models.heads.base import Readout
from models.heads.eagle.head import FeatureHead
from models.heads.mtp.config import MtpConfig
from models.heads.mtp.formats import find_shipped, open_shipped
from models.heads.weights import HeadModule, checkpoint_layout, draw_matrices
from models.layers import Linear, RMSNorm
from models.targets import ARCHITECTURES
from models.targets.llama import LlamaTarget
from models.weights import load_into


class MtpModule(DecoderLayer):
    """A decoder layer, of the target's kind if it has experts, over the projection of token and state; and its norm."""

    def __init__(self, config: MtpConfig, index: int) -> None:
        layer, self.hidden_first = config.layer, config.hidden_first
        block: Any = ARCHITECTURES[layer.architecture].make_layer(layer, index)
        super().__init__(layer, index, block.mlp, block.self_attn)
        norm = partial(RMSNorm, layer.hidden_size, layer.norm_eps, centered=layer.centered_norms)
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = norm(), norm(), norm()
        self.input_proj = Linear(2 * layer.hidden_size, layer.hidden_size, bias=False)

    def join(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return the layer's input `[..., H]`, from embeddings and states `[..., H]`."""
        parts = [self.token_layernorm(embedded), self.hidden_layernorm(state)]
        return self.input_proj(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1)).to(state.dtype)


class MtpHead(FeatureHead):
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        self.mtp_layers = nn.ModuleList(MtpModule(config, index) for index in range(config.layer.num_layers))

    def module(self, depth: int) -> MtpModule:
        layer = self.mtp_layers[depth % len(self.mtp_layers)]
        assert isinstance(layer, MtpModule)
        return layer

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        embedded, module = self.borrowed.embed(ids).to(state.dtype), self.module(depth)
        if self.config.zero_first:
            embedded = embedded.masked_fill((positions == 0).unsqueeze(-1), 0)
        rotary = self.rotary.rows(positions, state.dtype)
        for other in map(self.module, range(len(self.mtp_layers))):
            if other is not module:
                other.self_attn(other.input_layernorm(other.join(embedded, state)), rotary, attention)
        x, norm = module.join(embedded, state), module.final_layernorm if self.config.norm_recycled else None
        if len(self.mtp_layers) == 1:
            decode = self._fused_decoder.over(attention, self.mtp_layers, norm, packed=self._is_packed)
            if decode:
                return decode(x, rotary)[0]
        x = module(x, rotary, attention)
        return x if norm is None else norm(x)

    @property
    def _is_packed(self) -> bool:
        return self.module(0).input_proj.packed is not None

    def readout(self, depth: int) -> Readout:
        lm_head = self.borrowed.lm_head
        return Readout(lm_head) if self.config.norm_recycled else Readout(lm_head, self.module(depth).final_layernorm)

    def draft_parts(self) -> DraftParts | None:
        if len(self.mtp_layers) > 1:
            return None
        module, recycled = self.module(0), self.config.norm_recycled
        norm = module.final_layernorm
        decoder = self._fused_decoder.decoder(self.mtp_layers, norm if recycled else None, packed=self._is_packed)
        return draft_parts_of(
            self,
            decoder,
            self.borrowed.embedding,
            self.borrowed.lm_head,
            joined=module.input_proj.packed,
            norm=None if recycled else norm.weight,
            token_norm=module.token_layernorm.weight,
            state_norm=module.hidden_layernorm.weight,
            state_first=self.config.hidden_first,
            zero_first=self.config.zero_first,
        )


def initialize(head: MtpHead, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """Initialize at random; with `from_target` as the modules that the target ships, if it ships any.

    Otherwise each module is its last layer, over the state alone, and its final norm.
    """
    draw_matrices(head, seed)
    for name, parameter in head.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    if not from_target:
        return
    if target.config.mtp_modules and find_shipped(target.folder)[1]:
        return load_into(head, open_shipped(target.folder), checkpoint_layout(head), source=str(target.folder))
    size, donor = head.config.hidden_size, target.attention_layers[-1]
    weights = dict(donor.named_parameters())
    for layer in head.mtp_layers:
        assert isinstance(layer, MtpModule)
        for name, parameter in layer.named_parameters():
            if name in weights and weights[name].shape == parameter.shape:
                parameter.copy_(weights[name])
        norms = (layer.input_layernorm, donor.input_layernorm), (layer.post_attention_layernorm, donor.forward_norm)
        for norm, like in (*norms, (layer.final_layernorm, target.norm)):
            norm.weight.copy_(like.scale - int(norm.centered))
        states = layer.input_proj.weight[:, :size] if head.config.hidden_first else layer.input_proj.weight[:, size:]
        states.copy_(torch.eye(size))


HEAD = HeadModule(MtpHead, initialize)
