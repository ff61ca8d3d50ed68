"""The page at `/`: one document with its style and script inside; it loads nothing and talks to this server alone."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
PURE = ("answer", "statistics", "conversation", "markdown")  # run without a browser, so that tests can run them alone
SCRIPTS = (*PURE, "client", "view", "chat", "completion", "compare", "page")


class Page(NamedTuple):
    html: str
    headers: dict[str, str]


@cache
def page() -> Page:
    """The policy names the page's own style and script by their hashes: nothing else runs, whatever a model writes."""
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    script = source(SCRIPTS)
    html = (FOLDER / "page.html").read_text(encoding="utf-8")
    html = html.replace("/* page.css */", style).replace("/* page.js */", script)
    policy = [
        "default-src 'none'",
        f"style-src 'sha256-{digest(style)}'",
        f"script-src 'sha256-{digest(script)}'",
        "connect-src 'self'",
        "img-src data:",  # the icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Page(html, headers)


def source(scripts: Sequence[str]) -> str:
    """One script of several files."""
    parts = [(FOLDER / "script" / f"{name}.js").read_text(encoding="utf-8") for name in scripts]
    return '"use strict";\n' + "\n".join(parts)


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
