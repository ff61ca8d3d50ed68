"""Turns a command line into a checked dataclass: Hydra composes it, this module makes its errors one clear message.

The only module that handles a DictConfig. Knows the form of Hydra's errors and nothing about what a command does.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from infer.config import REGISTERED, RESOLVERS
from infer.options.exported_heads import with_head
from infer.options.literal_text import encode_all, literal_overrides
from infer.options.model_choices import OPTION, PROVIDER, named_choices
from infer.processes.launched import launched_rank
from infer.settings.other_names import full_keys, unknown
from infer.settings.paths import REPO_ROOT, resolve_path
from models.heads.config import HeadConfig

CONF = str(REPO_ROOT / "conf")
USER_ERROR = 2
T = TypeVar("T")

OmegaConf.register_new_resolver("repo", lambda path: str(resolve_path(path)), replace=True)
store_once = functools.cache(ConfigStore.instance().store)


def to_config(config: DictConfig, schema: type[T]) -> T:
    """Convert a composed DictConfig to its dataclass, whose checks run here."""
    _refuse_added_keys(config)
    try:
        result = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ValueError(f"{key}: must be given, as {key}=...") from None
    assert isinstance(result, schema)
    return result


def store_schemas() -> None:
    """Hand the schemas and resolvers registered so far to Hydra."""
    for (group, name), schema in REGISTERED.items():
        store_once(group=group, name=name, node=schema, provider=PROVIDER)
    for name, function in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def compose(command: str, schema: type[T], overrides: Sequence[str] = ()) -> T:
    """Return the config that the command line `overrides` gives, for tests and for use from Python."""
    GlobalHydra.instance().clear()
    store_schemas()
    with hydra.initialize_config_dir(CONF, version_base="1.3"):
        try:
            words = full_keys(overrides, [field.name for field in fields(cast(Any, schema))])
            config = hydra.compose(command, named_choices(words))
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(explain(error)) from error
    refuse_keys_without_effect(command, overrides)
    return to_config(config, schema)


def entry_point(command: str, schema: type[T]) -> Callable[[Callable[[T], Any]], Callable[[], None]]:
    """Return a decorator for the main function of a command (`conf/<command>.yaml`).

    A ValueError or OSError counts as the user's error: one message on stderr and exit code 2; HYDRA_FULL_ERROR=1 adds
    the traceback. Any other exception is a bug and shows its traceback. The function returns a sweep's metric; to fail,
    it raises.
    """

    def decorate(task: Callable[[T], Any]) -> Callable[[], None]:
        full_error = os.environ.get("HYDRA_FULL_ERROR")
        typed: list[str] = []

        @functools.wraps(task)
        def run(config: DictConfig) -> Any:
            _set_full_error(full_error)  # processes that the task starts see the user's setting
            with _user_errors(full_error == "1"):  # within Hydra too, which would print half a traceback
                sys.argv[1:] = typed
                refuse_keys_without_effect(command, HydraConfig.get().overrides.task)
                return task(to_config(config, schema))

        def main() -> None:
            if {"-h", "--help"} & set(sys.argv[1:]):
                print(help_text(command, schema))
                return
            typed[:] = sys.argv[1:]
            store_schemas()
            _set_full_error("1")  # so that Hydra raises its errors instead of printing them
            try:
                with _user_errors(full_error == "1"):
                    words = full_keys(typed, [field.name for field in fields(cast(Any, schema))])
                    sys.argv[1:] = named_choices(literal_overrides(words, schema))  # Hydra reads sys.argv
                    hydra.main(config_path=CONF, config_name=command, version_base="1.3")(run)()
            finally:
                _set_full_error(full_error)

        return main

    return decorate


def engine_entry_point(command: str, schema: type[T]) -> Callable[[Callable[[T], Any]], Callable[[], None]]:
    """Return the same for a command that loads an engine: `head=auto` is then a head by name.

    Processes that torchrun started beside rank 0 follow it, and do not run the task.
    """

    def decorate(task: Callable[[T], Any]) -> Callable[[], None]:
        @functools.wraps(task)
        def run(config: Any) -> Any:
            if launched_rank(config.engine):
                from infer.processes.launch import follow_launched

                return follow_launched(config.model, config.engine)
            return task(with_head(config))

        return entry_point(command, schema)(run)

    return decorate


def groups_of(command: str) -> dict[str, list[str]]:
    """Group -> options, for the groups in the defaults list of conf/<command>.yaml."""
    defaults = cast(Any, OmegaConf.load(Path(CONF) / f"{command}.yaml")).defaults
    names = [str(name) for entry in defaults if isinstance(entry, DictConfig) for name in entry if name != "hydra"]
    return {name: sorted(path.stem for path in (Path(CONF) / name).glob("*.yaml")) for name in names}


def help_text(command: str, schema: type) -> str:
    groups, config = groups_of(command), compose(command, schema)
    keys = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in groups}
    width = max(map(len, groups), default=0)
    lines = ["usage: key=value ..."]
    lines += ["", "groups, as group=option; their keys as group.key=value:"] if groups else []
    lines += [f"  {group:<{width}}  {' | '.join(options)}" for group, options in groups.items()]
    also = [f"{group}=" for group in groups if group == "model" or (group == "head" and command != "train")]
    takes = "take" if len(also) > 1 else "takes"
    lines += [f"{' and '.join(also)} also {takes} a folder, a .gguf file or a hub id (owner/name)"] if also else []
    lines += ["", "keys and their defaults:"]
    lines += [f"  {line}" for line in OmegaConf.to_yaml(OmegaConf.create(keys)).splitlines()]
    lines += ["", "--cfg job shows the whole configuration, --cfg job --package head one group; -m sweeps over a=1,2"]
    return "\n".join(lines)


@contextmanager
def _user_errors(show_traceback: bool) -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        if show_traceback:
            traceback.print_exception(error)
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def refuse_keys_without_effect(command: str, overrides: Iterable[str]) -> None:
    """Raise ValueError for `head.` keys without effect: all commands but `train` read an exported head, whose
    hyper-parameters are in its config.json.
    """
    read = {f"head.{field.name}" for field in fields(HeadConfig)}
    for override in overrides if command != "train" else ():
        key = override.partition("=")[0].lstrip("+~")
        if key.startswith("head.") and key not in read:
            raise ValueError(f"{key}: only shapes a new head (train/run.py); an exported head brings its own")


def _refuse_added_keys(config: DictConfig) -> None:
    """Raise ValueError for unknown keys: Hydra's `+key=value` opens a schema, and OmegaConf drops the key silently."""
    field_names = {field.name for field in fields(cast(Any, OmegaConf.get_type(config)))}
    for name in config:
        if name not in field_names:
            key = config._get_full_key(str(name))
            raise ValueError(_unknown_key(key, field_names))
        if OmegaConf.is_missing(config, name) or not isinstance(config[name], DictConfig):
            continue
        if OmegaConf.get_type(config[name]) is not dict:  # a dict with keys of the user's choice has no schema
            _refuse_added_keys(config[name])


