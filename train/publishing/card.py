"""The model card of an exported head: README.md, from the facts of its provenance.json, for people and the model hub.

A speed belongs to a machine, so the card states none.
The front matter is that of https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from infer.request import SpeculationStats
from models.heads import HEADS
from train.config import as_list

README = "README.md"


def card(record: Mapping[str, Any], arguments: str, placeholders: str = "") -> str:
    """Return the card's text. `record`: provenance.json, with all that `export_head` adds to it.

    `arguments` are those of a serving command, `placeholders` names what to fill in there.
    """
    config = record["config"]
    model, head = config["model"]["name"], config["head"]["name"]
    size, coverage, learnt = record["draft_vocab_size"], 100 * record["coverage"], record["data_counts"]["learnt"]
    trained, depth = record["trained_depth"], config["eval_draft_tokens"]
    beyond = trained is not None and depth > trained
    deeper = " The positions beyond that were measured without training for them." if beyond else ""
    passes, git = record["tokens"] / learnt["tokens"], record.get("git") or {}
    commit = f"`{(git.get('commit') or 'unknown')[:12]}`{' with changes' if git.get('dirty') else ''}"
    return f"""{front_matter(record)}
# {head} head for {model}

Drafts tokens for one target, `{record["target"]}` with fingerprint `{record["target_fingerprint"]}`; loading it for
another is refused unless `head.allow_mismatch=true`. Speculation changes no token: the head decides how many come per
step, never which. Trained by Headway. {HEADS[head].files}

## Acceptance

{acceptance(record)}

Trained for drafts of {f"up to {trained}" if trained else "any number of"} tokens, measured up to {depth}.{deeper}

The draft vocabulary has {size:,} of the target's {record["vocab_size"]:,} tokens, and {coverage:.1f} % of the tokens of
the held-out greedy responses are in it. The head drafts no other.

## Settings that pay

No speed was measured for this card: what pays depends on the machine and on the requests at once.

## Serve it

From the root of Headway's repository{placeholders}:

    python infer/serve.py {arguments}
    python infer/generate.py {arguments} compare=true

## What it was trained on

{training_data(record)}

{data_lines(record["data_counts"])}

Run `{record["run"]}`, {record["steps"]} updates over {record["tokens"]:,} tokens, {passes:.1f} passes over the
{learnt["learnt"]:,} answer tokens; data {record["data_source"]} (hash `{record["data_hash"]}`);
commit {commit}. `provenance.json` holds the versions and the whole configuration.
"""


def front_matter(record: Mapping[str, Any]) -> str:
    """Return the hub's metadata; license and base model only if they are known."""
    known = {"license": record["config"].get("license"), "base_model": record["base_model"], "library_name": "headway"}
    lines = [f"{key}: {value}" for key, value in known.items() if value]
    return "\n".join(["---", *lines, f"tags: [speculative-decoding, {record['config']['head']['name']}]", "---", ""])


def acceptance(record: Mapping[str, Any]) -> str:
    """Return the tables of τ and of the acceptance by position, and the numbers of prompts and tokens behind them."""
    lengths = record["acceptance_length"], record["acceptance_length_sampled"]
    taus = [
        [name, *("undefined" if each[source] is None else f"{each[source]:.3f}" for each in lengths)]
        for name, source in (("**in the engine**", "engine"), ("simulated by the trainer", "simulated"))
    ]
    counts = {name: SpeculationStats(**each) for name, each in record["counted"].items()}
    columns = (
        [f"{a / d:.3f} ({a} of {d})" for a, d in zip(each.accepted_by_position, each.drafted_by_position, strict=True)]
        for each in counts.values()
    )
    positions = enumerate(zip_longest(*columns, fillvalue=""), start=1)
    totals = "; ".join(f"{name}: {each.emitted:,} tokens in {each.steps:,} verifies" for name, each in counts.items())
    config = record["config"]
    return f"""{table(["τ: tokens per verify, bonus included", "greedy", "temperature 1"], taus)}

Chains of up to {config["eval_draft_tokens"]} tokens on {record["held_out_prompts"]} held-out prompts with up to \
{config["eval_max_tokens"]} tokens each. By position, in the engine ({totals}):

{table(["position", *counts], [[str(place), *shares] for place, shares in positions])}"""


def training_data(record: Mapping[str, Any]) -> str:
    """Return the list of the data sets, with the rows to be read, and who wrote the responses and how."""
    data = record["config"]["data"]
    entries = as_list(data["path"]) if "interleave" in data else [record["data_source"]]
    parts = [entry if isinstance(entry, dict) else {"path": entry} for entry in entries]
    sets = "".join(
        f"- `{part['path']}`" + "".join(f", `{key}={part[key]}`" for key in ("lines", "rows") if key in part) + "\n"
        for part in parts
    )
    if data.get("responses") == "given":
        return f"{sets}\nResponses: those of the data, not the target's own."
    writer = "a server" if data["server"] else "the engine"
    sampling = ", ".join(f"`{key}={data[key]}`" for key in ("temperatures", "top_k", "top_p", "max_new_tokens"))
    return f"{sets}\nResponses: the target's own, generated by {writer} at these temperatures in turn ({sampling})."


def data_lines(counts: Mapping[str, Any]) -> str:
    """Return how many rows were read and answered, and the tokens that they made; nothing for data without counts."""
    rows, responses = counts.get("rows"), counts.get("answers")
    if not rows or not responses:
        return ""
    dropped = ", ".join(f"{count} {reason}" for reason, count in rows["dropped"].items()) or "none"
    learnt = counts["learnt"]
    return (
        f"{rows['read']} rows were read: {rows['train']} to train on, {rows['held_out']} held out; left out: "
        f"{dropped}. Of {responses['conversations']} conversations {responses['done']} were answered, "
        f"{responses.get('skipped', 0)} held nothing to learn from, {responses['failed']} failed, "
        f"{counts.get('shortened', 0)} were shortened; there was no time for {counts.get('no_time', 0)} more. They "
        f"made {learnt['sequences']} sequences of {learnt['tokens']:,} tokens, {learnt['learnt']:,} of them learnt; "
        f"{learnt['left_out']} more were left out, because sequence_length leaves nothing to learn in them."
    )


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    width = max([len(names), *(len(row) for row in rows)])
    padded = [[*row, *[""] * (width - len(row))] for row in [names, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    return "\n".join([lines[0], "|" + "---|" * width, *lines[1:]])
