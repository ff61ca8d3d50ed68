"""A head that was learnt from what is served can be served again, and goes on learning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from infer.config import EngineConfig, HeadConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.learning.messages import Message
from infer.options.cli import compose
from infer.options.exported_heads import with_head
from infer.request import Completion, SamplingParams, SpeculationStats
from tests.train.conftest import STEPS
from tests.train.test_learning import head, learnt, served, traffic, words  # noqa: F401
from train.config import LearnConfig

Served = tuple[list[Completion], list[SamplingParams]]


def config_of(words: Sequence[str]) -> LearnConfig:  # noqa: F811
    return with_head(compose("learn", LearnConfig, [*words]))


def drafted_with(path: Path, target: Path, served: Served) -> SpeculationStats:  # noqa: F811
    """Return what an engine counts, which is loaded with the head at `path` and answers what was answered before."""
    drafts = ProposerConfig(name="head", max_draft_tokens=STEPS)
    loaded = Engine.load(
        ModelConfig("demo", str(target)), HeadConfig("auto", str(path)), EngineConfig(max_tokens_in_cache=4096), drafts
    )
    completions, params = served
    again = loaded.generate([completion.prompt_ids for completion in completions], params)
    assert [each.token_ids for each in again] == [each.token_ids for each in completions]
    total = SpeculationStats()
    for each in again:
        total.merge(each.stats)
    return total


def test_a_head_that_was_saved_is_served_and_learns_on(words: list[str], traffic: list[Message], served: Served,  # noqa: F811
    tiny_target_folder: Path, tmp_path: Path) -> None:  # fmt: skip
    place = tmp_path / "outputs" / "heads" / "demo" / "eagle3-learned"
    save = ["learning.save=true", "learning.keep=1"]
    first = learnt(config_of([*words, *save, "learning.passes=2"]), traffic)  # there is more to learn
    assert first.facts["number"] == "1"
    before, after = (drafted_with(path, tiny_target_folder, served) for path in (tmp_path / "head", place / "1"))
    assert after.acceptance_length > before.acceptance_length + 0.05

    again = [word for word in words if not word.startswith(("head=", "head.path="))]
    again += ["head=auto", f"head.path={place / '1'}"]
    second = learnt(config_of([*again, *save]), traffic)
    assert second.facts["tau_before"] == first.facts["tau_after"]
    assert second.facts["number"] == "2"
    assert sorted(path.name for path in place.iterdir()) == ["1", "2"]  # the one in use is not deleted
    assert float(second.facts["tau_after"]) > float(second.facts["tau_before"])

    unsaved = learnt(config_of(again), traffic)
    assert unsaved.facts["number"] == "2"
    assert all(torch.equal(value, second.tensors[name]) for name, value in unsaved.tensors.items())
    with pytest.raises(ValueError, match="no exported head"):
        drafted_with(place / "3", tiny_target_folder, served)
