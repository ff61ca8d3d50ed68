"""Published heads draft what their formulas say, and `head=published` names the ones that are known."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from infer.config import GenerateConfig, PublishedHeadConfig
from infer.engine.loading import read_names
from infer.options.cli import CONF, compose
from infer.options.exported_heads import choose_head, kind_of, published_head, with_head
from infer.options.model_names import read_model
from models.formats.conversion import detect, read_checkpoint
from models.heads.files import load_head
from models.hub import is_hub_id
from models.targets import load_target
from tests.formats.plain import Target
from tests.formats.published import PUBLISHED
from tests.formats.source import H, V
from tests.formats.test_reference_forward import drafts_of_engine, drafts_of_formulas

LISTED: dict[str, list[str]] = yaml.safe_load((Path(CONF) / "head" / "published.yaml").read_text())["heads"]
MIXTRAL = "yuhuili/EAGLE-mixtral-instruct-8x7B"


@pytest.fixture(scope="module")
def target(tiny_target_folder):
    return Target(tiny_target_folder)


@pytest.fixture(scope="module")
def mixtral_folder(tmp_path_factory):
    import transformers

    torch.manual_seed(5)
    config = transformers.MixtralConfig(
        vocab_size=V, hidden_size=H, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, num_local_experts=4, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mixtral")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_head_drafts_what_its_formulas_say(tmp_path, tiny_target_folder, mixtral_folder, target, name):
    source, target_folder = PUBLISHED[name], tiny_target_folder
    if name == MIXTRAL:
        target_folder, target = mixtral_folder, Target(mixtral_folder)
    folder = source.write(tmp_path / "in", seed=3)
    assert detect(folder).name == source.form
    assert kind_of(folder) == source.head
    served = load_target(str(target_folder))
    rounds = drafts_of_engine(served, load_head(folder, name=source.head, target=served))
    assert [drafted for _, drafted in rounds] == drafts_of_formulas(source, target, rounds)
    assert len({tuple(drafted) for _, drafted in rounds}) > 3  # the drafts are not constant


def test_granites_accelerator_drafts_for_its_own_family(tmp_path):
    source = PUBLISHED["ibm-granite/granite-20b-code-instruct-accelerator"]
    config = transformers.GPTBigCodeConfig(
        vocab_size=V, n_embd=H, n_layer=3, n_head=4, n_positions=512,
        initializer_range=0.2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    served = load_target(str(tmp_path / "target"))
    head = load_head(source.write(tmp_path / "head", seed=3), name="mlp", target=served)
    rounds = drafts_of_engine(served, head)
    assert [drafted for _, drafted in rounds] == drafts_of_formulas(source, Target(tmp_path / "target"), rounds)


def test_the_head_for_mixtral_is_for_no_other_target(tmp_path, tiny_target_folder):
    folder = PUBLISHED[MIXTRAL].write(tmp_path / "in")
    with pytest.raises(ValueError, match="a head for Mixtral, not for LlamaForCausalLM"):
        load_head(folder, target=load_target(str(tiny_target_folder)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_notes_are_few_and_name_no_key_that_says_nothing(tmp_path, name):
    folder = PUBLISHED[name].write(tmp_path / "in")
    if PUBLISHED[name].head == "eagle3":
        return
    notes = read_checkpoint(detect(folder), folder).notes
    assert len(notes) <= 6
    assert not any("use_cache" in note or "pad_token_id" in note for note in notes)


def test_all_that_is_listed_is_a_hub_id_of_one_target():
    ids = [name for names in LISTED.values() for name in names]
    assert all(is_hub_id(name) for name in (*LISTED, *ids))
    assert max(Counter(ids).values()) == 1
    assert PUBLISHED.keys() <= set(ids)
    documented = Counter(name.partition("/")[0] for name in ids)
    assert documented["ibm-ai-platform"] + documented["ibm-granite"] == 9
    assert sum("medusa" in name for name in ids) == 4
    eagle = [name for name in ids if name.startswith("yuhuili/EAGLE-")]
    assert len(set(eagle) - {"yuhuili/EAGLE-LLaMA3.1-Instruct-8B"}) == 11
    for owner in ("RedHatAI", "lmsys", "z-lab", "nvidia"):
        assert documented[owner] >= 3


def head_for(model: str) -> str:
    """Return the hub id that head=published stands for, for a model that nobody downloads."""
    config = compose("generate", GenerateConfig, [f"model={model}", "head=published", "prompt=a"])
    assert isinstance(config.head, PublishedHeadConfig)
    return published_head(config.head.heads, config.model)


@pytest.mark.parametrize("option", sorted(path.stem for path in (Path(CONF) / "model").glob("*.yaml")))
def test_each_configured_model_has_one_or_an_error_that_lists_the_others(option):
    model = read_model(option)
    if model.path in LISTED:
        assert head_for(option) == head_for(model.path) == LISTED[model.path][0]
        return
    with pytest.raises(
        ValueError, match=rf"head=published: no head is known for model={option}; targets with one: "
    ) as error:
        head_for(option)
    assert all(name in str(error.value) for name in LISTED)


def test_a_copy_of_a_target_has_its_head_by_name(tmp_path):
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (tmp_path / "Qwen3-8B-Q4_K_M.gguf").write_bytes(b"GGUF")
    copies = (
        str(folder),
        str(tmp_path / "Qwen3-8B-Q4_K_M.gguf"),
        "someone/qwen3-8b",
        "Qwen/Qwen3-8B-AWQ",
        "x/Qwen3-8B-quantized.w4a16",
    )
    assert {head_for(model) for model in copies} == {LISTED["Qwen/Qwen3-8B"][0]}
    with pytest.raises(ValueError, match="no head is known for model=qwen3-8b-base"):
        head_for("Qwen/Qwen3-8B-Base")


def test_head_published_is_a_head_from_the_hub(tmp_path, tiny_target_folder):
    """With head.path it is that head, which needs no download here."""
    folder = PUBLISHED["ibm-granite/granite-7b-instruct-accelerator"].write(tmp_path / "in")
    words = [f"model={tiny_target_folder}", "head=published", f"head.path={folder}", "prompt=a"]
    config = with_head(compose("generate", GenerateConfig, words))
    assert (type(config.head).__name__, config.head.name, config.head.path) == ("HeadConfig", "mlp", str(folder))
    _, head, _ = read_names(str(tiny_target_folder), config.head, "auto", "outputs")
    assert head == config.head
    with pytest.raises(ValueError, match="head=published: no head is known for model="):
        read_names(str(tiny_target_folder), "published", "auto", "outputs")
    assert choose_head(config.head, "outputs", config.model) is config.head


def test_a_pickle_of_a_published_head_holds_the_same_tensors(tmp_path):
    source = PUBLISHED["yuhuili/EAGLE-Vicuna-7B-v1.3"]
    folder = source.write(tmp_path / "in")
    tensors = read_checkpoint(detect(folder), folder).tensors
    assert all(torch.equal(tensors[ours], source.tensors()[theirs]) for theirs, ours, _ in source.rows)
