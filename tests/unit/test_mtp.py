"""MTP modules that a target ships: read by name, served without a path, trained further, and stitched back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.config import GenerateConfig, ProposerConfig
from infer.engine import Engine
from infer.generate import run
from infer.options.cli import compose
from infer.options.exported_heads import with_head
from infer.request import SamplingParams
from models.heads import HEADS
from models.heads.files import load_head, save_head
from models.heads.weights import checkpoint_tensors, initialize
from models.mixers.layers import GatedAttention
from models.targets import check_weights, empty_target, load_target
from models.weights import INDEX, LazyTensors, shard_files
from scripts import convert
from tests.heads import make_head
from tests.hub_cache import SHIPS_MODULE, TARGETS, put_beside_vision, ship_module, write_target
from tests.unit.quantized_writers import FP8, fp8_blocks, write

AROUND = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
STORED_AS = {  # prefix of module i of a target of 8 layers, what AROUND is called there, copies of the target's tensors
    "deepseek": (
        "model.layers.{}.",
        ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
        {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"},
    ),
    "mimo": ("model.mtp_layers.{}.", AROUND, {}),
}
STORED_AS["deepseek v3"] = STORED_AS["deepseek"]
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 7,
}  # fmt: skip


@pytest.fixture(scope="module", params=STORED_AS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def plain_folder(family, tiny_target_folder, tmp_path_factory):
    """A target of 8 layers without modules: Llama's with DeepSeek's names; MiMo's, which is Qwen2's; DeepSeek's own."""
    if family == "deepseek":
        return tiny_target_folder
    from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen2Config

    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    kind, more = (Qwen2Config, {}) if family == "mimo" else (DeepseekV3Config, LATENT)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = kind(**sizes | more, initializer_range=0.1, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(config)
    folder = tmp_path_factory.mktemp("plain")
    model.save_pretrained(folder)
    for path in tiny_target_folder.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def ship(family, plain_folder, tmp_path_factory):
    """`ship(modules)`: a copy of the target with random modules, in two shards, and these by speculators' names."""
    prefix, around, copies = STORED_AS[family]

    def make(modules: int = 1) -> tuple[Path, dict[str, torch.Tensor]]:
        target = load_target(str(plain_folder))
        head = make_head(target, "mtp", num_modules=modules, hidden_first=family == "mimo")
        tensors, ours = load_file(plain_folder / "model.safetensors"), checkpoint_tensors(head)
        renamed, theirs = dict(zip(AROUND, around, strict=True)), {}
        for name, value in ours.items():
            _, index, rest = name.split(".", 2)
            module, _, kind = rest.rpartition(".")
            place = int(index) + (0 if family == "mimo" else 8)
            theirs[f"{prefix.format(place)}{renamed.get(module, module)}.{kind}"] = value
            theirs |= {prefix.format(place) + copy: tensors[name].clone() for copy, name in copies.items()}
        folder = tmp_path_factory.mktemp("shipped")
        for path in plain_folder.iterdir():
            if path.name != "model.safetensors":
                (folder / path.name).write_bytes(path.read_bytes())
        config = json.loads((plain_folder / "config.json").read_text()) | {"num_nextn_predict_layers": modules}
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"} if family == "mimo" else {}
        (folder / "config.json").write_text(json.dumps(config))
        last = sorted(tensors)[-1]
        shards = {"model-1.safetensors": tensors, "model-2.safetensors": {**theirs, last: tensors.pop(last)}}
        for name, part in shards.items():
            save_file(part, folder / name, metadata={"format": "pt"})
        weight_map = {name: file for file, part in shards.items() for name in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder, ours

    return make


def test_a_target_loads_without_its_modules(ship, plain_folder):
    folder, _ = ship(2)
    check_weights(folder, empty_target(folder))
    target, plain = load_target(str(folder)), load_target(str(plain_folder))
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), plain.parameters(), strict=True))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with pytest.raises(ValueError, match="not part of this architecture"):
        load_target(str(folder))


@pytest.mark.parametrize("modules", [1, 2])
def test_the_modules_are_read_from_the_targets_shards(ship, family, modules):
    folder, ours = ship(modules)
    head = load_head(folder, name="mtp", target=load_target(str(folder)))
    assert (head.config.layer.num_layers, head.config.hidden_first) == (modules, family == "mimo")
    read = checkpoint_tensors(head)
    assert read.keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in read.items())


