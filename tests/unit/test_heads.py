"""Every head as a checkpoint: a saved head loads to equal logits; what does not fit is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.config import SCHEMAS
from infer.engine import Engine
from models.attention import CausalAttention
from models.config import LAST, UNNORMED
from models.heads import HEADS
from models.heads.config import NewHeadConfig
from models.heads.files import load_head, save_head
from models.heads.weights import initialize
from models.targets import load_target
from tests.heads import DRAFT_VOCAB, ONE_OF_EACH, VARIANTS, make_head
from train.objectives.draft_states import draft_states

H, V = 64, 384
FREE = {"torch_dtype", "speculators_version"}  # keys that need not be as they would be written today


def write(head, folder, target):
    folder.mkdir(exist_ok=True)
    metadata = {"verifier": target.path, "verifier_architecture": "LlamaForCausalLM", "speculative_tokens": 4}
    save_head(head, folder, provenance={"target_fingerprint": target.fingerprint}, **metadata)
    return folder


def draft_logits(head, target, steps):
    """Return the logits by depth for all positions of a text."""
    ids = torch.randint(1, V, (1, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        aux = target(ids, torch.arange(12)[None], CausalAttention(), aux_layers=head.config.aux_layers).aux
        return [head.logits(state, depth) for depth, state in enumerate(draft_states(head, ids, aux, steps))]


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_loads_again_to_equal_logits(tiny_target, tmp_path, variant):
    head = make_head(tiny_target, variant)
    folder = write(head, tmp_path / "head", tiny_target)
    reloaded = load_head(folder, name=VARIANTS[variant][0], target=tiny_target)
    assert reloaded.config == head.config
    assert torch.equal(reloaded.target_ids, head.target_ids)
    steps = min(3, head.config.max_depth or 3)
    before, after = (draft_logits(candidate, tiny_target, steps) for candidate in (head, reloaded))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    second = write(reloaded, tmp_path / "again", tiny_target)
    assert (second / "config.json").read_text() == (folder / "config.json").read_text()
    first, other = load_file(folder / "model.safetensors"), load_file(second / "model.safetensors")
    assert first.keys() == other.keys()
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_p_eagle_is_a_speculators_checkpoint(tiny_target, tmp_path):
    folder = write(make_head(tiny_target, "p-eagle"), tmp_path / "head", tiny_target)
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "peagle"
    assert (config["mask_token_id"], config["num_depths"], config["embed_requires_grad"]) == (0, 8, True)
    assert load_file(folder / "model.safetensors")["mask_hidden"].shape == (1, 1, 3 * H)


def test_medusa_maps_to_absolute_ids(tiny_target, tmp_path):
    head = make_head(tiny_target, "medusa, truncated")
    token_map = load_file(write(head, tmp_path / "head", tiny_target) / "model.safetensors")["token_map"]
    assert token_map.tolist() == sorted(token_map.tolist())
    assert int(token_map[-1]) > DRAFT_VOCAB
    assert torch.equal(head.target_ids, token_map)


def test_an_embedding_that_is_the_targets_is_not_stored(tiny_target, tmp_path):
    head = make_head(tiny_target, "eagle3, the target's embedding")
    folder = write(head, tmp_path / "head", tiny_target)
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")
    loaded = load_head(folder, target=tiny_target)
    assert loaded.embed_tokens is tiny_target.embed_tokens
    rounded = load_head(folder, target=tiny_target, dtype=torch.bfloat16).get_parameter("embed_tokens.weight")
    assert torch.equal(rounded, tiny_target.embedding_weight.bfloat16())
    assert tiny_target.embedding_weight.dtype == torch.float32
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is not there, the head shares its target's"):
        load_head(folder)


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_a_key_left_out_is_an_error(tiny_target, tmp_path, variant):
    """No reader's default decides. Which head it is, the file must say in any case."""
    folder = write(make_head(tiny_target, variant), tmp_path / "head", tiny_target)
    path, message = folder / "config.json", "is missing|of no head that we know|expected|must be|disagree"
    config = json.loads(path.read_text())
    for key in config.keys() - FREE:
        path.write_text(json.dumps({name: value for name, value in config.items() if name != key}))
        with pytest.raises(ValueError, match=message):
            load_head(folder)


