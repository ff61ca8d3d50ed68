"""What `head=` means to a command that reads a head: `none`, or a head of the target, which `auto` chooses.

Training exports to <output_dir>/heads/<model>/<head>; heads shipped with the repository are in
models/<model>/heads/<head>. Of several the one with the best measured τ drafts; where that cannot be compared, the
newest. A target that has no head under its name gets those that were trained for the same weights under another one.
`published` takes one from the model hub.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from infer.config import AUTO, ModelConfig, ProposerConfig, PublishedHeadConfig
from infer.settings.draft_tree import Measured
from infer.settings.paths import REPO_ROOT, resolve_path, short
from models.config import read_config_json
from models.heads import DEFAULT_HEAD, HEADS, SHIPPED_BY_TARGETS
from models.heads.config import PROVENANCE, HeadConfig
from models.heads.measured_tree import RANK_ACCURACY, best_paths, rank_accuracy
from models.heads.measurement import best_measured, made_for
from models.hub import cached_snapshot, fetch_snapshot, is_hub_id
from models.mtp_names import modules_of

T = TypeVar("T")
SHIPPED = REPO_ROOT / "models"
QUANTIZED = re.compile(r"[-.](awq|gptq|fp8|int[48]|quantized|w\d+a\d+|i?q\d|bf16|f16).*")  # the end of a target's name


def export_folder(head: HeadConfig, output_dir: str, model_name: str) -> Path:
    """Return where training exports the head of this model; `head.path` overrides."""
    return resolve_path(head.path) if head.path else resolve_path(output_dir) / "heads" / model_name / head.name


def head_folder(head: HeadConfig, output_dir: str, model: ModelConfig) -> Path:
    """Return the head's folder: at `head.path`, else that of `find_head`, else where training exports."""
    if head.path:
        return head_at(head.path, head.revision)
    return find_head([head.name], output_dir, model)[0] or export_folder(head, output_dir, model.name)


def find_head(kinds: Iterable[str], output_dir: str, model: ModelConfig) -> tuple[Path | None, str]:
    """Return the folder of the head of these kinds that drafts for the target, None if there is none; and a line on
    why that one, empty if there was no choice.
    """
    exports, kinds = resolve_path(output_dir) / "heads", list(kinds)
    exported = [folder for kind in kinds if is_head(folder := exports / model.name / kind)]
    exported.sort(key=lambda folder: (folder / "config.json").stat().st_mtime, reverse=True)
    shipped = [folder for kind in kinds if is_head(folder := shipped_heads(model.name) / kind)]
    if not exported and not shipped:
        heads = trained_for(kinds, exports, model)
        why = "it was trained for the same weights under another name"
        return (heads[0], f"{short(heads[0])} drafts: {why}") if heads else (None, "")
    best, why, other = best_measured([*exported, *shipped])
    return best, f"{short(best)} drafts: {why}; head={short(other)} takes that one" if other else ""


def trained_for(kinds: Sequence[str], exports: Path, model: ModelConfig) -> list[Path]:
    """Return the heads of these kinds that were trained for the target's weights, whatever its name was then."""
    folders = [*(path for kind in kinds for path in exports.glob(f"*/{kind}"))]
    folders += [path for kind in kinds for path in SHIPPED.glob(f"*/heads/{kind}")]
    targets = {folder: made_for(folder) for folder in folders if is_head(folder)}
    checkpoint = local_checkpoint(model) if any(targets.values()) else None
    if checkpoint is None:
        return []
    from models.checkpoint import fingerprint

    wanted = fingerprint(checkpoint)
    return [folder for folder, target in targets.items() if target == wanted]


def local_checkpoint(model: ModelConfig) -> Path | None:
    """Return the target's checkpoint, None if it is yet to be fetched from the model hub, or is none."""
    from models.checkpoint import has_weights
    from models.gguf import is_gguf
    from models.targets import resolve_checkpoint

    place = model.path_or_hub_id
    if is_hub_id(place) and not Path(place).exists():
        folder = cached_snapshot(place, model.revision)
    else:
        folder = resolve_checkpoint(place, model.revision)
    return folder if folder is not None and (is_gguf(folder) or has_weights(folder)) else None


def head_at(path: str, revision: str | None = None, *, weights: bool = True, option: str = "head.path=") -> Path:
    """Return the folder or GGUF file at a path relative to the repository; if there is none, that of a hub id, fetched.

    Without `weights` only the config is fetched. Raises ValueError naming `option` if the hub is out of reach.
    """
    place = resolve_path(path)
    if place.exists() or not is_hub_id(path):
        return place
    from models.heads.files import fetch_head

    return fetch_head(path, revision, weights=weights, option=option)


def shipped_heads(model_name: str) -> Path:
    return SHIPPED / model_name / "heads"


