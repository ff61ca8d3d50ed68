"""MTP modules are trained by FastMTP's loss; every flag that families disagree on shows in the acceptance length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams, SpeculationStats
from models.attention import CausalAttention
from models.heads.base import Head
from models.heads.borrowing import borrow
from models.heads.mtp.config import MtpConfig
from models.heads.mtp.formats import open_shipped
from models.heads.mtp.head import MtpHead
from models.targets import load_target
from models.targets.llama import LlamaTarget
from tests.conftest import MakeTarget
from tests.heads import make_head, make_objective, memorise
from tests.hub_cache import SHIPS_MODULE, TARGETS, ship_module, write_target
from tests.train.launching import ROOT, on_two_processes
from tests.train.running import run
from train.data.sequences import Sequences
from train.features.online import compute_features
from train.features.teacher import teach
from train.publishing.trackers import read_metrics

STEPS = 4
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["mtp", "mtp, hidden first, centered norms", "mtp, three modules"])
def test_the_loss_is_fast_mtps(engine: Engine, tiny_target: LlamaTarget, responses: Sequences, variant: str) -> None:
    """Σ_k β^k CE(t[i+2+k]) / Σ_k β^k; step k is a causal forward over t[i+1+k] and the states of step k - 1."""
    batch, head = responses.batch(range(4)), make_head(tiny_target, variant)
    objective = make_objective(head, "mtp", steps=STEPS)
    features = compute_features(engine.target, batch, head.config.aux_layers)
    teacher = teach(engine.target, features.hidden, batch, head.target_ids)
    loss, sums = objective(batch, features, teacher, objective.denominators(batch))
    layers, total, weights = head.mtp_layers, 0.0, [0.6**step for step in range(STEPS)]
    states, length = features.aux[0], batch.ids.shape[1]
    rotary = head.rotary.rows(torch.arange(length).expand_as(batch.ids), states.dtype)
    for step, weight in enumerate(weights):
        module = layers[step % len(layers)]
        tokens = F.pad(batch.ids[:, 1 + step :], (0, 1 + step))
        embedded = tiny_target.embed_tokens(tokens)
        embedded[:, 0] *= not head.config.zero_first
        inputs = [scaled(embedded, module.token_layernorm), scaled(states, module.hidden_layernorm)]
        x = torch.cat(inputs[::-1] if head.config.hidden_first else inputs, dim=-1) @ module.input_proj.weight.T
        x = module(x, rotary, CausalAttention())
        states = scaled(x, module.final_layernorm) if head.config.norm_recycled else x
        logits = scaled(x, module.final_layernorm) @ tiny_target.lm_head.weight.T
        costs = []
        for row in range(len(batch.ids)):
            for slot in range(length - 2 - step):
                if batch.assistant[row, slot + 1 : slot + 3 + step].all():
                    costs.append(-logits[row, slot].log_softmax(-1)[batch.ids[row, slot + 2 + step]].item())
        assert sums.loss[step] == pytest.approx(sum(costs), rel=1e-4)
        total += weight / sum(weights) * sum(costs) / len(costs)
    assert loss.item() == pytest.approx(total, rel=1e-4)


def scaled(x: Tensor, norm: torch.nn.Module) -> Tensor:
    weight = norm.weight + 1 if norm.centered else norm.weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


@pytest.fixture(scope="module")
def folder(make_target_folder: MakeTarget) -> Path:
    """Return a target whose final norm has scales of any size and sign.

    With equal ones a state before it is the same to the modules, which norm it, as one after it.
    """
    folder = make_target_folder(seed=8, num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.randn(64, generator=torch.Generator().manual_seed(2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Engine:
    drafts = ProposerConfig(name="head", max_draft_tokens=STEPS)
    limits = EngineConfig(max_tokens_in_cache=2048, max_batch=16)
    return Engine(load_target(str(folder)), proposer="none", config=limits, proposer_config=drafts)


def tau(engine: Engine, head: Head, prompts: list[list[int]]) -> float:
    engine.set_proposer("none")
    expected = [completion.token_ids for completion in engine.generate(prompts, PARAMS)]
    engine.set_proposer("head", head)
    stats = SpeculationStats()
    for completion, ids in zip(engine.generate(prompts, PARAMS), expected, strict=True):
        assert completion.token_ids == ids
        stats.merge(completion.stats)
    return stats.acceptance_length


@pytest.fixture(scope="module")
def trained(folder: Path, plain: Engine):
    """`trained(num_modules)`: a head that has memorised what follows prompts of one token, and these prompts."""
    prompts = [[token] for token in range(40, 64)]

    def make(num_modules: int) -> tuple[Head, list[list[int]]]:
        target = load_target(str(folder))
        head = make_head(target, "mtp", num_modules=num_modules, zero_first=True)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for module in head.mtp_layers:
                module.final_layernorm.weight.copy_(torch.randn(64, generator=generator))  # as above
        plain.set_proposer("none")
        rows = [
            (a.prompt_ids + a.token_ids, [False] + [True] * len(a.token_ids)) for a in plain.generate(prompts, PARAMS)
        ]
        return memorise(head, plain.target, Sequences.of(rows), STEPS, rounds=100), prompts

    return make


def with_config(head: Head, config: MtpConfig, target: LlamaTarget) -> Head:
    """Return a head of another config with the same weights, or some of them."""
    other = MtpHead(config)
    weights = head.state_dict()
    other.load_state_dict({name: weights[name] for name in other.state_dict()})
    borrow(other, target)
    return other.requires_grad_(False)


def test_every_wrong_flag_costs_accepted_tokens(folder: Path, plain: Engine, trained) -> None:
    head, prompts = trained(1)
    two, _ = trained(2)
    config, target = head.config, load_target(str(folder))
    right, right_of_two = (tau(plain, with_config(each, each.config, target), prompts) for each in (head, two))
    wrong = {
        "hidden_first": replace(config, hidden_first=True),
        "centered_norms": replace(config, layer=replace(config.layer, centered_norms=True)),
        "pre_norm": replace(config, pre_norm=True),
        "norm_recycled": replace(config, norm_recycled=False),
        "zero_first": replace(config, zero_first=False),
    }
    lengths = {flag: tau(plain, with_config(head, other, target), prompts) for flag, other in wrong.items()}
    assert min(right, right_of_two) > 2.5
    assert tau(plain, with_config(two, config, target), prompts) < right_of_two - 0.1, "its first module at all depths"
    assert {flag: length for flag, length in lengths.items() if length > right - 0.1} == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("objective", ["mtp", "ttt"])
def test_modules_with_experts_are_trained_further(settings: list[str], tmp_path: Path, precision: str, objective: str):
    words = [item for item in settings if not item.startswith(("head.", "objective.", "model.path", "precision"))]
    words += [f"model.path={shipped(tmp_path)}", "head=mtp", f"objective={objective}", "steps=6", "optim.lr=0.003"]
    words += [f"precision={precision}", "eval_every=3", "eval_draft_tokens=2", "parallel=single"]
    result = run(words)
    assert result["gap"] == 0.0
    rows = [row["eval/loss"] for row in read_metrics(tmp_path / result["run"]) if "eval/loss" in row]
    assert rows[-1] < rows[0]
    ours = open_shipped(tmp_path / "target")
    trained = load_file(Path(result["export"]) / "model.safetensors")
    assert trained.keys() == ours.keys()
    frozen = {name for name, value in trained.items() if torch.equal(value, ours[name])}
    assert frozen == {"mtp_layers.0.mlp.gate.e_score_correction_bias"}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_whose_tokens_use_other_experts_train_together(settings: list[str], tmp_path: Path, parallel: str):
    words = [item for item in settings if not item.startswith(("head.", "objective.", "model.path", "batch_size"))]
    words += [f"model.path={shipped(tmp_path)}", "head=mtp", "steps=3", f"parallel={parallel}", "batch_size=1"]
    words += ["data.max_new_tokens=3", "eval_draft_tokens=2", "model.device=cpu"]  # so few that most are unused
    on_two_processes(ROOT / "train" / "run.py", *words)
    (export,) = (tmp_path / "heads").glob("*/mtp/model.safetensors")
    trained, ours = load_file(export), open_shipped(tmp_path / "target")
    assert sum(not torch.equal(value, ours[name]) for name, value in trained.items()) > len(ours) // 2


def shipped(folder: Path) -> Path:
    """Write a DeepSeek-V3 that ships a module, whose layer has latent attention and experts."""
    target = write_target(folder / "target", *TARGETS["deepseek_v3"][:2])
    ship_module(target, SHIPS_MODULE["deepseek_v3"])
    return target
