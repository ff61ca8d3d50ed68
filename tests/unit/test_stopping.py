"""Where an output ends: stop ids, stop strings across tokens, lengths; and what is held back until that is decided."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from infer.batch.params import SamplingParams
from infer.batch.stopping import StopStrings
from infer.request import Request
from infer.sampling.emission import cut


class Letters:
    """A detokenizing stream in which token i is letter i."""

    def push(self, ids):
        return "".join(chr(97 + token) for token in ids)

    def flush(self):
        return ""


def text_of(stops):
    from infer.batch.stopping import StopText

    return StopText(Letters(), stops)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=5),
)
def test_pieces_do_not_show(text, stops, cuts):
    strings = StopStrings(stops)
    edges = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    shown, matched = "", None
    for begin, end in itertools.pairwise(edges):
        piece, matched = strings.push(text[begin:end])
        shown += piece
        if matched is not None:
            break
    else:
        shown += strings.flush()
    first_end = min((text.find(s) + len(s) for s in stops if s in text), default=None)
    if first_end is None:
        assert (shown, matched) == (text, None)
    else:
        assert matched is not None
        assert text.startswith(shown + matched)
        assert not any(stop in shown for stop in stops)


def test_nothing_is_shown_that_may_begin_a_stop():
    strings = StopStrings(["END", "\n\n"])
    assert strings.push("the E") == ("the ", None)
    assert strings.push("N") == ("", None)
    assert strings.push("T\n") == ("ENT", None)
    assert strings.push("\nrest") == ("", "\n\n")


def run(tokens, *, room=10, stop_ids=frozenset(), eos_id=None, emitted_before=0, text=None, **masks):
    params = SamplingParams(max_tokens=50, **masks)
    request = Request("r", [9], params, 0, [9] + [7] * emitted_before, stop_ids, eos_id, stop_text=text)
    emitted, reason, stop_reason = cut(tokens, request, room=room)
    assert (reason == "error") == (request.error is not None)
    return emitted, reason, stop_reason


def test_what_follows_a_stop_is_cut():
    assert run([1, 2, 3]) == ([1, 2, 3], None, None)
    assert run([1, 2, 3], stop_ids=frozenset({2})) == ([1, 2], "stop", 2)
    assert run([1, 2, 3], room=2) == ([1, 2], "length", None)
    assert run([1, 2], room=2, stop_ids=frozenset({2})) == ([1, 2], "stop", 2)
    assert run([1, 2, 3], stop_ids=frozenset({1, 2}), eos_id=1) == ([1], "stop", None)
    assert run([2, 1], stop_ids=frozenset({1, 2}), eos_id=1) == ([2], "stop", 2)
    assert run([1, 2], eos_id=1) == ([1, 2], None, None)  # EOS is ignored unless it is a stop id
    assert run([0, 1, 2, 3], text=text_of(["bc"])) == ([0, 1, 2], "stop", "bc")


def test_a_stop_string_may_span_steps():
    text = text_of(["bcd"])
    assert run([0, 1], text=text) == ([0, 1], None, None)
    assert run([2, 3, 4], text=text) == ([2, 3], "stop", "bcd")
    assert text.finish() == "a"


def test_before_min_tokens_a_stop_string_is_text():
    text = text_of(["b"])
    assert run([0, 1, 2], text=text, min_tokens=3) == ([0, 1, 2], None, None)
    assert run([1], text=text, emitted_before=3, min_tokens=3) == ([1], "stop", "b")
    assert text.finish() == "abc"


def test_what_a_mask_forbids_is_not_emitted():
    """It was sampled at a row where the masks together allow nothing."""
    assert run([1, 2, 3], allowed_token_ids=(1, 3)) == ([1], "error", None)
    assert run([1, 2, 1], bad_words=((1, 2, 1),)) == ([1, 2], "error", None)
    assert run([2], emitted_before=1, bad_words=((7, 2),)) == ([], "error", None)
    assert run([1, 5], stop_ids=frozenset({5}), min_tokens=3) == ([1], "error", None)
    assert run([1, 5], stop_ids=frozenset({5}), emitted_before=1, min_tokens=2) == ([1, 5], "stop", 5)
    assert run([1, 3, 1], allowed_token_ids=(1, 3), bad_words=((3, 3),)) == ([1, 3, 1], None, None)
