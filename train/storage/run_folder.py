"""outputs/<run>/: one folder per run, created, or resumed with the configuration with which it was started.

Only keys in FREE may differ on resumption: no past update depends on them.

A run takes another run's sequences if they are exactly those that it would generate. The target's output depends on the
target, the prompts and the generation settings, not on the head that is trained on it, so several heads trained under
one `output_dir` need it generated only once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from infer import config as infer_config
from infer.console.command_words import python_command
from infer.devices import dtype_name
from infer.options.cli import load_config, save_config
from infer.settings.paths import resolve_path
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from train import config as train_config
from train.config import TrainConfig
from train.schedule import Budget
from train.storage import atomic

CONFIG, SCHEDULE = "config.yaml", "schedule.json"
LOCK = ".run"  # what a run locks: not its folder, which an export to a head.path in it locks
WRITTEN_INTO = ("data", "checkpoints")  # subfolders that a run writes into
HEAD_CONFIG, PROVENANCE = "config.json", "provenance.json"  # files of an exported head
# Keys (or prefixes) that may differ when a run is resumed: no past update depends on them.
FREE = (
    "steps", "minutes", "check", "stage", "tracker.", "engine.", "features.target", "features.record", "log_every",
    "eval_every", "checkpoint_every", "keep_checkpoints", "export", "output_dir",
    "overwrite", "license", "head.path", "data.concurrency",
)  # fmt: skip
BOUND = ("engine.weights", "engine.kv_dtype", "engine.exact")  # exceptions: a target's output depends on them
ABSENT = object()


def name_run(config: TrainConfig) -> TrainConfig:
    """Return the configuration with `run` set: <model>-<head>-<date and time>, numbered if that exists already."""
    if config.run is not None:
        return config
    base = f"{config.model.name}-{config.head.name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [base, *(f"{base}-{number}" for number in range(2, 100))]
    free = next(name for name in names if not (resolve_path(config.output_dir) / name).exists())
    return replace(config, run=free)


def stored_config(config: TrainConfig) -> TrainConfig | None:
    """Return the configuration with which the run was begun or last resumed; None if it does not exist."""
    if config.run is None:
        return None
    file = resolve_path(config.output_dir) / config.run / CONFIG
    schemas = {**infer_config.SCHEMAS, **train_config.SCHEMAS}
    return load_config(file, TrainConfig, schemas) if file.is_file() else None


def check_run(config: TrainConfig) -> bool:
    """Return whether the run exists and can be resumed. Raises ValueError naming the keys that differ from it."""
    if config.run is None:
        return False
    folder, stored = resolve_path(config.output_dir) / config.run, stored_config(config)
    if stored is not None:
        refuse_differences(config, stored, folder)
        return True
    if folder.is_dir() and any(folder.glob("[!.]*")):  # a dot: of a run that was killed before it wrote anything
        raise ValueError(f"run={config.run}: {folder} holds something else than a training run; choose another name")
    return False


def other_export(config: TrainConfig, folder: Path) -> str | None:
    """Describe the head in `folder`, to which this run exports, if another run exported it, else None."""
    if not (folder / HEAD_CONFIG).is_file():
        return None
    run = run_of_head(folder)
    if run is not None and run == config.run:
        return None
    return f"the head of run {run}" if run else "a head that no run of ours exported"


def run_of_head(folder: Path) -> str | None:
    """Return the run that exported the head in `folder`, None if unknown."""
    try:
        return json.loads((folder / PROVENANCE).read_text(encoding="utf-8")).get("run")
    except (OSError, ValueError, AttributeError):
        return None


def refusal(config: TrainConfig, folder: Path) -> str | None:
    """Return why this run may not export to `folder`, None if it may: another run's head would be replaced."""
    other = None if config.stage != "all" or config.overwrite else other_export(config, folder)
    return other and f"{folder}: holds {other}, which this run's would replace"


def refuse_other_export(config: TrainConfig) -> None:
    """Raises ValueError if this run would replace another run's head without overwrite=true."""
    if why := refusal(config, config.export_folder):
        raise ValueError(
            f"{why}. Give head.path= another folder, overwrite=true to replace it, or run= the name of that run to "
            "resume it"
        )


@contextmanager
def open_run(config: TrainConfig) -> Iterator[None]:
    """Create the run's folder, or check it, and lock it within the block. Raises ValueError if it cannot be resumed."""
    assert config.run is not None
    folder = resolve_path(config.output_dir) / config.run
    check_run(config)
    refuse_other_export(config)
    atomic.make_folder(folder / LOCK)
    with ExitStack() as stack:
        try:
            stack.enter_context(atomic.lock(folder / LOCK))
        except BlockingIOError as error:
            raise ValueError(
                f"run={config.run}: another process is training in {folder}; wait for its end, or give another run="
            ) from error
        for place in (folder, *(folder / name for name in WRITTEN_INTO)):
            atomic.sweep(place)
        with atomic.replace_file(folder / CONFIG) as staging:
            save_config(config, staging)
        yield


