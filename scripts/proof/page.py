"""The certificate as one HTML page, with its styles and drawings in it and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

COLORS = {"auto": "#1b7f4d", "chain": "#2f6fb0", "suffix": "#b06a1b"}
WIDTH, HEIGHT, BAR = 560, 220, 34  # of the drawing of speeds; of a bar and its gap
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; margin: .7em 0 } tr:nth-child(even) { background: #f5f5f3 }
td, th { padding: .15em .7em; text-align: left; vertical-align: top } th { border-bottom: 1px solid #888 }
.verdict { font-size: 1.15em; padding: .6em 1em; border-left: .4em solid #1b7f4d; background: #eef6f1 }
.bad { border-color: #b3261e; background: #fbeceb } .different { color: #b3261e; font-weight: bold }
.equal { color: #1b7f4d } .not { color: #8a6d00 } svg text { font: 12px system-ui, sans-serif }
code { overflow-wrap: anywhere }
"""


class Markup(str):
    """Text that is HTML already."""


def page(record: Mapping[str, Any]) -> str:
    """Return the page of `Certificate.record`."""
    machine, target, prompts, speed = (record[key] for key in ("machine", "target", "prompts", "speed"))
    facts = {
        "command": record["command"],
        "date, commit": f"{record['date']}, {machine['commit']}",
        "machine": ", ".join(str(machine[key]) for key in ("cpu", "level", "gpu") if machine[key]),
        "threads": f"{machine['threads']} of {machine['cores']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version),
        "target": f"{target['name']}, {target['dtype']} on {target['device']}; head: {target['head'] or 'none'}",
        "prompts": ", ".join(f"{key} {value}" for key, value in prompts.items()),
        "seed": record["config"]["seed"],
    }
    files = {**target["files"], **{f"head: {name}": value for name, value in target["head_files"].items()}}
    title = f"Drafts and plain decoding: {target['name']}"
    bad = record["faults"] or not record["complete"] or not record["counted"]["equal"]
    parts = [
        *(f"<p class='different'>{escape(fault)}</p>" for fault in record["faults"]),
        table(["what", "which"], facts.items()),
        "<h2>Cells: each request with drafts in a batch, and decoded plainly and alone</h2>",
        table(["sampling", "drafts", "requests", "situation", "result", ""], map(cell_row, record["cells"])),
        "<h2>Not covered</h2>",
        table(["what", "why"], [*record["not_covered"].items(), (record["never_tried"], "not tried by this command")]),
        "<h2>Speed beside plain decoding</h2>",
        chart(speed) if speed else "<p>Not measured.</p>",
        table(["requests", "drafts", "ratio", "quartiles", "rounds", "tokens/s", "plain", "τ"], map(speed_row, speed)),
        *(f"<p>{escape(each['why_slower'])}.</p>" for each in speed if each["why_slower"]),
        "<h2>Acceptance of greedy drafts</h2>",
        *(accepted(name, each) for name, each in record["acceptance"].items()),
        "<h2>Files</h2>" + table(["file", "SHA-256"], files.items()),
    ]
    return document(title, [record["verdict"]], parts, bad=bool(bad))


def document(title: str, verdict: Iterable[str], parts: Iterable[str], *, bad: bool) -> str:
    """Return a page with the lines of its verdict, and its parts in HTML."""
    said = "<br>".join(map(escape, verdict))
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    lines = [head, f"<h1>{escape(title)}</h1><p class='verdict{' bad' if bad else ''}'>{said}</p>", *parts]
    return "\n".join([*lines, "</html>\n"])


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [("th", header), *(("td", row) for row in rows)]
    cells = (
        "".join(f"<{tag}>{each if isinstance(each, Markup) else escape(str(each))}</{tag}>" for each in row)
        for tag, row in lines
    )
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in cells) + "</table>"