def test_a_target_with_modules_needs_no_path(ship, capsys):
    folder, _ = ship()
    words = [f"model={folder}", "model.device=cpu", "head=mtp", "proposer=head", "compare=true", "prompt=Hello"]
    words += ["chat=false", "max_tokens=12", "ignore_eos=true"]
    run(with_head(compose("generate", GenerateConfig, words)))
    assert f"head mtp from {folder}" in (text := capsys.readouterr().out)
    assert "acceptance" in text


def test_auto_takes_the_modules_of_a_target_for_which_there_is_no_other_head(ship, tiny_head_folder, tmp_path, capsys):
    folder, _ = ship()
    words = [f"model={folder}", "model.device=cpu", f"output_dir={tmp_path}", "head=auto", "prompt=Hello", "chat=false"]
    words += ["max_tokens=12", "ignore_eos=true"]
    config = with_head(compose("generate", GenerateConfig, words))
    assert (config.head.name, config.head.path) == ("mtp", str(folder))
    run(config)
    assert f"head mtp from {folder}, the target's own modules, up to" in capsys.readouterr().out
    exported = shutil.copytree(tiny_head_folder, tmp_path / "heads" / config.model.name / "eagle3")
    config = with_head(compose("generate", GenerateConfig, words))
    assert (config.head.name, config.head.path) == ("eagle3", str(exported))


