"""Checkpoints of a training run: parameters, optimiser, random state and position, in safetensors and JSON.

A checkpoint is one folder, written atomically. `latest` names the newest and is updated last, `best` the one with the
highest acceptance length, `stable` the one at which the decay of the learning rate began, from which a longer run
continues. Restoring a checkpoint continues the run bit for bit; one whose files have changed is refused, by the SHA-256
in its state. Knows only names and tensors of what is trained.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from train.storage import atomic

LATEST, BEST, STABLE = "latest", "best", "stable"
WITHOUT = {  # what the run does if there is no such checkpoint
    LATEST: "start the run anew",
    BEST: "go on without a best one",
    STABLE: "extend the run from its newest one",
}
ASIDE = "aside-"  # name prefix of a checkpoint whose step will be run again
FILES = ("module", "optimizer", "random")
DIGEST = "sha256"  # key of the state: of the files and of the rest of the state


class Trained(NamedTuple):
    """Full (unsharded) tensors of what is trained, whatever the parallel strategy."""

    module: dict[str, Tensor]  # trained parameters and persistent buffers, by name
    optimizer: dict[str, Tensor]  # by `<parameter>|<key>`


class Checkpoint(NamedTuple):
    trained: Trained
    random: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    folder: Path,
    step: int,
    trained: Trained,
    state: Mapping[str, Any],
    *,
    keep: int,
    best: bool = False,
    stable: bool = False,
) -> Path:
    """Write `folder`/step-NNNNNN; keep the newest `keep` checkpoints, and those marked `best` and `stable`."""
    path = folder / f"step-{step:06d}"
    with atomic.replace_folder(path) as staging:
        save_file(separate(trained.module), staging / "module.safetensors")
        save_file(separate(trained.optimizer), staging / "optimizer.safetensors")
        save_file(random_state(), staging / "random.safetensors")
        state = {"step": step, **state}
        atomic.write_text(staging / "state.json", json.dumps(state | {DIGEST: digest(staging, state)}, indent=2) + "\n")
    if best:
        atomic.write_text(folder / BEST, path.name + "\n")
    if stable:
        mark_stable(path)
    atomic.write_text(folder / LATEST, path.name + "\n")
    kept = {path, find_checkpoint(folder, BEST), find_checkpoint(folder, STABLE)}
    for old in [*sorted(folder.glob("step-*"))[:-keep], *folder.glob(f"{ASIDE}*")]:
        if old not in kept:
            atomic.discard(old)
    return path


def digest(path: Path, state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's files and state, as hexadecimal digits."""
    total = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
    for name in FILES:
        with (path / f"{name}.safetensors").open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def mark_stable(path: Path) -> None:
    atomic.write_text(path.parent / STABLE, path.name + "\n")


def return_to(path: Path) -> None:
    """Make `path` the newest checkpoint. Remove later ones, but keep the best under a name that no step will use."""
    folder = path.parent
    best = find_checkpoint(folder, BEST)
    if best is not None and best.name > path.name:
        aside = folder / f"{ASIDE}{best.name}"
        with atomic.replace_folder(aside) as staging:
            shutil.copytree(best, staging, dirs_exist_ok=True)
        atomic.write_text(folder / BEST, aside.name + "\n")
    atomic.write_text(folder / LATEST, path.name + "\n")
    for later in sorted(folder.glob("step-*")):
        if later > path:
            atomic.discard(later)


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies that share no memory, as safetensors requires."""
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}


def find_checkpoint(folder: Path, name: str = LATEST) -> Path | None:
    """Return the newest complete checkpoint, or the one of that name; None if there is none."""
    if not (folder / name).is_file():
        return None
    path = folder / (folder / name).read_text(encoding="utf-8").strip()
    if not path.is_dir():
        raise ValueError(f"{folder / name}: names {path.name}, which is not there; delete it to {WITHOUT[name]}")
    return path


def load_checkpoint(path: Path, expected: Mapping[str, Tensor]) -> Checkpoint:
    """Load what `save_checkpoint` wrote. Raises ValueError if that cannot be read, has changed since or is not of
    `expected` tensors.
    """
    state = read_state(path)
    written = state.pop(DIGEST, None)  # None: of a version that wrote none
    try:
        if written not in (None, digest(path, state)):
            raise ValueError("its files are not as they were written")
        module, optimizer, random = (load_file(path / f"{name}.safetensors") for name in FILES)
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: this checkpoint cannot be read ({error}); delete it") from error
    if module.keys() != expected.keys():
        names = sorted(module.keys() ^ expected.keys())
        raise ValueError(f"{path}: of another head; these tensors are on one side only: {', '.join(names[:8])}")
    return Checkpoint(Trained(module, optimizer), random, state)


def read_state(path: Path) -> dict[str, Any]:
    """Return the run state stored in a checkpoint. Raises ValueError if it cannot be read."""
    try:
        return json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: this checkpoint cannot be read ({error}); delete it") from error


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return trainable parameters and persistent buffers by name."""
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return {name: value.detach() for name, value in module.state_dict().items() if name not in frozen}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into a module that is not sharded."""
    current = module_tensors(module)
    with torch.no_grad():
        for name, value in tensors.items():
            current[name].copy_(value)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def gather_module(module: nn.Module) -> dict[str, Tensor]:
    """Return the full tensors of `module_tensors` of a module that may be sharded; a collective call."""
    from torch.distributed.checkpoint import state_dict as library  # takes a second to import

    options = library.StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    return cast(dict[str, Tensor], library.get_model_state_dict(module, options=options))


def gather_trained(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Trained:
    """Return the full state of a module, sharded or not, and of its parameters' optimisers; a collective call."""
    from torch.distributed.checkpoint import state_dict as library

    states: dict[str, Any] = {}
    for optimizer in optimizers:
        if optimizer.state:  # else no step was taken yet, and the library would take an empty one to make a state
            options = library.StateDictOptions(full_state_dict=True)
            states |= cast(Any, library.get_optimizer_state_dict(module, optimizer, options=options))["state"]
    tensors = {f"{name}|{key}": value for name, state in states.items() for key, value in state.items()}
    return Trained(gather_module(module), tensors)


def load_trained(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], trained: Trained) -> None:
    """Load a full state into a module, sharded or not, and its optimisers; a collective call."""
    from torch.distributed.checkpoint import state_dict as library

    options = library.StateDictOptions(full_state_dict=True, strict=False)  # frozen parameters are not in it
    library.set_model_state_dict(module, dict(trained.module), options=options)
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in trained.optimizer.items():
        name, _, slot = key.rpartition("|")
        states.setdefault(name, {})[slot] = value
    if states:
        current = library.get_optimizer_state_dict(module, optimizers)
        state = {"state": states, "param_groups": current["param_groups"]}
        library.set_optimizer_state_dict(module, optimizers, state, options=options)
        for name, parameter in trainable(module).items():
            if name not in states:  # not updated yet; the library has made a state by an empty step
                for optimizer in optimizers:
                    optimizer.state.pop(parameter, None)


def random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state |= {f"cuda.{index}": value for index, value in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    for name, value in state.items():
        if name.startswith("cuda.") and int(name[5:]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, int(name[5:]))
