"""Checks that refuse a run before anything heavy starts: reported by check=true, raised before a run's folder is made.

Errors visible from the keys alone are raised by the schemas (train/config.py). The checks here need the sizes of target
and head, a folder, a package, a server or the command-line arguments; the heaviest of them reads a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from infer.config_checks import resolve_path
from models.heads import read_head
from models.lora import refuse_unknown_layers
from models.tokenizer import Tokenizer
from train.checkpoint import latest_checkpoint, read_state
from train.config import FilesDataConfig, HubDataConfig, OfflineFeaturesConfig, RowsDataConfig, TrainConfig
from train.data.answer_server import check_server
from train.data.folder import FAILED, SOURCE, TRAIN
from train.features.layout import Layout
from train.features.store import origin, refuse_other_store, wider_layout
from train.objective_config import Medusa2ObjectiveConfig
from train.planning.shapes import Shapes, processes, shapes
from train.preparation import refuse_other_shape
from train.publishing.export import check_room
from train.publishing.trackers import check_tracker


def refuse(config: TrainConfig, overrides: Sequence[str] = ()) -> None:
    """Raises ValueError naming every key that cannot work, its value and what to do."""
    found = refusals(config, shapes(config), overrides)
    if found:
        raise ValueError("; ".join(found))


def refusals(config: TrainConfig, known: Shapes, overrides: Sequence[str] = ()) -> list[str]:
    """Return the messages of all failed checks. `overrides`: the command-line arguments."""
    checks: tuple[Callable[[TrainConfig, Shapes], None], ...] = (server_answers,)
    if config.stage == "all":
        checks = (head_can_be_divided, start_fits, tracker_works, layers_exist, store_fits, processes_are_the_runs)
        checks += (export_has_room, server_answers)
    found = list(words_without_effect(config, overrides))
    for check in checks:
        try:
            check(config, known)
        except ValueError as error:
            found.append(str(error))
    return found


def words_without_effect(config: TrainConfig, overrides: Sequence[str]) -> Iterator[str]:
    """Yield messages for keys without effect. Only for the command line: a recipe may serve runs of either kind."""
    data, unread = config.data, dict[str, str]()
    if isinstance(data, RowsDataConfig) and data.responses == "given":
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


def head_can_be_divided(config: TrainConfig, known: Shapes) -> None:
    """Refuse ZeRO-3, which gathers parameters when their module is called, if the head, never called, has any."""
    loose = [name for name, _ in known.head.named_parameters(recurse=False)]
    if loose and config.parallel.name == "zero3":
        raise ValueError(
            f"parallel=zero3: head={config.head.name} holds {', '.join(loose)} outside of any layer, which ZeRO-3 "
            "cannot divide; use parallel=zero2 or parallel=fsdp"
        )


def start_fits(config: TrainConfig, known: Shapes) -> None:
    given = getattr(config.head, "start_from", None)
    if given is None:
        return
    folder = resolve_path(given)
    try:
        earlier = read_head(folder, name=config.head.name, target=known.target).config
    except ValueError as error:
        raise ValueError(f"head.start_from={given}: {error}") from error
    refuse_other_shape(folder, earlier, known.head.config)


def tracker_works(config: TrainConfig, known: Shapes) -> None:
    check_tracker(config.tracker)


def layers_exist(config: TrainConfig, known: Shapes) -> None:
    if isinstance(config.objective, Medusa2ObjectiveConfig):
        refuse_unknown_layers(known.target.layers, config.objective.lora_on)


def store_fits(config: TrainConfig, known: Shapes) -> None:
    """Check the parts of a store's manifest that are determined before there are sequences."""
    settings, target = config.features, known.target
    if not isinstance(settings, OfflineFeaturesConfig) or settings.path is None:
        return
    layout = Layout.of(target, known.head.config.aux_layers, settings)
    tokenizer = Tokenizer.load(known.checkpoint)
    wanted = origin(target, tokenizer, layout, settings.shard_mb, config.engine.weight_format)
    if not target.fingerprint:
        del wanted["target"]
    folder = resolve_path(settings.path)
    if wider_layout(layout, wanted, folder) is None:
        refuse_other_store(folder, wanted)


def processes_are_the_runs(config: TrainConfig, known: Shapes) -> None:
    """Refuse another number of processes than the run's; a single one that only plans a distributed run is accepted."""
    here = processes()
    if config.run is None or (here == 1 and config.parallel.name != "single"):
        return
    path = latest_checkpoint(resolve_path(config.output_dir) / config.run / "checkpoints")
    there = here if path is None else read_state(path).get("processes", here)
    if there != here:
        raise ValueError(
            f"run={config.run}: {path} was written by {there} processes, here are {here}; resume it with {there}"
        )


def export_has_room(config: TrainConfig, known: Shapes) -> None:
    """Check the disk space for the export; with Medusa-2 a target is published beside the head."""
    target = known.target
    size = sum(value.numel() * value.element_size() for value in target.parameters())
    besides = size if isinstance(config.objective, Medusa2ObjectiveConfig) else 0
    check_room(config, known.head, target, besides)


def server_answers(config: TrainConfig, known: Shapes) -> None:
    """Check the server, unless sequences exist or may be reused from another run, which open_data determines."""
    if config.data.server is None:
        return
    runs = resolve_path(config.output_dir)
    own = runs / str(config.run) / "data"
    again = config.stage == "regenerate" and (own / FAILED).is_file()
    if again or not ((own / TRAIN).is_file() or any(runs.glob(f"*/data/{SOURCE}"))):
        check_server(config.data)
