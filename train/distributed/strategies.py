"""The optimisers of a run, and parallel strategies: how the head's parameters and their state are placed in training.

    single, ddp    replicated in every process, through accelerate
    fsdp           sharded by torch's `fully_shard`, gathered for each forward and backward. Accelerate's own FSDP is
                   not used: on a CPU it silently trains plain DDP instead
    zero2, zero3   DeepSpeed through accelerate: optimiser state and gradients sharded, with zero3 the parameters too

Checkpoints are independent of the strategy: `state` gathers full tensors by name, `load` shards them again. A head is
small compared with its target, so sharding it helps only where it does not fit; it is never selected automatically.

Muon (arXiv 2502.16982) orthogonalises the momentum of a matrix, so that an update changes all directions alike. It is
meant for maps between hidden states: embeddings, maps to the vocabulary, norms, biases and tensors of other shapes are
left to AdamW.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from models.heads import HEADS
from models.heads.base import Head
from models.heads.weights import checkpoint_layout
from models.weights import rows_of_parts
from train import checkpoint
from train.checkpoint import Trained
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
    outputs = tuple(f"{name}." for name in HEADS[head.config.name].output_layers)
    layout = checkpoint_layout(head)
    matrices: dict[nn.Parameter, list[int]] = {}
    linear = {f"{name}.weight" for name, module in head.named_modules() if isinstance(module, nn.Linear)}
    for name, weight in head.named_parameters():
        if name in linear and not name.startswith(outputs) and weight.requires_grad and min(weight.shape) > 1:
            matrices[weight] = rows_of_parts(len(weight), len(layout[name]), head.config.projected_heads)
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


class Replicated:
    """The replicated strategy, which keeps everything in every process; also the interface of all strategies."""

    fused_optimizer = True  # one pass over each parameter; on a CPU nine times as fast as several

    def __init__(self, accelerator: Accelerator, objective: Objective, optim: OptimConfig, rate: float) -> None:
        self.accelerator, self.plain, self.clip = accelerator, objective, optim.clip
        self._make_optimizers = partial(make_optimizers, objective, optim, rate, fused=self.fused_optimizer)
        self.objective: Any
        self.optimizers: Sequence[Any]
        self._prepare()

    def _prepare(self) -> None:
        self.objective, *self.optimizers = self.accelerator.prepare(self.plain, *self._make_optimizers())

    @property
    def head(self) -> Head:
        """The head with full, current parameters, if `collect` was called since the last update."""
        return self.plain.head

    @property
    def measured(self) -> Objective:
        """The objective around `head`, for evaluation on one process."""
        return self.plain

    def collect(self) -> None:
        """Update `head` to the trained parameters. Call it on every process, before one of them evaluates."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run backward, averaging gradients over processes; `last` marks the last micro-batch of an update."""
        self.accelerator.backward(loss)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context for forward and backward of a micro-batch."""
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.objective)

    def update(self, rate: float, *, sound: bool) -> float:
        """Take one optimiser step with clipped gradients; return the gradient norm before clipping.

        If `sound` is false or that norm is not finite, nothing changes and the gradients are dropped. All processes
        decide alike.
        """
        norm = self._clip()
        if sound and math.isfinite(norm):
            self._set_rate(rate)
            for optimizer in self.optimizers:
                optimizer.step()
        self.drop()
        return norm

    def drop(self) -> None:
        """Discard the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def rehearse(self) -> None:
        """Take the time of an update, before the first one, and change nothing."""
        self.update(0.0, sound=True)
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def state(self) -> Trained:
        """Return the full state. Call it on every process."""
        return checkpoint.gather_trained(self.plain.head, self.optimizers)

    def load(self, state: Trained) -> None:
        """Load the full state. Call it on every process."""
        checkpoint.load_trained(self.plain.head, self.optimizers, state)

    def close(self, *, together: bool) -> None:
        """Release resources after the last use. `together`: every process calls this, at the same point."""

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._groups() for parameter in group["params"]]

    def _clip(self) -> float:
        return float(self.accelerator.clip_grad_norm_(self._parameters(), self.clip) or 0.0)

    def _set_rate(self, rate: float) -> None:
        for group in self._groups():
            group["lr"] = rate


class Sharded(Replicated):
    """Base of the sharded strategies: a second, full copy of the head is what is evaluated and saved."""

    fused_optimizer = False

    def __init__(self, accelerator: Accelerator, objective: Objective, optim: OptimConfig, rate: float) -> None:
        self._copy = copy.deepcopy(objective)
        super().__init__(accelerator, objective, optim, rate)

    @property
    def head(self) -> Head:
        return self._copy.head

    @property
    def measured(self) -> Objective:
        return self._copy

    def collect(self) -> None:
        checkpoint.load_module(self._copy.head, self._module())

    def _module(self) -> dict[str, Tensor]:
        """Return the full tensors of the head; a collective call."""
        return checkpoint.gather_module(self.plain.head)


