"""Measures updates of heads for a target of an 8B shape: tokens per second and the model FLOPs utilisation (MFU), with
features that lie on the device and with those that the target computes. Run by `gpu_check.sh` alone.

The MFU is that of `head_flops` (train/step_clock.py): three times the matrix products of the head's forward on real
tokens and of the logits of its slots, per second, by PEAK. What the target computes does not count, nor attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from models.heads.base import Head
from models.heads.borrowing import borrow, borrowed_by
from models.heads.config import NewHeadConfig
from models.heads.dflash.config import DFlashOptions
from models.heads.eagle3.config import Eagle3Options
from models.heads.weights import set_vocabulary
from models.layers import pack
from models.targets.llama import LlamaTarget
from models.vocab import build_draft_vocab
from tests.device import DEVICE, ON_GPU, sized
from tests.kernels.triton import targets
from tests.kernels.triton.measure_engines import DTYPE
from tests.kernels.triton.measure_scaling import spread

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s of dense products in bf16, as NVIDIA states them
LENGTH, SEQUENCES = sized((24, 2), (4096, 2))  # tokens of a sequence, sequences of an update
UPDATES = sized((1, 1), (3, 8))  # before those that are timed, and those
VOCABULARY = sized(100, 32000)
HEADS: dict[str, tuple[NewHeadConfig, str, dict[str, Any]]] = {  # options, objective, its settings
    "eagle3, 7 steps": (
        Eagle3Options(draft_vocab_size=VOCABULARY, aux_layers=sized([0, 1, 2], None)),
        "ttt",
        {"steps": sized(2, 7)},  # as published heads are trained (SpecForge)
    ),
    "dflash": (DFlashOptions(**sized({"num_layers": 1, "aux_layers": [0, 1, 2]}, {})), "dflash", {}),
}
SOURCES = ("stored", "the library", "the engine's kernels")  # of features; the last packs the target for good


@dataclass
class Trained:
    """The target, and the head that is trained, of which there is one at a time."""

    target: LlamaTarget
    lender: LlamaTarget  # of LM head and embedding, which stays as it is
    packed: bool = False
    name: str = ""
    placement: Any = None

    def of(self, name: str) -> Any:
        """Return what trains a new head, as `train/run.py parallel=single precision=bf16` makes it on a GPU."""
        if name != self.name:
            from accelerate import Accelerator

            from train.config import SCHEMAS, OptimConfig
            from train.distributed.strategies import Replicated
            from train.objectives.registry import OBJECTIVES

            self.placement = None
            (options, objective, settings), self.name = HEADS[name], name
            made = OBJECTIVES[objective](
                new_head(options, self.target, self.lender), SCHEMAS["objective"][objective](name=objective, **settings)
            )
            accelerator = Accelerator(cpu=not ON_GPU, mixed_precision="bf16" if ON_GPU else "no")
            self.placement = Replicated(accelerator, made, OptimConfig(), 1e-4)
        return self.placement


@torch.no_grad()
def new_head(options: NewHeadConfig, target: LlamaTarget, lender: LlamaTarget) -> Head:
    """Return a random head in fp32, made on the target's device: a CPU would take a minute."""
    device, vocabulary = target.norm.weight.device, target.config.vocab_size
    with device:
        head = options.make(target.config)
    set_vocabulary(head, *build_draft_vocab(torch.arange(vocabulary, 0, -1), head.config.draft_vocab_size))
    borrow(head, lender)
    for borrowed in borrowed_by(head):
        borrowed.to(next(head.parameters()))
    generator = torch.Generator(device).manual_seed(0)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
    return head


@pytest.fixture(scope="module")
def trained() -> Trained:
    for name in ("accelerate", "tqdm"):
        pytest.importorskip(name)
    shape = sized("tiny", "llama3.1-8b")
    small = replace(targets.config_of(shape), num_layers=1)
    lender = targets.randomised(LlamaTarget, small, DTYPE, DEVICE)
    return Trained(targets.random_target(shape, DTYPE, DEVICE), lender)


@pytest.mark.gpu(seconds=12)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("source", SOURCES)
def measure_updates(trained: Trained, record_property: Callable[..., None], source: str, name: str) -> None:
    from train.data.sequences import Sequences
    from train.features.online import compute_features
    from train.step_clock import head_flops, memory_bytes

    if source == SOURCES[-1] and not trained.packed:
        trained.packed = True
        pack(trained.target, exact=True, weight_format="same")
    placement = trained.of(name)
    generator, head, target = torch.Generator().manual_seed(1), placement.plain.head, trained.target
    ids = torch.randint(1, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)  # all in the draft vocabulary
    rows = [(row, torch.arange(LENGTH) >= LENGTH // 8) for row in ids]
    batch = Sequences.joined(rows).batch(range(SEQUENCES)).to(DEVICE)
    flops = head_flops(head, placement.plain.steps)
    denominators, seconds, losses, kept = placement.plain.denominators(batch), list[float](), list[float](), None
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(sum(UPDATES)):
        begin = time.perf_counter()
        features = kept or compute_features(target, batch, head.config.aux_layers)
        kept = features if source == "stored" else None
        teacher = placement.plain.teach(target, features.hidden, batch)
        draws = torch.Generator(DEVICE).manual_seed(len(seconds))
        loss, sums = placement.objective(batch, features, teacher, denominators, False, draws)
        placement.backward(loss, last=True)
        norm = placement.update(1e-4, sound=True)  # whose norm the host reads, as it does the loss
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - begin)
    timed, tokens = seconds[UPDATES[0] :], SEQUENCES * LENGTH
    median, useful = statistics.median(timed), flops.step(tokens, float(sums.count.sum()))
    peak = next((peak for gpu, peak in PEAK.items() if ON_GPU and gpu in torch.cuda.get_device_name()), None)
    line = {"head": name, "features": source, "sequences": SEQUENCES, "length": LENGTH, "losses": losses}
    line |= {"update_s": round(median, 4), "tokens_per_s": round(tokens / median, 1)}
    line |= {"spread": spread([tokens / value for value in timed]), "head_tflops": useful / median / 1e12}
    line |= {"mfu": peak and round(useful / median / peak, 4), "peak_flops": peak, "memory": memory_bytes(DEVICE)}
    record_property("training/updates", line)
    assert norm > 0
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
