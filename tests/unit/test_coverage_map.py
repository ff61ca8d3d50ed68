"""docs/coverage.md is what tests were seen to do, and has a place for all that is registered."""

from __future__ import annotations

import ast
from dataclasses import fields

import pytest

from infer.batch.params import SamplingParams
from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.settings.paths import REPO_ROOT
from models.heads import HEADS
from models.targets import ARCHITECTURES, load_target
from tests import coverage_map
from tests.observed import FUNCTIONS, Observer, Setting, Watch, function_of, missing, read

MEANT = {"greedy", "seeded", "chain", "tree", "accepted", "rejected", "batch", "chunks", "preempted"}  # of every head
FACTS = {*coverage_map.SITUATIONS, *(f"p:{field.name}" for field in fields(SamplingParams))}


def test_the_page_is_what_the_record_says() -> None:
    assert coverage_map.PAGE.read_text(encoding="utf-8") == coverage_map.page()


def test_every_test_that_compares_exists_and_drafted_when_it_was_recorded() -> None:
    named = FUNCTIONS | {f"tests/{test}" for test in coverage_map.PROMISES.values()}
    for file in {test.partition("::")[0] for test in named}:
        tree = ast.parse((REPO_ROOT / file).read_text(encoding="utf-8"))
        defined = {f"{file}::{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {test for test in named if test.startswith(f"{file}::")} <= defined
    drafting = {function_of(test) for test, uses in read().items() if uses}
    assert drafting == FUNCTIONS


def test_what_is_recorded_is_collected(request: pytest.FixtureRequest) -> None:
    """Of the files that this run has collected as a whole."""
    (observer,) = (each for each in request.config.pluginmanager.get_plugins() if isinstance(each, Observer))
    assert observer.stale == []


def test_there_is_a_place_for_all_that_is_registered() -> None:
    assert coverage_map.unclassified() == []
    rows = {name for names in coverage_map.DRAFTERS.values() for name in names}
    for _, setting, facts in coverage_map.events():
        assert setting.drafter in rows
        assert setting.kernels in coverage_map.KERNELS
        assert facts <= FACTS
    for row, column in coverage_map.NOTHING:
        names = coverage_map.DRAFTERS[row]
        assert not coverage_map.where(lambda setting, facts: setting.drafter in names and column in facts)  # noqa: B023


@pytest.mark.parametrize("head", HEADS)
def test_every_head_is_compared(head: str) -> None:
    assert set().union(*(facts for _, setting, facts in coverage_map.events() if setting.drafter == head)) >= MEANT


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_target_is_compared(architecture: str) -> None:
    """Itself, or another name of the same class."""
    names = {name for name, kind in ARCHITECTURES.items() if kind is ARCHITECTURES[architecture]}
    seen = [(setting, facts) for _, setting, facts in coverage_map.events() if setting.target in names]
    assert set().union(*(facts for _, facts in seen)) >= {"greedy", "seeded", "batch"}
    assert {setting.dtype for setting, _ in seen} & {"float32", "bfloat16"}


def test_a_test_that_does_less_is_found(tiny_target_folder) -> None:
    """By what an engine does under watch: it would fail if nothing were seen."""
    proposer = ProposerConfig(name="auto", max_draft_tokens=2)
    engine = Engine(
        load_target(str(tiny_target_folder)), proposer="ngram", config=EngineConfig(), proposer_config=proposer
    )
    with Watch() as watch:
        engine.generate([[5, 6, 7] * 6] * 2, SamplingParams(max_tokens=8, ignore_eos=True, presence_penalty=0.1))
    ((setting, facts),) = watch.uses.items()
    assert setting == Setting("ngram", "LlamaForCausalLM", setting.kernels, "float32", "same", "same")
    assert facts - {"accepted", "rejected"} == {
        *("batch", "chain", "greedy", "p:ignore_eos", "p:max_tokens", "p:presence_penalty")
    }
    test = "tests/lossless/test_trees.py::test_head_trees"
    assert missing(test, {setting: facts}, watch.uses) == []
    assert missing(test, {setting: {*facts, "tree"}}, watch.uses) == [f"{'/'.join(setting)}: tree"]
    assert missing(test, {setting._replace(drafter="suffix"): {"greedy"}}, watch.uses)
