"""scripts/prove.py as a user runs it: what it shows of a sound engine, and how it finds faults that are planted."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.engine import Engine
from infer.kvcache.pool import KVPool
from infer.options.cli import compose
from infer.options.exported_heads import with_head
from infer.request import SamplingParams
from infer.sampling import choose
from kernels.linear import PackedLinear
from models.demo.corpus import held_out_prompts
from models.heads.files import save_head
from models.targets import load_target
from models.tokenizer import Tokenizer
from scripts import prove
from scripts.proof.causes import Figures, why_slower
from scripts.proof.config import ProveConfig
from scripts.proof.matrix import DRAFTS, SAMPLINGS, cover
from scripts.proof.situations import SITUATIONS
from tests.chats import FOLDER
from tests.conftest import VOCAB_SIZE
from tests.heads import make_head, memorise
from train import evaluation
from train.data.sequences import Sequences

CELLS, PROMPTS = 10, 4  # of about thirty cells: every value of every axis

Proof = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def models(make_target_folder, once) -> list[str]:
    """Return overrides: a small random target, and a head that has memorised its answers to the prompts."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = make_target_folder(seed=4, num_hidden_layers=3, max_position_embeddings=1024, **sizes)
    shutil.copy(FOLDER / "qwen2_5.jinja", folder / "chat_template.jinja")  # it calls tools

    def train(place: Path) -> None:
        target = load_target(str(folder))
        engine, prompts = Engine(load_target(str(folder)), proposer="none"), held_out_prompts(Tokenizer.load(folder), 3)
        completions = engine.generate(prompts, SamplingParams(max_tokens=64))
        head = make_head(target, "mtp", seed=3)
        memorise(head, engine.target, Sequences.of_completions(completions), 4, rounds=40)
        stated = {"verifier": target.path, "verifier_architecture": "LlamaForCausalLM", "speculative_tokens": 4}
        save_head(head, place, provenance={"target_fingerprint": target.fingerprint}, **stated)

    return [
        "model=demo",
        f"model.path={folder}",
        "model.device=cpu",
        "head=mtp",
        f"head.path={once('prove', train)}",
    ]


@pytest.fixture(scope="module")
def draft_model(models, tmp_path_factory) -> str:
    """Return the override for a draft model that is often right: the target, with noise on its LM head."""
    folder = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(models[1].partition("=")[2], folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] += 0.05 * torch.randn(VOCAB_SIZE, 32, generator=torch.Generator().manual_seed(0))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return f"proposer.draft_model={folder}"


