"""python -m tests.trainers [--python FILE]: heads of other trainers read by us, and ours opened by them.

Their logits are compared with ours, in fp32. `scripts/peers.sh speculators` makes the environment, unless --python
names one. The target, the heads and the logs lie in `.trainers/`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.attention import CausalAttention
from models.formats.checkpoint import export_format
from models.formats.conversion import FORMATS, UNSUPPORTED, detect, read_checkpoint, write_checkpoint
from models.heads import HEADS
from models.heads.base import Head
from models.heads.block import BlockHead, base_logits
from models.heads.dflash2.config import DFlash2Config
from models.heads.files import load_head, save_head
from models.heads.mtp.head import MtpHead
from models.targets import load_target
from models.targets.llama import LlamaTarget
from scripts.benchmarks.document import markdown
from tests.formats import test_other_trainers as recorded
from tests.heads import VARIANTS, make_head
from train.data import alignment
from train.objectives.draft_states import draft_states

HERE, FOLDER = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2] / ".trainers"
LENGTH, STEPS, CLOSE = 40, 3, 1e-4  # of the largest logit
SHOWN, LIBRARIES = 110, ("speculators", "specforge")
SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": None, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
EXPORTED = ("eagle3", "p-eagle", "mtp", "dflash", "dspark", "dflash2")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trainers", description=__doc__, allow_abbrev=False)
    parser.add_argument("--python", type=Path, help="of an environment with speculators, instead of that of peers.sh")
    parser.add_argument("--record", type=Path, help="write the logits that tests/formats/test_other_trainers.py reads")
    options = parser.parse_args(argv)
    python = options.python or install()
    shutil.rmtree(FOLDER / "heads", ignore_errors=True)
    folders = {kind: FOLDER / "heads" / kind for kind in ("target", "speculators", "specforge", "ours")}
    target = make_target(folders["target"])
    if options.record:
        return record(python, target, options.record)
    ours, lost = dict[Path, Tensor](), dict[Path, list[str]]()
    for library in LIBRARIES:
        folders[library].mkdir(parents=True)
        run(python, "make", target.path, folders[library], library=library)
    outcomes = {folder: "" for library in LIBRARIES for folder in sorted(folders[library].iterdir()) if folder.is_dir()}
    for folder in outcomes:
        try:
            ours[folder] = logits_of(load_head(folder, target=target), target, folder)
        except ValueError as error:
            outcomes[folder] = f"refused: {str(error).replace(f'{folder}: ', '')}"
    for folder, head in export(folders["ours"], target):
        ours[folder], checkpoint = logits_of(head, target, folder), read_checkpoint(detect(folder), folder)
        lost[folder] = export_format(HEADS[head.config.name]).losses(checkpoint)
    results = run(python, "logits", *(folder for folder in ours if folder.parent != folders["specforge"]))
    results += [{"folder": folder, "error": None} for folder in ours if folder.parent == folders["specforge"]]
    for result in results:
        folder, error = Path(result["folder"]), result["error"]
        outcome = error or compared(ours[folder], load_file(f"{folder}.logits.safetensors")["logits"])
        said = lost.get(folder, ())
        outcomes[folder] = f"as announced: {said[0]}" if said and not outcome.startswith("equal") else outcome
    rows = [(f"{folder.name}", f"{folder.parent.name}", outcome[:SHOWN]) for folder, outcome in outcomes.items()]
    print(markdown(("head", "made by", "logits"), rows, pad=True).rstrip())
    fine = ("equal", "as announced", *(f"refused: {name}" for name in UNSUPPORTED.values()))
    return int(not all(outcome.startswith(fine) for outcome in outcomes.values()))


def record(python: Path, target: LlamaTarget, file: Path) -> int:
    """Write the logits `[slots, K, Vd]` that speculators computes of the heads of trained_sources.py."""
    ids, features = recorded.inputs()
    folders = {name: FOLDER / "heads" / "recorded" / name for name in recorded.TRAINED_SOURCES}
    for name, source in recorded.TRAINED_SOURCES.items():
        config = json.loads(json.dumps(source.config))
        config["speculators_config"]["verifier"]["name_or_path"] = target.path
        folders[name].parent.mkdir(exist_ok=True)
        replace(source, config=config).write(folders[name])
        save_file({"ids": ids[0], "features": torch.cat(features, dim=-1)[0]}, f"{folders[name]}.inputs.safetensors")
    run(python, "logits", *folders.values())
    logits = {name: load_file(f"{folder}.logits.safetensors")["logits"] for name, folder in folders.items()}
    save_file({name: each[list(recorded.SLOTS)].contiguous() for name, each in logits.items()}, file)
    return 0


def install() -> Path:
    """Return the Python of the environment with the pinned trainers, installed unless it is there."""
    subprocess.run([HERE.parents[1] / "scripts/peers.sh", "speculators"], check=True)
    return Path(os.environ.get("HEADWAY_PEERS", HERE.parents[1] / ".peers")) / "speculators/bin/python"


def make_target(folder: Path) -> LlamaTarget:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**SIZES)).save_pretrained(folder)
    return load_target(str(folder))


def run(python: Path, command: str, *words: object, library: str = LIBRARIES[0]) -> list[dict[str, Any]]:
    """Run a trainer's side; return the results that it prints. The rest is in .trainers/<library>-<command>.log."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (FOLDER / f"{library}-{command}.log").open("w") as log:
        done = subprocess.run(
            [python, HERE / f"use_{library}.py", command, *map(str, words)],
            stdout=subprocess.PIPE, stderr=log, text=True, check=True, env=environment,
        )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def export(folder: Path, target: LlamaTarget) -> Iterator[tuple[Path, Head]]:
    """Export a head of every variant that speculators has a class for; DFlash2's is converted to its format."""
    facts: dict[str, Any] = {
        "verifier": target.path,
        "verifier_architecture": target.config.architecture,
        "provenance": {"target_fingerprint": target.fingerprint},
    }
    for variant, (name, options) in VARIANTS.items():
        if name not in EXPORTED:
            continue
        head, place = make_head(target, variant), folder / variant.replace("'", "")
        place.mkdir(parents=True)
        save_head(head, place, speculative_tokens=options.get("num_depths", STEPS), **facts)
        if name == DFlash2Config.name:
            checkpoint = read_checkpoint(FORMATS["headway"], place)
            shutil.rmtree(place)
            place.mkdir()
            try:
                write_checkpoint(FORMATS["speculators"], checkpoint, place)
            except ValueError:  # a reduced draft vocabulary
                continue
        yield place, head


