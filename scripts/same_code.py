"""Shows that a change touches names, docstrings and comments alone: syntax trees of a revision and of the working tree.

    python scripts/same_code.py HEAD                     # docstrings and comments only
    python scripts/same_code.py v1 --names names.txt     # after renames as well

A line of the file is `old new`: identifiers, keyword arguments, attributes and parts of module names. Imports that
follow each other are compared as a set, since their order is by name. Files that git recognises as moved are compared
with what they were. Prints what differs and ends with exit code 1 if anything does.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.environment  # noqa: F401

# isort: split

import argparse
import ast
import subprocess
from collections.abc import Mapping
from pathlib import Path

from infer.config_checks import REPO_ROOT

NAMED = {"id", "attr", "arg", "name", "asname", "module", "rest"}  # the fields of a syntax tree that hold a name


def normalised(source: str, names: Mapping[str, str] | None = None) -> str:
    """The syntax tree as text: without docstrings and comments, `names` renamed, neighbouring imports sorted."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in NAMED & set(node._fields):
            value = getattr(node, field)
            if names and isinstance(value, str):
                setattr(node, field, ".".join(names.get(part, part) for part in value.split(".")))
        if isinstance(node, ast.Global | ast.Nonlocal) and names:
            node.names = [names.get(name, name) for name in node.names]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                node.body = node.body[1:]
    lines, imports = list[str](), list[str]()
    for statement in tree.body:
        text = ast.dump(statement)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports.append(text)
        else:
            lines += [*sorted(imports), text]
            imports = []
    return "\n".join([*lines, *sorted(imports)])


def differing(root: Path, revision: str, names: Mapping[str, str]) -> list[str]:
    """What of the Python files that changed since `revision` is more than names and prose."""
    git = ["git", "-C", str(root)]
    changes = _output([*git, "diff", "-M", "--name-status", revision, "--", "*.py"])
    wrong = []
    for line in changes.splitlines():
        status, *paths = line.split("\t")
        if status[0] in "AD":
            wrong.append(f"{paths[0]}: {'added' if status == 'A' else 'removed'}")
            continue
        before = _output([*git, "show", f"{revision}:{paths[0]}"])
        after = (root / paths[-1]).read_text(encoding="utf-8")
        if normalised(before, names) != normalised(after):
            wrong.append(f"{paths[-1]}: its code differs")
    return wrong


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return done.stdout


def read_names(path: Path) -> dict[str, str]:
    """Raises ValueError naming the line that is not `old new`."""
    names = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if len(words) not in (0, 2):
            raise ValueError(f"{path}, line {number}: must be `old new`; found {line!r}")
        names |= dict([words] if words else [])
    return names


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python scripts/same_code.py", description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("revision", help="what git knows: HEAD, a commit, a branch")
    parser.add_argument("--names", type=Path, metavar="FILE", help="lines of `old new`")
    args = parser.parse_args(argv)
    try:
        wrong = differing(REPO_ROOT, args.revision, read_names(args.names) if args.names else {})
    except (ValueError, OSError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(wrong) or "the same code")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
