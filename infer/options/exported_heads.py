"""Where the exported head of a target is looked up, and which one `head=auto` takes.

Training exports to <output_dir>/heads/<model>/<head>; heads that come with the repository lie in
models/<model>/heads/<head>, and are taken where training has exported none of their kind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from infer.config_checks import REPO_ROOT, resolve_path
from infer.options.head_config import AUTO, HEAD_NAMES, HeadConfig

T = TypeVar("T")
SHIPPED = REPO_ROOT / "models"
DEFAULT_HEAD = "eagle3"  # what `auto` stands for where no head is: messages name it, and how to train it


def head_folder(head: HeadConfig, output_dir: str, model_name: str) -> Path:
    """Of the head to load: `head.path`, what training exported, what is shipped; where training would export else."""
    exported, shipped = head.folder(output_dir, model_name), shipped_heads(model_name) / head.name
    return shipped if not head.path and not is_head(exported) and is_head(shipped) else exported


def shipped_heads(model_name: str) -> Path:
    return SHIPPED / model_name / "heads"


def is_head(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def choose_head(head: HeadConfig, output_dir: str, model_name: str) -> HeadConfig:
    """`head=auto` as a head by name: the one at head.path, the newest export, the first that is shipped.

    Raises ValueError where head.path holds none.
    """
    if head.name != AUTO:
        return head
    if head.path:
        return named(head, kind_of(resolve_path(head.path)))
    exports = resolve_path(output_dir) / "heads" / model_name
    trained = [name for name in HEAD_NAMES if is_head(exports / name)]
    if trained:
        return named(head, max(trained, key=lambda name: (exports / name / "config.json").stat().st_mtime))
    shipped = (name for name in HEAD_NAMES if is_head(shipped_heads(model_name) / name))
    return named(head, next(shipped, DEFAULT_HEAD))


def with_head(config: T) -> T:
    """A command's config in which `head=auto` is a head by name."""
    own: Any = config
    return replace(own, head=choose_head(own.head, own.output_dir, own.model.name))


def read_head_config(text: str) -> HeadConfig:
    """From Python: a name, `none` and `auto` among them, or the folder of an exported head."""
    if text in (*HEAD_NAMES, AUTO, "none"):
        return HeadConfig(name=text)
    if not resolve_path(text).is_dir():
        raise ValueError(f"head={text}: no head ({', '.join((*HEAD_NAMES, AUTO, 'none'))}) and no folder of one")
    return HeadConfig(name=kind_of(resolve_path(text)), path=text)


def kind_of(folder: Path) -> str:
    from models.heads import read_head

    return read_head(folder).head


def named(head: HeadConfig, name: str) -> HeadConfig:
    return HeadConfig(name=name, path=head.path, allow_mismatch=head.allow_mismatch)
