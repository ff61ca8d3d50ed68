"""The training of a target (pretrain_demo.py): schedule, optimisers, checkpoints, and a resumable loop.

The learning rate is constant after a warm-up and then cools down linearly. Until the cool-down begins the trajectory
does not depend on `steps`, so a stopped run can be resumed with another length. Muon trains the layers' matrices, AdamW
everything else (both from torch.optim). This module does not depend on where batches come from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from torch import Tensor, nn
from tqdm import tqdm

from infer.config_checks import resolve_path
from infer.options.literal_text import literal_overrides
from models.targets.llama import LlamaTarget
from train.checkpoint import Trained, latest_checkpoint, load_checkpoint, module_tensors, save_checkpoint
from train.signals import StopRequest

Optimizers = Sequence[torch.optim.Optimizer]
RECENT = 100  # steps over which the printed training loss is averaged


@dataclass
class LoopConfig:
    """The configuration keys that all these scripts share."""

    batch_tokens: int = 4096
    steps: int = 1760
    warmup: int = 60
    cooldown: float = 0.4  # share of the steps
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.02
    seed: int = 0
    eval_every: int = 200
    checkpoint_every: int = 100
    threads: int = 0  # 0 = torch's default
    compile: bool = False
    folder: str = "outputs/pretraining"  # checkpoints and metrics.jsonl
    export: str = "outputs/target"


FREE_ON_RESUME = {"steps", "cooldown", "eval_every", "checkpoint_every", "threads", "compile", "folder", "export"}
C = TypeVar("C", bound=LoopConfig)


def read_config(schema: type[C], argv: Sequence[str], doc: str | None) -> C:
    """Parse key=value arguments; -h prints `doc` and the keys. Raises SystemExit with a message that names the key."""
    structured = OmegaConf.structured(schema)
    if {"-h", "--help"} & set(argv):
        print(doc)
        print("Options, key=value:\n" + OmegaConf.to_yaml(structured))
        raise SystemExit(0)
    try:
        return OmegaConf.to_object(OmegaConf.merge(structured, OmegaConf.from_dotlist(literal_overrides(argv, schema))))  # type: ignore[return-value]
    except MissingMandatoryValue as error:
        raise SystemExit(f"error: {error.full_key} must be given, as {error.full_key}=...") from error
    except (OmegaConfBaseException, ValueError) as error:
        raise SystemExit(f"error: {error}\nkeys: {', '.join(structured)}") from error


def make_optimizers(model: LlamaTarget, config: LoopConfig) -> list[torch.optim.Optimizer]:
    inner = [(p.ndim == 2 and not n.startswith(("embed_tokens", "lm_head")), p) for n, p in model.named_parameters()]
    matrices, others = ([p for is_matrix, p in inner if is_matrix == wanted] for wanted in (True, False))
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay)
    adamw = torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def learning_rate_factor(step: int, config: LoopConfig) -> float:
    if step < config.warmup:
        return (step + 1) / config.warmup
    return min(1.0, (config.steps - step) / max(1, config.cooldown * config.steps))


def state_of(optimizers: Optimizers) -> dict[str, Tensor]:
    """Return the optimisers' state as `<optimiser>|<parameter>|<key>` -> tensor."""
    return {
        f"{index}|{parameter}|{key}": value
        for index, optimizer in enumerate(optimizers)
        for parameter, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def resume(path: Path, model: LlamaTarget, optimizers: Optimizers, config: LoopConfig, free: set[str]) -> int:
    """Load model and optimisers and return the checkpoint's step.

    Raises SystemExit if a key outside `free` differs from the checkpoint's configuration.
    """
    checkpoint = load_checkpoint(path, module_tensors(model))
    saved = checkpoint.state["config"]
    for key, value in asdict(config).items():
        if key not in free and saved.get(key) != value:
            raise SystemExit(f"error: {key}={value} but {path} was made with {saved.get(key)}; use another folder=")
    model.load_state_dict(checkpoint.trained.module)
    states = [optimizer.state_dict() for optimizer in optimizers]
    for name, value in checkpoint.trained.optimizer.items():
        index, parameter, key = name.split("|")
        states[int(index)]["state"].setdefault(int(parameter), {})[key] = value
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    return checkpoint.state["step"]


def run_steps(
    config: LoopConfig,
    model: LlamaTarget,
    loss_at: Callable[[int], Tensor],
    measure: Callable[[], dict[str, Any]],
    *,
    free: set[str] = FREE_ON_RESUME,
) -> float | None:
    """Train to config.steps, resuming from the folder's checkpoint if there is one.

    SIGTERM and SIGINT stop the loop after writing a checkpoint, a second one at once. `loss_at(step)` returns the mean
    loss of that step's batch and is called under autocast. `measure()` returns held-out metrics, including `held_out`.
    Returns the mean training loss of the last RECENT steps, or None when stopped.
    """
    folder = resolve_path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    optimizers = make_optimizers(model, config)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peak = [group["lr"] for group in groups]
    checkpoints, step = folder / "checkpoints", 0
    if (latest := latest_checkpoint(checkpoints)) is not None:
        step = resume(latest, model, optimizers, config, free)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        print(f"resuming {latest}")
    recent: list[float] = []
    bar = tqdm(total=config.steps, initial=step, unit="step", dynamic_ncols=True)
    with StopRequest() as stop, (folder / "metrics.jsonl").open("a") as log:
        while step < config.steps and not stop.requested:
            started = time.perf_counter()
            factor = learning_rate_factor(step, config)
            for group, rate in zip(groups, peak, strict=True):
                group["lr"] = rate * factor
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_at(step)
            loss.backward()
            if not torch.isfinite(loss):
                raise SystemExit(f"error: the loss is {loss.item()} at step {step}; the last checkpoint is kept")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            recent = [*recent[1 - RECENT :], loss.item()]
            row = {"step": step, "loss": recent[-1], "lr": factor, "seconds": time.perf_counter() - started}
            if step % config.eval_every == 0 or step == config.steps:
                row |= measure()
                bar.write(f"step {step}: train {sum(recent) / len(recent):.3f}, held-out {row['held_out']:.3f} nats")
            log.write(json.dumps(row) + "\n")
            log.flush()
            bar.set_postfix(loss=f"{sum(recent) / len(recent):.3f}", tokens_s=int(config.batch_tokens / row["seconds"]))
            bar.update()
            if step % config.checkpoint_every == 0 or step == config.steps or stop.requested:
                trained = Trained(module_tensors(model), state_of(optimizers))
                save_checkpoint(checkpoints, step, trained, {"config": asdict(config)}, keep=1)
    bar.close()
    if step < config.steps:
        print(f"stopped at step {step}; the same command goes on")
        return None
    return sum(recent) / len(recent) if recent else float("nan")
