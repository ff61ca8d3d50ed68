"""The page at `/`: one HTML document with inline style and script. It loads nothing and calls this server only."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
PURE = ("answer", "statistics", "conversation", "markdown")  # need no browser, so that tests can run them alone
SCRIPTS = (*PURE, "client", "view", "chat", "completion", "compare", "learning", "page")


class Page(NamedTuple):
    html: str
    headers: dict[str, str]


@cache
def page() -> Page:
    """Return the page. Its policy allows its style and script by hash alone, so nothing that a model writes can run."""
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
    """Return the files of `scripts` concatenated into one script."""
    parts = [(FOLDER / "script" / f"{name}.js").read_text(encoding="utf-8") for name in scripts]
    return '"use strict";\n' + "\n".join(parts)


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
