"""Measures how an engine step's time divides between forwards of the target, forwards of the head, and Python code.

    python scripts/step_time.py model=demo head=eagle3
    python scripts/step_time.py model=demo head=none proposer=none engine.threads=1 max_tokens=128
    python scripts/step_time.py model=demo head=eagle3 proposer.adaptive=true plot=costs.png

Decodes held-out prompts of the demo corpus one at a time and times every forward from call to return, so it needs an
idle machine without a GPU. The last line of standard output is one JSON document. `plot` draws the cost table from
which the controller chooses draft lengths: the times of verifying and drafting that were profiled at the first start.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infer.options.cli import entry_point
from infer.speculation.control.cost_model import CostTable
from scripts.config import StepTimeConfig


class Stopwatch:
    """Sums the time spent in wrapped calls; nested wrapped calls count once."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._inside = 0.0, 0, False

    def wrap(self, owner: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside, begin = True, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin
                self.calls += 1
                self._inside = False

        setattr(owner, name, timed)


def plot_costs(table: CostTable, file: str) -> None:
    """Plot milliseconds of a verify over rows per request, and of drafting over depth, one line per batch size."""
    from train.publishing.plots import Panel, draw

    panels = []
    for title, curves in (("verify", table.steps), *table.drafts.items()):
        verifies = title == "verify"
        points = {
            str(batch): [
                (size / batch if verifies else size, 1000 * seconds)
                for size, seconds in zip(curve.sizes, curve.seconds, strict=True)
            ]
            for batch, curve in zip(table.batches, curves, strict=True)
        }
        name = title if verifies else f"drafting, {title.replace('_', ' ')}"
        x = "rows of each request" if verifies else "depth"
        panels.append(Panel(points, x, "milliseconds", name, legend="requests", axes={"ylim": (0, None)}))
    draw(Path(file), *panels, columns=len(panels))


@entry_point("step_time", StepTimeConfig)
def main(config: StepTimeConfig) -> None:
    from infer.engine import Engine
    from infer.request import SamplingParams
    from models.demo.corpus import held_out_prompts

    engine = Engine.load(config.model, config.head, config.engine, config.proposer, output_dir=config.output_dir)
    assert engine.tokenizer is not None
    if config.plot is not None:
        if engine.costs is None:
            drafts = engine.proposer_name != "none"
            reason = "the machine was too busy or too slow to measure costs" if drafts else "nothing drafts"
            raise ValueError(f"plot={config.plot}: {reason} (proposer={engine.proposer_name}), so none are known")
        plot_costs(engine.costs, config.plot)
        print(f"written: {config.plot}")
    target, head = Stopwatch(), Stopwatch()
    for name in ("forward", "logits"):
        target.wrap(engine.target, name)
    if engine.head is not None:
        for name in ("fuse", "step", "logits"):
            head.wrap(engine.head, name)
    params = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens, seed=0, ignore_eos=True)
    steps: list[tuple[float, float, float]] = []  # seconds: whole step, target, head
    for prompt in held_out_prompts(engine.tokenizer, config.num_prompts, config.prompt_tokens):
        engine.add(prompt, params)
        engine.step()  # the prefill
        while engine.has_work:
            before, begin = (target.seconds, head.seconds), time.perf_counter()
            engine.step()
            total = time.perf_counter() - begin
            steps.append((total, target.seconds - before[0], head.seconds - before[1]))
    total, in_target, in_head = (1000 * statistics.median(column) for column in zip(*steps, strict=True))
    around = 1000 * statistics.median(total - in_target - in_head for total, in_target, in_head in steps)
    share = statistics.median((total - in_target - in_head) / total for total, in_target, in_head in steps)
    print(f"{engine.proposer_name}: {len(steps)} steps at batch 1, medians")
    for name, value in (("step", total), ("target", in_target), ("head", in_head), ("around them", around)):
        print(f"  {name:<12} {value:7.2f} ms")
    print(f"  outside model forwards: {100 * share:.1f} % of a step")
    document = {"proposer": engine.proposer_name, "steps": len(steps), "outside_share": share}
    print(json.dumps(document | {"ms": {"step": total, "target": in_target, "head": in_head, "around": around}}))


if __name__ == "__main__":
    main()
