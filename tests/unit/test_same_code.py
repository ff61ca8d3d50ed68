"""scripts/same_code.py accepts changes of prose and consistent renames, and detects changes of code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.same_code import Differs, differing, normalised, read_names, renames

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
        (("import json", "import math"), False),
    ],
)
def test_prose_may_change_and_code_may_not(change: tuple[str, str], same: bool) -> None:
    before, after = normalised(CODE), normalised(CODE.replace(*change))
    if same:
        assert renames(before, after) == {}
    else:
        with pytest.raises(Differs):
            renames(before, after)


def test_names_are_mapped_wherever_they_stand() -> None:
    after = CODE.replace("at", "first").replace("count", "number")
    assert renames(normalised(CODE), normalised(after)) == {"count": "number"}
    assert renames(normalised(CODE, {"at": "first", "count": "number"}), normalised(after)) == {}


LOCALS = """
class Box:
    def add(self, own, found):
        for one in own:
            found.append(self.size + one + len(own))
        return [(lambda own: own)(one) for one in found]
"""


@pytest.mark.parametrize(
    ("after", "shared"),
    [
        (LOCALS.replace("own", "items").replace("found", "pages"), {}),
        (LOCALS.replace("one", "item"), {}),
        (LOCALS.replace(".size", ".length").replace("Box", "Case"), {"size": "length", "Box": "Case"}),
        (LOCALS.replace("one in own", "one in found"), None),  # another variable
        (LOCALS.replace("own", "found"), None),  # two variables become one
        (LOCALS.replace("len(own)", "len(items)"), None),  # renamed in one place only
        (LOCALS.replace("own", "len"), None),  # shadows a name that is defined elsewhere
        (LOCALS.replace("len", "own"), None),
    ],
)
def test_local_names_may_change_consistently(after: str, shared: dict[str, str] | None) -> None:
    before = normalised(LOCALS)
    if shared is None:
        with pytest.raises(Differs):
            renames(before, normalised(after))
    else:
        assert renames(before, normalised(after)) == shared


def test_a_checkout_is_compared_with_a_revision(tmp_path: Path) -> None:
    def git(*args: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *args], check=True)

    git("init", "-q")
    (tmp_path / "one.py").write_text(CODE)
    git("add", ".")
    git("commit", "-q", "-m", "One")
    git("mv", "one.py", "two.py")
    (tmp_path / "two.py").write_text(CODE.replace("Counts.", "How many."))
    assert differing(tmp_path, "HEAD", {}) == []
    (tmp_path / "two.py").write_text(CODE.replace("- at", "+ at"))
    assert differing(tmp_path, "HEAD", {}) == ["two.py: its code differs"]
    (tmp_path / "two.py").write_text(CODE.replace("count", "number"))
    assert differing(tmp_path, "HEAD", {}) == ["two.py: names that are not local to a function differ: count is number"]
    assert differing(tmp_path, "HEAD", {}, renamed := {}) == []
    assert renamed == {"two.py": {"count": "number"}}
    with pytest.raises(ValueError, match="nowhere"):
        differing(tmp_path, "nowhere", {})


def test_a_line_that_is_no_pair_is_named(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("a b\n\nc\n")
    with pytest.raises(ValueError, match="line 3: must be `old new`; found 'c'"):
        read_names(tmp_path / "names")
