"""Evaluates an exported head by data set, temperature, chat template, draft shape and prompt length.

    python scripts/evaluate.py model=demo head=eagle3
    python scripts/evaluate.py model=demo head=eagle3 files=[gsm8k/test.jsonl] columns='{prompt: question}'
    python scripts/evaluate.py model=demo head=eagle3 temperatures=[0] shapes=[chain3] concurrency=[1,4,16]

`files` takes what data.path of training takes; without it, held-out prompts of the demo corpus are used. Speed is a
ratio to plain decoding of the same prompts in the same round. A verify counts as cut short by the draft vocabulary if
it ended at a token outside it, which the head cannot draft. Tables, plots and a few responses with their accepted
drafts marked are written to <output_dir>/eval/<model>-<head>/, and to the tracker with tracker=wandb or tensorboard.
The last line of standard output is one JSON document, which `save=NAME` also writes to scripts/results/.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from infer.config import ProposerConfig
from infer.console.compare import Comparison, Pair
from infer.options.cli import engine_entry_point
from infer.options.exported_heads import head_folder
from infer.options.paths import resolve_path
from scripts.config import EvalConfig
from scripts.document import document, publish, table
from scripts.harness import OFF, run_round
from scripts.systems import System, Task, engine_system, read_file

DEMO = "demo corpus"
BUCKETS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # upper bounds of prompt lengths, in tokens


@dataclass
class Cell:
    """The results for one data set, chat template setting, temperature, draft shape and concurrency."""

    data: str
    template: bool
    temperature: float
    shape: str
    concurrency: int
    prompts: int
    acceptance_length: float
    by_position: list[float]
    by_context: dict[str, dict[str, float]]  # `about`, by the upper bound of the prompt length in tokens
    coverage: float  # share of the emitted tokens that the draft vocabulary holds
    cut_short: float  # share of the verifies that ended at a token outside it: an upper bound of what it costs
    tokens_per_s: float
    ratio: float  # to plain decoding, median over the rounds
    identical: bool  # whether the token ids equal those of plain decoding


PromptSet = tuple[str, bool, list[list[int]]]  # name, whether the chat template is used, prompts


def prompt_sets(config: EvalConfig, engine: Any) -> Iterator[PromptSet]:
    """Yield the prompts of every file, with and without chat template, or of the demo corpus.

    Raises ValueError for data that cannot be read.
    """
    from models.demo.corpus import held_out_prompts

    if not config.files:
        yield DEMO, False, held_out_prompts(engine.tokenizer, config.num_prompts, config.prompt_tokens)
    longest = engine.context - config.max_tokens - 1
    for path, name in zip(config.files, names_of(config.files), strict=True):
        for template in config.chat_template:
            options = {"chat_template": template}
            yield name, template, read_file(config, path, engine.tokenizer, config.num_prompts, longest, **options)


def names_of(files: Sequence[str]) -> list[str]:
    """Return the files' names without suffixes; equal names are preceded by their folder, as in gsm8k/test."""
    names = [Path(file).name.partition(".")[0] for file in files]
    return [
        f"{Path(file).parent.name}/{name}" if names.count(name) > 1 else name
        for file, name in zip(files, names, strict=True)
    ]


