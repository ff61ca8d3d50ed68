"""Resolves `model=` (an option of conf/model/, a folder, a .gguf file or a hub id), and names the target in outputs.

From Python, `read_model` takes these words, and `read_head_config` those of `head=`; infer/options/model_choices.py
makes Hydra take them on a command line.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from infer.config import AUTO, PUBLISHED, ModelConfig, PublishedHeadConfig
from infer.options.exported_heads import head_at, kind_of
from infer.settings.paths import REPO_ROOT, resolve_path
from models.checks import home_path
from models.gguf import is_gguf
from models.heads import HEADS
from models.heads.config import HeadConfig
from models.hub import is_hub_id

CONF = REPO_ROOT / "conf"
GGUF, PACKAGE = ".gguf", "package:"


def read_model(text: str, **settings: Any) -> ModelConfig:
    """Return the target that `text` names, with other `settings` of ModelConfig. Raises ValueError if it names none."""
    if text in model_options():
        return ModelConfig(**(read_option("model", text) | settings))
    path = find_model(text)
    if path is None:
        raise ValueError(no_model(text))
    return replace(model_at(path), **settings)


def model_at(path: str) -> ModelConfig:
    """Return the target at a `model.path` that no option of conf/model/ has."""
    return ModelConfig(name=model_name(path), path=path)


def read_head_config(text: str) -> HeadConfig:
    """Return the head for use from Python: a name, or the folder, GGUF file or hub id of a head."""
    if text == PUBLISHED:
        return PublishedHeadConfig(**read_option("head", text))
    if text in (*HEADS, AUTO, "none"):
        return HeadConfig(name=text)
    if not (resolve_path(text).is_dir() or is_gguf(text) or is_hub_id(text)):
        raise ValueError(f"head={text}: no head ({', '.join((*HEADS, AUTO, PUBLISHED, 'none'))}), no folder or hub id")
    return HeadConfig(name=kind_of(head_at(text, weights=False, option="head=")), path=text)


def read_option(group: str, option: str) -> dict[str, Any]:
    """Return the keys that conf/<group>/<option>.yaml sets. Raises ValueError if there is no such file."""
    from omegaconf import OmegaConf  # without it an engine can still be made from a loaded target

    options = options_of(group)
    if option not in options:
        raise ValueError(f"{group}={option}: no such option; known: {', '.join(options)}")
    written = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml")))
    return {key: value for key, value in written.items() if key != "defaults"}


def options_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def model_options() -> list[str]:
    return options_of("model")


def find_model(text: str) -> str | None:
    """Return `model.path` of a folder, a .gguf file or a hub id; None for anything else.

    Files are looked up from the working directory, then from the repository. Their path is absolute, or relative to the
    repository if inside it.
    """
    for start in (Path.cwd(), REPO_ROOT):
        place = Path(os.path.abspath(start / home_path(text)))
        if text and (place.is_dir() or (place.suffix.lower() == GGUF and place.is_file())):
            inside = place.is_relative_to(REPO_ROOT) and place != REPO_ROOT
            return str(place.relative_to(REPO_ROOT)) if inside else str(place)
    return text if is_hub_id(text) or text.startswith(PACKAGE) else None


def model_name(path: str) -> str:
    """Return the last part of a path or hub id in lower case, without .gguf; '-' replaces characters unfit for a file.

    The quantization stays part of the name, as files that differ in it are different targets.
    """
    last = os.path.basename(str(resolve_path(path))).lower().removesuffix(GGUF)
    return re.sub(r"[^\w.-]+", "-", last).strip(".-") or "target"


def no_model(text: str) -> str:
    close = difflib.get_close_matches(text, model_options(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(model_options())}"
    return f"model={text}: no name of conf/model/ ({hint}), no folder, no {GGUF} file, no hub id (owner/name)"
