"""Checks that refuse a run before anything heavy starts: reported by check=true, raised before a run's folder is made.

Errors visible from the keys alone are raised by the schemas (train/config.py). The checks here need the sizes of target
and head, a folder, a package, a server or the command-line arguments; the heaviest of them reads a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from infer.options.exported_heads import head_at
from infer.options.paths import resolve_path
from models.heads import HEADS
from models.heads.files import read_head
from models.heads.objectives import JointObjectiveConfig
from models.heads.weights import checkpoint_layout
from models.lora import refuse_unknown_layers
from models.tokenizer import Tokenizer
from train.checkpoint import latest_checkpoint, read_state
from train.config import FilesDataConfig, HubDataConfig, OfflineFeaturesConfig, TrainConfig
from train.data.answer_server import check_server
from train.data.folder import FAILED, SOURCE, TRAIN
from train.features.layout import Layout
from train.features.store import origin, refuse_other_store, wider_layout
from train.planning.shapes import Shapes, processes, shapes
from train.preparation.head import refuse_other_shape
from train.publishing.trackers import check_tracker
from train.storage.atomic import free_disk


def refuse(config: TrainConfig, overrides: Sequence[str] = ()) -> None:
    """Raises ValueError naming every key that cannot work, its value and what to do."""
    messages = refusals(config, shapes(config), overrides)
    if messages:
        raise ValueError("; ".join(messages))


def refusals(config: TrainConfig, meta_shapes: Shapes, overrides: Sequence[str] = ()) -> list[str]:
    """Return the messages of all failed checks. `overrides`: the command-line arguments."""
    checks: tuple[Callable[[TrainConfig, Shapes], None], ...] = (outputs_have_room, server_responds)
    if config.stage == "all":
        of_training = (head_can_be_divided, start_fits, tracker_works, layers_exist, store_fits, processes_are_the_runs)
        checks = of_training + checks
    messages = list(overrides_without_effect(config, overrides))
    for check in checks:
        try:
            check(config, meta_shapes)
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
        unread |= dict.fromkeys(("concurrency", "retries", "timeout_s"), "is of requests, and there is no data.server")
    if (isinstance(data, FilesDataConfig) and data.held_out_path is not None) or (
        isinstance(data, HubDataConfig) and data.held_out_split is not None
    ):
        unread["held_out_share"] = "the data have a held-out side of their own"
    for word in overrides:
        key = word.partition("=")[0].lstrip("+")
        why = unread.get(key.removeprefix("data.")) if key.startswith("data.") else None
        if why:
            yield f"{word}: has no effect here, {why}; leave it out"


def head_can_be_divided(config: TrainConfig, meta_shapes: Shapes) -> None:
    """Refuse ZeRO-3, which gathers parameters when their module is called, if the head has others."""
    loose = HEADS[config.head.name].loose_parameters
    if loose and config.parallel.name == "zero3":
        raise ValueError(
            f"parallel=zero3: head={config.head.name} holds {', '.join(loose)} outside of any layer, which ZeRO-3 "
            "cannot divide; use parallel=zero2 or parallel=fsdp"
        )


def start_fits(config: TrainConfig, meta_shapes: Shapes) -> None:
    path = getattr(config.head, "start_from", None)
    if path is None:
        return
    folder = head_at(path, config.head.revision, option="head.start_from=")
    try:
        earlier = read_head(folder, name=config.head.name, target=meta_shapes.target).config
    except ValueError as error:
        raise ValueError(f"head.start_from={path}: {error}") from error
    refuse_other_shape(folder, earlier, meta_shapes.head.config)


def tracker_works(config: TrainConfig, meta_shapes: Shapes) -> None:
    check_tracker(config.tracker)


def layers_exist(config: TrainConfig, meta_shapes: Shapes) -> None:
    if isinstance(config.objective, JointObjectiveConfig):
        refuse_unknown_layers(meta_shapes.target.layers, config.objective.lora_on)


def store_fits(config: TrainConfig, meta_shapes: Shapes) -> None:
    """Check the parts of a store's manifest that are determined before there are sequences."""
    settings, target = config.features, meta_shapes.target
    if not isinstance(settings, OfflineFeaturesConfig) or settings.path is None:
        return
    layout = Layout.of(target, meta_shapes.head.config.aux_layers, settings)
    tokenizer = Tokenizer.load(meta_shapes.checkpoint)
    wanted = origin(target, tokenizer, layout, config.engine.weight_format)
    if not target.fingerprint:
        del wanted["target"]
    folder = resolve_path(settings.path)
    if wider_layout(layout, wanted, folder) is None and refuse_other_store(folder, wanted) is None:
        free_disk(folder)  # there is no store yet, so one will be written


def processes_are_the_runs(config: TrainConfig, meta_shapes: Shapes) -> None:
    """Refuse another number of processes than the run's; a single one that only plans a distributed run is accepted."""
    count = processes()
    if config.run is None or (count == 1 and config.parallel.name != "single"):
        return
    path = latest_checkpoint(resolve_path(config.output_dir) / config.run / "checkpoints")
    saved = count if path is None else read_state(path).get("processes", count)
    if saved != count:
        raise ValueError(
            f"run={config.run}: {path} was written by {saved} processes, here are {count}; resume it with {saved}"
        )


def outputs_have_room(config: TrainConfig, meta_shapes: Shapes) -> None:
    """Check that the run and its export can be written: the head and, beside it, a target that is trained too."""
    try:
        free_disk(resolve_path(config.output_dir) / (config.run or ""))
    except ValueError as error:
        raise ValueError(f"output_dir={config.output_dir}: {error}") from error
    if config.stage != "all":
        return
    target, head = meta_shapes.target, meta_shapes.head
    exported = [head.state_dict()[name] for name in checkpoint_layout(head)]
    exported += target.parameters() if config.trains_target else ()
    size = sum(value.numel() for value in exported) * target.norm.weight.element_size()
    _, free = free_disk(config.export_folder)
    if free < size:
        raise ValueError(f"{config.export_folder}: the export will need {size} bytes, {free} are free; free some space")


def server_responds(config: TrainConfig, meta_shapes: Shapes) -> None:
    """Check the server, unless sequences exist or may be reused from another run, which open_data determines."""
    if config.data.server is None:
        return
    runs = resolve_path(config.output_dir)
    data_folder = runs / str(config.run) / "data"
    retry_failed = config.stage == "regenerate" and (data_folder / FAILED).is_file()
    if retry_failed or not ((data_folder / TRAIN).is_file() or any(runs.glob(f"*/data/{SOURCE}"))):
        check_server(config.data)
