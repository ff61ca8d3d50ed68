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
from models.heads.files import load_head
from models.targets import load_target
from models.targets.llama import LlamaTarget
from tests.train.conftest import STEPS, make_head
from tests.train.test_learning import answered, head, learnt, messages_of, served, tau_on_held_back, traffic, words  # noqa: F401
from train.config import LearnConfig
from train.data.sequences import Sequences as Responses

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


@pytest.fixture(scope="session")
def shifted(engine: Engine, tiny_target: LlamaTarget, responses: Responses) -> list[Message]:
    """Requests of other kinds, of which a head has more to learn than of the same ones again."""
    return list(messages_of(engine, *answered(engine, seed=7), make_head(tiny_target, responses, vocab=384)))


def test_a_head_that_was_saved_is_served_and_learns_on(
    words: list[str],  # noqa: F811
    traffic: list[Message],  # noqa: F811
    shifted: list[Message],
    served: Served,  # noqa: F811
    tiny_target_folder: Path,
    tmp_path: Path,
) -> None:
    place = tmp_path / "outputs" / "heads" / "demo" / "eagle3-learned"
    save = ["learning.save=true", "learning.keep=1"]
    first = learnt(config_of([*words, *save]), traffic)
    assert first.facts["number"] == "1"
    before, after = (drafted_with(path, tiny_target_folder, served) for path in (tmp_path / "head", place / "1"))
    assert after.acceptance_length > before.acceptance_length + 0.05

    again = [word for word in words if not word.startswith(("head=", "head.path="))]
    again += ["head=auto", f"head.path={place / '1'}", "learning.lr=1e-3"]
    second = learnt(config_of([*again, *save]), shifted)
    saved = load_head(place / "1", name="eagle3", target=load_target(str(tiny_target_folder)))
    assert second.facts["tau_before"] == f"{tau_on_held_back(saved, shifted):.4f}"
    assert second.facts["number"] == "2"
    assert sorted(path.name for path in place.iterdir()) == ["1", "2"]  # the one in use is not deleted
    assert float(second.facts["tau_after"]) > float(second.facts["tau_before"])

    unsaved = learnt(config_of(again), shifted)
    assert unsaved.facts["number"] == "2"
    assert all(torch.equal(value, second.tensors[name]) for name, value in unsaved.tensors.items())
    with pytest.raises(ValueError, match="no exported head"):
        drafted_with(place / "3", tiny_target_folder, served)