@pytest.mark.parametrize(
    "variant",
    [*ONE_OF_EACH, "medusa, shared and truncated", "mlp, tied", "dspark, rnn"],
)
def test_tensors_are_strict(tiny_target, tmp_path, variant):
    folder = write(make_head(tiny_target, variant), tmp_path / "head", tiny_target)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in tensors.items():
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, path)
        if name in ("d2t", "t2d"):  # each follows from the other
            assert torch.equal(load_head(folder).get_buffer(name), value)
            continue
        with pytest.raises(ValueError, match=f"{name}: missing"):
            load_head(folder)
        save_file(tensors | {name: value[:-1].contiguous() if value.shape[0] > 1 else value[..., :-1]}, path)
        with pytest.raises(ValueError, match=r"expected \["):
            load_head(folder)
    save_file(tensors | {"lm_head.bias": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"lm_head\.bias: not part"):
        load_head(folder)


def test_another_kind_of_head_is_named(tiny_target, tmp_path):
    folder = write(make_head(tiny_target, "mlp"), tmp_path / "head", tiny_target)
    with pytest.raises(ValueError, match=r"head=medusa: .*holds a head of another kind; say head=mlp"):
        load_head(folder, name="medusa")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "hydra"}))
    with pytest.raises(ValueError, match=r"of no head that we know \(eagle, .*, dflash2, draft-model\)"):
        load_head(folder)


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_a_head_of_another_target_is_refused(tiny_target, make_target_folder, tmp_path, variant):
    folder = write(make_head(tiny_target, variant), tmp_path / "head", tiny_target)
    other = load_target(str(make_target_folder(seed=5)))
    with pytest.raises(ValueError, match=r"another target.*head\.allow_mismatch=true"):
        load_head(folder, target=other)
    load_head(folder, target=other, allow_mismatch=True)
    narrow = load_target(str(make_target_folder(hidden_size=32)))
    with pytest.raises(ValueError, match="target_hidden_size is 64, the target's is 32"):
        load_head(folder, target=narrow, allow_mismatch=True)


def test_the_target_lends_its_lm_head_and_embedding_without_a_copy(tiny_target_folder, tmp_path):
    target = load_target(str(tiny_target_folder))
    folder = write(make_head(target, "eagle, the target's embedding"), tmp_path / "head", target)
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")
    loaded = load_head(folder, target=target)
    assert loaded.borrowed.lm_head is target.lm_head
    engine = Engine(target, head=loaded)
    served = engine._head.module
    assert served.borrowed.lm_head is target.lm_head
    assert served.borrowed.embedding is target.embedding_weight
    assert served.borrowed.lm_head.packed is not None
    assert not any("borrowed" in name for name, _ in served.named_parameters())


def test_what_is_borrowed_follows_the_heads_dtype_and_stays_the_targets(tiny_target_folder):
    target = load_target(str(tiny_target_folder))
    head = make_head(target, "eagle")
    assert head.borrowed.lm_head is target.lm_head
    head.to(torch.bfloat16)
    assert head.borrowed.lm_head.weight.dtype == head.borrowed.embedding.dtype == torch.bfloat16
    assert target.lm_head.weight.dtype == torch.float32
    assert torch.equal(head.borrowed.lm_head.weight, target.lm_head.weight.bfloat16())


