"""An imported head drafts in the engine what a plain implementation of its format's documented forward drafts.

The references are written from the formulas, in torch, over the tensors under their own names; they do
not use models/heads, keep no cache and recompute every row. The target's hidden states are transformers'.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.heads.base import Head
from models.heads.files import load_head
from models.targets import load_target
from models.targets.llama import LlamaTarget
from tests.formats.block_forward import block
from tests.formats.plain import Target, mlp, rms, rotate
from tests.formats.source import Source
from tests.formats.sources import SOURCES
from tests.formats.trained_sources import SLIDING

DRAFTS = 4


def attention(x: Tensor, tensors: dict[str, Tensor], prefix: str, theta: float, lowest: Tensor | None = None) -> Tensor:
    """Causal attention with 8 heads of dimension 8, and as many KV heads as there are or fewer.

    lowest: the first row that each row sees.
    """
    names = (f"{prefix}self_attn.{name}_proj" for name in "qkv")
    projected = (F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name in names)
    q, k, v = (rows.unflatten(-1, (-1, 8)) for rows in projected)
    if f"{prefix}self_attn.q_norm.weight" in tensors:
        q, k = (rms(rows, tensors[f"{prefix}self_attn.{name}_norm.weight"]) for rows, name in ((q, "q"), (k, "k")))
    q, k = rotate(q, theta), rotate(k, theta)
    k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], dim=1) for rows in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(8)
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    if lowest is not None:
        hidden |= torch.arange(len(x)) < lowest[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    return F.linear(mixed, tensors[f"{prefix}self_attn.o_proj.weight"])


def eagle(tensors: dict[str, Tensor], config: dict[str, Any], target: Target, ids: list[int], count: int) -> list[int]:
    """fc(cat(embedding, hidden)), one layer without input norm, no final norm; the output is the next hidden."""
    theta = config.get("rope_theta", 10000.0)
    tokens, states = ids[1:], list(target.hidden_states(ids)[-1][:-1])
    drafted: list[int] = []
    for _ in range(count):
        x = torch.cat([tensors["embed_tokens.weight"][tokens], torch.stack(states)], dim=-1)
        x = F.linear(x, tensors["fc.weight"], tensors.get("fc.bias"))
        x = x + attention(x, tensors, "layers.0.", theta)
        x = x + mlp(rms(x, tensors["layers.0.post_attention_layernorm.weight"]), tensors, "layers.0.")
        drafted.append(int((x[-1] @ target.lm_head.T).argmax()))
        tokens, states = [*tokens, drafted[-1]], [*states, x[-1]]
    return drafted


def mtp(tensors: dict[str, Tensor], config: dict[str, Any], target: Target, ids: list[int], count: int) -> list[int]:
    """A projection of both normed inputs, a layer, a norm. Step k is module k of n, over rows of all steps."""
    layer, n = config["transformer_layer_config"], config["num_nextn_predict_layers"]
    theta, less = layer["rope_theta"], float(config.get("centered_norms", False))
    tokens = ids[1:]
    if config.get("pre_norm"):
        states = list(target.before_norm(ids)[:-1])
    else:
        states = list(target.hidden_states(ids)[-1][:-1])
    drafted: list[int] = []
    for step in range(count):
        prefix = f"mtp_layers.{step % n}."

        def norm(x: Tensor, name: str, prefix: str = prefix) -> Tensor:
            return rms(x, tensors[f"{prefix}{name}.weight"] + less)

        embedded = target.embedding[tokens].clone()
        if config.get("zero_first"):
            embedded[0] = 0
        parts = [norm(embedded, "token_layernorm"), norm(torch.stack(states), "hidden_layernorm")]
        x = F.linear(
            torch.cat(parts[:: -1 if config.get("hidden_first") else 1], -1), tensors[f"{prefix}input_proj.weight"]
        )
        x = x + attention(norm(x, "input_layernorm"), tensors, prefix, theta)
        x = x + mlp(norm(x, "post_attention_layernorm"), tensors, prefix)
        normed = norm(x, "final_layernorm")
        drafted.append(int((normed[-1] @ target.lm_head.T).argmax()))
        recycled = normed if config.get("norm_recycled", True) else x
        tokens, states = [*tokens, drafted[-1]], [*states, recycled[-1]]
    return drafted


def eagle3_body(
    tensors: dict[str, Tensor], config: dict[str, Any], embedded: Tensor, state: Tensor, slots: int
) -> Tensor:
    """cat(norm(embedding), norm(state)) into the first layer, the state as residual; later layers are plain Llama's.

    Rows past the first `slots`, which are drafted from the last of these, see what it sees in its window.
    """
    layer = config.get("transformer_layer_config", config)
    theta = layer.get("rope_theta", 10000.0)
    row, kinds = torch.arange(len(embedded)), layer.get("layer_types") or [""] * layer["num_hidden_layers"]
    lowest = [row.clamp(max=slots - 1) + 1 - layer["sliding_window"] if kind == SLIDING else None for kind in kinds]
    first = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    normed = rms(state, tensors[f"{first}hidden_norm.weight"])
    x = torch.cat([rms(embedded, tensors[f"{first}input_layernorm.weight"]), normed], dim=-1)
    x = (normed if config.get("norm_before_residual") else state) + attention(x, tensors, first, theta, lowest[0])
    x = x + mlp(rms(x, tensors[f"{first}post_attention_layernorm.weight"]), tensors, first)
    for index in range(1, layer["num_hidden_layers"]):
        prefix = f"layers.{index}."
        x = x + attention(rms(x, tensors[f"{prefix}input_layernorm.weight"]), tensors, prefix, theta, lowest[index])
        x = x + mlp(rms(x, tensors[f"{prefix}post_attention_layernorm.weight"]), tensors, prefix)
    return x


def fuse(tensors: dict[str, Tensor], config: dict[str, Any], features: list[Tensor]) -> Tensor:
    if config.get("fc_norm"):
        features = [rms(feature, tensors[f"fc_norm.{index}.weight"]) for index, feature in enumerate(features)]
    fused = torch.cat(features, dim=-1)
    if config.get("norm_before_fc"):
        fused = rms(fused, tensors["input_norm.weight"])
    return F.linear(fused, tensors["fc.weight"])


def draft_token(tensors: dict[str, Tensor], hidden: Tensor) -> int:
    """Return the most likely token as a target id; d2t holds offsets."""
    draft_id = int(F.linear(rms(hidden, tensors["norm.weight"]), tensors["lm_head.weight"]).argmax())
    return draft_id + int(tensors["d2t"][draft_id])


def eagle3(tensors: dict[str, Tensor], config: dict[str, Any], target: Target, ids: list[int], count: int) -> list[int]:
    hidden = [*target.hidden_states(ids)[:-1], target.before_norm(ids)]
    embedding = tensors.get("embed_tokens.weight", target.embedding)
    # the inputs of layers 2, N//2 and N-3 of 8; SpecForge's 1, 3, 4 (outputs, counted from 0) are the same
    layers = config.get("eagle_aux_hidden_state_layer_ids") or (2, 4, 5)
    layers = layers if layers[0] == 2 else (2, 4, 5)
    tokens, states = ids[1:], list(fuse(tensors, config, [hidden[layer][:-1] for layer in layers]))
    drafted: list[int] = []
    for _ in range(count):
        x = eagle3_body(tensors, config, embedding[tokens], torch.stack(states), len(ids) - 1)[-1]
        drafted.append(draft_token(tensors, x))
        fed_back = rms(x, tensors["norm.weight"]) if config.get("norm_output") else x
        tokens, states = [*tokens, drafted[-1]], [*states, fed_back]
    return drafted


def p_eagle(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target, ids: list[int], count: int
) -> list[int]:
    """One forward: after the last real row come rows of the mask token, with mask_hidden in place of the features."""
    hidden = target.hidden_states(ids)
    real = fuse(tensors, config, [hidden[layer][:-1] for layer in (2, 4, 5)])
    mask = fuse(tensors, config, list(tensors["mask_hidden"][0, 0].chunk(3)))
    tokens = [*ids[1:], *[config["mask_token_id"]] * (count - 1)]
    states = torch.cat([real, mask.expand(count - 1, -1)])
    rows = eagle3_body(tensors, config, tensors["embed_tokens.weight"][tokens], states, len(tokens))
    return [draft_token(tensors, row) for row in rows[-count:]]


def medusa(tensors: dict[str, Tensor], config: dict[str, Any], target: Target, ids: list[int], count: int) -> list[int]:
    """Residual layers x + silu(W x + b), then the head's LM head; head h predicts the token h after the next."""
    hidden = target.hidden_states(ids)[-1][-2]  # the state that the last token was sampled from
    drafted = []
    for head in range(count):
        x = hidden
        for layer in range(config["medusa_num_layers"]):
            name = f"{head}.{layer}.linear"
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        drafted.append(int((tensors[f"{head}.{config['medusa_num_layers']}.weight"] @ x).argmax()))
    return drafted


