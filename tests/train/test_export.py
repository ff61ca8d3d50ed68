"""The exported head: serving can load it, it is complete whatever happens, and it is refused for another target."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.options.cli import compose
from infer.request import SpeculationStats
from models.heads.eagle3.head import Eagle3Head
from models.heads.files import load_head
from models.targets import load_target
from models.targets.llama import LlamaTarget
from tests.conftest import MakeTarget
from tests.train.conftest import full_disk
from train.acceptance import Acceptance, Measured
from train.config import TrainConfig
from train.planning.plan import outputs_have_room
from train.preparation.models import Shapes
from train.publishing import card as card_module
from train.publishing.export import drafts_by_name, export_head, serving_arguments
from train.storage.provenance import provenance

FACTS = {
    "run": "r",
    "steps": 5,
    "tokens": 30,
    "data_source": "somewhere",
    "data_hash": "abc",
    "data_counts": {"learnt": {"tokens": 20, "learnt": 10}},
    "trained_depth": 3,
}


def stats(*accepted: int) -> SpeculationStats:
    recorded = SpeculationStats()
    for count in accepted:
        recorded.record(drafted=3, accepted=count, emitted=count + 1)
    return recorded


MEASURED = Measured(
    greedy=Acceptance(simulated=stats(3, 1), engine=stats(3, 0)),
    sampled=Acceptance(simulated=stats(1, 0), engine=stats(1, 0)),
    rank_accuracy=[[0.6123, 0.2], [0.5, 0.0]],
    held_out_prompts=2,
    coverage=0.75,
)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return compose("train", TrainConfig, [f"output_dir={tmp_path}", "run=r"])


def export(
    head: Eagle3Head, target: LlamaTarget, config: TrainConfig, measured: Measured = MEASURED, **facts: Any
) -> tuple[Path, list[Eagle3Head]]:
    measured_heads: list[Eagle3Head] = []

    def measure(loaded: Eagle3Head) -> Measured:
        measured_heads.append(loaded)
        return measured

    record = provenance(dataclasses.asdict(config), **FACTS | facts)
    folder, result = export_head(head, target, config, record, measure)
    assert result is measured
    return folder, measured_heads


def test_a_head_that_another_run_has_exported_meanwhile_stays(
    random_head: Eagle3Head, tiny_target: LlamaTarget, config: TrainConfig
) -> None:
    def measure(_: object) -> Measured:  # in the middle of the export of run r
        export(random_head, tiny_target, dataclasses.replace(config, run="first"), run="first")
        return MEASURED

    beside, _ = export_head(random_head, tiny_target, config, FACTS | {"config": dataclasses.asdict(config)}, measure)
    wanted = config.export_folder
    assert beside == wanted.with_name("eagle3-r")
    assert [json.loads((each / "provenance.json").read_text())["run"] for each in (wanted, beside)] == ["first", "r"]
    card = (beside / "README.md").read_text()
    assert "python infer/serve.py model=demo head=eagle3 'head.path=<folder of this head>'" in card
    again, _ = export_head(random_head, tiny_target, config, FACTS | {"config": dataclasses.asdict(config)}, measure)
    assert again == beside
    forced = dataclasses.replace(config, overwrite=True)
    assert export(random_head, tiny_target, forced)[0] == wanted
    assert sorted(each.name for each in wanted.parent.iterdir()) == ["eagle3", "eagle3-r"]


@pytest.mark.parametrize(("accepted", "by_name"), [((99, 90), False), ((1, 0), True)])
def test_the_card_names_the_place_of_a_head_that_its_name_does_not_give(
    random_head: Eagle3Head, tiny_target: LlamaTarget, config: TrainConfig, accepted: tuple[int, ...], by_name: bool,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_head_folder: Path,
) -> None:  # fmt: skip
    shipped = shutil.copytree(tiny_head_folder, tmp_path / "shipped" / "demo" / "heads" / "eagle3")
    counts = {"steps": 100, "emitted": 100 + sum(accepted), "accepted_by_position": accepted}
    better = {"target_fingerprint": tiny_target.fingerprint, "counted": {"greedy": counts}}
    (shipped / "provenance.json").write_text(json.dumps(better))
    monkeypatch.setattr("infer.options.exported_heads.SHIPPED", tmp_path / "shipped")
    folder, _ = export(random_head, tiny_target, config)
    assert drafts_by_name(folder, config) is by_name
    inside = dataclasses.replace(config, output_dir="outputs")
    words, _ = serving_arguments(inside, inside.export_folder, by_name=by_name)
    assert words == "model=demo head=eagle3" + ("" if by_name else " head.path=outputs/heads/demo/eagle3")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_folder(random_head: Eagle3Head, tiny_target: LlamaTarget, config: TrainConfig, tmp_path: Path) -> None:
    folder, measured_heads = export(random_head, tiny_target, config)
    assert folder == tmp_path / "heads" / "demo" / "eagle3"
    assert set(snapshot(folder)) == {"config.json", "model.safetensors", "provenance.json", "README.md"}
    loaded = load_head(folder, target=tiny_target)
    for name, value in random_head.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
        assert torch.equal(value, measured_heads[0].state_dict()[name]), name  # the measured head is the published one


def test_provenance_and_card(random_head: Eagle3Head, tiny_target: LlamaTarget, config: TrainConfig) -> None:
    folder, _ = export(random_head, tiny_target, config)
    record = json.loads((folder / "provenance.json").read_text())
    assert record["target_fingerprint"] == tiny_target.fingerprint
    assert record["acceptance_length"] == {"simulated": 3.0, "engine": 2.5}
    assert record["acceptance_length_sampled"] == {"simulated": 1.5, "engine": 1.5}
    assert record["rank_accuracy"] == [[0.6123, 0.2], [0.5, 0.0]]
    assert record["config"]["optim"]["lr"] == config.optim.lr
    assert record["data_hash"] == "abc"
    assert (record["draft_vocab_size"], record["vocab_size"]) == (random_head.config.draft_vocab_size, 384)
    assert (record["base_model"], record["held_out_prompts"], record["coverage"]) == (None, 2, 0.75)
    assert SpeculationStats(**record["counted"]["greedy"]) == MEASURED.greedy.engine
    assert record["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert set(record["git"]) == {"commit", "dirty"}
    card = (folder / "README.md").read_text()
    assert "| **in the engine** | 2.500 | 1.500 |\n| simulated by the trainer | 3.000 | 1.500 |\n" in card
    assert "| 1 | 0.500 (1 of 2) | 0.500 (1 of 2) |" in card
    arguments = serving_arguments(config, folder, by_name=True)
    assert card == card_module.card(record, *arguments), "it can be made again from provenance.json"
    assert "python infer/serve.py model=demo head=eagle3" in card


def test_the_dtype_is_the_targets(random_head: Eagle3Head, tiny_target_folder: Path, config: TrainConfig) -> None:
    target = load_target(str(tiny_target_folder), dtype=torch.bfloat16)
    folder, measured_heads = export(random_head, target, config)
    assert measured_heads[0].fc.weight.dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert torch.equal(load_head(folder).d2t, random_head.d2t)


def test_head_path_names_another_place(
    random_head: Eagle3Head, tiny_target: LlamaTarget, config: TrainConfig, tmp_path: Path
) -> None:
    config.head.path = str(tmp_path / "elsewhere")
    assert export(random_head, tiny_target, config)[0] == tmp_path / "elsewhere"


def test_a_head_of_another_target_is_refused(
    random_head: Eagle3Head, tiny_target: LlamaTarget, make_target_folder: MakeTarget, config: TrainConfig
) -> None:
    folder, _ = export(random_head, tiny_target, config)
    other_target = load_target(str(make_target_folder(seed=5)))
    with pytest.raises(ValueError, match=r"head\.allow_mismatch=true"):
        load_head(folder, target=other_target)
    load_head(folder, target=other_target, allow_mismatch=True)


def test_a_full_disk_leaves_the_previous_export_whole(
    random_head: Eagle3Head, tiny_target: LlamaTarget, config: TrainConfig
) -> None:
    folder, _ = export(random_head, tiny_target, config)
    before = snapshot(folder)
    with torch.no_grad():
        random_head.fc.weight.zero_()
    for limit in (100, 2000, 50_000, 200_000):
        with full_disk(limit), pytest.raises(ValueError, match=r"heads/demo/eagle3: no room to write it"):
            export(random_head, tiny_target, config)
        assert snapshot(folder) == before
        assert [path.name for path in folder.parent.iterdir()] == ["eagle3"]
    export(random_head, tiny_target, config)
    assert snapshot(folder)["model.safetensors"] != before["model.safetensors"]


def test_an_error_while_measuring_publishes_nothing(
    random_head: Eagle3Head, tiny_target: LlamaTarget, config: TrainConfig, tmp_path: Path
) -> None:
    def measure(loaded: Eagle3Head) -> Measured:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_head(random_head, tiny_target, config, FACTS, measure)
    assert list((tmp_path / "heads" / "demo").iterdir()) == []


def test_what_a_killed_export_left_is_removed(
    random_head: Eagle3Head, tiny_target: LlamaTarget, config: TrainConfig, tmp_path: Path
) -> None:
    (tmp_path / "heads" / "demo" / ".eagle3.0123abcd.tmp").mkdir(parents=True)
    folder, _ = export(random_head, tiny_target, config)
    assert [path.name for path in folder.parent.iterdir()] == ["eagle3"]


def test_room_is_checked_before_the_run(
    random_head: Eagle3Head, tiny_target: LlamaTarget, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = Shapes(tiny_target, random_head, tiny_target.folder)
    outputs_have_room(config, shapes)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(ValueError, match=r"heads/demo/eagle3: the export will need \d+ bytes, 10 are free"):
        outputs_have_room(config, shapes)


def test_an_acceptance_without_a_verify_is_undefined() -> None:
    """As of sampled responses that all end with their first token."""
    nothing = Acceptance(SpeculationStats(), SpeculationStats())
    assert nothing.summary() == {"simulated": None, "engine": None}
