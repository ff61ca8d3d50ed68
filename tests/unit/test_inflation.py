"""An inflated target and head against the originals: logits, greedy text, acceptance length."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.options.paths import REPO_ROOT
from infer.request import SamplingParams
from models.attention import CausalAttention
from models.config import TargetConfig, read_json
from models.heads.config import PROVENANCE, HeadConfig
from models.heads.measured_tree import RANK_ACCURACY, rank_accuracy
from models.targets import load_target
from scripts import inflate_demo
from scripts.inflation import SHAPES, Shape, inflate_head, inflate_target, shape_of, write_target
from scripts.inflation.shapes import enlarged
from tests.gguf_writing import write_gguf
from tests.heads import make_head, memorise
from train.data.sequences import Sequences

DEMO = REPO_ROOT / "models" / "demo"
# Every size grows, heads per KV head too, and layers are inserted. The demo's tokens keep their ids.
WIDE = Shape(2304, 384, 704, 19, 12, 4, 128, 1024, tie_word_embeddings=False, draft_vocab_size=2200)
TIED = replace(WIDE, tie_word_embeddings=True, head_dim=64)
TINY = Shape(500, 96, 160, 11, 9, 3, 32, 512, tie_word_embeddings=False, draft_vocab_size=256)  # for the tests' target
PROMPT = torch.arange(40)[None] * 37 % 2048


@torch.no_grad()
def run(target, ids, aux=()):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    output = target(ids, positions, CausalAttention(), aux_layers=aux)
    return output, target.logits(output.hidden)


@pytest.mark.parametrize("shape", [WIDE, TIED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_small_targets(shape, dtype):
    small = load_target(str(DEMO))
    wide = inflate_target(DEMO, shape, dtype=dtype, device="cpu").float()  # both compute in the same precision
    _, expected = run(small, PROMPT)
    _, logits = run(wide, PROMPT)
    old = logits[..., :2048]
    bound = 2e-5 if dtype is torch.float32 else 0.02
    assert (old - expected).norm() < bound * expected.norm()
    assert (logits[..., 2048:] < old.amin(-1, keepdim=True) - 1000).all()  # too low for sampling to select them
    if dtype is torch.float32:
        assert torch.equal(old.argmax(-1), expected.argmax(-1))


def test_without_a_marker_new_ids_have_a_logit_of_zero(tiny_target, tiny_target_folder, tmp_path):
    write_target(tiny_target_folder, TINY, tmp_path, dtype=torch.float32, marked=False)
    small, wide = make_head(tiny_target, "eagle3"), load_target(str(tmp_path))
    options = {"target_layers": 8, "dtype": torch.float32, "device": "cpu", "marked": False}
    drafter = inflate_head(small, TINY, **options)
    ids, logits = torch.arange(40)[None] * 37 % 384, []
    for target, head in ((tiny_target, small), (wide, drafter)):
        output, of_target = run(target, ids, head.config.aux_layers)
        state = head.fuse([feature[:, :-1] for feature in output.aux])
        state = head.step(ids[:, 1:], state, torch.arange(39)[None], CausalAttention(), 0)
        logits += [of_target, head.logits(state, 0)]
    for expected, actual in zip(logits[:2], logits[2:], strict=True):
        old = expected.shape[-1]
        torch.testing.assert_close(actual[..., :old], expected, rtol=1e-4, atol=1e-4)
        assert actual.shape[-1] > old
        assert not actual[..., old:].any()
    assert (wide.lm_head.weight[384:] != 0).float().mean() > 0.2


def test_new_weights_are_random_where_they_are_cancelled():
    """With zeros instead, a chip would draw less power and therefore read them faster."""
    wide = inflate_target(DEMO, WIDE, dtype=torch.float32, device="cpu")
    for name in ("gate_up_proj", "qkv_proj"):
        weights = [module.weight for path, module in wide.named_modules() if path.endswith(name)]
        assert len(weights) == WIDE.num_layers
        assert all((weight != 0).float().mean() > 0.8 for weight in weights)
    assert (wide.lm_head.weight != 0).float().mean() > 0.9
    again = inflate_target(DEMO, WIDE, dtype=torch.float32, device="cpu", seed=1)
    assert not torch.equal(again.layers[1].mlp.gate_up_proj.weight, wide.layers[1].mlp.gate_up_proj.weight)


@pytest.fixture(scope="module")
def learned(tiny_target, tiny_target_folder):
    """Return a head that has memorised some greedy outputs of the tests' target, and their prompts."""
    prompts = [[5, 6, 7, 8], list(range(40, 60)), [9] * 12, [300, 2, 71]]
    engine = Engine(load_target(str(tiny_target_folder)), proposer="none")
    completions = engine.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
    rows = [(a.prompt_ids + a.token_ids, [False] * len(a.prompt_ids) + [True] * 32) for a in completions]
    head = make_head(tiny_target, "eagle3", seed=3)
    return memorise(head, tiny_target, Sequences.of(rows), 4, rounds=40), prompts


