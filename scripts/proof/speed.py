"""Speed with drafts beside plain decoding, in paired rounds at every number of requests; and what is accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from infer.console.compare import Comparison, Pair, timed
from infer.request import SamplingParams
from infer.steps.stats import StepTimes
from scripts.benchmarks.comparison.rounds import order_of
from scripts.proof.cases import Ask
from scripts.proof.causes import Figures, why_slower
from scripts.proof.engines import Engines
from scripts.proof.matrix import proposer_of

PLAIN, TOKENS = "none", 48
LEAST_ROUNDS, MOST_ROUNDS = 4, 7  # before `auto` is called slower; in all

Speeds = dict[int, dict[str, list[Pair]]]  # by requests and drafts


def measure_speed(
    engines: Engines, prompts: Sequence[Sequence[int]], until: float | None, tick: Callable[[str], None]
) -> Speeds:
    """Measure rounds until the time `until`, or one if it is None; each runs plain decoding and all drafts once.

    Every round is of all numbers of requests, so that each has as many rounds when time is up; the first always ends.
    """
    results: Speeds = {count: {} for count in engines.config.requests}
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=engines.config.seed)
    widest = [Ask(tuple(ids), params) for ids in cycled(prompts, max(results), 0)]
    engine = engines.make("auto", widest, profile=True, prefix_cache=False)
    names = [PLAIN, "auto", *(["chain"] if engines.parts.head is not None else []), "suffix"]
    try:
        for number in range(MOST_ROUNDS if until is not None else 1):
            for count, pairs in results.items():
                if number and until is not None and time.monotonic() > until:
                    return results
                runs, texts = {}, cycled(prompts, count, number * count)
                for name in order_of(names, number, str(count)):
                    tick(f"speed: {name}, {count} requests")
                    drafts = proposer_of(name, engines.parts.proposer, engines.parts.head)
                    runs[name] = timed(engine, drafts.name, texts, params, max_concurrency=count, config=drafts)
                for name in names[1:]:
                    pairs.setdefault(name, []).append(Pair(runs[PLAIN], runs[name]))
    finally:
        engine.close()
    return results


def cycled(prompts: Sequence[Sequence[int]], count: int, first: int) -> list[list[int]]:
    return [list(prompts[(first + index) % len(prompts)]) for index in range(count)]


def speed_table(speeds: Speeds, missed: float) -> list[dict[str, Any]]:
    """Return a record per number of requests and drafts. `missed`: see causes.Figures."""
    table = []
    for count, pairs in sorted(speeds.items()):
        totals = {name: Comparison(rounds) for name, rounds in pairs.items()}
        table += [record(count, name, total) for name, total in totals.items()]
        for row in table[-len(totals) :]:
            if row["drafts"] == "auto" and row["rounds"] >= LEAST_ROUNDS and row["ratio"]["high"] < 1:
                row["why_slower"] = (
                    f"auto, {count} requests: {row['ratio']['median']:.2f} times plain decoding's speed, below 1 in "
                    "three of four rounds; if the machine was idle, use proposer=none at this load"
                )
            elif row["drafts"] == ("chain" if "chain" in totals else "suffix") and row["steps"]["drafted_ms"]:
                row["why_slower"] = explained(row, totals, missed)
    return table


def explained(row: dict[str, Any], totals: dict[str, Comparison], missed: float) -> str | None:
    """Return why the drafts of a row of the table do not pay, by causes.why_slower."""
    name, steps, stats = row["drafts"], row["steps"], totals[row["drafts"]].speculation
    copies = totals["suffix"].ratio.median if name == "chain" else None
    costs = (row["plain_step_ms"], steps["drafted_ms"], steps["drafting_ms"], steps["drafted_rows"])
    accepted = stats.acceptance_length, stats.acceptance_by_position
    figures = Figures(row["requests"], row["ratio"]["median"], *accepted, *costs, missed, copies, name == "chain")
    why = why_slower(figures)
    return why and f"{name}, {why}"


def record(count: int, name: str, total: Comparison) -> dict[str, Any]:
    on, off = ([pair.on.steps for pair in total.pairs], [pair.off.steps for pair in total.pairs])
    drafted, plain = (sum((each for each in side if each is not None), StepTimes()).summary() for side in (on, off))
    return {
        "requests": count,
        "drafts": name,
        "rounds": len(total.pairs),
        "ratio": asdict(total.ratio),
        "tokens_per_s": total.on_tokens_per_s,
        "plain_tokens_per_s": total.off_tokens_per_s,
        "acceptance_length": total.speculation.acceptance_length if total.speculation.drafted else None,
        "steps": drafted,
        "plain_step_ms": plain["plain_ms"],
        "identical": total.identical,
        "why_slower": None,
    }
