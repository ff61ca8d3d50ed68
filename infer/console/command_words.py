"""Command lines for users to paste: the words that reproduce a configuration, quoted for a shell.

Knows what `model=` and `head=` take, and no keys of single commands.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from infer.config import ModelConfig
from infer.options.model_names import model_at, model_options, read_model
from infer.settings.paths import REPO_ROOT
from models.checks import home_path
from models.heads.config import HeadConfig

OUTPUTS = "outputs"
TARGET_FOLDER, HEAD_FOLDER = "<folder of the target>", "<folder of this head>"  # for users to fill in


def python_command(script: str, *words: str, processes: int = 1) -> str:
    """Return a command that runs `script` of this repository from this process's folder with its interpreter."""
    python, launcher = interpreter(), shutil.which("torchrun")
    start = [python]
    if processes > 1:
        start = ["torchrun"] if launcher and python == "python" else [python, "-m", "torch.distributed.run"]
        start += ["--nproc_per_node", str(processes)]
    return shlex.join([*start, os.path.relpath(REPO_ROOT / script), *words])


def interpreter() -> str:
    """Return `python` if a shell finds this interpreter under that name, else its path."""
    on_path = shutil.which("python")
    if on_path and Path(on_path).parent == Path(sys.executable).parent:
        return "python"
    return os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable


def model_overrides(model: ModelConfig) -> list[str]:
    """Return the words that name this target on a command line of this machine."""
    is_option = model.name in model_options()
    settings, defaults = vars(model), vars(read_model(model.name) if is_option else model_at(model.path))
    changed = {key: "null" if value is None else value for key, value in settings.items() if value != defaults[key]}
    words = [f"model.{key}={value}" for key, value in changed.items()]
    return [f"model={model.name if is_option else model.path}", *words]


def head_words(head: HeadConfig, output_dir: str) -> list[str]:
    """Return the words that name the head that training exported."""
    place = [f"head.path={head.path}"] if head.path else []
    place += [f"head.revision={head.revision}"] if head.revision else []
    if not place and output_dir != OUTPUTS:
        place = [f"output_dir={output_dir}"]
    return [f"head={head.name}", *place]


def portable_path(path: str) -> str | None:
    """Return a path or hub id in a form valid on any machine: relative to the repository. None if there is none."""
    folder = home_path(path)
    if not folder.is_absolute():
        return path
    return str(folder.relative_to(REPO_ROOT)) if folder.is_relative_to(REPO_ROOT) else None