@pytest.fixture
def proof(models, tmp_path, monkeypatch) -> Proof:
    """Return `proof(*overrides)`: runs the command; returns its exit code and the certificate."""
    words = [*models, f"output_dir={tmp_path}", f"num_prompts={PROMPTS}", "requests=[1,8]", f"cells={CELLS}"]

    def call(*overrides: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr("sys.argv", ["scripts/prove.py", *words, *overrides])
        code = 0
        try:
            prove.run(with_head(compose("prove", ProveConfig, sys.argv[1:])))
        except SystemExit as stop:
            code = int(stop.code or 0)
        file = tmp_path / "proofs" / "demo" / "certificate.json"
        return code, json.loads(file.read_text()) if file.exists() else {}

    return call


def test_a_sound_engine(proof: Proof, draft_model: str, capsys, tmp_path) -> None:
    code, certificate = proof(draft_model)
    assert code == 0, certificate["faults"]
    cells = certificate["cells"]
    assert len(cells) == CELLS
    assert certificate["complete"]
    assert certificate["counted"]["different"] == 0
    assert certificate["counted"]["equal"] >= CELLS - 3  # a random target copies little when it is sampled
    for cell in cells:
        counts = cell["counts"]
        if cell["result"] == "equal":
            assert counts["accepted"] > 0
            assert counts["rejected"] > 0
            assert all(counts[name] > 0 for name in SITUATIONS[cell["situation"]].shows)
            assert cell["drafts"] == "combined" or (counts["siblings"] > 0) == cell["drafts"].endswith("tree")
    assert {cell["drafts"] for cell in cells} == set(DRAFTS)
    assert {cell["situation"] for cell in cells} == set(SITUATIONS)
    assert "draft model, tree" in {cell["drafts"] for cell in cells if cell["result"] == "equal"}
    (calls,) = (cell["counts"] for cell in cells if cell["situation"] == "tools")
    assert min(calls["constrained"], calls["accepted"]) > 0  # a random target calls alike, whoever drafts
    assert not set(certificate["not_covered"]) & {*DRAFTS, *SITUATIONS}
    assert [(each["requests"], each["drafts"]) for each in certificate["speed"]] == [
        (count, name) for count in (1, 8) for name in ("auto", "chain", "suffix")
    ]
    assert all(each["identical"] for each in certificate["speed"])
    chain = certificate["acceptance"]["chain"]
    assert chain["parity"]["simulated"] == chain["parity"]["engine"] > 2
    assert len(chain["by_prompt"]) == certificate["prompts"]["count"] == PROMPTS
    assert set(certificate["target"]["files"]) >= {"config.json", "model.safetensors"}
    page = (tmp_path / "proofs" / "demo" / "certificate.html").read_text()
    assert certificate["verdict"] in page
    assert certificate["prompts"]["sha256"] in page
    assert not re.search(r"src=|href=|url\(|@import", page)
    assert capsys.readouterr().out.splitlines()[-2] == certificate["verdict"]


def other_order(monkeypatch) -> None:
    """The product of the LM head sums eight rows from the last input to the first."""
    exact = PackedLinear.__call__

    def sums(self, x):
        if self.out_features != VOCAB_SIZE or x.reshape(-1, self.in_features).shape[0] != 8:
            return exact(self, x)
        return x.flip(-1) @ self.unpacked_weight().flip(-1).T

    monkeypatch.setattr(PackedLinear, "__call__", sums)
    monkeypatch.setattr("infer.engine.engine.probe_exactness", lambda *parts: None)  # which finds this at start


def stale_page(monkeypatch) -> None:
    """The last page that a prefix hit adopts holds what another page held."""
    adopt = KVPool.adopt

    def adopts(self, request, pages):
        adopt(self, request, pages)
        if len(pages) > 1:
            self.layers.copy(pages[0] * self.page_size, pages[-1] * self.page_size, self.page_size)

    monkeypatch.setattr(KVPool, "adopt", adopts)


def noise_by_place(monkeypatch) -> None:
    """The noise of a request's samples depends on its place in the batch."""
    exact = choose.sampled_parameters

    def parameters(requests, device, counts, *, drafting):
        keyed = [replace(request, seed=request.seed + place) for place, request in enumerate(requests)]
        return exact(keyed, device, counts, drafting=drafting)

    monkeypatch.setattr(choose, "sampled_parameters", parameters)


def penalty_forgotten(monkeypatch) -> None:
    """Penalties do not count the drafted tokens before a drafted row."""
    paths = choose.drafted_paths
    monkeypatch.setattr(choose, "drafted_paths", lambda tree, row, count: [[] for _ in paths(tree, row, count)])


FAULTS = {
    "other order": (other_order, ()),
    "stale page": (stale_page, ()),
    "noise by place": (noise_by_place, ()),
    "penalty forgotten": (penalty_forgotten, ("penalties", "structured")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_shrunk(proof: Proof, monkeypatch, tmp_path, name: str) -> None:
    plant, situations = FAULTS[name]
    plant(monkeypatch)
    monkeypatch.setattr(prove, "MOST_FAULTS", 1)
    code, certificate = proof()
    assert code == 1
    assert certificate["verdict"].startswith(f"{len(certificate['faults'])} difference")
    (cell,) = (cell for cell in certificate["cells"] if cell["result"] == "different")
    assert not situations or cell["situation"] in situations
    assert cell["sampling"] == "seeded" or name != "noise by place"
    assert cell["counts"]["cached"] > 0 or name != "stale page"
    words = shlex.split(cell["repeat"])
    assert words[:2] == ["python", "scripts/prove.py"]
    case = json.loads((tmp_path / words[-1].partition("=")[2]).read_text())
    sizes = [len(each["prompt"]) + each["params"]["max_tokens"] for each in case["requests"]]
    assert sum(sizes) < 8 * (64 + 40) / 3
    assert proof(words[-1])[0] == 1
    monkeypatch.undo()


def test_a_head_that_sees_a_token_too_many(proof: Proof, monkeypatch) -> None:
    """It changes no token, since drafts never do; but training then reports what serving does not have."""
    states = evaluation.draft_states

    def leaking(head, ids, aux, *rest):
        return states(head, ids.roll(-1, 1), tuple(each.roll(-1, 1) for each in aux), *rest)

    monkeypatch.setattr(evaluation, "draft_states", leaking)
    code, certificate = proof("cells=1")
    assert code == 1
    assert certificate["counted"]["different"] == 0
    (fault,) = certificate["faults"]
    assert re.fullmatch(r"chain: τ is [\d.]+ in serving and [\d.]+ as training simulates it", fault)


def test_a_target_without_a_head(proof: Proof) -> None:
    """`head=auto`, the default, finds none: what drafts without one is proved, and the certificate says what is not."""
    _, certificate = proof("head=auto", "head.path=null", "cells=3")
    assert len(certificate["cells"]) == 3
    assert certificate["not_covered"]["chain"].startswith("no head was given")
    with pytest.raises(ValueError, match="no exported head"):  # one that is asked for must be there
        proof("head.path=null", "cells=3")


def test_ctrl_c_leaves_a_certificate(proof: Proof, monkeypatch, tmp_path) -> None:
    def interrupted(*parts):
        raise KeyboardInterrupt

    monkeypatch.setattr("scripts.proof.acceptance.measure_acceptance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        proof("cells=2")
    certificate = json.loads((tmp_path / "proofs" / "demo" / "certificate.json").read_text())
    assert not certificate["complete"]
    assert "Incomplete: it was interrupted." in certificate["verdict"]
    assert len(certificate["cells"]) == 2


def test_the_cells_cover_every_pair_and_every_value_early() -> None:
    cells = list(cover([1, 4, 8, 16]))
    axes = (SAMPLINGS, DRAFTS, [1, 4, 8, 16], SITUATIONS)
    for axis, values in enumerate(axes):
        assert {cell[axis] for cell in cells[: max(map(len, axes)) + 2]} == set(values)
    pairs = set().union(*(cell.pairs for cell in cells))
    assert len({pair for cell in cover([1, 4, 8, 16]) for pair in cell.pairs}) == len(pairs)
    assert len(cells) < 80
    assert not any(cell.requests == 1 and cell.situation == "pre-emption" for cell in cells)


SOUND = Figures(4, 0.9, 2.0, [0.6, 0.3, 0.1], plain_ms=10, drafted_ms=22.0, drafting_ms=1.0, rows=16)


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        (SOUND._replace(ratio=1.0), None),
        (SOUND._replace(suffix_ratio=1.2), "copies have 1.20: use proposer=suffix"),
        (SOUND._replace(drafting_ms=9.0), "drafting costs more than it brings, 9.0 of the 22.0 ms"),
        (SOUND, r"verify rows cost too much here at this batch, 21.0 ms for 16 where plain decoding takes 10.0"),
        (SOUND._replace(tau=1.9, drafting_ms=11, drafted_ms=31, missed=0.5), "50 % of the verifies end at a token"),
        (
            SOUND._replace(tau=1.1, drafting_ms=3.0),
            r"τ is too low on these prompts, 1.10 where 2.20 would pay, and from position 3 on",
        ),
    ],
)
def test_why_drafts_do_not_pay(figures: Figures, says: str | None) -> None:
    sentence = why_slower(figures)
    assert sentence is None if says is None else re.search(says, sentence or "")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("proposer=none", "proposer=none: leaves nothing to prove; proposer=auto tries all"),
        ("proposer.acceptance=typical", "proposer.acceptance=typical: gives up what is proved here"),
        ("requests=[]", r"requests=\[\]: name at least one"),
        ("repeat=nowhere.json", "repeat=.*nowhere.json: is no case that prove.py wrote"),
    ],
)
def test_bad_input(proof: Proof, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        proof(override)


def test_help_and_a_wrong_key(forked) -> None:
    shown = forked(["scripts/prove.py", "--help"])
    assert shown.returncode == 0, shown.stderr
    assert all(f"\n  {key}:" in shown.stdout for key in ("minutes", "cells", "requests", "repeat"))
    wrong = forked(["scripts/prove.py", "minute=1"])
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: minute: unknown key; did you mean minutes?")
