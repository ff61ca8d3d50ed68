"""A head is its folder, a YAML file, a line of the registry and its tests: no other code names one."""

from __future__ import annotations

import ast
import re
from abc import ABC
from importlib import import_module
from pathlib import Path

import pytest
from torch import nn

from infer.speculation.proposers.draft_loops import LOOPS
from models.heads import HEADS
from models.heads.block import Corrector
from models.heads.weights import module_of
from tests.unit.test_layout import ROOT, parse, relative, sources

PRODUCT = ("kernels", "models", "infer", "train", "scripts")
# Code that is about one head, or that names an objective, which may bear the name of the head it was made for.
EXCEPTIONS = {
    "models/formats/speculators.py": "a format that several heads share",
    "models/formats/dflash.py": "what the formats of block drafters share",
    "models/gguf/mamba2.py": "layers of Nemotron that are an MLP",
    "models/targets/falcon_h1.py": "factors of its MLP",
    "models/targets/nemotron_h.py": "layers that are an MLP",
    "models/gguf/head.py": "GGUF files of heads, whose one architecture is eagle3",
    "train/objectives/block.py": "the objectives of block drafters",
    "train/objectives/eagle.py": "the objective of one head",
    "train/objectives/registry.py": "the objectives by name",
    "scripts/benchmarks/comparison/servers.py": "vLLM and llama.cpp are measured with an EAGLE-3 head",
    "scripts/benchmarks/train.py": "heads that speculators trains on a CPU",
}
WORD = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, sorted(HEADS, key=len, reverse=True)))})(?![\w.])")
IDENTIFIER = re.compile(r"eagle|medusa|dflash|dspark|mlp(?=head|config|options|speculator|objective)", re.IGNORECASE)


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Return the expressions that are no code: documentation of modules, classes and functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented) and node.body]
    return {body[0].value for body in bodies if isinstance(body[0], ast.Expr)}


def named_heads(tree: ast.Module) -> list[str]:
    """Return the texts, imported modules and identifiers that name a head."""
    prose, names = docstrings(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            names += WORD.findall(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += IDENTIFIER.findall(node.module)
        elif isinstance(node, ast.Name | ast.Attribute | ast.alias | ast.ClassDef | ast.FunctionDef | ast.arg):
            fields = [getattr(node, field, None) for field in ("id", "attr", "name", "arg")]
            names += [name for name in fields if name and IDENTIFIER.search(name)]
    return names


def test_only_a_heads_own_folder_names_it() -> None:
    files = [path for path in sources(*PRODUCT) if not path.is_relative_to(ROOT / "models" / "heads")]
    naming = {relative(path): sorted(set(names)) for path in files if (names := named_heads(parse(path)))}
    assert {file: names for file, names in naming.items() if file not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() <= naming.keys(), "an exception that no longer names a head"


def test_what_heads_share_names_none() -> None:
    shared = [path for path in (ROOT / "models" / "heads").glob("*.py") if path.name != "__init__.py"]
    assert {relative(path): names for path in shared if (names := named_heads(parse(path)))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "if head.name == 'medusa': pass",
        "raise ValueError('say head=eagle3')",
        "from models.heads.p_eagle.config import X",
        "kind = MlpHead",
        "def eagle3_folder(): pass",
    ],
)
def test_the_search_finds_a_name(code: str) -> None:
    assert named_heads(ast.parse(code)) != []


def test_the_search_leaves_prose_and_layers_alone() -> None:
    code = '"""As in medusa."""\nself.mlp = layer\nname = "model.layers.0.mlp.gate_proj"'
    assert named_heads(ast.parse(code)) == []


def members(kind: type) -> set[str]:
    """Return the public names of a kind of head, inherited ones but torch's included."""
    classes = [base for base in kind.__mro__ if base not in nn.Module.__mro__ and base is not ABC]
    return {name for base in classes for name in vars(base) if not name.startswith("_")}


@pytest.mark.parametrize("kind", [*LOOPS, Corrector])
def test_a_kind_of_heads_has_at_most_eight_members(kind: type) -> None:
    assert 5 <= len(members(kind)) <= 8, members(kind)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_of_one_kind(name: str) -> None:
    assert len([kind for kind in LOOPS if issubclass(module_of(name).kind, kind)]) == 1


def test_to_add_a_head_540_lines_are_to_be_read() -> None:
    """What models/heads/README.md names: what heads share, and the folder of one of them."""
    files = [f"{name}.py" for name in ("config", "base", "weights", "eagle/config", "eagle/head")]
    texts = [(ROOT / "models" / "heads" / file).read_text(encoding="utf-8") for file in files]
    assert sum(len(text.splitlines()) for text in texts) <= 540


@pytest.mark.parametrize("name", HEADS)
def test_the_registry_agrees_with_folder_and_yaml(name: str) -> None:
    folder = Path(*HEADS[name].__module__.split(".")[:-1])
    assert folder == Path("models/heads") / name.replace("-", "_")
    assert module_of(name) is import_module(".".join([*folder.parts, "head"])).HEAD
    assert f"name: {name}\n" in (ROOT / "conf" / "head" / f"{name}.yaml").read_text(encoding="utf-8")
