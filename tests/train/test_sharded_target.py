"""A target sharded over two processes (ZeRO-3) gives the bits of a replicated one, in about half of its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.config import EngineConfig
from infer.engine import Engine
from infer.options.cli import compose
from infer.request import SamplingParams
from models.config import LAST
from models.layers import pack
from models.targets import load_target
from models.targets.llama import LlamaTarget
from tests.conftest import MakeTarget
from tests.gguf_writing import write_gguf
from tests.train.conftest import write_family
from tests.train.launching import on_two_processes
from tests.train.test_family_heads import DEEPSEEK
from train.checkpoint import find_checkpoint
from train.config import TrainConfig
from train.data.sequences import Batch, Sequences
from train.features.online import compute_features

LAYERS, AUX = 24, (2, 12, 21, LAST)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
SETTINGS = [
    "head.draft_vocab_size=200", "data.num_sequences=8", "data.max_new_tokens=12", "data.prompt_tokens=12",
    "sequence_length=40", "batch_size=2", "steps=2", "minutes=null", "eval_every=1", "eval_prompts=3",
    "eval_max_tokens=8", "tracker=none", "precision=fp32", "engine.max_tokens_in_cache=1024", "engine.threads=1",
    "objective.steps=2", "eval_draft_tokens=2", "parallel=ddp", "overwrite=true",
]  # fmt: skip


def batches_of(rank: int) -> list[Batch]:
    """Return three batches for rank 0 and one for rank 1, all different."""
    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randint(1, 384, (9 + 5 * row,), generator=generator).tolist() for row in range(4)]
    sequences = Sequences.of([(row, [True] * len(row)) for row in rows])
    return [sequences.batch([0, 3]), sequences.packed([[1, 2], [3]]), sequences.batch([2])][: 3 - 2 * rank]


def outputs_of(target: LlamaTarget, batches: Sequence[Batch], aux: Sequence[int]) -> torch.Tensor:
    """Return features and logits, flattened."""
    parts = [torch.stack(compute_features(target, batch, aux).aux) for batch in batches]
    return torch.cat([part.flatten() for part in parts] + [target.logits(part[-1]).flatten() for part in parts])


@pytest.fixture(scope="module")
def target_folder(make_target_folder: MakeTarget) -> Path:
    """Return a target of so many layers that two complete ones weigh little."""
    return make_target_folder(num_hidden_layers=LAYERS, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def outputs(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    common = [*SETTINGS, f"model.path={target_folder}", f"output_dir={folder}"]
    on_two_processes(Path(__file__).with_name("sharded_worker.py"), str(folder), str(target_folder), *common)
    return folder


@pytest.mark.slow
def test_features_logits_and_tokens_are_those_of_a_whole_target(outputs: Path, target_folder: Path) -> None:
    config = EngineConfig(max_tokens_in_cache=1024, threads=1)
    engine = Engine(load_target(str(target_folder)), proposer="none", config=config)
    for rank in range(2):
        saved = torch.load(outputs / f"rank-{rank}.pt")
        assert torch.equal(saved["found"], outputs_of(engine.target, batches_of(rank), AUX))
    token_ids = [completion.token_ids for completion in engine.generate(PROMPTS, SamplingParams(max_tokens=12, seed=1))]
    assert torch.load(outputs / "rank-0.pt")["answers"] == token_ids


@pytest.mark.slow
def test_a_process_holds_half_of_the_layers(outputs: Path, target_folder: Path) -> None:
    target = load_target(str(target_folder))
    total = sum(p.numel() for p in target.layers.parameters())
    rest = target.embed_tokens.weight.numel() + target.norm.weight.numel()
    held = total / 2 + 2 * total / LAYERS  # its half, and two layers gathered at a time
    for rank in range(2):
        num_bytes = torch.load(outputs / f"rank-{rank}.pt")["held"]
        assert num_bytes == pytest.approx(4 * (held + rest), rel=0.01)
        assert num_bytes < 0.62 * 4 * (total + rest)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["online", "offline"])
def test_a_head_trained_on_it_has_the_same_bits(features: str, outputs: Path) -> None:
    heads = []
    for name in ("whole", features):
        path = find_checkpoint(outputs / name / "checkpoints")
        assert path is not None
        heads.append(load_file(path / "module.safetensors"))
    for name, value in heads[0].items():
        assert value.equal(heads[1][name]), name


@pytest.mark.slow
def test_a_head_trained_on_what_it_recorded_is_nearly_the_same(outputs: Path) -> None:
    """Each process records the conversations that it continues; the kernels of serving sum in another order."""
    paths = [find_checkpoint(outputs / name / "checkpoints") for name in ("whole", "recorded")]
    whole, recorded = (load_file(path / "module.safetensors") for path in paths if path is not None)
    for name, value in whole.items():
        assert (value.float() - recorded[name].float()).abs().max() < 1e-2, name
    assert not list(outputs.glob("features/*/recorded-*"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"features\.target=sharded: .* parallel=single has one; use parallel=ddp"),
        (["parallel=ddp", "engine.weights=int8"], r"features\.target=sharded: .*; use engine\.weights=same"),
        (["parallel=ddp", "engine.graphs=on"], r"features\.target=sharded: .*; use engine\.graphs=auto"),
    ],
)
def test_what_does_not_go_with_a_sharded_target_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose("train", TrainConfig, ["features.target=sharded", *overrides])


def test_an_unknown_way_to_hold_the_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"features\.target=half: .*whole.*sharded"):
        compose("train", TrainConfig, ["features.target=half"])


class SingleProcess:
    """The exchange of a single process that holds everything."""

    rank, ranks = 0, 1

    def gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> Callable[[], Any]:
        gathered.copy_(shard)
        return lambda: None

    def any(self, flag: bool) -> bool:
        return flag


@pytest.mark.parametrize(("form", "dtype"), [("folder", torch.bfloat16), ("GGUF file", torch.float32)])
@torch.no_grad()
def test_layers_of_two_kinds_give_the_bits_of_a_whole_target(
    form: str, dtype: torch.dtype, gemma_folder: Path, tmp_path: Path
) -> None:
    path = gemma_folder
    if form == "GGUF file":
        path = tmp_path / "gemma.gguf"
        write_gguf(gemma_folder, path)
    full, gathered = (load_target(str(path), dtype=dtype, exchange=each) for each in (None, SingleProcess()))
    for _ in range(2):
        assert torch.equal(outputs_of(gathered, batches_of(0), (2, 5)), outputs_of(full, batches_of(0), (2, 5)))
        pack(full)
        pack(gathered)


def test_a_target_whose_routers_are_in_fp32_is_sharded_in_fp32_alone(tmp_path: Path) -> None:
    path = str(write_family("DeepseekV3Config", tmp_path, **DEEPSEEK))
    full, gathered = load_target(path), load_target(path, exchange=SingleProcess())
    assert torch.equal(outputs_of(gathered, batches_of(0), (2, 5)), outputs_of(full, batches_of(0), (2, 5)))
    with pytest.raises(ValueError, match=r"features.target=sharded: .* routers or decays in fp32"):
        load_target(path, dtype=torch.bfloat16, exchange=SingleProcess())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"layer 1.*up_proj\.weight: missing"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), r"extra: not part of this architecture"),
    ],
)
def test_a_wrong_checkpoint_is_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, make_target_folder: MakeTarget
) -> None:
    folder = make_target_folder()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_target(str(folder), exchange=SingleProcess())
