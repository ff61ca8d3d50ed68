"""A server on loopback with the model hub's HTTP interface, for clients whose HF_ENDPOINT points at it.

It serves folders as repositories, as far as huggingface_hub asks: a model's information, its tree, and its files with
their hashes, by range too. Files may arrive cut, short, changed, or be held back.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".bin", ".pt")
MAIN = "main"


class Mirror:
    """`branches`: (repository, revision) -> folder. `faults`: repository/file -> what happens at its next download:
    `cut` (the connection closes halfway), `short` (bytes are missing), `changed` (a byte is), `held` until `release`.
    """

    def __init__(self, branches: Mapping[tuple[str, str], Path]) -> None:
        self.branches = dict(branches)
        self.faults: dict[str, str] = {}
        self.downloads: Counter[str] = Counter()  # by repository/file
        self.ranges: list[str] = []
        self.requests = 0
        self.is_held, self.release = threading.Event(), threading.Event()
        self.url = ""

    def commit(self, repository: str, revision: str) -> str | None:
        folder = self.branches.get((repository, revision))
        if folder is not None:
            return hashlib.sha1(f"{repository} {folder}".encode()).hexdigest()
        commits = (self.commit(name, branch) for name, branch in self.branches if name == repository)
        return revision if revision in commits else None

    def folder(self, repository: str, commit: str) -> Path:
        places = self.branches.items()
        return next(place for (name, branch), place in places if self.commit(name, branch) == commit)

    def environment(self, cache: Path) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "no_proxy": "*"}


@contextmanager
def mirror(branches: Mapping[tuple[str, str], Path]) -> Iterator[Mirror]:
    hub = Mirror(branches)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Mirror

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.respond()

    def do_GET(self) -> None:
        self.respond()

    def respond(self) -> None:
        self.hub.requests += 1
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.describe("/".join(parts[2:4]), *parts[4:6])
        elif len(parts) > 4 and parts[2] == "resolve":
            self.send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.refuse("RepoNotFound")

    def describe(self, repository: str, what: str = "revision", revision: str = MAIN) -> None:
        if not any(name == repository for name, _ in self.hub.branches):
            return self.refuse("RepoNotFound")
        commit = self.hub.commit(repository, revision)
        if commit is None:
            return self.refuse("RevisionNotFound")
        folder = self.hub.folder(repository, commit)
        entries = [entry(folder, file) for file in sorted(folder.rglob("*")) if file.is_file()]
        siblings = [{"rfilename": item["path"]} for item in entries]
        content = entries if what == "tree" else {"id": repository, "sha": commit, "siblings": siblings}
        self.send(json.dumps(content).encode(), {"Content-Type": "application/json"})
        return None

    def send_file(self, repository: str, revision: str, name: str) -> None:
        commit = self.hub.commit(repository, revision)
        if commit is None:
            return self.refuse("RevisionNotFound")
        file = self.hub.folder(repository, commit) / name
        if not file.is_file():
            return self.refuse("EntryNotFound", {"X-Repo-Commit": commit})
        item, content, status = entry(file.parent, file), file.read_bytes(), 200
        headers = {"ETag": f'"{item["lfs"]["oid"] if "lfs" in item else item["oid"]}"', "X-Repo-Commit": commit}
        fault = self.hub.faults.pop(f"{repository}/{name}", "") if self.command == "GET" else ""
        if self.command == "GET":
            self.hub.downloads[f"{repository}/{name}"] += 1
        if wanted := self.headers.get("Range"):
            self.hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content, status = content[start:], 206
        if fault == "short":
            content = content[:-9]
        if fault == "changed":
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.send(content, headers, status, sent=len(content) // 2 if fault in ("cut", "held") else None)
        if fault == "held":
            self.hub.is_held.set()
            self.hub.release.wait()
        return None

    def refuse(self, code: str, headers: Mapping[str, str] = {}) -> None:
        self.send(b"{}", {"X-Error-Code": code, "X-Error-Message": code, **headers}, 404)

    def send(self, content: bytes, headers: Mapping[str, str], status: int = 200, *, sent: int | None = None) -> None:
        """Send a response; with `sent` only so many of its bytes, after which the connection closes."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:sent])
            self.wfile.flush()
        self.close_connection = self.close_connection or sent is not None


def entry(folder: Path, file: Path) -> dict[str, Any]:
    """Return a file as the hub lists it in a tree: large ones with the sha256 that git-lfs stores."""
    content = file.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    item = {"type": "file", "oid": blob, "size": len(content), "path": file.relative_to(folder).as_posix()}
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return item | ({"lfs": lfs} if file.suffix in LFS else {})
