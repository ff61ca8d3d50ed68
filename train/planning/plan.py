"""The plan that check=true prints: a run's data, memory, disk, time and outputs, and what cannot work.

Sizes come from configuration files and from the data, which are read as in the run; no weight is loaded and nothing
heavy is started, but for the update that check=true then tries (`Run.try_update`). Times are estimates from a matrix
product and a memory copy measured on this machine, accurate within a factor of two or three.

What cannot work is reported here, and refused before a run's folder is made and anything heavy starts. Errors visible
from the keys alone are raised by the schemas (train/config.py); the checks here need the sizes of target and head, a
folder, a package, a server or the command-line arguments. The heaviest of them reads a head.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from infer.devices import free_bytes, resolve_device
from infer.kvcache.memory import context_of
from infer.options.exported_heads import head_at
from infer.settings.paths import resolve_path
from models.heads import HEADS
from models.heads.base import Head
from models.heads.files import read_head
from models.heads.weights import checkpoint_layout
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from train.checkpoint import find_checkpoint, read_state
from train.config import FilesDataConfig, HubDataConfig, OfflineFeaturesConfig, RowsDataConfig, TrainConfig
from train.data.answer_server import ServerGenerator
from train.data.dialogue import count_answers
from train.data.folder import FAILED, SOURCE, TRAIN
from train.data.prompts import longest_prompt, read_prompts
from train.features.layout import Layout
from train.features.store import origin, refuse_other_store, wider_layout
from train.planning.memory_plan import CURES, GB, features_in_memory, memory_parts, parameters
from train.planning.precision import choose_precision, compute_dtype
from train.preparation.models import Shapes, processes, refuse_other_shape, shapes
from train.publishing.trackers import check_tracker
from train.storage.atomic import free_disk
from train.storage.run_folder import check_run, other_export, refuse_other_export

SAVED_BYTES = 12  # per trained parameter in a checkpoint: value and two moments


@dataclass
class Plan:
    lines: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    can_be_tried: bool = False  # by an update, for which weights and processes are here

    def add(self, topic: str, text: str) -> None:
        self.lines.append(f"{topic:<8}{text}")


def check_plan(config: TrainConfig, overrides: Sequence[str] = ()) -> Plan:
    """Print and return the plan. Raises ValueError for what cannot work. `overrides`: the command-line arguments."""
    plan = make_plan(config, overrides)
    for line in plan.lines if int(os.environ.get("RANK", "0")) == 0 else ():
        print(line, file=sys.stderr)
    if plan.refusals:
        raise ValueError("; ".join(plan.refusals))
    return plan


def describe_plan(config: TrainConfig) -> list[str]:
    """Return lines with upper bounds of memory and disk, printed at the start of a run; does not read the data."""
    plan, (target, head, _) = Plan(), shapes(config)
    tokens = config.data.num_sequences * config.sequence_length
    plan_depth(plan, config)
    plan_memory_of(plan, config, target, head, tokens)
    plan_disk(plan, config, target, head, tokens, resolve_path(config.output_dir) / str(config.run))
    return plan.lines + [f"note    {text}" for text in plan.refusals]


def make_plan(config: TrainConfig, overrides: Sequence[str] = ()) -> Plan:
    """Make the plan. Raises ValueError when data, target or head cannot be used at all."""
    plan = Plan()
    resumed = check_run(config)
    folder = resolve_path(config.output_dir) / (config.run or f"{config.model.name}-{config.head.name}-<time>")
    plan.add("run", f"{folder}, {'resumed' if resumed else 'new'}")
    meta_shapes = shapes(config)
    target, head, checkpoint = meta_shapes
    plan.refusals += refusals(config, meta_shapes, overrides)
    tokens, responses = plan_data(plan, config, target, checkpoint)
    plan_depth(plan, config)
    plan_memory_of(plan, config, target, head, tokens)
    store = plan_disk(plan, config, target, head, tokens, folder)
    plan_time(plan, config, target, head, tokens, responses)
    written = [f"{folder}/ (config, data, metrics, checkpoints, plots)", *([str(store)] if store else [])]
    if config.stage == "all":
        plan.can_be_tried = bool(target.fingerprint) and (config.parallel.name == "single") == (processes() == 1)
        other = other_export(config, config.export_folder)
        fate = f" (replaces {other})" if other else " (replaced)" if config.export_folder.exists() else ""
        written.append(f"{config.export_folder}/{fate}")
        try:
            refuse_other_export(config)
        except ValueError as error:
            plan.refusals.append(str(error))
    plan.add("writes", ", ".join(written))
    return plan


def plan_data(plan: Plan, config: TrainConfig, target: LlamaTarget, checkpoint: Path) -> tuple[int, int]:
    """Return upper bounds of training tokens, and of responses to generate. Reads the data as the run does."""
    tokenizer = Tokenizer.load(checkpoint)
    context = context_of(config.engine, target.config)
    prompts = read_prompts(config, tokenizer, context)
    for line in prompts.reading.lines():
        plan.add("data", line)
    data = config.data
    responses = sum(count_answers(example, tokenizer) for example in prompts.train.values())
    tokens = len(prompts.train) * config.sequence_length
    if data.provides_responses:
        plan.add("data", f"at most {tokens} tokens, {config.sequence_length} per sequence; the data has the responses")
    else:
        new = responses * data.max_new_tokens
        writer = data.server or "our engine"
        plan.add(
            "data",
            f"{writer} generates at most {responses} responses, {new} tokens; training uses at most {tokens} tokens",
        )
    longest = longest_prompt(data, context)
    if isinstance(data, RowsDataConfig) and config.sequence_length <= longest:
        plan.add(
            "data", f"prompts may have {longest} tokens; sequences are cut at sequence_length={config.sequence_length}"
        )
    responses = 0 if data.provides_responses else responses
    plan.numbers |= {"rows": prompts.reading.summary(), "tokens": tokens, "answers": responses}
    return tokens, responses


def plan_depth(plan: Plan, config: TrainConfig) -> None:
    """Say if drafts are measured deeper than they are trained; nothing for a run that trains no head."""
    trained, measured = config.trained_depth, config.eval_draft_tokens
    if config.stage == "all" and trained is not None and measured > trained:
        plan.add(
            "depth",
            f"objective.steps={trained} trains drafts of {trained} tokens and eval_draft_tokens={measured} measures "
            f"longer ones, which are accepted less; objective.steps={measured} trains them too",
        )


def plan_memory_of(plan: Plan, config: TrainConfig, target: LlamaTarget, head: Head, tokens: int) -> None:
    parts = memory_parts(config, target, head, tokens)
    needed, free = sum(parts.values()), free_bytes(resolve_device(config.model.device))
    if config.features.target == "sharded":
        plan.add("memory", f"of one of {processes()} processes, which share the target")
    text = ", ".join(f"{name} {size / GB:.2f}" for name, size in parts.items())
    plan.add("memory", f"about {needed / GB:.2f} GB, besides Python, torch and a step's activations: {text}")
    plan.add("memory", "free memory is unknown" if free is None else f"{free / GB:.2f} GB are free")
    plan.numbers |= {"memory_bytes": needed, "memory_free": free, "trained_parameters": parameters(head)[0]}
    if free is not None and needed > free:
        largest = max(parts, key=lambda name: parts[name])
        plan.refusals.append(
            f"memory: about {needed / GB:.2f} GB needed, {free / GB:.2f} GB are free; most is for the {largest}: "
            f"{CURES[largest]}"
        )


def plan_disk(
    plan: Plan, config: TrainConfig, target: LlamaTarget, head: Head, tokens: int, folder: Path
) -> Path | None:
    """Add the disk estimate; return the folder of the feature store, None if there will be none."""
    trained, frozen = parameters(head)
    store = None
    parts = {"data": 12 * tokens}
    if config.stage == "all":
        parts["checkpoints"] = (config.keep_checkpoints + 2) * trained * SAVED_BYTES  # + one being written, + the best
        parts["exported head"] = 2 * (trained + frozen) * target.norm.weight.element_size()
    if isinstance(config.features, OfflineFeaturesConfig) and (config.stage == "all" or config.features.record):
        parts["features"] = tokens * Layout.for_head(target, head.config, config.features).token_bytes
        path = config.features.path
        store = resolve_path(path) if path else resolve_path(config.output_dir) / "features" / config.model.name
    try:
        place, free = free_disk(folder)
    except ValueError:
        return store  # `refusals` names it
    needed = sum(parts.values())
    text = ", ".join(f"{name} {size / GB:.2f}" for name, size in parts.items())
    plan.add("disk", f"at most {needed / GB:.2f} GB: {text}; {free / GB:.2f} GB are free in {place}")
    plan.numbers |= {"disk_bytes": needed, "disk_free": free}
    if needed > free:
        plan.refusals.append(
            f"disk: {needed / GB:.2f} GB are needed at most, {free / GB:.2f} GB are free in {place}; give another "
            "output_dir=, a smaller keep_checkpoints" + (", or features=online" if store else "")
        )
    return store


def plan_time(plan: Plan, config: TrainConfig, target: LlamaTarget, head: Head, tokens: int, responses: int) -> None:
    device, precision = resolve_device(config.model.device), choose_precision(config)
    # On a CPU without bf16 the kernels of a bf16 target compute in fp32 as well.
    speed, bandwidth = measure(device, target.norm.weight.dtype if device.type == "cuda" else compute_dtype(config))
    weights, active = sum(p.numel() for p in target.parameters()), active_parameters(target)
    item = target.norm.weight.element_size()
    estimates = {}
    if responses and config.data.server is None:
        rows = min(config.engine.max_batch, responses)
        step = max(weights * item / bandwidth, rows * 2 * active / speed)
        estimates["generating"] = responses * config.data.max_new_tokens / rows * step
    if config.stage == "all":
        trained, _ = parameters(head)
        batch = config.batch_size * config.sequence_length
        kept = isinstance(config.features, OfflineFeaturesConfig) or features_in_memory(config, target, head, tokens)
        depths = range(config.objective.steps or head.config.max_depth or 1)
        separate = HEADS[head.config.name].separate_depths  # else a step multiplies by each weight at every depth
        uses = 1 if separate else sum(map(config.objective.slot_share, depths))
        flops = 6 * trained * uses + (0 if kept else 2 * active)  # per token
        step = config.accumulate * batch * flops / speed
        estimates["a step"] = step
        if config.steps is not None:
            estimates["all steps"] = step * config.steps
    text = ", ".join(f"{name} about {readable(seconds)}" for name, seconds in estimates.items())
    limit = f"; at most {config.minutes:g} minutes in all" if config.minutes is not None else ""
    rate = f"{speed / 1e9:.{0 if speed > 1e10 else 2}f} GFLOP/s in {precision.name}"
    plan.add("time", f"{text or 'nothing to compute here'}{limit} (at {rate}, estimated)")
    if precision.reason:
        plan.add("time", f"precision={precision.name}: {precision.reason}")
    plan.numbers["precision"] = precision.name
    plan.numbers["seconds"] = {name: round(seconds, 3) for name, seconds in estimates.items()}


def active_parameters(target: LlamaTarget) -> int:
    """Return the number of parameters active per token: inactive experts cost no time."""
    experts = target.config.experts
    total = 0
    for name, parameter in target.named_parameters():
        share = experts.active / experts.count if experts is not None and ".experts." in name else 1
        total += int(parameter.numel() * share) if "embed_tokens" not in name else 0
    return total


def measure(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return FLOP/s of a matrix product of 512 rows and bytes/s of a copy; on a GPU with sizes that saturate it."""
    from torch.utils.benchmark import Timer  # takes a moment to import

    rows, side, size = (4096, 8192, 2**28) if device.type == "cuda" else (512, 1024, 2**24)
    tensors = {
        "x": torch.ones(rows, side, dtype=dtype, device=device),
        "w": torch.ones(side, side, dtype=dtype, device=device),
        "block": torch.zeros(size, dtype=torch.uint8, device=device),
    }
    product, copy = (
        Timer(statement, globals=tensors, num_threads=torch.get_num_threads()).blocked_autorange().median
        for statement in ("x @ w.t()", "block.clone()")
    )
    return 2.0 * rows * side * side / product, 2.0 * size / copy


