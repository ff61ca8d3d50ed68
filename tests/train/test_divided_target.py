"""Training with a target that is tensor parallel or quantized: its features, and a head trained on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infer.kvcache.memory import weight_bytes
from infer.options.cli import compose
from kernels.weights.quantize import NarrowFormat, quantize, widen
from models.config import LAST
from models.layers import Linear, pack
from models.targets import load_target
from train.checkpoint import find_checkpoint, load_file
from train.config import TrainConfig
from train.data.sequences import Sequences
from train.features.online import compute_features
from train.loop import train
from train.planning.memory_plan import target_bytes
from train.preparation.models import open_engine

AUX = (2, 4, 5, LAST)


@pytest.fixture
def settings(tiny_target_folder: Path, tmp_path: Path) -> list[str]:
    return [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "head.draft_vocab_size=200", "packing=true",
        "overwrite=true",
        "data.num_sequences=8", "data.max_new_tokens=12", "data.prompt_tokens=12", "sequence_length=48",
        "batch_size=2", "minutes=null", "steps=2", "eval_prompts=2", "eval_max_tokens=8", "tracker=none",
        "precision=fp32", "engine.max_tokens_in_cache=1024", "objective.steps=2", "eval_draft_tokens=2",
    ]  # fmt: skip


def features_of(settings: list[str], responses: Sequences) -> torch.Tensor:
    engine = open_engine(compose("train", TrainConfig, settings), torch.device("cpu"))
    try:
        batches = [responses.packed([[0, 3], [5]]), responses.batch([1])]
        features = [torch.stack(compute_features(engine.target, batch, AUX).aux).flatten(0, 2) for batch in batches]
        logits = [engine.target.logits(part[-20:]) for part in features]
        return torch.cat([part.flatten() for part in (*features, *logits)])
    finally:
        engine.close()


@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one(
    settings: list[str], responses: Sequences, tmp_path: Path, started_here: Callable[[], list[int]]
) -> None:
    divided = "engine.tensor_parallel=2"
    assert torch.equal(features_of([*settings, divided], responses), features_of(settings, responses))
    dspark = ["head=dspark", "head.num_layers=1"]  # it reads the target's embedding and LM head
    whole, *others = (
        trained(tmp_path, [*settings, f"run={name}", *more])
        for name, more in (
            ("whole", []),
            # data.top_k: or it would reuse the other's responses
            ("divided", [divided, "data.top_k=1000", "features=offline"]),
            ("dspark-whole", dspark),
            ("dspark-divided", [*dspark, divided]),
        )
    )
    for one, other in ((whole, others[0]), (others[1], others[2])):
        for name, value in one.items():
            torch.testing.assert_close(other[name].float(), value.float(), rtol=1e-3, atol=1e-4)
    assert started_here() == []


def trained(folder: Path, overrides: list[str]) -> dict[str, torch.Tensor]:
    """Train and return the tensors of the last checkpoint."""
    result = train(compose("train", TrainConfig, overrides))
    assert result is not None
    path = find_checkpoint(folder / result["run"] / "checkpoints")
    assert path is not None
    return load_file(path / "module.safetensors")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_features_are_those_of_the_rounded_weights(
    settings: list[str], responses: Sequences, tiny_target_folder: Path, weights: NarrowFormat
) -> None:
    rounded = load_target(str(tiny_target_folder))
    settings = [*settings, f"engine.weights={weights}"]
    planned = target_bytes(rounded, compose("train", TrainConfig, settings))
    with torch.no_grad():
        for module in rounded.modules():
            if isinstance(module, Linear):
                module.weight.copy_(widen(*quantize(module.weight, weights)))
    actual = features_of(settings, responses)
    batches = [responses.packed([[0, 3], [5]]), responses.batch([1])]
    parts = [torch.stack(compute_features(rounded, batch, AUX).aux).flatten(0, 2) for batch in batches]
    logits = [rounded.logits(part[-20:]) for part in parts]
    expected = torch.cat([part.flatten() for part in (*parts, *logits)])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(actual, features_of(settings[:-1], responses), atol=1e-2)
    pack(rounded, weight_format=weights)
    assert planned == pytest.approx(weight_bytes(rounded), rel=0.05)


def test_what_does_not_go_with_a_divided_or_rounded_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.tensor_parallel=2: divides the target .*; use parallel=single"):
        compose("train", TrainConfig, ["engine.tensor_parallel=2", "parallel=ddp"])
