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
import infer.environment  # noqa: F401

# isort: split

import datetime
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from infer.cli import entry_point
from infer.config import EvalConfig, ProposerConfig
from infer.config_checks import resolve_path
from infer.console.compare import Comparison, Pair
from infer.options.exported_heads import export_folder, head_folder, with_head
from infer.request import SpeculationStats

DEMO = "demo corpus"
BUCKETS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # upper bounds of prompt lengths, in tokens


@dataclass
class Context:
    acceptance_length: float
    coverage: float
    cut_short: float


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
    by_context: dict[str, Context]  # by the upper bound of the prompt length in tokens
    coverage: float  # share of the emitted tokens that the draft vocabulary holds
    cut_short: float  # share of the verifies that ended at a token outside it: an upper bound of what it costs
    tokens_per_s: float
    ratio: float  # to plain decoding, median over the rounds
    identical: bool  # whether the token ids equal those of plain decoding


def prompt_sets(config: EvalConfig, engine: Any) -> Iterator[tuple[str, bool, list[list[int]]]]:
    """Yield (name, whether the chat template is used, prompts). Raises ValueError for data that cannot be read."""
    from models.demo.corpus import held_out_prompts
    from train.config import FilesDataConfig
    from train.data.prompts import Reader

    if not config.files:
        yield DEMO, False, held_out_prompts(engine.tokenizer, config.num_prompts, config.prompt_tokens)
    longest = engine.context - config.max_tokens - 1
    for path, name in zip(config.files, names_of(config.files), strict=True):
        for template in config.chat_template:
            settings = FilesDataConfig(
                name="files",
                path=path,
                columns=config.columns,
                chat_template=template,
                prompt_tokens=config.prompt_tokens,
            )
            reader = Reader(settings, engine.tokenizer, longest, config.num_prompts)
            prompts = reader.read_prompts()
            for line in reader.reading.named():
                print(line, file=sys.stderr)
            yield name, template, prompts


def names_of(files: Sequence[str]) -> list[str]:
    """Return the files' names without suffixes; equal names are preceded by their folder, as in gsm8k/test."""
    names = [Path(file).name.partition(".")[0] for file in files]
    return [
        f"{Path(file).parent.name}/{name}" if names.count(name) > 1 else name
        for file, name in zip(files, names, strict=True)
    ]


def measure(config: EvalConfig, engine: Any, sets: Sequence[tuple[str, bool, list[list[int]]]]) -> list[Cell]:
    from tqdm import tqdm

    from infer.console.compare import compare
    from infer.request import SamplingParams

    cells = []
    rounds = list(itertools.product(sets, config.temperatures, config.concurrency))
    with tqdm(total=len(rounds) * len(config.shapes), unit="cell", disable=None, dynamic_ncols=True) as bar:
        for (name, template, prompts), temperature, together in rounds:
            params = SamplingParams(temperature=temperature, seed=config.seed, max_tokens=config.max_tokens)
            groups = [prompts[start : start + together] for start in range(0, len(prompts), together)]
            for shape in config.shapes:
                bar.set_description(f"{name}, temperature {temperature:g}, {shape}")
                draft_as(engine, shape)
                comparison = Comparison(list(compare(engine, groups, params)))
                ids = engine.head.target_ids.cpu()
                cells.append(cell(name, template, temperature, shape, together, groups, comparison, ids))
                bar.update()
    return cells


def draft_as(engine: Any, shape: str) -> None:
    """Make the engine's head draft in this shape, at most to the head's maximal depth."""
    from scripts.bench_systems import no_deeper, shaped

    drafts = no_deeper(shaped(ProposerConfig(name="head"), shape), engine.head.config.max_depth)
    engine.set_proposer("head", config=drafts)


