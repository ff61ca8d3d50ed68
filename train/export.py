"""From a trained head to outputs/heads/<model>/<head>: speculators config and weights, provenance, a card.

The folder changes at once or not at all. What is published was loaded back and measured first, by the caller's
`measure`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.request import SpeculationStats
from models.heads import load_head, save_head
from models.heads.eagle3 import Eagle3Head
from models.targets.llama import LlamaTarget
from train import atomic
from train.config import TrainConfig


@dataclass(frozen=True)
class Measured:
    """Greedy acceptance on the held-out prompts."""

    simulated: SpeculationStats
    engine: SpeculationStats

    @property
    def gap(self) -> float:
        """Relative difference of the trainer's figure from the engine's."""
        engine = self.engine.acceptance_length
        return (self.simulated.acceptance_length - engine) / engine if engine else 0.0

    def summary(self) -> dict[str, Any]:
        return {
            "simulated": round(self.simulated.acceptance_length, 4),
            "engine": round(self.engine.acceptance_length, 4),
        }


def export_head(
    head: Eagle3Head,
    target: LlamaTarget,
    config: TrainConfig,
    provenance: Mapping[str, Any],
    measure: Callable[[Eagle3Head], Measured],
) -> tuple[Path, Measured]:
    """Publishes the head in the target's dtype. `measure` sees the head as serving will load it."""
    folder = config.head.folder(config.output_dir, config.model.name)
    dtype = target.norm.weight.dtype
    atomic.sweep(folder.parent)
    with atomic.replace_folder(folder) as staging:
        record = {**provenance, "target_fingerprint": target.fingerprint, "target": target.path}

        def write(record: Mapping[str, Any]) -> None:
            save_head(
                head,
                staging,
                verifier=target.path,
                verifier_architecture=target.config.architecture,
                speculative_tokens=config.eval_draft_tokens,
                provenance=dict(record),
                dtype=dtype,
            )

        write(record)
        loaded = load_head(staging, dtype=dtype, device=target.norm.weight.device, target=target)
        measured = measure(loaded)
        write({**record, "acceptance_length": measured.summary()})
        (staging / "README.md").write_text(card(config, record, measured), encoding="utf-8")
    return folder, measured


def card(config: TrainConfig, record: Mapping[str, Any], measured: Measured) -> str:
    """The model card."""
    engine = measured.engine
    model, head = config.model.name, config.head.name
    commit = (record.get("git") or {}).get("commit") or "unknown"
    counts = zip(engine.acceptance_by_position, engine.accepted_by_position, engine.drafted_by_position, strict=True)
    rows = "\n".join(
        f"| {place} | {share:.3f} | {accepted} of {drafted} |"
        for place, (share, accepted, drafted) in enumerate(counts, start=1)
    )
    return f"""# {head} head for {model}

Drafts up to {config.eval_draft_tokens} tokens per step for `{record["target"]}`. Speculation changes no token: the head
decides how many come per step, never which. Trained by Headway.

| acceptance length τ (tokens per verify, bonus included) | |
|---|---|
| **engine** | **{engine.acceptance_length:.3f}** |
| simulated by the trainer | {measured.simulated.acceptance_length:.3f} (gap {100 * measured.gap:+.2f} %) |

Greedy, on {config.eval_prompts} held-out prompts with up to {config.eval_max_tokens} tokens each
({engine.emitted} tokens in {engine.steps} verifies).

| position | acceptance | accepted |
|---|---|---|
{rows}

## Serve it

    python infer/serve.py model={model} head={head}
    python infer/generate.py model={model} head={head} compare=true

The files follow the `speculators` format, which vLLM reads as well. The head belongs to one target, fingerprint
`{record["target_fingerprint"]}`; loading it for another is refused unless `head.allow_mismatch=true`.

## Where it comes from

Run `{record["run"]}`, {record["steps"]} steps; data {record["data_source"]} (hash `{record["data_hash"]}`);
commit `{commit[:12]}`. `provenance.json` holds the versions and the whole configuration.
"""


def check_room(config: TrainConfig, head: Eagle3Head, target: LlamaTarget) -> None:
    """Refuses a run whose export could not be written, before it costs anything. Raises ValueError."""
    folder = config.head.folder(config.output_dir, config.model.name)
    size = sum(value.numel() for value in head.state_dict().values()) * target.norm.weight.element_size()
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise ValueError(f"{folder}: the exported head will need {size} bytes, {free} are free; free some space")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{folder}: {place} is not writable; give another output_dir=")
