"""A command that is forked is a process of its own, and sees and gives what a new interpreter would."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.forking import Run

SHOW = (
    "import os, sys, json, torch; print(json.dumps([sys.argv, os.getcwd(), dict(os.environ), sys.stdin.read(), "
    "sys.path[0], __name__, torch.ones(3).sum().item()])); print('said', file=sys.stderr); sys.exit(3)"
)


def test_arguments_folder_variables_and_files_are_its_own(forked: Run, tmp_path: Path) -> None:
    ran = forked(["-c", SHOW, "one", "two words"], cwd=tmp_path, env={"ONLY": "this"}, input="typed")
    expected = [["-c", "one", "two words"], str(tmp_path), {"ONLY": "this"}, "typed", "", "__main__", 3.0]
    assert (ran.returncode, json.loads(ran.stdout), ran.stderr) == (3, expected, "said\n")


def test_temporary_files_go_where_its_environment_says(forked: Run, tmp_path: Path) -> None:
    ran = forked(["-c", "import tempfile; print(tempfile.gettempdir())"], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ran.stdout == f"{tmp_path}\n"


def test_a_script_runs_as_main_with_its_folder_ahead(forked: Run, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nif __name__ == '__main__':\n    print(beside.WORD, sys.argv[1:])")
    ran = forked([script, "a"])
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "found ['a']\n", "")


def test_nothing_is_left_for_the_next(forked: Run) -> None:
    first = "import os, sys, torch; os.environ['LEFT'] = '1'; torch.left = 1; sys.modules['left'] = torch; print(1)"
    assert forked(["-c", first]).stdout == "1\n"
    then = "import os, sys, torch; print('LEFT' in os.environ, hasattr(torch, 'left'), 'left' in sys.modules)"
    assert forked(["-c", then]).stdout == "False False False\n"


def test_how_it_ends_is_told(forked: Run) -> None:
    failed = forked(["-c", "raise ValueError('for this reason')"])
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == "ValueError: for this reason"
    assert forked(["-c", "import os; os.kill(os.getpid(), 9)"]).returncode == -signal.SIGKILL
    assert forked(["-c", "import os; os._exit(7)"]).returncode == 7
    assert int(forked(["-c", "import os; print(os.getpid())"]).stdout) != os.getpid()
