"""httpx's functions with a timeout that only a hang exceeds; its default is five seconds, too few on a busy machine."""

from __future__ import annotations

from typing import Any

import httpx

SECONDS = 600.0


def request(method: str, url: str, **options: Any) -> httpx.Response:
    return httpx.request(method, url, **{"timeout": SECONDS, **options})


def get(url: str, **options: Any) -> httpx.Response:
    return request("GET", url, **options)


def head(url: str, **options: Any) -> httpx.Response:
    return request("HEAD", url, **options)


def post(url: str, **options: Any) -> httpx.Response:
    return request("POST", url, **options)