def readable(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def refuse(config: TrainConfig, overrides: Sequence[str] = ()) -> None:
    """Raises ValueError naming every key that cannot work, its value and what to do."""
    messages = refusals(config, shapes(config), overrides)
    if messages:
        raise ValueError("; ".join(messages))


def refusals(config: TrainConfig, meta_shapes: Shapes, overrides: Sequence[str] = ()) -> list[str]:
    """Return the messages of all failed checks. `overrides`: the command-line arguments."""
    target, head, checkpoint = meta_shapes
    checks: list[Callable[[], None]] = [
        lambda: head_can_be_divided(config),
        lambda: start_fits(config, target, head),
        lambda: check_tracker(config.tracker),
        lambda: store_fits(config, target, head, checkpoint),
        lambda: processes_are_the_runs(config),
    ]
    messages = list(overrides_without_effect(config, overrides))
    of_all = [lambda: outputs_have_room(config, meta_shapes), lambda: server_responds(config)]
    for check in [*(checks if config.stage == "all" else ()), *of_all]:
        try:
            check()
        except ValueError as error:
            messages.append(str(error))
    return messages


def overrides_without_effect(config: TrainConfig, overrides: Sequence[str]) -> Iterator[str]:
    """Yield messages for keys without effect. Only for the command line: a recipe may serve runs of either kind."""
    data, unread = config.data, dict[str, str]()
    if data.provides_responses:
        sampling = ("temperatures", "top_k", "top_p", "max_new_tokens")
        unread |= dict.fromkeys(sampling, "the target writes nothing with data.responses=given")
    if data.server is None:
        unread |= {"concurrency": "is of requests, and there is no data.server"}
    if (isinstance(data, FilesDataConfig) and data.held_out_path is not None) or (
        isinstance(data, HubDataConfig) and data.held_out_split is not None
    ):
        unread["held_out_share"] = "the data have a held-out side of their own"
    for word in overrides:
        key = word.partition("=")[0].lstrip("+")
        why = unread.get(key.removeprefix("data.")) if key.startswith("data.") else None
        if why:
            yield f"{word}: has no effect here, {why}; leave it out"


def head_can_be_divided(config: TrainConfig) -> None:
    """Refuse ZeRO-3, which gathers parameters when their module is called, if the head has others."""
    loose = HEADS[config.head.name].loose_parameters
    if loose and config.parallel.name == "zero3":
        raise ValueError(
            f"parallel=zero3: head={config.head.name} holds {', '.join(loose)} outside of any layer, which ZeRO-3 "
            "cannot divide; use parallel=zero2 or parallel=fsdp"
        )


def start_fits(config: TrainConfig, target: LlamaTarget, head: Head) -> None:
    path = getattr(config.head, "start_from", None)
    if path is None:
        return
    folder = head_at(path, config.head.revision, option="head.start_from=")
    try:
        earlier = read_head(folder, name=config.head.name, target=target).config
    except ValueError as error:
        raise ValueError(f"head.start_from={path}: {error}") from error
    refuse_other_shape(folder, earlier, head.config)


def store_fits(config: TrainConfig, target: LlamaTarget, head: Head, checkpoint: Path) -> None:
    """Check the parts of a store's manifest that are determined before there are sequences."""
    settings = config.features
    if not isinstance(settings, OfflineFeaturesConfig) or settings.path is None:
        return
    layout = Layout.for_head(target, head.config, settings)
    wanted = origin(target, Tokenizer.load(checkpoint), layout, config.engine.weight_format)
    if not target.fingerprint:
        del wanted["target"]
    folder = resolve_path(settings.path)
    if wider_layout(layout, wanted, folder) is None and refuse_other_store(folder, wanted) is None:
        free_disk(folder)  # there is no store yet, so one will be written


def processes_are_the_runs(config: TrainConfig) -> None:
    """Refuse another number of processes than the run's; a single one that only plans a distributed run is accepted."""
    count = processes()
    if config.run is None or (count == 1 and config.parallel.name != "single"):
        return
    path = find_checkpoint(resolve_path(config.output_dir) / config.run / "checkpoints")
    saved = count if path is None else read_state(path).get("processes", count)
    if saved != count:
        raise ValueError(
            f"run={config.run}: {path} was written by {saved} processes, here are {count}; resume it with {saved}"
        )


def outputs_have_room(config: TrainConfig, meta_shapes: Shapes) -> None:
    """Check that the run and the head that it exports can be written."""
    try:
        free_disk(resolve_path(config.output_dir) / (config.run or ""))
    except ValueError as error:
        raise ValueError(f"output_dir={config.output_dir}: {error}") from error
    if config.stage != "all":
        return
    target, head = meta_shapes.target, meta_shapes.head
    exported = [head.state_dict()[name] for name in checkpoint_layout(head)]
    size = sum(value.numel() for value in exported) * target.norm.weight.element_size()
    _, free = free_disk(config.export_folder)
    if free < size:
        raise ValueError(f"{config.export_folder}: the export will need {size} bytes, {free} are free; free some space")


def server_responds(config: TrainConfig) -> None:
    """Check the server, unless sequences exist or may be reused from another run, which open_data determines."""
    if config.data.server is None:
        return
    runs = resolve_path(config.output_dir)
    data_folder = runs / str(config.run) / "data"
    retry_failed = config.stage == "regenerate" and (data_folder / FAILED).is_file()
    if retry_failed or not ((data_folder / TRAIN).is_file() or any(runs.glob(f"*/data/{SOURCE}"))):
        ServerGenerator(config.data, 0).close()