def test_the_last_hidden_state_is_what_the_lm_head_reads(tiny_target):
    ids, positions = torch.arange(9)[None], torch.arange(9)[None]
    with torch.no_grad():
        out = tiny_target(ids, positions, CausalAttention(), aux_layers=(LAST, 3, 8, UNNORMED))
        assert torch.equal(tiny_target.norm(out.aux[2]), out.hidden)
    assert out.aux[0] is out.hidden
    assert out.aux[2] is out.aux[3]
    with pytest.raises(ValueError, match=r"aux_layers: id 9 is outside -2\.\.8"):
        tiny_target(ids, positions, CausalAttention(), aux_layers=(9,))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("eagle3", {"num_heads": 3, "num_kv_heads": 2}, "head.num_heads=3: must be a multiple of head.num_kv_heads=2"),
        ("eagle3", {"hidden_size": 32, "embed_requires_grad": False}, "head.embed_requires_grad=false: needs a head"),
        ("p-eagle", {"mask_token_id": 384}, "head.mask_token_id=384: must be a token of the target's 384"),
        ("dflash", {"mask_token_id": 384}, "head.mask_token_id=384: must be a token of the target's 384"),
        ("dflash", {"aux_layers": [2, 9]}, "head.aux_layers=[2, 9]: ids of this target are 0..8"),
        ("dflash", {"num_layers": 7}, "head.aux_layers: 7 layers collide on a target of 8; name them"),
        ("dflash2", {"conv_group_size": 24}, "head.conv_group_size=24: must divide the hidden size, 64"),
        ("dflash2", {"selector_top_k": 385}, "head.selector_top_k=385: must be 1 to 384"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tiny_target, name, options, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        HEADS[name](**options).for_target(tiny_target.config)
    assert message in str(error.value)


def test_sizes_of_its_own_do_not_start_from_the_target(tiny_target):
    head = make_head(tiny_target, "eagle3, sizes of its own")
    assert head.embed_tokens.weight.requires_grad
    weights = []
    for from_target in (True, False):
        initialize(head, tiny_target, from_target=from_target)
        weights.append(torch.cat([parameter.flatten() for parameter in head.parameters()]))
    assert torch.equal(*weights)


def test_an_untrained_eagle3_head_is_the_targets_last_layer_on_its_features(tiny_target):
    """Without embeddings, and with the last layer's input as the last feature, it computes the target's own logits."""
    head = make_head(tiny_target, "eagle3", aux_layers=[2, 4, 7])
    for parameter in head.parameters():
        parameter.data.fill_(1.0)
    initialize(head, tiny_target, from_target=True)
    with torch.no_grad():
        head.fc.weight[:, :-H] = head.embed_tokens.weight[:] = 0.0
        ids = torch.randint(1, V, (1, 12), generator=torch.Generator().manual_seed(5))
        positions = torch.arange(12)[None]
        output = tiny_target(ids, positions, CausalAttention(), aux_layers=head.config.aux_layers)
        logits = head.logits(head.step(ids, head.fuse(output.aux), positions, CausalAttention(), 0), 0)
        assert torch.allclose(logits, tiny_target.logits(output.hidden)[..., head.target_ids], atol=1e-4)


def test_every_head_has_a_config_group():
    assert set(SCHEMAS["head"]) == {*HEADS, "none", "auto", "published"}
    assert all(issubclass(SCHEMAS["head"][name], NewHeadConfig) for name in HEADS)


def test_medusa_starts_as_the_lm_head_and_mlp_at_its_variances(tiny_target):
    medusa = make_head(tiny_target, "medusa, truncated")
    initialize(medusa, tiny_target, from_target=True)
    features = torch.randn(5, H)
    wanted = tiny_target.logits(features)[:, medusa.target_ids]
    for depth in range(5):
        with torch.no_grad():
            assert torch.allclose(medusa.logits(features, depth), wanted, atol=1e-5)
    mlp = HEADS["mlp"](inner_dim=2048, n_predict=3).make(tiny_target.config)
    initialize(mlp, tiny_target, from_target=False)
    assert mlp.emb[0].weight.std().item() == pytest.approx(2048**-0.5, rel=0.02)
    # variance: each state is sw * (previous state) + ew * (token), and half of the first one's is left after the last
    sw, ew = mlp.config.state_weight, mlp.config.embedding_weight
    assert sw ** (2 * 3) == pytest.approx(0.5)
    assert sw**2 + ew**2 * 2 / 2048 == pytest.approx(1.0)
