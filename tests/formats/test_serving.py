"""A head of another format given as head.path, as downloaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.config import GenerateConfig
from infer.generate import run
from infer.options.cli import compose
from infer.options.exported_heads import with_head
from models.config import RopeConfig
from models.formats.conversion import FORMATS, render
from models.heads.files import load_head, read_head
from models.heads.layer_config import reaching
from models.layers import rope_frequencies
from models.sharding import Part
from models.targets import load_target
from scripts import convert
from tests.formats.sources import SOURCES

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = ("dflash with windows", "speculators dspark", "dflash2")


@pytest.mark.parametrize("name", ["safeailab-eagle", "safeailab-eagle3", "medusa", "ibm-mlp", "arctic-lstm", *BLOCKS])
def test_generate_takes_the_folder_as_it_is(tmp_path, capsys, tiny_target_folder, name):
    source = SOURCES[name]
    words = [
        "model=demo",
        f"model.path={tiny_target_folder}",
        "model.device=cpu",
        f"head={source.head}",
        f"head.path={source.write(tmp_path / 'in')}",
        "compare=true",  # exits unless the token ids are those of plain decoding
        "num_prompts=2",
        "prompt_tokens=8",
        "max_tokens=12",
        "ignore_eos=true",
    ]
    run(with_head(compose("generate", GenerateConfig, words)))
    assert "acceptance" in capsys.readouterr().out


def test_what_is_left_open_is_refused_with_the_way_out(tmp_path, tiny_target_folder):
    target = load_target(str(tiny_target_folder))
    source = SOURCES["safeailab-eagle3 of SpecForge"]
    with pytest.raises(ValueError, match="Convert with --norm-output vllm or --norm-output specforge"):
        load_head(source.write(tmp_path / "specforge"), target=target)
    config = source.config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    (tmp_path / "specforge" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Convert with --layer-ids hidden_states or --layer-ids outputs"):
        load_head(tmp_path / "specforge", target=target)
    with pytest.raises(ValueError, match=r"head=eagle3: .*holds a head of another kind; say head=medusa"):
        load_head(SOURCES["medusa"].write(tmp_path / "medusa"), name="eagle3", target=target)


@pytest.mark.parametrize(("name", "file"), [("safeailab-eagle", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt")])
def test_a_pickle_is_served_after_one_line_of_warning(tmp_path, tiny_target_folder, name, file, forked):
    source = SOURCES[name]
    folder = source.write(tmp_path / "in")
    (folder / source.file).unlink()
    torch.save(source.tensors(), folder / file)
    words = [f"model={tiny_target_folder}", f"head.path={folder}", "proposer.adaptive=false", "num_prompts=1"]
    words += ["prompt=Hello", "chat=false", "max_tokens=8", "ignore_eos=true", "model.device=cpu"]
    result = forked([ROOT / "infer" / "generate.py", *words])
    assert result.returncode == 0, result.stderr
    assert f"head {source.head} from {folder}" in result.stdout
    assert result.stderr.count("a pickle, of which tensors are read and nothing is run") == 1


def test_a_shared_embedding_is_the_targets(tmp_path, tiny_target_folder):
    target = load_target(str(tiny_target_folder))
    folder = SOURCES["safeailab-eagle3 sharing the embedding"].write(tmp_path / "in")
    assert torch.equal(load_head(folder, target=target).embed_tokens.weight, target.embedding_weight)
    config = json.loads((folder / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the head shares its target's; load it with a target"):
        load_head(folder)


def full_vocabulary_head(folder):
    """Write an EAGLE-3 head over the target's vocabulary that omits what it shares and names its layer layers.0."""
    source = SOURCES["safeailab-eagle3"]
    source.write(folder)
    config = {**source.config, "draft_vocab_size": 384, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    (folder / "config.json").write_text(json.dumps(config))
    shared = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")
    tensors = {key: value for key, value in source.tensors().items() if key not in shared}
    save_file({key.replace("midlayer.", "layers.0."): value for key, value in tensors.items()}, folder / source.file)
    return folder


def test_an_lm_head_that_is_not_there_is_the_targets(tmp_path, capsys, make_target_folder, tiny_target_folder):
    target = load_target(str(tiny_target_folder))
    folder = full_vocabulary_head(tmp_path / "in")
    with pytest.raises(ValueError, match=r"\.weight is not there, the head shares its target's; load it with a target"):
        load_head(folder)
    head = load_head(folder, target=target)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight)
    for rank in range(2):  # with a tensor parallel target, each rank holds a part
        part = load_target(str(tiny_target_folder), part=Part(rank, 2, lambda x, sizes, everywhere=True: x))
        assert torch.equal(load_head(folder, target=part).lm_head.weight, target.lm_head.weight)
    other = make_target_folder(tie_word_embeddings=True)  # an LM head that differs from the embedding it is tied to
    tensors = load_file(other / "model.safetensors") | {"lm_head.weight": target.lm_head.weight}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_head(folder, target=load_target(str(other))).lm_head.weight, target.lm_head.weight)
    words = ["--from", "auto", "--to", "headway", "--verifier", str(other), str(folder), str(tmp_path / "ours")]
    assert convert.main(words) == 0
    assert torch.equal(load_head(tmp_path / "ours").lm_head.weight, target.lm_head.weight)
    with pytest.raises(ValueError, match=r"(?s)not in the checkpoint, which shares the target's.*--verifier"):
        render(FORMATS["headway"], read_head(folder, target=target))
    words = ["model=demo", f"model.path={tiny_target_folder}", "model.device=cpu", "head=eagle3", f"head.path={folder}"]
    run(with_head(compose("generate", GenerateConfig, [*words, "compare=true", "num_prompts=1", "max_tokens=8"])))
    assert "acceptance" in capsys.readouterr().out


def test_a_short_context_is_stretched_to_the_targets_without_turning_anything(tmp_path, tiny_target_folder):
    target = load_target(str(tiny_target_folder))
    folder = SOURCES["safeailab-eagle3"].write(tmp_path / "in")
    config = load_head(folder, target=target).config
    assert config.layer.max_position_embeddings == target.config.max_position_embeddings == 512
    assert reaching(config, 100) is config
    medusa = load_head(SOURCES["medusa"].write(tmp_path / "medusa"), target=target).config
    assert reaching(medusa, 10**6) is medusa
    for rope in (
        RopeConfig(10000.0),
        RopeConfig(10000.0, "linear", (("factor", 4.0),)),
        RopeConfig(10000.0, "yarn", (("factor", 4.0),)),
        RopeConfig(10000.0, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 64.0))),
    ):
        short = replace(config, layer=replace(config.layer, rope=rope, max_position_embeddings=128))
        long = reaching(short, 4096).layer
        before, factor = rope_frequencies(rope, 8, 128)
        after, same_factor = rope_frequencies(long.rope, 8, long.max_position_embeddings)
        assert torch.equal(before, after)
        assert factor == same_factor
