"""The page at `/`: one document with its style and script inside; it loads nothing and talks to this server alone."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent


class Page(NamedTuple):
    html: str
    headers: dict[str, str]


@cache
def page() -> Page:
    """The policy names the page's own style and script by their hashes: nothing else runs, whatever a model writes."""
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
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


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
