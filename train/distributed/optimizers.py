"""The optimisers of a run: AdamW for everything, or Muon for the matrices of hidden layers and AdamW for the rest.

Muon (arXiv 2502.16982) orthogonalises the momentum of a matrix, so that an update changes all directions alike. It is
meant for maps between hidden states: embeddings, maps to the vocabulary, norms, biases and tensors of other shapes are
left to AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.heads import HEADS
from models.heads.base import Head
from models.heads.weights import checkpoint_layout
from models.weights import rows_of_parts
from train.config import MuonConfig, OptimConfig
from train.objectives.base import Objective


def make_optimizers(
    objective: Objective, config: OptimConfig, rate: float, *, fused: bool
) -> list[torch.optim.Optimizer]:
    """Return one optimiser, or with optim=muon two, that share the trained parameters and take their steps together.

    fused: AdamW may update a parameter in one pass over it.
    """
    groups = objective.parameter_groups()
    optimizers: list[torch.optim.Optimizer] = []
    if isinstance(config, MuonConfig):
        parts = hidden_matrices(objective.head)
        matrices = selected(groups, lambda parameter: parameter in parts)
        groups = selected(groups, lambda parameter: parameter not in parts)
        if matrices:
            optimizers.append(
                PartwiseMuon(
                    matrices,
                    parts,
                    lr=rate,
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
    if groups:
        on_cpu = next(objective.head.parameters()).device.type == "cpu"
        optimizers.append(
            torch.optim.AdamW(
                groups,
                lr=rate,
                betas=(config.betas[0], config.betas[1]),
                weight_decay=config.weight_decay,
                fused=True if fused and on_cpu else None,  # None: torch's default for the device
            )
        )
    return optimizers


def selected(groups: Sequence[dict[str, Any]], wanted: Callable[[nn.Parameter], bool]) -> list[dict[str, Any]]:
    """Return the parameter groups with only the wanted parameters, without groups that have none."""
    chosen = [group | {"params": [*filter(wanted, group["params"])]} for group in groups]
    return [group for group in chosen if group["params"]]


def hidden_matrices(head: Head) -> dict[nn.Parameter, list[int]]:
    """Return the trained weights of linear layers between hidden states, with the rows of each matrix merged in them.

    A layer with one output or input has a vector, which is none.
    """
    attention, outputs = head.config.attention, tuple(f"{name}." for name in HEADS[head.config.name].output_layers)
    heads = (1, 1) if attention is None else (attention.num_heads, attention.num_kv_heads)
    layout = checkpoint_layout(head)
    matrices: dict[nn.Parameter, list[int]] = {}
    linear = {f"{name}.weight" for name, module in head.named_modules() if isinstance(module, nn.Linear)}
    for name, weight in head.named_parameters():
        if name in linear and not name.startswith(outputs) and weight.requires_grad and min(weight.shape) > 1:
            matrices[weight] = rows_of_parts(len(weight), len(layout[name]), heads)
    return matrices


class PartwiseMuon(torch.optim.Muon):
    """torch's Muon, which treats the matrices that are merged in one parameter (QKV, gate and up) each for itself.

    parts: the rows of each matrix of a parameter. State and checkpoints stay those of the merged parameter.
    """

    def __init__(self, params: Any, parts: dict[nn.Parameter, list[int]], **settings: Any) -> None:
        self._parts = parts
        super().__init__(params, **settings)

    def _init_group(
        self,
        group: MutableMapping[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        """Collect views of parameters, gradients and momenta, which the update changes in place."""
        merged: Sequence[list[Tensor]] = ([], [], [])
        is_complex = super()._init_group(group, *merged)
        for tensors in zip(*merged, strict=True):
            rows = self._parts[cast(nn.Parameter, tensors[0])]
            for views, tensor in zip((params_with_grad, grads, muon_momentum_bufs), tensors, strict=True):
                views.extend(tensor.split(rows))
        return is_complex