@torch.no_grad()
def logits_of(head: Head, target: LlamaTarget, folder: Path) -> Tensor:
    """Return the head's logits `[T, K, Vd]` of every slot and depth; write what they are computed from for others."""
    ids = torch.randint(1, SIZES["vocab_size"], (1, LENGTH), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(LENGTH)[None]
    aux = target(ids, positions, CausalAttention(), aux_layers=head.config.aux_layers).aux
    save_file({"ids": ids[0], "features": torch.cat(aux, dim=-1)[0]}, f"{folder}.inputs.safetensors")
    depths = min(head.config.max_depth or STEPS, 8)
    if isinstance(head, MtpHead):  # its objective's steps do not see each other's rows
        state, logits = head.fuse(aux), list[Tensor]()
        for depth in range(STEPS):
            state = head.step(alignment.draft_tokens(ids, depth), state, positions, CausalAttention(), depth)
            logits.append(head.logits(state, depth))
    elif isinstance(head, BlockHead) and isinstance(head.config, DFlash2Config):  # before the selector
        logits = [base_logits(head, state) for state in draft_states(head, ids, aux, depths)]
    else:
        logits = [head.logits(state, depth) for depth, state in enumerate(draft_states(head, ids, aux, depths))]
    return torch.stack([each[0] for each in logits], dim=1)


def compared(ours: Tensor, theirs: Tensor) -> str:
    depths = min(ours.shape[1], theirs.shape[1])
    ours, theirs = ours[:, :depths], theirs[:, :depths]
    known = ~theirs.isnan()
    error = float(((ours - theirs).abs()[known] / theirs[known].abs().max()).max())
    return f"{'equal' if error < CLOSE else 'differ'}: {error:.1e} of the largest, {int(known[..., 0].sum())} rows"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    sys.exit(main(sys.argv[1:]))
