"""Checkpoints: everything is restored, the newest is selected, and errors name a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from train import checkpoint
from train.checkpoint import BEST, find_checkpoint


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    module[0].bias.requires_grad_(False)
    return module, torch.optim.AdamW(checkpoint.trainable(module).values(), lr=0.01)


def save(folder: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, state: dict, **kw: Any) -> Path:
    return checkpoint.save_checkpoint(folder, step, checkpoint.gather_trained(module, [optimizer]), state, **kw)


def load(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    loaded = checkpoint.load_checkpoint(path, checkpoint.module_tensors(module))
    checkpoint.load_trained(module, [optimizer], loaded.trained)
    checkpoint.restore_random_state(loaded.random)
    return loaded.state


def work(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        module(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_restored_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    module, optimizer = make(0)
    work(module, optimizer, 3)
    save(tmp_path, 3, module, optimizer, {"tokens": 7}, keep=2)
    work(module, optimizer, 3)

    restored, restored_optimizer = make(0)
    work(restored, restored_optimizer, 1)  # something to overwrite
    torch.manual_seed(99)
    path = find_checkpoint(tmp_path)
    assert path is not None
    assert load(path, restored, restored_optimizer) == {"step": 3, "tokens": 7}
    work(restored, restored_optimizer, 3)
    for name, value in module.state_dict().items():
        assert torch.equal(value, restored.state_dict()[name]), name


def test_a_parameter_that_was_never_updated_is_restored_as_such(tmp_path: Path) -> None:
    module, optimizer = make(0)
    module[2](torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    path = save(tmp_path, 1, module, optimizer, {}, keep=2)
    restored, restored_optimizer = make(0)
    load(path, restored, restored_optimizer)
    updated = [parameter in restored_optimizer.state for parameter in checkpoint.trainable(restored).values()]
    assert updated == [name.startswith("2.") for name in checkpoint.trainable(restored)]
    assert checkpoint.gather_trained(restored, [restored_optimizer]).optimizer.keys() == {
        f"2.{name}|{key}" for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_only_safetensors_and_json(tmp_path: Path) -> None:
    path = save(tmp_path, 1, *make(0), {}, keep=1)
    files = sorted(file.name for file in path.iterdir())
    assert files == ["module.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"]


def test_frozen_parameters_are_not_stored(tmp_path: Path) -> None:
    module, _ = make(0)
    assert "0.bias" not in checkpoint.module_tensors(module)
    assert "1.running_mean" in checkpoint.module_tensors(module)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    module, optimizer = make(0)
    for step in (1, 2, 3, 10):
        save(tmp_path, step, module, optimizer, {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003", "step-000010"]
    assert find_checkpoint(tmp_path) == tmp_path / "step-000010"


def test_the_best_is_kept_beside_them(tmp_path: Path) -> None:
    module, optimizer = make(0)
    assert find_checkpoint(tmp_path, BEST) is None
    for step in range(1, 7):
        save(tmp_path, step, module, optimizer, {}, keep=1, best=step in (2, 3))
    assert find_checkpoint(tmp_path, BEST) == tmp_path / "step-000003"
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003", "step-000006"]
    (tmp_path / "best").write_text("step-000002\n")
    with pytest.raises(ValueError, match=r"best: names step-000002, which is not there; delete it to go on without"):
        find_checkpoint(tmp_path, BEST)


def test_returning_to_the_stable_one_keeps_the_best(tmp_path: Path) -> None:
    module, optimizer = make(0)
    for step in range(1, 7):
        save(tmp_path, step, module, optimizer, {"best": step}, keep=2, best=step == 5, stable=step == 3)
    stable = checkpoint.find_checkpoint(tmp_path, checkpoint.STABLE)
    assert stable == tmp_path / "step-000003"
    checkpoint.return_to(stable)
    assert find_checkpoint(tmp_path) == stable
    assert find_checkpoint(tmp_path, BEST) == tmp_path / "aside-step-000005"
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == ["aside-step-000005", "step-000003"]
    for step in (4, 5, 6):
        save(tmp_path, step, module, optimizer, {}, keep=1)
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == [
        "aside-step-000005", "step-000003", "step-000006",
    ]  # fmt: skip
    save(tmp_path, 7, module, optimizer, {}, keep=1, best=True)
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == ["step-000003", "step-000007"]


def test_writing_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    module, optimizer = make(0)
    for tokens in (1, 2):
        path = save(tmp_path, 5, module, optimizer, {"tokens": tokens}, keep=2)
    assert json.loads((path / "state.json").read_text())["tokens"] == 2


def test_a_kill_before_latest_moves_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = make(0)
    save(tmp_path, 1, module, optimizer, {}, keep=2)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.atomic, "write_text", die)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, module, optimizer, {}, keep=2)
    assert find_checkpoint(tmp_path) == tmp_path / "step-000001"


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "none") is None


def test_what_cannot_be_restored_is_named(tmp_path: Path) -> None:
    module, optimizer = make(0)
    path = save(tmp_path, 1, module, optimizer, {}, keep=2)
    mismatched = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"of another head; these tensors are on one side only: 0.bias, 1\.bias"):
        load(path, mismatched, torch.optim.AdamW(mismatched.parameters()))
    refused = pytest.raises(ValueError, match="step-000001: this checkpoint cannot be read .*; delete it")
    for name in ("module.safetensors", "random.safetensors", "state.json"):
        content = (path / name).read_bytes()
        place = content.index(b'"step": 1') + 8 if name == "state.json" else -1
        (path / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place:][1:])
        with refused:
            load(path, module, optimizer)
        (path / name).write_bytes(content)
    load(path, module, optimizer)
    (path / "optimizer.safetensors").write_bytes(b"cut")
    with refused:
        load(path, module, optimizer)
    (tmp_path / "latest").write_text("step-000077\n")
    with pytest.raises(ValueError, match="names step-000077, which is not there"):
        find_checkpoint(tmp_path)