def is_head(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def lacks_head(head: HeadConfig, output_dir: str, model: ModelConfig) -> bool:
    """Return whether there is no head of this kind yet, and none was asked for by its place."""
    return head.path is None and not is_head(head_folder(head, output_dir, model))


def learned_folder(head_name: str, output_dir: str, model_name: str) -> Path:
    """Return where the heads of this model are numbered that learnt from what was served (train/learning/)."""
    return resolve_path(output_dir) / "heads" / model_name / f"{head_name}-learned"


def choose_head(head: HeadConfig, output_dir: str, model: ModelConfig, *, quiet: bool = False) -> HeadConfig:
    """Return a head by name and place: the one at head.path, else that of `find_head`, of any kind for `head=auto`,
    else the target's own modules, for `head=auto` and `head=mtp`. Without any, the place remains open.

    Says on standard error why it is that one, unless `quiet`. `head=published` becomes the first known one. Raises
    ValueError if there is none at head.path, or none known.
    """
    if isinstance(head, PublishedHeadConfig):
        head = HeadConfig(AUTO, head.path or published_head(head.heads, model), head.revision, head.allow_mismatch)
    if head.path and head.name == AUTO:
        return replace(head, name=kind_of(head_at(head.path, head.revision, weights=False)))
    if head.path or head.name == "none":
        return head
    folder, why = find_head(HEADS if head.name == AUTO else [head.name], output_dir, model)
    if folder is not None:
        if why and not quiet:
            print(f"note: head={head.name}: {why}", file=sys.stderr, flush=True)
        return replace(head, name=folder.name, path=short(folder), revision=None)
    if head.name in (AUTO, SHIPPED_BY_TARGETS) and ships_modules(model):
        return replace(head, name=SHIPPED_BY_TARGETS, path=model.path_or_hub_id, revision=model.revision)
    return replace(head, name=DEFAULT_HEAD) if head.name == AUTO else head


def ships_modules(model: ModelConfig) -> bool:
    """Return whether the target's config states MTP modules, and its files hold them; they are fetched from the hub."""
    folder = Path(model.path_or_hub_id)
    if is_hub_id(model.path_or_hub_id) and not folder.exists():
        folder = fetch_snapshot(model.path_or_hub_id, model.revision, ("*.json",), "model=")
    config = folder / "config.json"
    if not (config.is_file() and modules_of(read_config_json(config))):
        return False
    from models.heads.mtp.formats import find_shipped
    from models.targets import read_target_config, resolve_checkpoint

    read_target_config(folder)  # an architecture that is no target is an error of the target, not of its modules
    return bool(find_shipped(resolve_checkpoint(model.path_or_hub_id, model.revision))[1])


def published_head(heads: dict[str, list[str]], model: ModelConfig) -> str:
    """Return the hub id of a target's first head. A folder, file or copy on the hub is known by the target's last name.

    Raises ValueError listing the targets that have one.
    """
    known_as = {model.path.lower(), QUANTIZED.sub("", model.name.lower())}
    for target, ids in heads.items():
        if known_as & {target.lower(), target.lower().rpartition("/")[2]}:
            return ids[0]
    raise ValueError(f"head=published: no head is known for model={model.name}; targets with one: {', '.join(heads)}")


def with_head(config: T) -> T:
    """Return a command's config with `head=auto` and `head=published` replaced by a head by name."""
    cfg: Any = config
    unused = hasattr(cfg, "proposer") and cfg.proposer.name not in (AUTO, "head", "combined")
    head = choose_head(cfg.head, cfg.output_dir, cfg.model, quiet=unused)
    if cfg.head.name == AUTO and head.path is None:  # the target has none
        head = replace(head, name=getattr(cfg, "without_head", head.name))
    return replace(cfg, head=head)


def kind_of(folder: Path) -> str:
    from models.formats.conversion import head_kind
    from models.heads.files import check_exported

    check_exported(folder)
    return head_kind(folder)


def resolve_tree(config: ProposerConfig, folder: Path) -> ProposerConfig:
    """Replace `proposer.tree=measured` by the tree of the exported head in `folder`; return any other config unchanged.

    The tree is no deeper than `proposer.max_draft_tokens`. Raises ValueError for a head that was not measured.
    """
    tree = config.shape
    if not isinstance(tree, Measured):
        return config
    accuracy = rank_accuracy(folder)
    if accuracy is None:
        raise ValueError(
            f"proposer.tree={config.tree}: {folder / PROVENANCE} holds no {RANK_ACCURACY}, which training writes; "
            "give the paths themselves, proposer.tree=[[0],[1],[0,0]], or a beam, proposer.tree=beam:4x5"
        )
    paths, _ = best_paths(accuracy[: config.draft_tokens], tree.nodes)
    if not paths:
        raise ValueError(f"proposer.tree={config.tree}: the head in {folder} was never right")
    return replace(config, tree=[list(path) for path in paths])
