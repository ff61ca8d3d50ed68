"""What scripts/same_code.py tells apart: prose and names from code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.same_code import differing, normalised, read_names

CODE = '''"""A module."""
import json
import os

def count(items, *, at=0):
    """Counts."""
    return len(items) - at  # so many
'''


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("Counts.", "How many there are."), True),
        (("  # so many", ""), True),
        (("import json\nimport os", "import os\nimport json"), True),
        (("- at", "+ at"), False),
        (("at=0", "at=1"), False),
        (("count", "number"), False),
    ],
)
def test_prose_may_change_and_code_may_not(change: tuple[str, str], same: bool) -> None:
    assert (normalised(CODE) == normalised(CODE.replace(*change))) is same


def test_names_are_mapped_wherever_they_stand() -> None:
    after = CODE.replace("at", "first").replace("count", "number")
    assert normalised(CODE, {"at": "first", "count": "number"}) == normalised(after)


def test_a_checkout_is_compared_with_a_revision(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    git("init", "-q")
    (tmp_path / "one.py").write_text(CODE)
    git("add", ".")
    git("commit", "-q", "-m", "One")
    git("mv", "one.py", "two.py")
    (tmp_path / "two.py").write_text(CODE.replace("Counts.", "How many."))
    assert differing(tmp_path, "HEAD", {}) == []
    (tmp_path / "two.py").write_text(CODE.replace("- at", "+ at"))
    assert differing(tmp_path, "HEAD", {}) == ["two.py: its code differs"]
    with pytest.raises(ValueError, match="nowhere"):
        differing(tmp_path, "nowhere", {})


def test_a_line_that_is_no_pair_is_named(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("a b\n\nc\n")
    with pytest.raises(ValueError, match="line 3: must be `old new`; found 'c'"):
        read_names(tmp_path / "names")
