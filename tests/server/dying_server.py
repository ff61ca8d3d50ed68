"""Run the server's command with an engine whose step raises once a request with the seed `DYING_SEED` arrives.

Steps are slowed down so that other streams are still running at that time.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

DYING_SEED = 666
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from infer.engine import Engine

    step = Engine.step

    def dying(engine: Engine) -> object:
        if any(request.seed == DYING_SEED for request in engine._requests.values()):
            raise RuntimeError("the device is gone")
        time.sleep(0.02)
        return step(engine)

    Engine.step = dying  # type: ignore[method-assign,assignment]
    sys.argv[0] = str(ROOT / "infer" / "serve.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
