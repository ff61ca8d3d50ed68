"""How fast each head trains on this machine, nothing else running: for the README's table of heads.

    python scripts/train_time.py experiment=demo-heads heads=[eagle,eagle3,medusa,mlp,p-eagle] steps=12 save=training

All words but `heads` and `save` are those of train/run.py, which runs once per head, for a few steps, and exports
nothing that lasts. The last line of standard output is one JSON document.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
os.environ.setdefault("USE_HUB_KERNELS", "NO")

import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HEADS = "[eagle,eagle3,medusa,mlp,p-eagle]"
WARM_UP = 2  # steps


def time_head(head: str, words: list[str], exported: str) -> dict[str, float]:
    """Tokens per second of its steps, median and range. Raises SystemExit with the run's exit code if it failed."""
    from infer.cli import compose
    from infer.config_checks import resolve_path
    from train.config import TrainConfig
    from train.trackers import read_metrics

    own = [*words, f"head={head}", f"run=train-time-{head}", f"head.path={exported}", "tracker=none", "log_every=1"]
    config = compose("train", TrainConfig, own)
    ran = subprocess.run([sys.executable, str(Path(HERE).parent / "train" / "run.py"), *own], stdout=subprocess.PIPE)
    if ran.returncode:
        raise SystemExit(ran.returncode)
    rows = read_metrics(resolve_path(config.output_dir) / f"train-time-{head}")
    speeds = [row["train/tokens_per_s"] for row in rows if "train/tokens_per_s" in row][WARM_UP:]
    if not speeds:
        raise SystemExit(f"error: steps={config.steps}: give more than {WARM_UP}, which warm up")
    return {"tokens_per_s": statistics.median(speeds), "low": min(speeds), "high": max(speeds)}


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    from scripts.bench import describe_machine, result_file

    own = {"heads": HEADS, "save": ""}
    words = []
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key in own:
            own[key] = value
        else:
            words.append(word)
    found: dict[str, Any] = {}
    for head in own["heads"].strip("[]").split(","):
        with tempfile.TemporaryDirectory() as exported:
            found[head] = time_head(head.strip(), words, str(Path(exported) / "head"))
        print(f"{head:<8} {found[head]['tokens_per_s']:.0f} tokens/s", flush=True)
    machine = describe_machine()
    report = {"machine": machine, "words": words, "heads": found}
    if own["save"]:
        file = result_file(own["save"], "demo", machine)
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"written: {file.relative_to(Path(HERE).parent)}")
    print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