def test_auto_takes_no_modules_that_the_files_of_a_target_lack(tiny_target_folder, tmp_path):
    folder = tmp_path / "stripped"
    shutil.copytree(tiny_target_folder, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    words = [f"model={folder}", f"output_dir={tmp_path}"]
    for name in ("auto", "mtp"):
        assert with_head(compose("generate", GenerateConfig, [*words, f"head={name}"])).head.path is None


def test_a_target_without_modules_has_no_head_mtp(tiny_target_folder):
    words = [f"model={tiny_target_folder}", "head=mtp", "proposer=head"]
    config = with_head(compose("generate", GenerateConfig, words))
    assert config.head.path is None
    with pytest.raises(ValueError, match="no exported head"):
        Engine.load(config.model, head=config.head, proposer="head")


def test_training_goes_on_from_the_modules_that_the_target_ships(ship):
    folder, ours = ship()
    target = load_target(str(folder))
    head = HEADS["mtp"]().make(target.config)
    initialize(head, target, from_target=True)
    assert all(torch.equal(value, ours[name]) for name, value in checkpoint_tensors(head).items())
    initialize(head, target, from_target=False)
    assert not torch.equal(
        checkpoint_tensors(head)["mtp_layers.0.input_proj.weight"], ours["mtp_layers.0.input_proj.weight"]
    )
    two = HEADS["mtp"](num_modules=2).make(target.config)
    with pytest.raises(ValueError, match=r"mtp_layers\.1\..*: missing"):
        initialize(two, target, from_target=True)


def stitch(folder, head, out, *more):
    words = ["--from", "auto", "--stitch", "--verifier", folder, *more, head, out]
    return convert.main([str(word) for word in words])


def export(head, target, folder):
    folder.mkdir()
    facts = {"verifier": target.path, "verifier_architecture": target.config.architecture, "speculative_tokens": 3}
    save_head(head, folder, provenance={"target_fingerprint": target.fingerprint}, **facts)
    return folder


def test_a_trained_head_is_stitched_into_a_copy_of_its_target(ship, tmp_path, capsys):
    folder, ours = ship()
    target = load_target(str(folder))
    head = load_head(folder, name="mtp", target=target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.25
    trained, out = checkpoint_tensors(head), tmp_path / "out"
    assert stitch(folder, export(head, target, tmp_path / "head"), out) == 0
    assert "read back and equal" in capsys.readouterr().out
    before, after = LazyTensors(shard_files(folder)), LazyTensors(shard_files(out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert (before.keys(), len(changed)) == (after.keys(), len(ours))
    for name in ("model-1.safetensors", "model-2.safetensors"):  # hard-linked, and written anew
        assert (folder / name).samefile(out / name) == (name == "model-1.safetensors")
    for name in ("config.json", INDEX):
        assert (folder / name).read_bytes() == (out / name).read_bytes()
        assert not (folder / name).samefile(out / name)
    stitched = load_target(str(out))
    again = load_head(out, name="mtp", target=stitched)
    assert all(torch.equal(value, trained[name]) for name, value in checkpoint_tensors(again).items())
    prompt = list(range(30, 60))
    drafts = ProposerConfig(name="head", max_draft_tokens=3)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    answers = [
        Engine(load_target(str(place)), head=module, proposer=name, proposer_config=drafts).generate([prompt], params)
        for place, module, name in ((folder, None, "none"), (out, again, "head"))
    ]
    assert answers[0][0].token_ids == answers[1][0].token_ids


def test_modules_go_out_in_the_neutral_layout_and_back_bit_for_bit(ship, tmp_path):
    folder, ours = ship(2)
    neutral, out = tmp_path / "neutral", tmp_path / "out"
    words = ["--from", "native-mtp", "--to", "speculators-mtp", "--verifier", folder, folder, neutral]
    assert convert.main([str(word) for word in words]) == 0
    assert load_file(neutral / "model.safetensors").keys() == ours.keys()
    assert stitch(folder, neutral, out) == 0
    assert {path.name for path in folder.iterdir()} == {path.name for path in out.iterdir()}
    assert all(path.read_bytes() == (out / path.name).read_bytes() for path in folder.iterdir())


def test_modules_in_blocks_of_fp8_are_read_widened_and_not_stitched(tmp_path, capsys):
    kind, changes, _ = TARGETS["deepseek_v3"]
    ship_module(write_target(tmp_path / "target", kind, changes), SHIPS_MODULE["deepseek_v3"])
    write(tmp_path / "target", FP8, fp8_blocks(48, 16), tmp_path / "fp8", tmp_path / "plain", ("eh_proj",))
    fp8, plain = (load_head(tmp_path / name, target=load_target(str(tmp_path / name))) for name in ("fp8", "plain"))
    for (name, parameter), reference in zip(fp8.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, reference), name
    assert stitch(tmp_path / "fp8", tmp_path / "plain", tmp_path / "out") == 2
    assert "is quantized, and its modules with it" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "reads_images"), [("qwen3_5", True), ("qwen3_next", False)])
def test_the_module_of_a_hybrid_target_is_served_trained_and_stitched_back(family, reads_images, tmp_path):
    """It is the family's attention layer, with an output gate, and with experts where the target has some."""
    folder, (kind, changes, _) = tmp_path / "target", TARGETS[family]
    ship_module(write_target(folder, kind, changes), SHIPS_MODULE[family])
    if reads_images:
        put_beside_vision(folder)
    check_weights(folder, empty_target(folder))
    target, stored = load_target(str(folder)), load_file(folder / "model.safetensors")
    head = load_head(folder, name="mtp", target=target)
    assert_stacked_experts_are_read_and_written(folder, head, tmp_path / "stacked")
    flags = head.config.hidden_first, head.config.pre_norm, head.config.norm_recycled, head.config.zero_first
    assert flags == (False, False, True, False)
    assert isinstance(head.mtp_layers[0].self_attn, GatedAttention)
    assert head.config.layer.centered_norms
    tensors = checkpoint_tensors(head)
    shipped = {name: value for name, value in stored.items() if name.startswith("mtp.")}
    assert len(tensors) == len(shipped)
    for ours, theirs in (("input_proj", "fc"), ("self_attn.q_proj", "layers.0.self_attn.q_proj")):
        assert torch.equal(tensors[f"mtp_layers.0.{ours}.weight"], shipped[f"mtp.{theirs}.weight"])
    words = [f"model={folder}", "head=mtp"]
    assert with_head(compose("generate", GenerateConfig, words)).head.path == str(folder)
    exported = load_head(export(head, target, tmp_path / "head"), target=target)
    assert exported.config == head.config
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.05
    (out := tmp_path / "changed").parent.mkdir(exist_ok=True)
    assert stitch(folder, export(head, target, out), tmp_path / "out") == 0
    again = load_head(tmp_path / "out", name="mtp", target=load_target(str(tmp_path / "out")))
    for name, value in checkpoint_tensors(again).items():
        assert torch.equal(value, checkpoint_tensors(head)[name]), name
    drafts = ProposerConfig(name="head", max_draft_tokens=3)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    answers = [
        Engine(load_target(str(folder)), head=module, proposer=name, proposer_config=drafts).generate(
            [list(range(30, 60)), [5]], params
        )
        for module, name in ((None, "none"), (exported, "head"))
    ]
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    assert sum(a.stats.drafted for a in answers[1]) > 0


def assert_stacked_experts_are_read_and_written(folder, head, place):
    """Some files have all experts of the module in one tensor each, as transformers has them."""
    tensors, experts = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.startswith("mtp.") and ".experts." in name]:
        prefix, _, rest = name.partition(".experts.")
        index, kind, _ = rest.split(".")
        experts.setdefault(prefix, {})[kind, int(index)] = tensors.pop(name)
    for prefix, parts in experts.items():
        pairs = [torch.cat([parts["gate_proj", i], parts["up_proj", i]]) for i in range(len(parts) // 3)]
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(pairs)
        tensors[f"{prefix}.experts.down_proj"] = torch.stack([parts["down_proj", i] for i in range(len(pairs))])
    shutil.copytree(folder, place)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    target = load_target(str(place))
    again = load_head(place, name="mtp", target=target)
    assert all(torch.equal(value, checkpoint_tensors(head)[name]) for name, value in checkpoint_tensors(again).items())
    with torch.no_grad():
        for parameter in again.parameters():
            parameter -= 0.05
    exported, out = export(again, target, place.with_name("stacked-head")), place.with_name("stacked-out")
    assert stitch(place, exported, out) == 0
    assert load_file(out / "model.safetensors").keys() == tensors.keys()
    stitched = checkpoint_tensors(load_head(out, name="mtp", target=load_target(str(out))))
    assert all(torch.equal(value, stitched[name]) for name, value in checkpoint_tensors(again).items())


def test_without_the_modules_that_its_config_states_a_target_lends_its_last_layer(tmp_path):
    folder = write_target(tmp_path / "target", *TARGETS["deepseek_v3"][:2])
    target = load_target(str(folder))
    assert target.config.mtp_modules == 1  # DeepSeek's default
    initialize(head := HEADS["mtp"]().make(target.config), target, from_target=True)
    tensors, last = checkpoint_tensors(head), load_file(folder / "model.safetensors")
    copied = [name for name in tensors if last.get(name.replace("mtp_layers.0", "model.layers.1")) is not None]
    assert len(copied) == len(tensors) - 4
    for name in copied:
        assert torch.equal(tensors[name], last[name.replace("mtp_layers.0", "model.layers.1")]), name


def test_what_cannot_be_stitched_is_named(ship, tiny_target_folder, tmp_path, capsys):
    folder, _ = ship()
    target = load_target(str(folder))
    two = export(make_head(target, "mtp", num_modules=2), target, tmp_path / "two")
    plain = load_target(str(tiny_target_folder))
    fresh = export(make_head(plain, "mtp"), plain, tmp_path / "fresh")
    eagle = export(make_head(target, "eagle"), target, tmp_path / "eagle")
    for target_folder, head, message in (
        (folder, two, "differ in mtp_layers.1."),
        (tiny_target_folder, fresh, "ships no MTP modules"),
        (folder, eagle, "needs a head of MTP modules"),
        ("some/target.gguf", two, "no such file"),
    ):
        assert stitch(target_folder, head, tmp_path / "out") == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert convert.main(["--from", "auto", "--stitch", str(two), str(tmp_path / "out")]) == 2
    assert "--verifier" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("architecture", "name", "message"),
    [
        (
            "Glm4MoeForCausalLM",
            "model.layers.8.mlp.experts.0.up_proj.weight",
            "architectures='Glm4MoeForCausalLM': one of",
        ),
        ("Glm4ForCausalLM", "model.layers.8.enorm.weight", "architectures='Glm4ForCausalLM': one of"),
    ],
)
def test_modules_of_other_layers_are_refused_by_name(tmp_path, architecture, name, message):
    config = {"architectures": [architecture], "num_hidden_layers": 8, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, name="mtp")