def cell_row(cell: Mapping[str, Any]) -> list[Any]:
    counts = ", ".join(f"{count} {name}" for name, count in cell["counts"].items() if count)
    said = escape(": ".join(text for text in (cell["why"], counts) if text))
    again = f"<br>again: <code>{escape(cell['repeat'])}</code>" if cell["repeat"] else ""
    result = f"<span class='{cell['result'].split()[0]}'>{cell['result']}</span>"
    shown = [cell[key] for key in ("sampling", "drafts", "requests", "situation")]
    return [*shown, Markup(result), Markup(said + again)]


def speed_row(each: Mapping[str, Any]) -> list[Any]:
    ratio, tau = each["ratio"], each["acceptance_length"]
    spread = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
    speeds = f"{each['tokens_per_s']:.1f}", f"{each['plain_tokens_per_s']:.1f}"
    drafted = "nothing drafted" if tau is None else f"{tau:.2f}"
    return [each["requests"], each["drafts"], f"{ratio['median']:.2f}", spread, each["rounds"], *speeds, drafted]


def chart(speed: Sequence[Mapping[str, Any]]) -> str:
    """Return a drawing of the ratio to plain decoding over the number of requests, with quartiles."""
    counts = sorted({each["requests"] for each in speed})
    top = max(1.2, *(each["ratio"]["high"] for each in speed))

    def y(ratio: float) -> float:
        return round(HEIGHT - 30 - ratio / top * (HEIGHT - 45), 1)

    def x(count: int) -> int:
        return 60 + (2 * counts.index(count) + 1) * (WIDTH - 150) // (2 * len(counts))

    marks = [
        f"<path d='M50 {y(1)}H{WIDTH - 90}' stroke='#888' stroke-dasharray='4'/><text x='5' y='{y(1)}'>plain</text>"
    ]
    marks += [f"<text x='{x(count)}' y='{HEIGHT - 12}' text-anchor='middle'>{count}</text>" for count in counts]
    marks += [f"<text x='{WIDTH - 85}' y='{HEIGHT - 12}'>requests</text>"]
    for place, name in enumerate(dict.fromkeys(each["drafts"] for each in speed)):
        color, line = COLORS[name], list[str]()
        for each in (each for each in speed if each["drafts"] == name):
            at, (median, low, high) = x(each["requests"]) + 7 * place, map(y, each["ratio"].values())
            line.append(f"{at},{median}")
            marks.append(
                f"<path d='M{at} {low}V{high}' stroke='{color}'/><circle cx='{at}' cy='{median}' r='3' fill='{color}'/>"
            )
        marks.append(f"<polyline fill='none' stroke='{color}' points='{' '.join(line)}'/>")
        marks.append(f"<text x='{WIDTH - 80}' y='{25 + 18 * place}' fill='{color}'>{name}</text>")
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}'>{''.join(marks)}</svg>"


def accepted(name: str, each: Mapping[str, Any]) -> str:
    """Return the shares accepted by position as bars, and the rest as a table."""
    rates = [(place, rate, 80 - 70 * rate) for place, rate in enumerate(each["by_position"])]
    bars = "".join(
        f"<rect x='{BAR * place}' y='{y:.1f}' width='24' height='{80 - y:.1f}' fill='{COLORS[name]}'/>"
        f"<text x='{BAR * place}' y='{y - 4:.1f}'>{100 * rate:.0f} %</text>"
        f"<text x='{BAR * place + 8}' y='94'>{place + 1}</text>"
        for place, rate, y in rates
    )
    lines = {
        "τ": f"{each['acceptance_length']:.3f}",
        "τ by prompt": ", ".join(f"{tau:.2f}" for tau in each["by_prompt"]),
    }
    if "parity" in each:
        lines["verifies that ended at a token outside the draft vocabulary"] = f"{100 * each['missed']:.1f} %"
        lines["τ as training simulates it, and in serving"] = "{simulated}, {engine}".format(**each["parity"])
    drawing = f"<svg viewBox='0 -10 {BAR * len(rates) + 10} 110' height='110'>{bars}</svg>"
    return f"<p>{name}, accepted by position:</p>{drawing}{table(['what', 'how much'], lines.items())}"