class FullyShard(Sharded):
    def _prepare(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
        self._sharded: Any = fully_shard(self.plain, mesh=mesh)
        self.objective, self.optimizers = self._in_autocast, self._make_optimizers()

    def _in_autocast(self, *inputs: Any) -> Any:
        with self.accelerator.autocast():
            return self._sharded(*inputs)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        self._sharded.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def _clip(self) -> float:
        norm: Any = nn.utils.clip_grad_norm_(self._parameters(), self.clip)
        return float(norm.full_tensor())


class Zero(Sharded):
    def _prepare(self) -> None:
        super()._prepare()
        self._engine: Any = self.objective
        self._load_optimizer({})  # the step of DeepSpeed's initialization must not count as one of ours

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        self._engine.backward(loss)

    def update(self, rate: float, *, sound: bool) -> float:
        """As in the base class. DeepSpeed computes the norm only in its step, which it skips if that is not finite."""
        if not sound:
            self.drop()
            return math.nan
        self._set_rate(rate)
        self._engine.step()
        return float(self._engine.get_global_grad_norm() or 0.0)

    def drop(self) -> None:
        self._engine.optimizer.zero_grad()

    rehearse = drop  # a step of DeepSpeed's cannot be undone

    def close(self, *, together: bool) -> None:
        self._engine.destroy()  # without it a process may abort on exit, after all work is done
        if together:
            self.accelerator.wait_for_everyone()

    def _module(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        tensors = checkpoint.module_tensors(self.plain.head)
        for name, parameter in checkpoint.trainable(self.plain.head).items():
            tensors[name] = present(safe_get_full_fp32_param(parameter))
        return tensors

    def state(self) -> Trained:
        from deepspeed.utils import safe_get_full_optimizer_state

        tensors = {}
        step = next(iter(self._base_optimizer.state.values()))["step"]
        for name, parameter in checkpoint.trainable(self.plain.head).items():
            tensors[f"{name}|step"] = step.detach().clone()
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{name}|{key}"] = present(safe_get_full_optimizer_state(parameter, key))
        return Trained(self._module(), tensors)

    def load(self, state: Trained) -> None:
        import deepspeed

        parameters = checkpoint.trainable(self.plain.head)
        checkpoint.load_module(self.plain.head, {n: v for n, v in state.module.items() if n not in parameters})
        for name, parameter in parameters.items():
            value = state.module[name].to(self.accelerator.device)
            set_full(parameter, value)  # what is updated; below, what the next forward reads
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)
        self._load_optimizer(state.optimizer)

    def _load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors and not self._base_optimizer.state:  # ZeRO-2 creates it in its first step
            flat = getattr(self._engine.optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO-3's partitions
            for part in flat or [part for group in self._base_optimizer.param_groups for part in group["params"]]:
                moments = {key: torch.zeros_like(part) for key in ("exp_avg", "exp_avg_sq")}
                self._base_optimizer.state[part] = {"step": torch.tensor(0.0), **moments}
            if flat is None:
                self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in checkpoint.trainable(self.plain.head).items():
            for key in ("exp_avg", "exp_avg_sq"):
                value = tensors.get(f"{name}|{key}")
                if value is not None:
                    set_full(parameter, value.to(self.accelerator.device), key)
        step = next((value for key, value in tensors.items() if key.endswith("|step")), torch.tensor(0.0))
        for values in self._base_optimizer.state.values():
            values["step"] = step.clone()

    @property
    def _base_optimizer(self) -> torch.optim.Optimizer:
        return self._engine.optimizer.optimizer


PLACEMENTS: dict[str, type[Replicated]] = {
    "single": Replicated, "ddp": Replicated, "fsdp": FullyShard, "zero2": Zero, "zero3": Zero,
}  # fmt: skip


def set_full(parameter: Any, value: Tensor, key: str | None = None) -> None:
    """Set a parameter in fp32 under DeepSpeed, or with `key` its optimiser state, from the full tensor.

    ZeRO-3 pads parameters that do not divide evenly among processes, which DeepSpeed's own `safe_set_full_*` ignore.
    """
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):  # ZeRO-2
        if key is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)
        return
    size, ranks = parameter.ds_tensor.numel(), torch.distributed.get_world_size()
    padded = nn.functional.pad(value.flatten(), (0, size * ranks - value.numel()))
    part = padded.narrow(0, size * torch.distributed.get_rank(), size)
    if key is None:
        utils.safe_set_local_fp32_param(parameter, part)
    else:
        utils.safe_set_local_optimizer_state(parameter, part, key)


def present(value: Tensor | None) -> Tensor:
    assert value is not None, "DeepSpeed holds no such tensor"
    return value.detach().clone()