def measure(
    config: EvalConfig, systems: Mapping[str, System], sets: Sequence[PromptSet], target_ids: Any
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
            lengths = [max(len(task.prompt) for task in group) for group in groups]
            for shape in config.shapes:
                pairs = [Pair(runs[OFF], runs[shape]) for runs in rounds]
                comparison = Comparison(pairs)
                results.append(
                    Cell(
                        data=name,
                        template=template,
                        temperature=temperature,
                        shape=shape,
                        concurrency=together,
                        prompts=len(prompts),
                        by_position=comparison.speculation.acceptance_by_position,
                        by_context=by_context(lengths, pairs, target_ids),
                        tokens_per_s=comparison.on_tokens_per_s,
                        ratio=comparison.ratio.median,
                        identical=comparison.identical,
                        **about(pairs, target_ids),
                    )
                )
    return results


def about(pairs: Sequence[Pair], target_ids: Any) -> dict[str, float]:
    """Return τ, coverage of the draft vocabulary, and the share of verifies that it cut short.

    Only the bonus token, which ends a verify, can lie outside the draft vocabulary, so each token outside it counts one
    verify. The first token of a response comes from the prefill and ends no verify.
    """
    import torch

    from models.vocab import coverage

    outputs = [ids for pair in pairs for ids in pair.on.token_ids]
    emitted, later = (torch.tensor([t for ids in outputs for t in ids[first:]]) for first in (0, 1))
    stats = Comparison(list(pairs)).speculation
    lacking = len(later) - round(len(later) * coverage(later, target_ids)) if len(later) else 0
    return {
        "acceptance_length": stats.acceptance_length,
        "coverage": coverage(emitted, target_ids),
        "cut_short": lacking / max(1, stats.steps),
    }


def by_context(lengths: Sequence[int], pairs: Sequence[Pair], target_ids: Any) -> dict[str, dict[str, float]]:
    """Group the results by prompt length; prompts that run together count with the length of the longest."""
    groups: dict[int, list[Pair]] = {}
    for length, pair in zip(lengths, pairs, strict=True):
        bucket = next((limit for limit in BUCKETS if length <= limit), 2 * BUCKETS[-1])
        groups.setdefault(bucket, []).append(pair)
    return {str(bucket): about(groups[bucket], target_ids) for bucket in sorted(groups)}


def tables(cells: Sequence[Cell]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the report's tables: what was measured, and the same by the length of the prompt."""
    rows = [asdict(cell) for cell in cells]
    contexts = [row.pop("by_context") for row in rows]
    places = [dict(itertools.islice(row.items(), 5)) for row in rows]
    lengths = [
        {**place, "prompt tokens": f"up to {limit}", **context}
        for place, by_limit in zip(places, contexts, strict=True)
        for limit, context in by_limit.items()
    ]
    return rows, lengths


def plot(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Plot acceptance by position for every shape, one curve per data set and temperature; with several concurrencies
    also speed over concurrency, one curve per shape too. Returns no paths without matplotlib.
    """
    from train.publishing.plots import PLAIN_SPEED, Panel, by_position, draw

    written = []
    for shape in dict.fromkeys(result.shape for result in cells):
        selected = [result for result in cells if result.shape == shape and result.concurrency == cells[0].concurrency]
        curves = {label_of(result): list(enumerate(result.by_position, start=1)) for result in selected}
        written.append(draw(folder / f"acceptance_{shape}.png", by_position(curves, shape)))
    if len({result.concurrency for result in cells}) > 1:
        speeds: dict[str, list[tuple[float, float]]] = {}
        for result in sorted(cells, key=lambda result: result.concurrency):
            speeds.setdefault(f"{label_of(result)}, {result.shape}", []).append((result.concurrency, result.ratio))
        written.append(draw(folder / "speed.png", Panel(speeds, "requests at once", PLAIN_SPEED, level=1)))
    return [path for path in written if path is not None]


def label_of(result: Cell) -> str:
    return f"{result.data}{'' if result.template else ', plain'}, T = {result.temperature:g}"


def metrics(cells: Sequence[Cell]) -> dict[str, float]:
    """Return scalars for a tracker, named like `eval/<data>, T = 0/chain5 at 1/tau`."""
    scalars: dict[str, float] = {}
    for cell in cells:
        values = {"tau": cell.acceptance_length, "coverage": cell.coverage, "cut_short": cell.cut_short}
        values |= {"ratio": cell.ratio}
        values |= {f"acceptance_{position}": share for position, share in enumerate(cell.by_position, start=1)}
        place = f"eval/{label_of(cell)}/{cell.shape} at {cell.concurrency}"
        scalars |= {f"{place}/{name}": value for name, value in values.items()}
    return scalars


def show(config: EvalConfig, cells: Sequence[Cell], samples: Sequence[Any], folder: Path) -> Path:
    """Write the report, log it to the tracker, and return its path. Raises ValueError if the disk is full."""
    from train.publishing.report import REPORT, texts
    from train.publishing.trackers import Results, make_trackers
    from train.storage import atomic

    plots = plot(cells, folder)
    title = f"# {config.head.name} for {config.model.name}"
    parts = [title, *map(table, tables(cells)), *(f"![{plot.stem}]({plot.name})" for plot in plots), texts(samples)]
    atomic.write_text(folder / REPORT, "\n\n".join(parts) + "\n")
    trackers = make_trackers(config.tracker, folder, f"eval-{folder.name}", asdict(config), resume_step=0)
    trackers.log(1, metrics(cells))
    head = head_folder(config.head, config.output_dir, config.model.name)
    trackers.publish(Results(plots, samples, head, ("evaluated",)))
    trackers.finish()
    return folder / REPORT


@engine_entry_point("eval", EvalConfig)
def main(config: EvalConfig) -> None:
    from infer.engine import Engine
    from train.publishing.samples import how_many, marked_responses
    from train.publishing.trackers import check_tracker
    from train.storage.atomic import free_disk, make_folder

    check_tracker(config.tracker)
    folder = resolve_path(config.output_dir) / "eval" / f"{config.model.name}-{config.head.name}"
    free_disk(folder)  # refuses a place that cannot be written, before anything is measured
    # Prompts are repeated: a prefix cache would spare one of the compared sides its prefill.
    cold, drafts = replace(config.engine, prefix_cache=False), ProposerConfig(name="head")
    engine = Engine.load(config.model, config.head, cold, drafts, output_dir=config.output_dir)
    assert engine.head is not None
    sets = list(prompt_sets(config, engine))
    systems = {OFF: engine_system(OFF, config, drafts, engine, {})}
    systems |= {shape: engine_system(f"head:{shape}", config, drafts, engine, {}) for shape in config.shapes}
    cells = measure(config, systems, sets, engine.head.target_ids.cpu())
    prompts = sets[0][2]
    systems[config.shapes[0]]([Task(prompts[0], 1)], 0.0, 1)  # the head drafts in this shape from here on
    samples = marked_responses(engine, prompts[: how_many(config.tracker)], config.max_tokens)
    make_folder(folder)
    report = show(config, cells, samples, folder)
    print(table(tables(cells)[0], pad=True), end="")
    print(f"written: {report}")
    heads = {config.head.name: head_folder(config.head, config.output_dir, config.model.name)}
    results = [asdict(cell) for cell in cells]
    publish(document(config, engine.target, heads, results), config.save, config.model.name)


if __name__ == "__main__":
    main()
