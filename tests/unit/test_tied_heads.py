"""`tie_word_embeddings: true` on files that contradict it: the weights decide, wherever a target is read or written."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infer.config import EngineConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.config import read_json
from models.formats.verifier import weights_of
from models.heads import HEADS
from models.heads.borrowing import borrow
from models.heads.weights import initialize
from models.sharding import Part, sizes_of
from models.targets import LlamaTarget, empty_target, load_target
from models.targets.tying import EMBEDDINGS, LM_HEAD
from models.targets.writing import save_target
from tests.unit.quantized_writers import compressed, packed, write
from tests.unit.reference import TOLERANCE, assert_equals_reference, reference_outputs, relative_error
from tests.unit.test_families import make_family_folder  # noqa: F401 - a fixture

EMBEDDING = EMBEDDINGS[0]
IDS = torch.randint(0, 384, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def tied(make_target_folder: Callable[..., Path]) -> Path:
    return make_target_folder(num_hidden_layers=4, tie_word_embeddings=True)


def other_head(embedding: Tensor) -> Tensor:
    return torch.randn(embedding.shape, generator=torch.Generator().manual_seed(9)) * 0.1


def variant(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Copy `source` to `folder`, with its tensors modified by `change`."""
    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def contradicting(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contradicting")
    return variant(tied, folder, lambda tensors: tensors.update({LM_HEAD: other_head(tensors[EMBEDDING])}))


def is_tied(target: LlamaTarget) -> bool:
    return target.lm_head.weight.data_ptr() == target.embed_tokens.weight.data_ptr()


def test_another_lm_head_is_kept_and_the_log_says_so(contradicting: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_equals_reference(contradicting, IDS)
    (record,) = [record for record in caplog.records if record.name == "headway.targets"]
    assert record.levelno == logging.WARNING
    assert LM_HEAD in record.getMessage()
    assert str(contradicting) in record.getMessage()


@pytest.mark.parametrize("name", ["qwen2", "qwen3 moe"])
def test_of_other_families_too(make_family_folder: Callable[..., Path], name: str, tmp_path: Path) -> None:  # noqa: F811
    source = make_family_folder(name, tie_word_embeddings=True)
    folder = variant(
        source, tmp_path / "own", lambda tensors: tensors.update({LM_HEAD: other_head(tensors[EMBEDDING])})
    )
    assert_equals_reference(folder, IDS)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update({LM_HEAD: tensors[EMBEDDING].clone()}),
        lambda tensors: tensors.update({LM_HEAD: tensors.pop(EMBEDDING)}),  # as safetensors' save_model leaves it
    ],
    ids=["doubled", "under the LM head's name"],
)
def test_one_weight_is_held_once(tied: Path, change: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = variant(tied, tmp_path / "own", change)
    assert_equals_reference(folder, IDS)
    wanted = load_target(str(tied))
    for target in (load_target(str(folder)), load_target(str(folder), layers=[-1])):
        assert is_tied(target)
        assert torch.equal(target.lm_head.weight, wanted.lm_head.weight)
    for rank in range(2):
        part, expected = (load_target(str(path), part=Part(rank, 2, no_gather)) for path in (folder, tied))
        assert torch.equal(part.lm_head.weight, expected.lm_head.weight)
        assert torch.equal(part.embed_tokens.weight, expected.embed_tokens.weight)
        storages = [part.get_parameter(f"{name}.weight").untyped_storage() for name in ("lm_head", "embed_tokens")]
        assert storages[0].data_ptr() == storages[1].data_ptr()
    save_target(wanted, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(load_file(tied / "model.safetensors"))
    for read in weights_of(folder).values():
        assert torch.equal(read(), wanted.embed_tokens.weight)
    assert not [record for record in caplog.records if record.name == "headway.targets"]


def no_gather(x: Tensor, sizes: Any, *, everywhere: bool = True) -> Tensor:
    raise AssertionError("nothing is computed here")


class SingleProcess:
    """An exchange between ranks for a single process, which holds all weights."""

    rank, ranks = 0, 1

    def gather(self, gathered: Tensor, shard: Tensor) -> Callable[[], Any]:
        gathered.copy_(shard)
        return lambda: None

    def any(self, flag: bool) -> bool:
        return flag


def test_every_way_to_load_it_keeps_both(contradicting: Path) -> None:
    tensors = load_file(contradicting / "model.safetensors")
    load_options: list[dict[str, Any]] = [{}, {"layers": [-1]}, {"exchange": SingleProcess()}]
    for options in load_options:
        target = load_target(str(contradicting), **options)
        assert torch.equal(target.lm_head.weight, tensors[LM_HEAD])
        assert torch.equal(target.embed_tokens.weight, tensors[EMBEDDING])
        assert not target.config.tie_word_embeddings
    sizes = sizes_of(LM_HEAD, 384, 2)
    assert sizes is not None
    parts = [load_target(str(contradicting), part=Part(rank, 2, no_gather)) for rank in range(2)]
    for part, rows in zip(parts, tensors[LM_HEAD].split(sizes), strict=True):
        assert torch.equal(part.lm_head.weight, rows)
        assert not part.config.tie_word_embeddings
    planned = empty_target(contradicting)  # what a plan of memory counts
    assert planned.lm_head.weight is not planned.embed_tokens.weight


def test_a_quantized_checkpoint_keeps_both(contradicting: Path, tmp_path: Path) -> None:
    scheme = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
    write(contradicting, scheme, packed(4, 32), tmp_path / "quantized", tmp_path / "plain")
    for rank in (None, 1):
        part = None if rank is None else Part(rank, 2, no_gather)
        quantized, plain = (load_target(str(tmp_path / name), part=part) for name in ("quantized", "plain"))
        assert torch.equal(quantized.lm_head.weight, plain.lm_head.weight)
        assert not torch.equal(quantized.lm_head.weight, quantized.embed_tokens.weight[: len(quantized.lm_head.weight)])


def test_written_it_says_what_it_is(contradicting: Path, tmp_path: Path) -> None:
    target = load_target(str(contradicting))
    save_target(target, tmp_path)
    assert read_json(tmp_path / "config.json")["tie_word_embeddings"] is False
    again = load_target(str(tmp_path))
    assert torch.equal(again.lm_head.weight, target.lm_head.weight)
    expected = reference_outputs(tmp_path, IDS).logits
    assert relative_error(expected, reference_outputs(contradicting, IDS).logits) < TOLERANCE


def test_a_head_borrows_the_lm_head_that_is_kept(contradicting: Path) -> None:
    """EAGLE speaks through the target's LM head, and drafts change no token of the target with it."""
    prompts = [[5, 6, 7] * 6, list(range(40, 60))]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = []
    for proposer in ("none", "head"):
        target = load_target(str(contradicting))
        head = HEADS["eagle"]().make(target.config)
        initialize(head, target, from_target=True)
        borrow(head, target)
        assert head.borrowed.lm_head is target.lm_head
        assert torch.equal(head.borrowed.lm_head.weight, load_file(contradicting / "model.safetensors")[LM_HEAD])
        engine = Engine(target, head=head, proposer=proposer, config=EngineConfig(max_batch=2))
        texts.append([completion.token_ids for completion in engine.generate(prompts, params)])
    assert texts[0] == texts[1]
    read = weights_of(contradicting)  # what a conversion takes of the target
    served = target.lm_head.unpacked_weight()
    assert served is not None
    assert torch.equal(read["lm_head.weight"](), served)
    assert torch.equal(read["embed_tokens.weight"](), target.embedding_weight)


def test_values_are_compared_across_shards_and_dtypes(contradicting: Path, tied: Path, tmp_path: Path) -> None:
    tensors = load_file(tied / "model.safetensors")
    tensors[EMBEDDING] = tensors[EMBEDDING].bfloat16()
    (tmp_path / "config.json").write_text((tied / "config.json").read_text())
    for change, wanted in ((0.0, True), (2.0**-20, False)):
        head = tensors[EMBEDDING].float()
        head[-1, -1] += change
        save_file(tensors, tmp_path / "a.safetensors")
        save_file({LM_HEAD: head}, tmp_path / "b.safetensors")
        weight_map = dict.fromkeys(tensors, "a.safetensors") | {LM_HEAD: "b.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert is_tied(load_target(str(tmp_path))) is wanted