def explain(error: BaseException) -> str:
    """Return one message that names the key, the value or the options."""
    if isinstance(error, MissingConfigException):
        return _wrong_option(error)
    if in_file := re.match(r"In '(.+?)': \w+ raised while composing config:\n(.+)\n +full_key: (.+)", str(error)):
        file, detail, key = in_file.groups()
        return f"conf/{file}.yaml: {key}: {detail}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        names = cause.parent_node if isinstance(cause.parent_node, DictConfig) else ()
        return _unknown_key(str(cause.full_key or cause.key), [str(name) for name in names if name != "hydra"])
    if isinstance(cause, OmegaConfBaseException):
        detail = str(cause.msg or cause).splitlines()[0]
        return f"{cause.full_key}: {detail}" if cause.full_key else detail
    return str(error) or type(error).__name__


def _wrong_option(error: MissingConfigException) -> str:
    options = [name for name in error.options or [] if not name.startswith(("base_", OPTION))]
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if not group or not options:
        return str(error)
    return f"{group}={option}: no such option; {_one_of(option, options)}"


def _unknown_key(key: str, names: Iterable[str]) -> str:
    return unknown(key) or f"{key}: unknown key; {_one_of(key.rpartition('.')[2], names)}"


def _one_of(word: str, choices: Iterable[str]) -> str:
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"known: {', '.join(choices)}"


def _set_full_error(value: str | None) -> None:
    if value is None:
        os.environ.pop("HYDRA_FULL_ERROR", None)
    else:
        os.environ["HYDRA_FULL_ERROR"] = value


def save_config(config: Any, path: Path) -> None:
    OmegaConf.save(OmegaConf.create(encode_all(config)), path)


def schema_of(values: Collection[str], options: Mapping[str, type]) -> type:
    """Return the schema nearest to the keys of an option with a custom name (data=mix is a FilesDataConfig)."""
    keys = set(values)
    return min(options.values(), key=lambda option: len(keys ^ {field.name for field in fields(cast(Any, option))}))


def load_config(path: Path, schema: type[T], schemas: dict[str, dict[str, type]]) -> T:
    """Read back what `save_config` wrote, as strictly as the command line."""
    plain = cast(DictConfig, OmegaConf.load(path))
    try:
        typed = OmegaConf.structured(schema)
        groups = {field.name for field in fields(cast(Any, schema))} & set(plain)
        for group, options in schemas.items():
            if group in groups:
                option = options.get(plain[group].get("name")) or schema_of(plain[group], options)
                typed = OmegaConf.merge(typed, {group: OmegaConf.structured(option)})
        merged = OmegaConf.merge(typed, plain)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {explain(error)}") from error
    return to_config(cast(DictConfig, merged), schema)
