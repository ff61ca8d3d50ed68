"""Makes Hydra accept on a command line any target that `model=` can name (infer/options/model_names.py), and any head.

Hydra's groups contain only the files of conf/. So before Hydra reads a command line, any other target, and a folder,
.gguf file or hub id of a head, is registered as an option for this process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hydra.core.config_store import ConfigStore

from infer.config import AUTO
from infer.options.literal_text import SWEEP, encode, list_items, quote, sweeps
from infer.options.model_names import PACKAGE, find_model, model_options, options_of, read_model
from models.heads.config import HeadConfig

GROUPS = ("model", "head")
OPTION = "named_by_"  # prefix of registered options
CHOICE = re.compile(r"(choice\()?(.*?)(?(1)\))", re.DOTALL)  # with -m: a,b or choice(a,b)
MORE_CONFIGS = ("--config-dir", "-cd", "hydra.searchpath")  # with these, Hydra finds options outside conf/
PROVIDER = "headway"  # of schemas and options, in Hydra's messages


def named_choices(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with all that `model=` and `head=` name as options that Hydra finds.

    A recipe may set the path of its own target, so with `experiment=` path and name are added as overrides. Raises
    ValueError for a text that names no target.
    """
    result, keys = [], {word.partition("=")[0].lstrip("+") for word in words}
    for word in words:
        key, equals, text = word.partition("=")
        if key not in GROUPS or not equals:
            result.append(word)
        elif sweeps(words) and SWEEP.search(text):
            matched = CHOICE.fullmatch(text)
            assert matched
            items = (_option(key, item, words) for item in list_items(matched[2]))
            result.append(f"{key}={matched[1] or ''}{','.join(items)}{')' if matched[1] else ''}")
        else:
            result.append(f"{key}={_option(key, text, words)}")
            if key == "model" and "experiment" in keys and (text in model_options() or find_model(text)):
                model = read_model(text)
                overrides = {"model.path": model.path, "model.name": model.name}
                result += [f"{name}={quote(value)}" for name, value in overrides.items() if name not in keys]
    return result


def _option(group: str, text: str, words: Sequence[str]) -> str:
    place = find_model(text)
    if text in options_of(group) or (place is None and any(word.startswith(MORE_CONFIGS) for word in words)):
        return text
    if group == "head":
        if place is None or place.startswith(PACKAGE):
            return text  # Hydra lists the heads
        node: object = HeadConfig(name=AUTO, path=encode(place))
    else:
        model = read_model(text)
        node = replace(model, name=encode(model.name), path=encode(model.path))
    name = OPTION + text.encode("utf-8", "surrogateescape").hex()  # whatever it contains, Hydra takes this for a word
    ConfigStore.instance().store(group=group, name=name, node=node, provider=PROVIDER)
    return name
