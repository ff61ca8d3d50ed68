"""Experiment trackers: metrics.jsonl always, and W&B or TensorBoard if configured. Secrets are masked.

A tracker that cannot work falls back or is rejected at the start; none can stop or hang a run. Independent of the
meaning of metrics.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import netrc
import os
import re
import secrets
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from infer.config import TrackerConfig, WandbConfig
from train.storage import atomic

METRICS, WANDB_ID, WANDB_SENT = "metrics.jsonl", "wandb-id", "wandb-sent"
SECRET_KEY = re.compile(r"(key|token|secret|password|passwd|credentials?|auth)$", re.IGNORECASE)
SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-)\w{8,}|//[^/\s:@]+:[^/\s@]+@")
INIT_SECONDS = 20  # timeout of W&B's initialisation, after which the run is tracked offline
FINISH_SECONDS = 60  # timeout of W&B's upload at the end


class Sample(NamedTuple):
    """A held-out prompt and its response, with accepted draft tokens marked."""

    prompt: str
    text: str
    acceptance_length: float


class Results(NamedTuple):
    """The results of a finished run."""

    plots: Sequence[Path]
    samples: Sequence[Sample]
    export: Path  # the exported head's folder
    aliases: Sequence[str]


class Tracker:
    """Contract: `log` at increasing steps, then `publish` and `finish` once; none raises on network failure."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    def publish(self, results: Results) -> None:
        """Send the results; plots, report and head are in the run's folder in any case."""

    def finish(self) -> None:
        """Release resources."""


class JsonlTracker(Tracker):
    """One JSON object per line, in which null is a mean over nothing.

    Rows after `resume_step`, of a killed run, are dropped, since they are logged again.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        self._path = folder / METRICS
        kept = [row for row in read_metrics(folder) if row["step"] <= resume_step]
        atomic.write_text(self._path, "".join(map(json_line, kept)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row. Raises ValueError if the disk is full."""
        with atomic.refuse_full_disk(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json_line({"step": step, **metrics}))


def json_line(row: Mapping[str, float]) -> str:
    """Return the row as JSON, which has no nan."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()}) + "\n"


class TensorboardTracker(Tracker):
    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Weights & Biases. Its files and run id are kept in the run's folder, so that resuming continues the W&B run."""

    def __init__(self, wandb: Any, config: WandbConfig, folder: Path, run: str, settings: Mapping[str, Any]) -> None:
        self._wandb, self._config, self._sent = wandb, config, folder / WANDB_SENT
        arguments = {
            "project": config.project,
            "entity": config.entity,
            "id": wandb_id(folder),
            "name": run,
            "dir": str(folder),
            "config": dict(settings),
        }
        quiet = wandb.Settings(console="off", silent=True, init_timeout=INIT_SECONDS, login_timeout=INIT_SECONDS)
        mode = wandb_mode(config, quiet.base_url)
        try:
            resume = "allow" if mode == "online" else None  # offline runs with the same id are merged by `wandb sync`
            self._run = wandb.init(**arguments, mode=mode, resume=resume, settings=quiet)
        except Exception as error:  # of any kind: a tracker must not end the run
            if config.mode == "online":
                raise ValueError(f"tracker.mode=online: W&B cannot be reached ({error}); try offline") from error
            warn(f"W&B cannot be reached ({type(error).__name__}: {error}); tracking offline")
            wandb.teardown()  # otherwise the id is still in use
            self._run = wandb.init(**arguments, mode="offline", settings=quiet)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def publish(self, results: Results) -> None:
        """Send plots, and sample texts and the head's files if configured, unless a repeated run has the same again."""
        content = [*(plot.read_bytes() for plot in results.plots), results.samples, self._config]
        digest = hashlib.sha256(repr(content).encode()).hexdigest()
        if self._sent.is_file() and self._sent.read_text(encoding="utf-8").strip() == digest:
            return
        try:
            self._send(results)
            atomic.write_text(self._sent, digest + "\n")
        except Exception as error:  # the head is exported: no failure here may end the run
            warn(f"the results could not be sent to W&B ({type(error).__name__}: {error})")

    def _send(self, results: Results) -> None:
        images = {f"plots/{plot.stem}": self._wandb.Image(str(plot)) for plot in results.plots}
        self._run.log(images)
        if self._config.samples:
            rows = [list(sample) for sample in results.samples[: self._config.samples]]
            self._run.log({"samples": self._wandb.Table(columns=["prompt", "answer, accepted marked", "τ"], data=rows)})
        if self._config.upload:
            artifact = self._wandb.Artifact("-".join(results.export.parts[-2:]), type="head")
            artifact.add_dir(str(results.export))
            self._run.log_artifact(artifact, aliases=list(results.aliases))

    def finish(self) -> None:
        """Wait for the upload up to FINISH_SECONDS; the rest stays in the run's folder for `wandb sync`."""
        ending = threading.Thread(target=self._run.finish, daemon=True)
        ending.start()
        ending.join(FINISH_SECONDS)
        if ending.is_alive():
            warn("W&B has not finished its upload; run `wandb sync` in the run's folder to complete it")