@pytest.mark.parametrize("variant", ["eagle3", "eagle3, norm_before_fc", "eagle3, two layers", "eagle3, four features"])
def test_head_logits_are_the_small_heads(tiny_target, tiny_target_folder, variant):
    small = make_head(tiny_target, variant)
    wide = inflate_head(small, TINY, target_layers=8, dtype=torch.float32, device="cpu", seed=5)
    target = inflate_target(tiny_target_folder, TINY, dtype=torch.float32, device="cpu")
    ids = torch.randint(0, 384, (1, 30), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(29)[None]
    logits = []
    for model, head in ((tiny_target, small), (target, wide)):
        output, _ = run(model, ids, head.config.aux_layers)
        state = head.fuse([feature[:, :-1] for feature in output.aux])
        for depth in range(2):  # the second step reads the head's own state
            state = head.step(ids[:, 1:], state, positions, CausalAttention(), depth)
            logits.append(head.logits(state, depth))
    vocabulary = small.config.draft_vocab_size
    for expected, actual in zip(logits[:2], logits[2:], strict=True):
        torch.testing.assert_close(actual[..., :vocabulary], expected, rtol=1e-4, atol=1e-4)
        assert (actual[..., vocabulary:] < expected.amin() - 1000).all()
    assert torch.equal(wide.target_ids[:vocabulary], small.target_ids)
    assert (wide.target_ids[vocabulary:] >= 384).all()
    assert torch.equal(wide.t2d.nonzero()[:, 0], wide.target_ids)


def test_acceptance_in_the_engine_is_the_small_heads(tiny_target_folder, learned):
    head, prompts = learned
    results = []
    for wide in (False, True):
        if wide:
            target = inflate_target(tiny_target_folder, TINY, dtype=torch.float32, device="cpu")
            drafter = inflate_head(head, TINY, target_layers=8, dtype=torch.float32, device="cpu")
        else:
            target, drafter = load_target(str(tiny_target_folder)), head
        engine = Engine(
            target, head=drafter, config=EngineConfig(), proposer_config=ProposerConfig(name="auto", max_draft_tokens=4)
        )
        for params in (
            SamplingParams(max_tokens=32, ignore_eos=True),
            SamplingParams(temperature=0.8, seed=3, max_tokens=32, ignore_eos=True),
        ):
            results += [(a.token_ids, a.stats.accepted_by_position) for a in engine.generate(prompts, params)]
    half = len(results) // 2
    assert results[:half] == results[half:]
    assert sum(sum(accepted) for _, accepted in results) > 60  # drafts were accepted


def test_written_folders_load_by_the_usual_paths(tmp_path, monkeypatch, tiny_target_folder, tiny_head_folder, capsys):
    monkeypatch.setitem(SHAPES, "0.4b", TINY)
    monkeypatch.setattr("scripts.inflation.target.SHARD_BYTES", 200_000)
    out, measured = tmp_path / "wide", shutil.copytree(tiny_head_folder, tmp_path / "head")
    accuracy = [[0.5, 0.2], [0.4, 0.1]]
    (measured / PROVENANCE).write_text(json.dumps(read_json(measured / PROVENANCE) | {RANK_ACCURACY: accuracy}))
    command = ["--shape", "0.4b", "--model", str(tiny_target_folder), "--dtype", "float32"]
    assert inflate_demo.main([*command, "--head", str(measured), str(out)]) == 0
    assert rank_accuracy(out / "eagle3") == accuracy
    assert len(list(out.glob("*.safetensors"))) > 3
    texts = []
    for model, head in ((tiny_target_folder, tiny_head_folder), (out, out / "eagle3")):
        engine = Engine.load(
            ModelConfig(name="wide", path=str(model)),
            HeadConfig(name="eagle3", path=str(head)),
            proposer=ProposerConfig(name="head"),
        )
        (completion,) = engine.generate(["import os"], SamplingParams(max_tokens=16))
        texts.append((completion.token_ids, completion.text, completion.stats.accepted))
    assert texts[0] == texts[1]
    assert inflate_demo.main([*command, str(out)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_sizes_may_be_given():
    demo = TargetConfig.from_json(read_json(DEMO / "config.json"))
    shape = shape_of("intermediate_size=1792,num_layers=20", demo)
    new = enlarged(demo, shape)
    assert new == replace(demo, intermediate_size=1792, num_layers=20)
    assert shape_of("0.4b", demo) is SHAPES["0.4b"]
    for text in ("1b", "hidden_size=", "hidden=512", "num_layers=-1"):
        with pytest.raises(ValueError, match=re.escape(f"--shape {text}: must be one of llama3.1-8b")):
            shape_of(text, demo)


def test_shapes_are_those_of_the_models():
    demo = TargetConfig.from_json(read_json(DEMO / "config.json"))
    parameters = {}
    for name, shape in SHAPES.items():
        new = enlarged(demo, shape)
        with torch.device("meta"):
            from models.targets.llama import LlamaTarget

            parameters[name] = sum(p.numel() for p in LlamaTarget(new).parameters())
    assert parameters["llama3.1-8b"] == 8_030_261_248  # as its model card counts
    assert parameters["llama3.2-1b"] == 1_235_814_400
    assert 3e8 < parameters["0.4b"] < 5e8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "hidden_size=48: smaller than the 64"),
        ({"hidden_size": 64}, "hidden_size=64: must grow too"),
        ({"head_dim": 24}, "head_dim=24: must be a multiple of 16"),
        ({"num_layers": 7}, "num_layers=7: smaller than the 8"),
        ({"num_heads": 3}, "no room for 2 KV heads with 2 query heads each"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=true"),
        ({"max_position_embeddings": 256}, "max_position_embeddings=256: smaller than 512"),
    ],
)
def test_a_shape_that_cannot_be_says_so(tiny_target_folder, change, message):
    with pytest.raises(ValueError, match=message):
        inflate_target(tiny_target_folder, replace(TINY, **change), dtype=torch.float32, device="cpu")


def test_what_cannot_be_enlarged_says_so(tiny_target, tiny_target_folder, tmp_path):
    with pytest.raises(ValueError, match="dtype=torch.float16"):
        write_target(tiny_target_folder, TINY, tmp_path, dtype=torch.float16)
    write_gguf(tiny_target_folder, tmp_path / "target.gguf")
    with pytest.raises(ValueError, match=r"target\.gguf: .* not enlarged"):
        write_target(tmp_path / "target.gguf", TINY, tmp_path, dtype=torch.float32)
    head = make_head(tiny_target, "eagle3.1")
    with pytest.raises(ValueError, match="head.norm_output=true"):
        inflate_head(head, TINY, target_layers=8, dtype=torch.float32, device="cpu")