def vllm_medusa(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target, ids: list[int], count: int
) -> list[int]:
    hidden = target.hidden_states(ids)[-1][-2]
    drafted = []
    for head in range(count):
        x, layer = hidden, 0
        while f"blocks.{head}.layers.{layer}.weight" in tensors:
            name = f"blocks.{head}.layers.{layer}"
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")))
            layer += 1
        lm_head = tensors["lm_head.weight" if config.get("original_lm_head") else f"lm_heads.{head}.weight"]
        index = int((lm_head @ x).argmax())
        drafted.append(int(tensors["token_map"][index]) if "token_map" in tensors else index)  # target ids, no offsets
    return drafted


def ibm_mlp(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target, ids: list[int], count: int
) -> list[int]:
    """The speculator's recurrence, with the weights that make state and embedding share the variance."""
    tensors = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    depth, inner = config["n_predict"], config["inner_dim"] or config["emb_dim"]
    state_weight = 0.5 ** (0.5 / depth)
    emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    state, token, drafted = target.hidden_states(ids)[-1][-2], ids[-1], []
    if config.get("scale_input"):
        state = state * torch.rsqrt(state.pow(2).mean() + 1e-6) / math.sqrt(2)
    for index in range(count):
        head = 0 if config.get("tie_weights") else index
        proj = min(index, 1) if config.get("tie_weights") else index
        z = tensors[f"proj.{proj}.weight"] @ state + emb_weight / state_weight * tensors[f"emb.{head}.weight"][token]
        normed = z * torch.rsqrt(z.pow(2).mean() + 1e-6) * tensors[f"ln.{head}.weight"] + tensors[f"ln.{head}.bias"]
        state = 0.5 * normed * (1 + torch.erf(normed / math.sqrt(2)))
        token = int((tensors[f"head.{head}.weight"] @ state).argmax())
        drafted.append(token)
    return drafted


