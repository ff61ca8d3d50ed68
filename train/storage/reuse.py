"""Reuse of another run's sequences if they are exactly those that this run would generate.

The target's output depends on the target, the prompts and the generation settings, not on the head that is trained on
it, so several heads trained under one `output_dir` need it generated only once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infer.options.devices import dtype_name
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from train.config import TrainConfig
from train.storage import atomic

SOURCE, RECIPE, INGREDIENTS = "source", "recipe", "made_from"  # keys of a record
LIMITED = "limited"  # key of a record: by how many minutes, and how many of the conversations were left out for that
WITHOUT_EFFECT = ("concurrency", "retries", "timeout_s")  # keys of data that do not change what is generated


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
    """Return a hash of the ingredients."""
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