def refuse_differences(new: TrainConfig, old: TrainConfig, folder: Path) -> None:
    if new.precision == "auto":  # keeps the run's own
        new = replace(new, precision=old.precision)
    new_values, old_values = flatten(asdict(new)), flatten(asdict(old))
    different = [
        f"{key}={new_values.get(key, ABSENT)} (the run has {old_values.get(key, ABSENT)})"
        for key in sorted(new_values.keys() | old_values.keys())
        if new_values.get(key, ABSENT) != old_values.get(key, ABSENT) and (key in BOUND or not key.startswith(FREE))
    ]
    if different:
        raise ValueError(
            f"run={new.run}: {folder} was begun with other settings: {'; '.join(different)}. "
            "Give the run's own to resume it, or another run= to begin a new one; steps and minutes may change"
            f"{from_its_head(old)}"
        )


def from_its_head(config: TrainConfig) -> str:
    """Return the hint how to start another run from this run's head, empty if none was exported."""
    folder = config.export_folder
    return (
        f". To go on from its head under other settings: run=<other> head.start_from={folder}"
        if run_of_head(folder) == config.run
        else ""
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def read_budget(folder: Path) -> Budget | None:
    """Return the stored budget, None if there is none yet. Raises ValueError if the file holds anything else."""
    path = folder / SCHEDULE
    try:
        return Budget(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not of this version ({error}); begin anew with another run=<name>") from error


def write_budget(folder: Path, budget: Budget) -> None:
    atomic.write_text(folder / SCHEDULE, json.dumps(asdict(budget)) + "\n")


def resume_command(config: TrainConfig, overrides: Sequence[str], processes: int = 1) -> str:
    """Return the command that resumes a run started with `overrides`."""
    kept = [item for item in overrides if not item.lstrip("+").startswith("run=")]
    return python_command("train/run.py", *kept, f"run={config.run}", processes=processes)


SOURCE, RECIPE, INGREDIENTS = "source", "recipe", "made_from"  # keys of a record
LIMITED = "limited"  # key of a record: by how many minutes, and how many of the conversations were left out for that
WITHOUT_EFFECT = ("concurrency",)  # keys of data that do not change what is generated


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, str]:
    """Return hashes of everything that maps conversations to token ids."""
    texts = tokenizer.chat.texts
    templates = json.dumps(texts, sort_keys=True) if len(texts) > 1 else next(iter(texts.values()), "")
    return {"tokenizer": text_hash(tokenizer.backend.to_str()), "chat_template": text_hash(templates)}


def ingredients(config: TrainConfig, target: LlamaTarget, tokenizer: Tokenizer, source: str) -> dict[str, Any]:
    """Return all that the sequences of both splits depend on. `source` identifies the prompts and their content."""
    engine, data = config.engine, asdict(config.data)
    bits = {"weights": engine.weight_format, "kv_dtype": engine.kv_dtype}
    changing = {key: value for key, value in bits.items() if value != "same"}
    return {
        "target": target.fingerprint,
        **tokenizer_record(tokenizer),
        "end_tokens": list(tokenizer.eos_ids),
        "dtype": dtype_name(config.model),
        "source": source,
        "data": {key: value for key, value in data.items() if key not in WITHOUT_EFFECT},
        "seed": config.seed,
        "held out": [config.eval_prompts, config.eval_max_tokens],
        "exact": engine.exact,
        **changing,
    }


def recipe(parts: Mapping[str, Any]) -> str:
    """Return a hash of the ingredients of data or features."""
    return text_hash(json.dumps(parts, sort_keys=True))


def refuse_other(config: TrainConfig, parts: Mapping[str, Any], record: Path) -> None:
    """Raises ValueError naming the differences if the JSON file `record` has other ingredients than `parts`."""
    stored = read_record(record)
    if stored[RECIPE] == recipe(parts):
        return
    old_parts = stored.get(INGREDIENTS, {})
    names = [name for name in sorted(old_parts.keys() | parts.keys()) if old_parts.get(name) != parts.get(name)]
    changes = "; ".join(f"{name} was {old_parts.get(name)} and is {parts.get(name)}" for name in names if old_parts)
    cure = "begin anew with another run=<name>"
    if "target" in names:
        cure = f"put back the weights that model.path={config.model.path} had, or {cure}"
    raise ValueError(
        f"run={config.run}: {record.parent} was made from something else: {changes or 'it says no more'}; {cure}"
    )


def read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record | {key: record[key] for key in (SOURCE, RECIPE)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read ({error!r}); begin anew with another run=<name>") from error


def find_twin(runs: Path, wanted: str, record: str, files: Sequence[str], minutes: float | None = None) -> Path | None:
    """Return a data folder `runs/*/data` that has all of `files` and whose JSON file `record` names recipe `wanted`.

    One that was limited by minutes is a twin of runs that have no more of them.
    """
    for path in sorted(runs.glob(f"*/data/{record}")):
        if not all((path.parent / name).is_file() for name in files):
            continue
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            limited = (stored.get(LIMITED) or {}).get("minutes")
        except (OSError, ValueError, AttributeError):
            continue  # a damaged record of another run is no error of this one
        if stored.get(RECIPE) == wanted and (limited is None or (minutes is not None and minutes <= limited)):
            return path.parent
    return None


def copy_twin(twin: Path, folder: Path, files: Sequence[str]) -> None:
    """Replace `folder` by one with `files` alone."""
    with atomic.replace_folder(folder) as staging:
        for name in files:
            shutil.copyfile(twin / name, staging / name)