def arctic(tensors: dict[str, Tensor], config: dict[str, Any], target: Target, ids: list[int], count: int) -> list[int]:
    """The LSTM whose gates read state and token; without gates the MLP speculator's recurrence, through stacks."""
    n, size = config["n_predict"], int(str(config["inner_dim"]).strip("[]").replace(",", ".").split(".")[0])
    state_weight = 0.5 ** (0.5 / n)
    alpha = math.sqrt((1 - state_weight**2) * size / 2) / state_weight
    state, cell, token, drafted = target.hidden_states(ids)[-1][-2], torch.zeros(size), ids[-1], []
    if config["scale_input"]:
        state = state * torch.rsqrt(state.pow(2).mean() + 1e-6) / math.sqrt(2)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + 1e-6) * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    def lstm(depth: int) -> tuple[Tensor, Tensor]:
        sums = {}
        for gate in ("forget", "input", "output", "cell"):
            table = tensors.get(f"{gate}_emb.0.weight", tensors["forget_emb.0.weight"])
            sums[gate] = tensors[f"{gate}_proj.{min(depth, 1)}.weight"] @ state + alpha * table[token]
        kept, entering = cell * sums["forget"].sigmoid(), gelu(norm(sums["cell"], "cell_ln.0"))
        new = kept + entering * sums["input"].sigmoid()
        return gelu(norm(new, "state_ln.0")) * sums["output"].sigmoid(), new

    def rnn(depth: int) -> Tensor:
        embedded = tensors[f"emb.{depth}.0.weight"][token]
        embedded = tensors[f"emb.{depth}.3.weight"] @ gelu(norm(embedded, f"emb.{depth}.1"))
        projected = tensors[f"proj.{depth}.0.weight"] @ state
        projected = tensors[f"proj.{depth}.3.weight"] @ gelu(norm(projected, f"proj.{depth}.1"))
        inner = gelu(norm(projected + alpha * embedded, f"ln.{depth}.0"))
        return gelu(norm(tensors[f"ln.{depth}.2.weight"] @ inner, f"ln.{depth}.3"))

    for depth in range(count):
        if config.get("method") == "sum_lstm":
            state, cell = lstm(depth)
        else:
            state = rnn(depth)
        token = int((tensors[f"head.{0 if config['tie_weights'] else depth}.weight"] @ state).argmax())
        drafted.append(token)
    return drafted


