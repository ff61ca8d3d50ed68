"""What `head=` means to a command that reads a head: `none`, or the exported head of a target, which `auto` chooses.

Training exports to <output_dir>/heads/<model>/<head>; heads shipped with the repository are in
models/<model>/heads/<head>, and are taken if training has exported none of their kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from infer.config_checks import REPO_ROOT, resolve_path
from models.gguf import is_gguf
from models.heads import DEFAULT_HEAD, HEADS
from models.heads.config import HeadConfig

T = TypeVar("T")
SHIPPED = REPO_ROOT / "models"
AUTO = "auto"


@dataclass
class NoHeadConfig(HeadConfig):
    def __post_init__(self) -> None:
        if self.path:
            raise ValueError(
                f"head.path={self.path}: head=none reads no head; drop head.path or say head={DEFAULT_HEAD}"
            )


def export_folder(head: HeadConfig, output_dir: str, model_name: str) -> Path:
    """Return where training exports the head of this model; `head.path` overrides."""
    return resolve_path(head.path) if head.path else resolve_path(output_dir) / "heads" / model_name / head.name


def head_folder(head: HeadConfig, output_dir: str, model_name: str) -> Path:
    """Return the head's folder: `head.path`, else the export, else the shipped head, else where training exports."""
    exported, shipped = export_folder(head, output_dir, model_name), shipped_heads(model_name) / head.name
    return shipped if not head.path and not is_head(exported) and is_head(shipped) else exported


def shipped_heads(model_name: str) -> Path:
    return SHIPPED / model_name / "heads"


def is_head(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def choose_head(head: HeadConfig, output_dir: str, model_name: str) -> HeadConfig:
    """Return `head=auto` as a head by name: the one at head.path, else the newest export, else the first shipped one.

    Raises ValueError if there is none at head.path.
    """
    if head.name != AUTO:
        return head
    if head.path:
        return replace(head, name=kind_of(resolve_path(head.path)))
    exports = resolve_path(output_dir) / "heads" / model_name
    trained = [name for name in HEADS if is_head(exports / name)]
    if trained:
        return replace(head, name=max(trained, key=lambda name: (exports / name / "config.json").stat().st_mtime))
    shipped = (name for name in HEADS if is_head(shipped_heads(model_name) / name))
    return replace(head, name=next(shipped, DEFAULT_HEAD))


def with_head(config: T) -> T:
    """Return a command's config with `head=auto` replaced by a head by name."""
    cfg: Any = config
    return replace(cfg, head=choose_head(cfg.head, cfg.output_dir, cfg.model.name))


def read_head_config(text: str) -> HeadConfig:
    """Return the head for use from Python: a name, `none` or `auto`, or the folder or GGUF file of an exported head."""
    if text in (*HEADS, AUTO, "none"):
        return HeadConfig(name=text)
    if not (resolve_path(text).is_dir() or is_gguf(text)):
        raise ValueError(f"head={text}: no head ({', '.join((*HEADS, AUTO, 'none'))}) and no folder of one")
    return HeadConfig(name=kind_of(resolve_path(text)), path=text)


def kind_of(folder: Path) -> str:
    from models.heads.files import read_head

    return read_head(folder).head
