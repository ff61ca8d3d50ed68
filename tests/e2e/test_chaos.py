"""scripts/chaos.py as a user runs it, and that what it looks for is found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from scripts.faults.lab import CANARY, KEY, Broken, Lab
from scripts.faults.serving import COMPLETE, ERROR, Body, Client

ROOT = Path(__file__).resolve().parents[2]
# of each kind of process one that ends it and one that does not; damaged kernels are compiled anew, which takes longest
FAULTS = [
    "server: kill -9", "server: clients hang up", "server: full disk", "server: memory limit", "server: SIGSTOP",
    "learning head: kill -9 of the trainer", "tensor parallel: kill -9 of a rank", "training: kill -9",
    "training: damaged", "training: two processes", "training: full disk", "training, two ranks: kill -9 of a rank",
]  # fmt: skip


def command(target: Path, output: Path, *words: str) -> list[str]:
    return [sys.executable, "scripts/chaos.py", f"model={target}", "model.name=tiny", f"output_dir={output}", *words]


@pytest.mark.slow
def test_a_round(tiny_target_folder: Path, tmp_path: Path, started_here: Callable[[], list[int]]) -> None:
    words = ["rounds=1", "seed=1", f"faults=[{','.join(f'{name!r}' for name in FAULTS)}]"]
    done = subprocess.run(
        command(tiny_target_folder, tmp_path, *words), cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    report = json.loads((tmp_path / "chaos" / "tiny" / "report.json").read_text())
    assert (done.returncode, report["broken"], report["unfinished"]) == (0, [], ""), done.stderr
    assert all(any(name.startswith(fault) for name in report["faults"]) for fault in FAULTS)
    assert all(row == {"runs": 1, "broken": 0} for row in report["faults"].values())
    assert report["outcomes"]["complete"] >= 4 * 8  # clients of servers that go on
    assert report["outcomes"]["error"] > 0
    assert re.search(rf"{len(report['faults'])} faults in [\d.]+ minutes, seed 1: ", done.stdout)
    assert started_here() == []
    assert not (tmp_path / "chaos" / "tiny" / "disk").exists()


@pytest.mark.slow
def test_ctrl_c_reports_what_was_done(
    tiny_target_folder: Path, tmp_path: Path, started_here: Callable[[], list[int]]
) -> None:
    words = command(tiny_target_folder, tmp_path, "rounds=1000", "faults=['server: clients hang up']")
    with subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background tests ignore it
    ) as process:
        try:
            assert process.stderr is not None
            assert "server: clients hang up: 8 complete" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=600)
        except BaseException:
            process.terminate()  # it then ends its servers, as after Ctrl-C
            raise
    assert process.returncode == 130
    assert "incomplete: it was interrupted; report: " in out
    assert json.loads((tmp_path / "chaos" / "tiny" / "report.json").read_text())["faults"]
    assert started_here() == []


def test_bad_input(tmp_path: Path, forked: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = forked(["scripts/chaos.py", f"output_dir={tmp_path}", "faults=[flood]"])
    assert done.returncode == 2
    assert "faults=['flood']: no fault begins so; there are ['server: kill -9'" in done.stderr


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path / "lab", 0)
    yield lab
    lab.close()


def test_what_is_left_or_logged_is_found(lab: Lab, tmp_path: Path) -> None:
    lab.check_logs()
    lab.check_nothing_left()
    for text, what in ((KEY, "the API key"), (f"x {CANARY}_1", "a prompt")):
        (lab.logs / "one.log").write_text(text)
        with pytest.raises(Broken, match=f"{what} is in .*one.log"):
            lab.check_logs()
    for file in (lab.temporary / "headway-x", lab.caches / ".part-x", tmp_path / "run" / ".state.json.ab.tmp"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
        with pytest.raises(Broken, match=f"files are left: {file}"):
            lab.check_nothing_left(tmp_path / "run")
        file.unlink()


def test_a_full_disk_has_no_room(lab: Lab) -> None:
    file = lab.disk / "file"
    before = os.statvfs(lab.disk).f_blocks
    if not lab.mounted:
        pytest.skip("this user may mount nothing")
    with lab.full_disk(), pytest.raises(OSError, match="No space left"):
        file.write_bytes(bytes(2**20))
    file.write_bytes(bytes(2**20))
    assert os.statvfs(lab.disk).f_blocks == before


EVENT = 'data: {"choices": [{"token_ids": [1, 2], "finish_reason": null}]}\n\n'
LAST = 'data: {"choices": [{"token_ids": [3], "finish_reason": "length"}]}\n\n'


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (EVENT + LAST, COMPLETE),
        (EVENT + 'data: {"error": {"message": "the engine has stopped"}}\n\n', ERROR),
        (EVENT, "cut without an error"),
        (EVENT + LAST.replace("3", "4"), "other ids in a stream"),
    ],
)
def test_an_answer_is_complete_or_an_error(said: str, verdict: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request).start()
        client = Client(f"http://127.0.0.1:{server.server_port}")
        if verdict in (COMPLETE, ERROR):
            assert client.ask(Body({}, [1, 2, 3]), stream=True) == verdict
        else:
            with pytest.raises(Broken, match=verdict):
                client.ask(Body({}, [1, 2, 3]), stream=True)
