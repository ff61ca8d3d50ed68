"""What all faults share: processes that are found again, a disk that can be full or slow, and what may not be left."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from infer.server.address import KEY_VARIABLE
from infer.settings.paths import REPO_ROOT
from kernels.cache import VARIABLE as CACHE_VARIABLE
from kernels.cpu.library import compiler, library_file

PATIENCE_S = 240.0  # a process that takes longer hangs
CANARY, KEY = "zebra_crossing_at_midnight", "the-key-that-no-log-may-show"
MARK = "HEADWAY_CHAOS"  # environment variable by which all processes of a run are found
SLOW = "HEADWAY_CHAOS_SLOW"  # environment variable: while this file exists, the disk is slow
ROOM_MB, BLOCK = 2048, 4096
# Python runs it at the start of each process: every file that is opened, renamed or removed then takes a while.
SLOW_DISK = f"""\
import os, sys, time
def slow(event, arguments, file=os.environ["{SLOW}"]):
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and os.path.exists(file):
        time.sleep(0.1)
sys.addaudithook(slow)
"""


class Broken(Exception):
    """What must hold after a fault does not."""


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Raises Broken with `what` if it does not hold in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise Broken(f"{what}, after {PATIENCE_S:.0f} s")
        time.sleep(0.02)


class Process:
    """A command that prints into a log file."""

    def __init__(self, words: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self.words, self.log = words, log
        with log.open("wb") as file:
            self.child = subprocess.Popen(
                words,
                cwd=REPO_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the match once it is printed. Raises Broken if the process ends before."""

        def printed() -> object:
            ended = self.child.poll() is not None  # asked first: what it printed is then complete
            if not re.search(pattern, self.said) and ended:
                raise Broken(f"{' '.join(self.words[1:3])} ended with {self.child.returncode}: {self.said[-1500:]}")
            return re.search(pattern, self.said)

        wait_until(printed, f"{pattern} is not printed by {self.words[1]}")
        match = re.search(pattern, self.said)
        assert match is not None
        return match

    def wait(self) -> int:
        wait_until(lambda: self.child.poll() is not None, f"{' '.join(self.words[1:3])} does not end")
        return self.child.wait()


class Lab:
    """A folder for one run of chaos.py, and the processes in it. `disk` is a file system of its own where this user may
    mount one; elsewhere a full disk is a limit of the size of files.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, Random(seed)
        self.disk, self.slow, self.logs = folder / "disk", folder / "slow", folder / "disk" / "logs"
        self.caches, self.temporary = self.disk / "cache", self.disk / "tmp"
        self.mark, self._count = str(uuid.UUID(int=self.random.getrandbits(128))) + f"-{os.getpid()}", 0
        self._seen = set[str]()  # of which a name in /dev/shm would tell
        self._unmount()
        shutil.rmtree(folder, ignore_errors=True)
        for place in (self.disk, folder / "hook"):
            place.mkdir(parents=True)
        self.mounted = self._mount(f"size={ROOM_MB}m")
        for place in (self.caches, self.temporary, self.logs):
            place.mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(SLOW_DISK)
        if cc := compiler():  # built before, by this user: it is rebuilt only where it is damaged
            with suppress(OSError):
                shutil.copy(built := library_file(cc), self.caches / built.name)

    def end_all(self) -> None:
        for pid in self.started():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.started(), "processes do not end")

    def close(self) -> None:
        self.end_all()
        shutil.copytree(self.logs, self.folder / "logs")
        self._unmount()
        shutil.rmtree(self.disk)

    def _mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "headway-chaos", str(self.disk)]
        return shutil.which("mount") is not None and not subprocess.run(command, capture_output=True).returncode

    def _unmount(self) -> None:
        if self.disk.is_mount():
            subprocess.run(["umount", "-l", str(self.disk)], check=True, capture_output=True)

    def start(self, *words: str, ranks: int = 1) -> Process:
        """Start a script of ours with its command-line words, by torchrun if there is more than one rank."""
        self._count += 1
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
        added = {
            CACHE_VARIABLE: self.caches, "TMPDIR": self.temporary, KEY_VARIABLE: KEY, MARK: self.mark, SLOW: self.slow,
            "PYTHONPATH": self.folder / "hook", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
        }  # fmt: skip
        log = self.logs / f"{self._count:04d}-{Path(words[0]).stem}.log"
        return Process([sys.executable, *launcher, *words], log, os.environ | {k: str(v) for k, v in added.items()})

    def started(self) -> list[int]:
        """Return the processes of this run that have not ended, however they were started."""
        pids = list[int]()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
        self._seen.update(map(str, pids))
        return sorted(pids)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Within the block there is no room on the disk, for the processes that run now."""
        pids, unlimited = self.started(), resource.RLIM_INFINITY
        if self.mounted:
            used = shutil.disk_usage(self.disk).used
            self._remount(f"size={max(used, BLOCK)}")
        else:
            limit_files(pids, BLOCK)
        try:
            yield
        finally:
            if self.mounted:
                self._remount(f"size={ROOM_MB}m")
            else:
                limit_files(pids, unlimited)

    def _remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.disk)], check=True, capture_output=True)

    @contextmanager
    def slow_disk(self) -> Iterator[None]:
        self.slow.touch()
        try:
            yield
        finally:
            self.slow.unlink()

    def check_logs(self) -> None:
        """Raises Broken if a key or a part of a prompt is in a log."""
        for log in sorted(self.logs.iterdir()):
            for what, text in (("the API key", KEY), ("a prompt", CANARY)):
                if text in log.read_text(errors="replace"):
                    raise Broken(f"{what} is in {log}")

    def check_nothing_left(self, *outputs: Path) -> None:
        """Raises Broken if a process is left, or a file that nobody needs, when all should have ended.

        torch's launcher leaves its own temporary folders when it is killed, torchelastic_* and torchinductor_*.
        """
        wait_until(lambda: not self.started(), f"processes are left: {self.started()}")
        unfinished = [path for folder in (self.caches, *outputs) for path in folder.rglob(".*") if path.name != ".run"]
        shared = [path for path in Path("/dev/shm").glob("*") if self._seen & set(re.findall(r"\d+", path.name))]
        if left := [*self.temporary.glob("[!t]*"), *self.temporary.glob("tmp*"), *unfinished, *shared]:
            raise Broken(f"files are left: {', '.join(map(str, left[:5]))}")


def limit_files(pids: Sequence[int], size: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def limit_memory(pid: int, more: int | None) -> None:
    """Let a process allocate no more than `more` bytes beyond what it has; None: as much as it likes."""
    now = int((Path("/proc") / str(pid) / "statm").read_text().split()[0]) * resource.getpagesize()
    size = resource.RLIM_INFINITY if more is None else now + more
    resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def suspend(pids: Sequence[int], seconds: float) -> None:
    """Stop processes for some seconds (SIGSTOP, SIGCONT)."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(seconds if number == signal.SIGSTOP else 0)


def damage(files: Sequence[Path], random: Random) -> Path:
    """Cut one of the files short, empty it or flip a bit of it; return it."""
    file = random.choice(sorted(files))
    content = bytearray(file.read_bytes())
    way = random.choice(("cut", "emptied", "flipped")) if content else "emptied"
    if way == "flipped":
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content if way == "flipped" else content[: random.randrange(len(content)) if way == "cut" else 0])
    return file
