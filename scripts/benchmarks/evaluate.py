"""Evaluates an exported head by data set, temperature, chat template and draft shape.

    python scripts/bench.py evaluate model=demo head=eagle3
    python scripts/bench.py evaluate model=demo head=eagle3 files=[gsm8k/test.jsonl] columns='{prompt: question}'
    python scripts/bench.py evaluate model=demo head=eagle3 temperatures=[0] shapes=[chain3] concurrency=[1,4,16]

`files` takes what data.path of training takes, and every question of its rows is measured, the later ones behind the
target's greedy answers; without it, held-out prompts of the demo corpus are used. Speed is a
ratio to plain decoding of the same prompts in the same round. A verify counts as cut short by the draft vocabulary if
it ended at a token outside it, which the head cannot draft.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infer.config import ProposerConfig
from infer.console.compare import Comparison, Pair
from infer.options.cli import engine_entry_point
from scripts.benchmarks.comparison.rounds import OFF, run_round
from scripts.benchmarks.comparison.systems import System, engine_system
from scripts.benchmarks.config import EvaluateConfig
from scripts.benchmarks.document import document, publish, table
from scripts.benchmarks.prompts import Task, read_file

DEMO = "demo corpus"

PromptSet = tuple[str, bool, list[list[int]]]  # name, whether the chat template is used, prompts
Cell = dict[str, Any]  # results of one data set, chat template setting, temperature, draft shape and concurrency


def prompt_sets(config: EvaluateConfig, engine: Any) -> Iterator[PromptSet]:
    """Yield the prompts of every file, with and without chat template, or of the demo corpus.

    Raises ValueError for data that cannot be read.
    """
    from models.demo.corpus import held_out_prompts

    if not config.files:
        yield DEMO, False, held_out_prompts(engine.tokenizer, config.num_prompts, config.prompt_tokens)
    longest = engine.context - config.max_tokens - 1
    for path, name in zip(config.files, names_of(config.files), strict=True):
        for template in config.chat_template:
            options = {"chat_template": template, "engine": engine}
            prompts = read_file(config, "files", path, engine.tokenizer, config.num_prompts, longest, **options)
            yield name, template, prompts


def names_of(files: Sequence[str]) -> list[str]:
    """Return the files' names without suffixes; equal names are preceded by their folder, as in gsm8k/test."""
    names = [Path(file).name.partition(".")[0] for file in files]
    return [
        f"{Path(file).parent.name}/{name}" if names.count(name) > 1 else name
        for file, name in zip(files, names, strict=True)
    ]


def measure(
    config: EvaluateConfig, systems: Mapping[str, System], sets: Sequence[PromptSet], target_ids: Any
) -> list[Cell]:
    """Measure `systems`, plain decoding and the head in every shape, in one round for each group of prompts that run
    together; `target_ids` are the ids in the draft vocabulary.
    """
    from tqdm import tqdm

    results = []
    cases = list(itertools.product(sets, config.temperatures, config.concurrency))
    total = len(systems) * sum(-(-len(prompts) // together) for (_, _, prompts), _, together in cases)
    with tqdm(total=total, unit="run", disable=None, dynamic_ncols=True) as bar:
        for (name, template, prompts), temperature, together in cases:
            tasks = [Task(prompt, config.max_tokens) for prompt in prompts]
            groups = [tasks[start : start + together] for start in range(0, len(tasks), together)]
            rounds = [
                run_round(systems, group, temperature, together, number, bar) for number, group in enumerate(groups)
            ]
            case = {"data": name, "template": template, "temperature": temperature}
            results += [
                case
                | {"shape": shape, "concurrency": together, "prompts": len(prompts)}
                | figures(Comparison([Pair(runs[OFF], runs[shape]) for runs in rounds]), target_ids)
                for shape in config.shapes
            ]
    return results


def figures(comparison: Comparison, target_ids: Any) -> Cell:
    """Return the figures of a cell: τ; the share of the emitted tokens that the draft vocabulary holds (`coverage`) and
    that of the verifies that ended at a token outside it, an upper bound of what it costs (`cut_short`); the median
    `ratio` to plain decoding; whether the token ids equal plain decoding's (`identical`).

    Only the bonus token, which ends a verify, can lie outside the draft vocabulary, so each token outside it counts one
    verify. The first token of a response comes from the prefill and ends no verify.
    """
    import torch

    from models.vocab import coverage

    outputs = [ids for pair in comparison.pairs for ids in pair.on.token_ids]
    emitted, later = (torch.tensor([t for ids in outputs for t in ids[first:]]) for first in (0, 1))
    stats = comparison.speculation
    lacking = len(later) - round(len(later) * coverage(later, target_ids)) if len(later) else 0
    return {
        "acceptance_length": stats.acceptance_length,
        "by_position": stats.acceptance_by_position,
        "coverage": coverage(emitted, target_ids),
        "cut_short": lacking / max(1, stats.steps),
        "tokens_per_s": comparison.on_tokens_per_s,
        "ratio": comparison.ratio.median,
        "identical": comparison.identical,
    }


@engine_entry_point("evaluate", EvaluateConfig)
def main(config: EvaluateConfig) -> None:
    from infer.engine import Engine

    # Prompts are repeated: a prefix cache would spare one of the compared sides its prefill.
    cold, drafts = replace(config.engine, prefix_cache=False), ProposerConfig(name="head", adaptive=False)
    engine = Engine.load(config.model, config.head, cold, drafts, output_dir=config.output_dir)
    assert engine.head is not None
    names = {OFF: OFF, **{shape: f"head:{shape}" for shape in config.shapes}}
    systems = {shape: engine_system(name, config, drafts, engine, {}) for shape, name in names.items()}
    cells = measure(config, systems, list(prompt_sets(config, engine)), engine.head.target_ids.cpu())
    print(table(cells, pad=True), end="")
    publish(document(config, engine.target.fingerprint, cells), config.save, config.model.name)