def cell(
    name: str,
    template: bool,
    temperature: float,
    shape: str,
    concurrency: int,
    groups: list,
    comparison: Comparison,
    target_ids: Any,
) -> Cell:
    overall = about(comparison.pairs, target_ids)
    return Cell(
        data=name,
        template=template,
        temperature=temperature,
        shape=shape,
        concurrency=concurrency,
        prompts=sum(map(len, groups)),
        acceptance_length=overall.acceptance_length,
        by_position=comparison.speculation.acceptance_by_position,
        by_context=by_context([max(map(len, group)) for group in groups], comparison, target_ids),
        coverage=overall.coverage,
        cut_short=overall.cut_short,
        tokens_per_s=comparison.on_tokens_per_s,
        ratio=comparison.ratio.median,
        identical=comparison.identical,
    )


def about(pairs: Sequence[Pair], target_ids: Any) -> Context:
    """Return τ, coverage of the draft vocabulary, and the share of verifies that it cut short.

    Only the bonus token, which ends a verify, can lie outside the draft vocabulary, so each token outside it counts one
    verify. The first token of a response comes from the prefill and ends no verify.
    """
    import torch

    from models.vocab import coverage

    outputs = [ids for pair in pairs for ids in pair.on.token_ids]
    emitted, later = (torch.tensor([t for ids in outputs for t in ids[first:]]) for first in (0, 1))
    stats = SpeculationStats()
    for pair in pairs:
        stats.merge(pair.on.speculation)
    lacking = len(later) - round(len(later) * coverage(later, target_ids)) if len(later) else 0
    return Context(stats.acceptance_length, coverage(emitted, target_ids), lacking / max(1, stats.steps))


def by_context(lengths: Sequence[int], comparison: Comparison, target_ids: Any) -> dict[str, Context]:
    """Group the results by prompt length; prompts that run together count with the length of the longest."""
    groups: dict[int, list[Pair]] = {}
    for length, pair in zip(lengths, comparison.pairs, strict=True):
        bucket = next((limit for limit in BUCKETS if length <= limit), 2 * BUCKETS[-1])
        groups.setdefault(bucket, []).append(pair)
    return {str(bucket): about(groups[bucket], target_ids) for bucket in sorted(groups)}


def table(cells: Sequence[Cell]) -> str:
    rows = [
        "| data | chat template | temperature | drafts | at once | τ | by position | coverage | cut short | tokens/s "
        "| ratio | same ids |"
    ]
    rows.append("|" + "---|" * 12)
    for result in cells:
        shares = " ".join(f"{share:.2f}" for share in result.by_position)
        rows.append(
            f"| {result.data} | {'yes' if result.template else 'no'} | {result.temperature:g} | {result.shape} | "
            f"{result.concurrency} | {result.acceptance_length:.3f} | {shares} | {100 * result.coverage:.1f} % | "
            f"{100 * result.cut_short:.1f} % | {result.tokens_per_s:.1f} | "
            f"{result.ratio:.2f} | {'yes' if result.identical else 'NO'} |"
        )
    return "\n".join(rows)


def context_table(cells: Sequence[Cell]) -> str:
    """Return a table by prompt length: τ, coverage of the draft vocabulary, and the share of verifies it cut short."""
    limits = sorted({int(limit) for result in cells for limit in result.by_context})
    rows = ["| data | temperature | drafts | at once | " + " | ".join(f"up to {limit}" for limit in limits) + " |"]
    rows.append("|" + "---|" * (4 + len(limits)))
    for result in cells:
        contexts = [result.by_context.get(str(limit)) for limit in limits]
        values = [
            f"{c.acceptance_length:.3f}, {100 * c.coverage:.1f} %, {100 * c.cut_short:.1f} %" if c else ""
            for c in contexts
        ]
        rows.append(
            f"| {result.data} | {result.temperature:g} | {result.shape} | {result.concurrency} | "
            + " | ".join(values)
            + " |"
        )
    return "\n".join(rows)


