"""Resolves `model=` (an option of conf/model/, a folder, a .gguf file or a hub id), and names the target in outputs.

Hydra's groups contain only the files of conf/. So before Hydra reads a command line, any other target is registered as
an option for this process (`model_choices`). From Python, `read_model` takes the same words.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from infer.config import ModelConfig
from infer.config_checks import REPO_ROOT, resolve_path
from infer.options.literal_text import SWEEP, encode, list_items, quote, sweeps

CONF = REPO_ROOT / "conf"
GGUF, PACKAGE = ".gguf", "package:"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OPTION = "named_by_"  # prefix of registered options
CHOICE = re.compile(r"(choice\()?(.*?)(?(1)\))", re.DOTALL)  # with -m: a,b or choice(a,b)
MORE_CONFIGS = ("--config-dir", "-cd", "hydra.searchpath")  # with these, Hydra finds options outside conf/


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
    return ModelConfig(name=model_name(path), path=path, dtype="auto")


def read_option(group: str, option: str) -> dict[str, Any]:
    """Return the keys that conf/<group>/<option>.yaml sets. Raises ValueError if there is no such file."""
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
        place = Path(os.path.abspath(start / Path(text).expanduser()))
        if text and (place.is_dir() or (place.suffix.lower() == GGUF and place.is_file())):
            inside = place.is_relative_to(REPO_ROOT) and place != REPO_ROOT
            return str(place.relative_to(REPO_ROOT)) if inside else str(place)
    is_id = HUB_ID.fullmatch(text) and not text.lower().endswith(GGUF)
    return text if is_id or text.startswith(PACKAGE) else None


def model_name(path: str) -> str:
    """Return the last part of a path or hub id in lower case, without .gguf; '-' replaces characters unfit for a file.

    The quantisation stays part of the name, as files that differ in it are different targets.
    """
    last = os.path.basename(str(resolve_path(path))).lower().removesuffix(GGUF)
    return re.sub(r"[^\w.-]+", "-", last).strip(".-") or "target"


def no_model(text: str) -> str:
    close = difflib.get_close_matches(text, model_options(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(model_options())}"
    return f"model={text}: no name of conf/model/ ({hint}), no folder, no {GGUF} file, no hub id (owner/name)"


def model_choices(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with every target that `model=` names as an option that Hydra finds.

    A recipe may set the path of its own target, so with `experiment=` path and name are added as overrides. Raises
    ValueError for a text that names no target.
    """
    result, keys = [], {word.partition("=")[0].lstrip("+") for word in words}
    for word in words:
        key, equals, text = word.partition("=")
        if key != "model" or not equals:
            result.append(word)
        elif sweeps(words) and SWEEP.search(text):
            matched = CHOICE.fullmatch(text)
            assert matched
            items = (_option(item, words) for item in list_items(matched[2]))
            result.append(f"model={matched[1] or ''}{','.join(items)}{')' if matched[1] else ''}")
        else:
            result.append(f"model={_option(text, words)}")
            if "experiment" in keys and (text in model_options() or find_model(text)):
                model = read_model(text)
                overrides = {"model.path": model.path, "model.name": model.name}
                result += [f"{name}={quote(value)}" for name, value in overrides.items() if name not in keys]
    return result


def _option(text: str, words: Sequence[str]) -> str:
    if text in model_options() or (find_model(text) is None and any(word.startswith(MORE_CONFIGS) for word in words)):
        return text
    model = read_model(text)
    name = OPTION + text.encode("utf-8", "surrogateescape").hex()  # whatever it contains, Hydra takes this for a word
    node = replace(model, name=encode(model.name), path=encode(model.path))
    ConfigStore.instance().store(group="model", name=name, node=node, provider="headway")
    return name
