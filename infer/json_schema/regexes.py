"""Translates clients' regular expressions (ECMA-262's and Python's) for llguidance, whose syntax is Rust's.

`\\d`, `\\w`, `\\s` and their negations are ASCII everywhere, as with Python's `re.ASCII` and in xgrammar.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ASCII = {
    **{r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]", r"\s": r"[\t-\r ]"},
    **{r"\D": "[^0-9]", r"\W": "[^0-9A-Za-z_]", r"\S": r"[^\t-\r ]"},
}
OTHER_NAMES = {r"\A": "^", r"\Z": "$", r"\z": "$", r"\0": r"\x00", r"\<": "<", r"\>": ">"}
NOTHING = "(?:)"  # in the place of an assertion: a quantifier may follow
MAX_AHEAD = 16  # look-aheads of one expression that are enforced
ESCAPE = (
    r"\\u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}"  # a surrogate pair
    r"|\\u\{[0-9A-Fa-f]*\}|\\[pP]\{[\w=:^]*\}|\\c[A-Za-z]|\\."
)
GROUP = r"\(\?(?:P?<(?![=!])\w*>|P[=>]|<?[=!]|#[^()]*\)|[>:]|[A-Za-z-]+[:)])"
PART = re.compile(rf"{ESCAPE}|{GROUP}|\[\^?\]?(?:\\.|[^\]\\])*+\]|\{{[0-9]*,?[0-9]*\}}|.", re.DOTALL)
MEMBER = re.compile(rf"{ESCAPE}|.", re.DOTALL)
QUANTIFIER = re.compile(r"\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]+)\}")
LOOKAROUND = ("(?=", "(?!", "(?<=", "(?<!")
# `[...]*$`: negative look-ahead for it asks for a character of another kind
ONLY_THESE = re.compile(r"\^?\[((?:[^\[\]\\^]|\\.)(?:[^\[\]\\]|\\.)*)\]\*\$")


class Translated(NamedTuple):
    """Regular expressions, all of which a text must match; `exact` if they say what the client's own does.

    Without any, nothing of it can be enforced.
    """

    regexes: list[str]
    exact: bool = True


def translate(text: str) -> Translated:
    """Translate a regular expression. What is malformed remains so, for llguidance to refuse. Linear in its length.

    Look-ahead at the beginning (`^(?=...)`) becomes an expression of its own. Other look-around and word boundaries,
    which no grammar can enforce, are left out. Nothing of an expression with back-references can be enforced.
    """
    out: list[str] = []
    groups: list[tuple[str, int, bool]] = []  # each open group: how it opens, its place in `out`, whether it is first
    ahead: list[str] = []
    exact, first, alternatives = True, True, False  # `first`: `out` asks for nothing but the beginning
    place = 0
    while place < len(text):
        match = PART.match(text, place)
        assert match is not None
        part, place = match[0], match.end()
        if part == "[":  # it is not closed, nor is any later one
            out.append(text[place - 1 :])
            break
        if part.startswith(r"\b") or part == r"\B":
            part, exact = NOTHING, False
        elif re.match(r"\\[1-9k]|\(\?P[=>]", part):
            return Translated([], exact=False)
        elif part.startswith("(?#"):
            part = NOTHING
        elif part == "(" or (part.startswith("(?") and not part.endswith(")")):
            groups.append((part, len(out), first and not groups))
            part = "(?:" if part.startswith(("(?<", "(?P<", "(?>", *LOOKAROUND)) else part
        elif part == ")" and groups:
            opening, begin, was_first = groups.pop()
            if opening in LOOKAROUND:
                leads = was_first and len(ahead) < MAX_AHEAD
                condition = leading(opening, "".join(out[begin + 1 :])) if leads else None
                ahead += [] if condition is None else [condition]
                exact &= condition is not None
                first |= was_first
                part, out[begin:] = NOTHING, []
        elif part.startswith("["):
            part = character_class(part)
        else:
            alternatives |= part == "|" and not groups
            part = braces(part) if part.startswith("{") else escaped(part)
        out.append(part)
        first &= part == NOTHING or (part == "^" and len(out) == 1)
    if alternatives:  # look-ahead belongs to the first one alone
        ahead, exact = [], exact and not ahead
    return Translated(["".join(out), *ahead], exact)


def leading(opening: str, body: str) -> str | None:
    """Return the expression that look-ahead at the beginning of a text amounts to, if there is one."""
    if opening == "(?=":
        return f"^(?:{body})"
    only = ONLY_THESE.fullmatch(body) if opening == "(?!" else None
    return f"[^{only[1]}]" if only else None


def braces(part: str) -> str:
    """Return a quantifier, or braces that are characters, as they are in Python and ECMA-262."""
    if QUANTIFIER.fullmatch(part):
        return part.replace("{,", "{0,")
    return part.replace("{", r"\{").replace("}", r"\}")


def escaped(part: str) -> str:
    if part.startswith(r"\c") and part[2:]:
        return rf"\x{ord(part[2]) % 32:02x}"
    if len(part) == len(r"\ud83d\ude00"):
        high, low = int(part[2:6], 16), int(part[8:], 16)
        return rf"\u{{{0x10000 + (high - 0xD800) * 0x400 + low - 0xDC00:x}}}"
    return ASCII.get(part) or OTHER_NAMES.get(part, part)


def character_class(part: str) -> str:
    """Return a class for Rust, which nests classes and combines them by `&&`, `--` and `~~`: escape what does."""
    begin = 2 if part.startswith("[^") else 1
    members = MEMBER.findall(part, begin, len(part) - 1)
    written, place = [part[:begin]], 0
    while place < len(members):
        last = place + 2  # of a range
        is_range = members[place + 1 : last] == ["-"] and last < len(members)
        if is_range and not {members[place], members[last]} & ASCII.keys():
            written += [in_class(members[place]), "-", in_class(members[last])]
            place = last + 1
        else:
            written.append(in_class(members[place]))
            place += 1
    return "".join([*written, "]"])


def in_class(member: str) -> str:
    if member in ("[", "]", "&", "~", "^", "-"):
        return f"\\{member}"
    return r"\x08" if member == r"\b" else escaped(member)
