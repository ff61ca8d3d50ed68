"""Checks that a change touches only names, docstrings and comments, by comparing syntax trees with those of a revision.

    python scripts/same_code.py HEAD                     # docstrings, comments, names local to a function
    python scripts/same_code.py v1 --names names.txt     # after renames of other names as well
    python scripts/same_code.py HEAD --list              # also print the other names that were renamed

A line of the file is `old new`: identifiers, keyword arguments, attributes and parts of module names. Local names may
change without being listed, as long as old and new names correspond one to one within a function. With --list every
consistent rename of attributes, keyword arguments and module-level names is accepted and printed with its file, for a
reader to check. Consecutive imports are compared as a set, because they are sorted by name. Files that git recognises
as moved are compared with their old version. Prints the differences; the exit code is 1 if there are any.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import argparse
import ast
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from infer.options.paths import REPO_ROOT
from scripts.errors import reports_errors

NAMED = {"id", "attr", "arg", "name", "asname", "module", "rest"}  # the fields of a syntax tree that hold a name
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)


def normalised(source: str, names: Mapping[str, str] | None = None) -> ast.Module:
    """Return the syntax tree without docstrings and comments, `names` renamed, neighbouring imports sorted."""
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
    statements, imports = list[ast.stmt](), list[ast.stmt]()
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports.append(statement)
        else:
            statements += [*sorted(imports, key=ast.dump), statement]
            imports = []
    tree.body = [*statements, *sorted(imports, key=ast.dump)]
    return tree


class Differs(Exception):
    """Two syntax trees differ in more than names."""


class Renames:
    """The names of one scope, before and after. `add` raises Differs unless they correspond one to one."""

    def __init__(self) -> None:
        self.new: dict[str, str] = {}
        self._old: dict[str, str] = {}

    def add(self, old: str, new: str) -> None:
        if self.new.setdefault(old, new) != new or self._old.setdefault(new, old) != old:
            raise Differs

    @property
    def changed(self) -> dict[str, str]:
        return {old: new for old, new in self.new.items() if old != new}


def renames(before: ast.Module, after: ast.Module) -> dict[str, str]:
    """Return the names, other than those local to a function, that differ between two otherwise equal trees.

    A function and everything nested in it are one scope. Attributes, keyword arguments and names defined outside of
    functions belong to the file's scope. Raises Differs for any other difference.
    """
    shared = Renames()
    _compare(before, after, shared, None, frozenset())
    return shared.changed


def _compare(before: object, after: object, shared: Renames, local: Renames | None, bound: frozenset[str]) -> None:
    if type(before) is not type(after):
        raise Differs
    if isinstance(before, list):
        assert isinstance(after, list)
        if len(before) != len(after):
            raise Differs
        for left, right in zip(before, after, strict=True):
            _compare(left, right, shared, local, bound)
    elif isinstance(before, ast.AST):
        assert isinstance(after, ast.AST)
        if isinstance(before, FUNCTIONS) and local is None:
            if isinstance(before, ast.FunctionDef | ast.AsyncFunctionDef):
                shared.add(before.name, getattr(after, "name", ""))
            local, bound = Renames(), frozenset(_bound(before))
        for field in before._fields:
            left, right = getattr(before, field, None), getattr(after, field, None)
            if isinstance(left, str) and isinstance(right, str) and _is_name(before, field):
                is_local = (
                    local is not None and left in bound and field != "attr" and not isinstance(before, ast.keyword)
                )
                (local if local is not None and is_local else shared).add(left, right)
                if local is not None and not is_local and field != "attr" and not isinstance(before, ast.keyword):
                    local.add(left, right)  # no local name may hide it
            else:
                _compare(left, right, shared, local, bound)
    elif before != after:
        raise Differs


def _is_name(node: ast.AST, field: str) -> bool:
    return field in NAMED and not (isinstance(node, ast.ImportFrom | ast.alias))


def _bound(function: ast.AST) -> Iterator[str]:
    """Yield the names that a function and those nested in it bind."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif node is not function and isinstance(node, DEFINITIONS) and node.name:
            yield node.name


def differing(
    root: Path, revision: str, names: Mapping[str, str], renamed: dict[str, dict[str, str]] | None = None
) -> list[str]:
    """Return a message for every Python file that differs from `revision` in more than names, docstrings and comments.

    `renamed`, if passed, accepts renames that are not local to a function and receives them by file. Raises ValueError
    with git's message if git fails.
    """
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
        try:
            more = renames(normalised(before, names), normalised(after))
        except SyntaxError as error:
            raise ValueError(f"{paths[-1]}: {error}") from None
        except Differs:
            wrong.append(f"{paths[-1]}: its code differs")
            continue
        if more and renamed is not None:
            renamed[paths[-1]] = more
        elif more:
            pairs = ", ".join(f"{old} is {new}" for old, new in more.items())
            wrong.append(f"{paths[-1]}: names that are not local to a function differ: {pairs}")
    return wrong


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return done.stdout


def read_names(path: Path) -> dict[str, str]:
    """Read a file of renames. Raises ValueError naming the line that is not `old new`."""
    names = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if len(words) not in (0, 2):
            raise ValueError(f"{path}, line {number}: must be `old new`; found {line!r}")
        names |= dict([words] if words else [])
    return names


@reports_errors
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python scripts/same_code.py", description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("revision", help="what git knows: HEAD, a commit, a branch")
    parser.add_argument("--names", type=Path, metavar="FILE", help="lines of `old new`")
    parser.add_argument("--list", action="store_true", help="accept and print renames that are not local to a function")
    args = parser.parse_args(argv)
    renamed: dict[str, dict[str, str]] = {}
    names = read_names(args.names) if args.names else {}
    wrong = differing(REPO_ROOT, args.revision, names, renamed if args.list else None)
    for path, pairs in renamed.items():
        print(path, *(f"    {old} {new}" for old, new in pairs.items()), sep="\n")
    print("\n".join(wrong) or "the same code")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