REFERENCES = {
    "safeailab-eagle": eagle,
    "safeailab-eagle3": eagle3,
    "speculators": eagle3,
    "speculators-mtp": mtp,
    "medusa": medusa,
    "vllm-medusa": vllm_medusa,
    "ibm-mlp": ibm_mlp,
    "arctic-lstm": arctic,
}

FORWARDS = {"p-eagle": p_eagle, "dflash": block, "dspark": block, "dflash2": block}  # heads with one forward for all


Rounds = list[tuple[list[int], list[int]]]  # of each step: the request's tokens, and what was drafted after them


def drafts_of_engine(served: LlamaTarget, head: Head) -> Rounds:
    """Return what the engine drafts with a head in a few steps."""
    count = min(DRAFTS, head.config.max_depth or DRAFTS)
    drafting = ProposerConfig(name="head", max_draft_tokens=count)
    engine = Engine(served, head=head, proposer="head", proposer_config=drafting, config=EngineConfig(prefill_chunk=16))
    rounds: Rounds = []
    proposer = engine._head
    assert proposer is not None
    propose = proposer.propose

    def record(requests, *rest):
        tree = propose(requests, *rest)
        if int(tree.length[0]) > 1:  # there are no drafts for the last tokens of an output
            rounds.append((list(requests[0].tokens), tree.token[0, 1 : int(tree.length[0])].tolist()))
        return tree

    proposer.propose = record
    prompt = torch.randint(1, 384, (21,), generator=torch.Generator().manual_seed(5)).tolist()
    engine.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    assert sum(len(drafted) == count for _, drafted in rounds) >= 5
    return rounds


def drafts_of_formulas(source: Source, target: Target, rounds: Rounds) -> list[list[int]]:
    """Return what is to be drafted in these steps with the tensors that `source` writes from seed 3."""
    reference = FORWARDS.get(source.head) or REFERENCES[source.form]
    tensors = source.tensors(3)
    return [reference(tensors, source.config, target, ids, len(drafted)) for ids, drafted in rounds]


@pytest.fixture(scope="module")
def target(tiny_target_folder):
    return Target(tiny_target_folder)


@pytest.mark.parametrize("name", SOURCES)
def test_the_engine_drafts_what_the_formulas_say(tmp_path, run, tiny_target_folder, target, name):
    source = SOURCES[name]
    folder = source.write(tmp_path / "in", seed=3)
    if source.options:  # the format leaves something open
        run(
            "--from",
            "auto",
            "--to",
            "headway",
            "--verifier",
            tiny_target_folder,
            *source.options,
            folder,
            tmp_path / "out",
        )
        folder = tmp_path / "out"
    served = load_target(str(tiny_target_folder))
    rounds = drafts_of_engine(served, load_head(folder, name=source.head, target=served))
    drafts = drafts_of_formulas(source, target, rounds)
    assert [drafted for _, drafted in rounds] == drafts
    assert len({tuple(drafted) for drafted in drafts}) > 3  # the drafts are not constant


@pytest.mark.parametrize("name", [name for name in SOURCES if not SOURCES[name].options])
def test_served_directly_or_converted_is_the_same(tmp_path, run, tiny_target_folder, name):
    source = SOURCES[name]
    folder = source.write(tmp_path / "in")
    run("--from", "auto", "--to", "headway", "--verifier", tiny_target_folder, folder, tmp_path / "out")
    served = load_target(str(tiny_target_folder))
    one, other = load_head(folder, target=served), load_head(tmp_path / "out", target=served)
    assert one.config == other.config
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())
