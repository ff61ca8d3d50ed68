"""Makes Hydra accept on a command line any target that `model=` can name (infer/options/model_names.py).

Hydra's groups contain only the files of conf/. So before Hydra reads a command line, any other target is registered as
an option for this process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hydra.core.config_store import ConfigStore

from infer.options.literal_text import SWEEP, encode, list_items, quote, sweeps
from infer.options.model_names import find_model, model_options, read_model

OPTION = "named_by_"  # prefix of registered options
CHOICE = re.compile(r"(choice\()?(.*?)(?(1)\))", re.DOTALL)  # with -m: a,b or choice(a,b)
MORE_CONFIGS = ("--config-dir", "-cd", "hydra.searchpath")  # with these, Hydra finds options outside conf/
PROVIDER = "headway"  # of schemas and options, in Hydra's messages


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
    ConfigStore.instance().store(group="model", name=name, node=node, provider=PROVIDER)
    return name