class Trackers(Tracker):
    """All of a run's trackers combined; `Trackers([])` does nothing.

    `logged`: the names that were logged for step `resume_step` before the run was resumed there; they are not again.
    """

    def __init__(self, trackers: list[Tracker], resume_step: int = 0, logged: Collection[str] = ()) -> None:
        self._trackers, self._resume_step, self._logged = trackers, resume_step, logged

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._resume_step:
            metrics = {name: value for name, value in metrics.items() if name not in self._logged}
        for tracker in self._trackers if metrics else ():
            tracker.log(step, metrics)

    def publish(self, results: Results) -> None:
        for tracker in self._trackers:
            tracker.publish(results)

    def finish(self) -> None:
        for tracker in self._trackers:
            tracker.finish()


def make_trackers(
    config: TrackerConfig, folder: Path, run: str, settings: Mapping[str, Any], *, resume_step: int
) -> Trackers:
    """Create the trackers of a run. `settings` is its configuration; secrets in it are masked before they are sent.

    Raises ValueError if `check_tracker` does, or if W&B is required (tracker.mode=online) and cannot be reached.
    """
    check_tracker(config)
    trackers: list[Tracker] = [JsonlTracker(folder, resume_step)]
    logged = {name for row in read_metrics(folder) if row["step"] == resume_step for name in row}
    if config.name == "tensorboard":
        trackers.append(TensorboardTracker(folder, resume_step))
    elif isinstance(config, WandbConfig):
        wandb = import_wandb()
        if wandb is None:
            warn(f"wandb is not installed: metrics go to {METRICS} only (tracker=none silences this note)")
        else:
            trackers.append(WandbTracker(wandb, config, folder, run, redact(settings)))
    return Trackers(trackers, resume_step, logged)


def check_tracker(config: TrackerConfig) -> None:
    """Raise ValueError for a tracker that cannot work on this machine and has no fallback."""
    if config.name == "tensorboard":
        try:
            importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ValueError(
                "tracker=tensorboard: tensorboard is not installed; pip install tensorboard, or tracker=none"
            ) from error
    if isinstance(config, WandbConfig) and config.mode == "online":
        wandb = import_wandb()
        if wandb is None:
            raise ValueError("tracker.mode=online: wandb is not installed; pip install wandb, or tracker=none")
        url = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
        if not has_wandb_credentials(url):
            raise ValueError(
                f"tracker.mode=online: there are no credentials for {url}; say `wandb login`, set WANDB_API_KEY, or "
                "tracker.mode=offline"
            )


def import_wandb() -> Any | None:
    """Return the wandb package or None. A folder `wandb` left by runs imports as an empty package without `init`."""
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        return None
    return wandb if hasattr(wandb, "init") else None


def wandb_id(folder: Path) -> str:
    """Return the W&B id of the run in this folder, created once. The run's name would not do: it need not be unique."""
    path = folder / WANDB_ID
    if not path.is_file():
        atomic.write_text(path, secrets.token_hex(8) + "\n")
    return path.read_text(encoding="utf-8").strip()


def wandb_mode(config: WandbConfig, default_url: str) -> str:
    """Return `tracker.mode`; for auto, WANDB_MODE if set, else online if there are credentials for the server."""
    if config.mode != "auto":
        return config.mode
    mode = os.environ.get("WANDB_MODE")
    if mode in ("online", "offline", "disabled"):
        return mode
    return "online" if has_wandb_credentials(os.environ.get("WANDB_BASE_URL") or default_url) else "offline"


def has_wandb_credentials(url: str) -> bool:
    """Return whether wandb would have credentials. Looks in the same places: calling wandb may prompt the user."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = [urlsplit(url).netloc]
    if not os.environ.get("WANDB_BASE_URL"):
        hosts.append("api.wandb.ai")  # where the default server's keys were stored before it moved
    file = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    try:
        entries = netrc.netrc(str(file))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(host in entries.hosts for host in hosts)


def redact(value: Any, key: str = "") -> Any:
    """Return a copy in which every text whose key names a secret, or that looks like one, is masked."""
    if isinstance(value, Mapping):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if isinstance(value, str) and (SECRET_KEY.search(key) or SECRET_VALUE.search(value)):
        return "***"
    return value


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return all complete rows; the last one may be truncated if the process was killed."""
    path = folder / METRICS
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
        except json.JSONDecodeError:
            break
    return rows


def warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)
