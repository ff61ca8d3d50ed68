"""Command lines that people paste: the words that give a configuration again, quoted for a shell.

Knows the groups of conf/, which `model=` starts from, and no command's own keys.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from infer.config import ModelConfig
from infer.config_checks import REPO_ROOT
from infer.head_config import HeadConfig

MODELS = REPO_ROOT / "conf" / "model"
ANY_MODEL = "demo"  # what a target that no file of conf/model names is given through
OUTPUTS = "outputs"
TARGET_FOLDER, HEAD_FOLDER = "<folder of the target>", "<folder of this head>"  # for people to fill in


def python_command(script: str, *words: str, processes: int = 1) -> str:
    """A line that runs `script` of this repository as this process is run: from its folder, with its interpreter."""
    python, launcher = interpreter(), shutil.which("torchrun")
    start = [python]
    if processes > 1:
        start = ["torchrun"] if launcher and python == "python" else [python, "-m", "torch.distributed.run"]
        start += ["--nproc_per_node", str(processes)]
    return shlex.join([*start, _from_here(REPO_ROOT / script), *words])


def interpreter() -> str:
    """`python` where a shell finds this interpreter under that name, else where it lies."""
    here = shutil.which("python")
    if here and Path(here).parent == Path(sys.executable).parent:
        return "python"
    return _from_here(Path(sys.executable)) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable


def _from_here(path: Path) -> str:
    return os.path.relpath(path)


def model_words(model: ModelConfig) -> list[str]:
    """What names this target on a command line, of this machine."""
    option = model.name if (MODELS / f"{model.name}.yaml").is_file() else ANY_MODEL
    usual = _usual(option)
    given = {field.name: getattr(model, field.name) for field in fields(model)}
    return [
        f"model={option}",
        *(f"model.{key}={_word(value)}" for key, value in given.items() if value != usual.get(key)),
    ]


def head_words(head: HeadConfig, output_dir: str) -> list[str]:
    """What names the head that training exported."""
    place = [f"head.path={head.path}"] if head.path else []
    if not place and output_dir != OUTPUTS:
        place = [f"output_dir={output_dir}"]
    return [f"head={head.name}", *place]


def portable_path(path: str) -> str | None:
    """A path or hub id as it reads on any machine: relative to the repository. None for a place of this machine."""
    folder = Path(path).expanduser()
    if not folder.is_absolute():
        return path
    return str(folder.relative_to(REPO_ROOT)) if folder.is_relative_to(REPO_ROOT) else None


def _usual(option: str) -> dict[str, Any]:
    """The keys of conf/model/<option>.yaml, and the schema's defaults."""
    defaults = {field.name: field.default for field in fields(ModelConfig) if field.default is not MISSING}
    return defaults | cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(MODELS / f"{option}.yaml")))


def _word(value: Any) -> str:
    return "null" if value is None else str(value)