def draw(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Plot acceptance by position for every shape, one curve per data set and temperature; with several concurrencies
    also speed over concurrency, one curve per shape too. Returns no paths without matplotlib.
    """
    from train.publishing.plots import PLAIN_SPEED, draw_curves

    written = []
    for shape in dict.fromkeys(result.shape for result in cells):
        selected = [result for result in cells if result.shape == shape and result.concurrency == cells[0].concurrency]
        curves = {label_of(result): list(enumerate(result.by_position, start=1)) for result in selected}
        names = "position in the draft", "share that is accepted"
        written.append(draw_curves(folder / f"acceptance_{shape}.png", curves, *names, ylim=(0, 1), title=shape))
    if len({result.concurrency for result in cells}) > 1:
        speeds: dict[str, list[tuple[float, float]]] = {}
        for result in sorted(cells, key=lambda result: result.concurrency):
            speeds.setdefault(f"{label_of(result)}, {result.shape}", []).append((result.concurrency, result.ratio))
        written.append(draw_curves(folder / "speed.png", speeds, "requests at once", PLAIN_SPEED, level=1))
    return [path for path in written if path is not None]


def label_of(result: Cell) -> str:
    return f"{result.data}{'' if result.template else ', plain'}, T = {result.temperature:g}"


def metrics(cells: Sequence[Cell]) -> dict[str, float]:
    """Return scalars for a tracker, named like `eval/<data>, T = 0/chain5 at 1/tau`."""
    scalars: dict[str, float] = {}
    for result in cells:
        place = f"eval/{label_of(result)}/{result.shape} at {result.concurrency}"
        values = {
            "tau": result.acceptance_length,
            "coverage": result.coverage,
            "cut_short": result.cut_short,
            "ratio": result.ratio,
        }
        scalars |= {f"{place}/{name}": value for name, value in values.items()}
        shares = enumerate(result.by_position, start=1)
        scalars |= {f"{place}/acceptance_{position}": share for position, share in shares}
    return scalars


def show(config: EvalConfig, cells: Sequence[Cell], samples: Sequence[Any], folder: Path) -> Path:
    """Write the report, log it to the tracker, and return its path. Raises ValueError if the disk is full."""
    from train.publishing.report import REPORT, texts
    from train.publishing.trackers import Results, make_trackers
    from train.storage import atomic

    plots = draw(cells, folder)
    by_length = "By the length of the prompt, in tokens: τ, coverage, verifies that the draft vocabulary cut short."
    parts = [f"# {config.head.name} for {config.model.name}", table(cells), by_length, context_table(cells)]
    parts += [*(f"![{plot.stem}]({plot.name})" for plot in plots), texts(samples)]
    atomic.write_text(folder / REPORT, "\n\n".join(parts) + "\n")
    trackers = make_trackers(config.tracker, folder, f"eval-{folder.name}", asdict(config), resume_step=0)
    trackers.log(1, metrics(cells))
    head = head_folder(config.head, config.output_dir, config.model.name)
    trackers.publish(Results(plots, samples, head, ("evaluated",)))
    trackers.finish()
    return folder / REPORT


@entry_point("eval", EvalConfig)
def main(config: EvalConfig) -> None:
    from infer.engine import Engine
    from scripts.bench import describe_machine, head_summaries, result_file, without_folders
    from train.publishing.samples import how_many, marked_responses
    from train.publishing.trackers import check_tracker

    config = with_head(config)
    check_tracker(config.tracker)
    # Prompts are repeated: a prefix cache would spare one of the compared sides its prefill.
    cold = replace(config.engine, prefix_cache=False)
    engine = Engine.load(config.model, config.head, cold, ProposerConfig(name="head"), output_dir=config.output_dir)
    sets = list(prompt_sets(config, engine))
    cells = measure(config, engine, sets)
    draft_as(engine, config.shapes[0])
    samples = marked_responses(engine, sets[0][2][: how_many(config.tracker)], config.max_tokens)
    folder = resolve_path(config.output_dir) / "eval" / f"{config.model.name}-{config.head.name}"
    folder.mkdir(parents=True, exist_ok=True)
    report = show(config, cells, samples, folder)
    print(table(cells))
    print(f"written: {report}")
    document = {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "target": {"path": without_folders(config.model.path), "fingerprint": engine.target.fingerprint},
        "heads": head_summaries({config.head.name: export_folder(config.head, config.output_dir, config.model.name)}),
        "config": without_folders(asdict(config)),
        "results": [asdict(result) for result in cells],
    }
    if config.save is not None:
        file = result_file(config.save, config.model.name, document["machine"])
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"written: {file.relative_to(Path(HERE).parent)}")
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
