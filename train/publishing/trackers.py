"""Experiment trackers: metrics.jsonl always, and if configured one of accelerate's. Secrets are masked.

A tracker that cannot work falls back or is rejected at the start; none can stop or hang a run. Independent of the
meaning of metrics.
"""

from __future__ import annotations

import importlib
import json
import math
import netrc
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from infer.config import TrackerConfig, WandbConfig
from train.storage import atomic
from train.storage.provenance import redact

if TYPE_CHECKING:  # importing accelerate takes a second
    from accelerate.tracking import GeneralTracker

METRICS, WANDB_ID = "metrics.jsonl", "wandb-id"
INIT_SECONDS = 20  # timeout of W&B's initialization, after which the run is tracked offline
FINISH_SECONDS = 60  # timeout of W&B's upload at the end
# By tracker: a module of its package and a name in it. A folder `wandb` left by runs imports too, without that name.
MODULES = {"wandb": ("wandb", "init"), "tensorboard": ("torch.utils.tensorboard", "SummaryWriter")}


class Trackers:
    """A run's metrics.jsonl, one JSON object per line, and what `config` names beside it; `Trackers()` does nothing.

    Call `log` at increasing steps, then `publish` and `finish` once. Rows after `resume_step`, of a killed run, are
    dropped, since they are logged again; what was logged for that step itself is not.
    """

    def __init__(
        self, folder: Path | None = None, resume_step: int = 0, config: TrackerConfig | None = None, remote: Any = None
    ) -> None:
        """`remote`: one of accelerate's trackers, started."""
        self._folder, self._resume_step, self._config, self._remote = folder, resume_step, config, remote
        rows = read_metrics(folder) if folder else []
        self._logged = {name for row in rows if row["step"] == resume_step for name in row}
        if folder:
            kept = [row for row in rows if row["step"] <= resume_step]
            atomic.write_text(folder / METRICS, "".join(map(json_line, kept)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row. Raises ValueError if the disk is full."""
        if step == self._resume_step:
            metrics = {name: value for name, value in metrics.items() if name not in self._logged}
        if self._folder is None or not metrics:
            return
        path = self._folder / METRICS
        with atomic.refuse_full_disk(path), path.open("a", encoding="utf-8") as file:
            file.write(json_line({"step": step, **metrics}))
        self._try(lambda remote: remote.log(dict(metrics), step=step))

    def publish(self, plots: Sequence[Path], head: Path, aliases: Sequence[str]) -> None:
        """Send a finished run's plots to W&B, and if configured the files of the folder `head` under these aliases."""
        config = self._config
        if isinstance(config, WandbConfig):
            self._try(lambda remote: send_to_wandb(remote, plots, head if config.upload else None, aliases))

    def finish(self) -> None:
        """Release resources. W&B's upload is waited for up to FINISH_SECONDS; the rest stays for `wandb sync`."""
        if not isinstance(self._config, WandbConfig):
            self._try(lambda remote: remote.finish())
            return
        ending = threading.Thread(target=self._try, args=(lambda remote: remote.finish(),), daemon=True)
        ending.start()
        ending.join(FINISH_SECONDS)
        if ending.is_alive():
            warn("W&B has not finished its upload; run `wandb sync` in the run's folder to complete it")

    def _try(self, send: Callable[[Any], object]) -> None:
        """Call `send` with the remote tracker. Its first failure, of any kind, ends it and not the run."""
        if self._remote is None:
            return
        try:
            send(self._remote)
        except Exception as error:
            warn(f"tracker={self._remote.name} fails and gets nothing more ({type(error).__name__}: {error})")
            self._remote = None


def json_line(row: Mapping[str, float]) -> str:
    """Return the row as JSON, in which null is nan, a mean over nothing."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()}) + "\n"


def send_to_wandb(remote: Any, plots: Sequence[Path], head: Path | None, aliases: Sequence[str]) -> None:
    import wandb

    remote.log({f"plots/{plot.stem}": wandb.Image(str(plot)) for plot in plots})
    if head is not None:
        artifact = wandb.Artifact("-".join(head.parts[-2:]), type="head")
        artifact.add_dir(str(head))
        remote.tracker.log_artifact(artifact, aliases=list(aliases))


def make_trackers(
    config: TrackerConfig, folder: Path, run: str, settings: Mapping[str, Any], *, resume_step: int
) -> Trackers:
    """Create the trackers of a run. `settings` is its configuration; secrets in it are masked before they are sent.

    Raises ValueError if `check_tracker` does, or if W&B is required (tracker.mode=online) and cannot be reached.
    """
    check_tracker(config)
    remote = None
    if config.name in MODULES and import_tracker(config.name) is None:
        warn(f"wandb is not installed: metrics go to {METRICS} only (pip install wandb; tracker=none silences this)")
    elif config.name in MODULES:
        try:
            with redirect_stdout(sys.stderr):  # standard output is for the result
                remote = start_tracker(config, folder, run, redact(settings), resume_step)
        except Exception as error:  # of any kind: a tracker must not end the run
            if isinstance(config, WandbConfig) and config.mode == "online":
                raise
            warn(
                f"tracker={config.name} cannot be used ({type(error).__name__}: {error}): metrics go to {METRICS} only"
            )
    return Trackers(folder, resume_step, config, remote)


def start_tracker(
    config: TrackerConfig, folder: Path, run: str, settings: dict[str, Any], resume_step: int
) -> GeneralTracker:
    """Start a tracker. Its files are in the run's folder, as is the id by which a resumed run goes on there."""
    from accelerate import PartialState
    from accelerate.tracking import TensorBoardTracker
    from accelerate.utils import clear_environment

    with clear_environment():  # accelerate's trackers need a state: a trainer has it, any other command is alone
        PartialState()
    if isinstance(config, WandbConfig):
        return start_wandb(config, folder, run, settings)
    tracker = TensorBoardTracker("tensorboard", folder, purge_step=resume_step + 1)
    tracker.start()
    return tracker


def start_wandb(config: WandbConfig, folder: Path, run: str, settings: dict[str, Any]) -> GeneralTracker:
    """Start accelerate's tracker for Weights & Biases, offline if its server cannot be reached and need not be."""
    import wandb
    from accelerate.tracking import WandBTracker

    quiet = wandb.Settings(console="off", silent=True, init_timeout=INIT_SECONDS, login_timeout=INIT_SECONDS)
    where = {"entity": config.entity, "id": wandb_id(folder), "name": run, "dir": str(folder)}

    def start(mode: str) -> GeneralTracker:
        resume = "allow" if mode == "online" else None  # offline runs with the same id are merged by `wandb sync`
        tracker = WandBTracker(config.project, **where, config=settings, mode=mode, resume=resume, settings=quiet)
        tracker.start()
        return tracker

    mode = wandb_mode(config, quiet.base_url)
    try:
        return start(mode)
    except Exception as error:  # of any kind: a tracker must not end the run
        if config.mode == "online":
            raise ValueError(f"tracker.mode=online: W&B cannot be reached ({error}); try offline") from error
        warn(f"W&B cannot be reached ({type(error).__name__}: {error}); tracking offline")
        wandb.teardown()  # otherwise the id is still in use
        return start("offline")


def check_tracker(config: TrackerConfig) -> None:
    """Raise ValueError for a tracker that cannot work on this machine and has no fallback."""
    if config.name not in MODULES or (isinstance(config, WandbConfig) and config.mode != "online"):
        return
    key = "tracker.mode=online" if isinstance(config, WandbConfig) else f"tracker={config.name}"
    module = import_tracker(config.name)
    if module is None:
        raise ValueError(f"{key}: {config.name} is not installed; pip install {config.name}, or tracker=none")
    if isinstance(config, WandbConfig):
        url = os.environ.get("WANDB_BASE_URL") or module.Settings().base_url
        if not has_wandb_credentials(url):
            raise ValueError(
                f"{key}: there are no credentials for {url}; say `wandb login`, set WANDB_API_KEY, or "
                "tracker.mode=offline"
            )


def import_tracker(name: str) -> Any | None:
    """Return the module of a tracker's package; None if it is not installed."""
    module_name, entry = MODULES[name]
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    return module if hasattr(module, entry) else None


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
