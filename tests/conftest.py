"""Fixtures that every test may use: a tiny random target as a Hugging Face folder, its tokenizer, a random head for it.

The folder is written by transformers, so loading it tests our reader. Everything is seeded. Session fixtures are shared
and must not be changed: load your own copy to pack or train it.
"""

from __future__ import annotations

import os

import infer.options.environment  # noqa: F401

# isort: split

# before anything imports a hub client or a tokenizer
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

import contextlib
import json
import textwrap
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, which torch itself does late

from infer.config import EngineConfig, ProposerConfig
from kernels.cpu.library import library
from models.heads.weights import initialize, set_vocabulary
from tests import forking
from tests.device import orders
from tests.gpu_hook import Hook
from tests.interpreted import INTERPRETED, patching_once, scaled
from tests.observed import Observer
from tests.unchanged import Unchanged

# No deadline: other processes may use the machine, so an example may take any time.
hypothesis.settings.register_profile("timeless", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("timeless")

END = "<|endoftext|>"
VOCAB_SIZE = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)

MakeTarget = Callable[..., Path]
Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session", autouse=True)
def probe_nothing() -> Iterator[None]:
    """Skip the start-up checks of exactness in Triton's interpreter, where they take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr("infer.engine.engine.probe_exactness", lambda *parts: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def build_once() -> None:
    """Build the C kernels before a test moves the cache folder, in which they would be built anew."""
    library()


@pytest.fixture(scope="session", autouse=True)
def interpret_faster() -> Iterator[None]:
    with patching_once() if os.environ.get("TRITON_INTERPRET") == "1" else contextlib.nullcontext():
        yield


def pytest_configure(config: pytest.Config) -> None:
    draft_always()
    config.pluginmanager.register(Unchanged(Path(__file__).resolve().parents[1]))
    config.pluginmanager.register(Observer(records=config.getoption("record_coverage")))
    if told := orders(config):
        config.pluginmanager.register(Hook(told))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-coverage", action="store_true", help="write tests/coverage.txt: see tests/observed.py")
    parser.addoption(
        "--gpu-orders", type=json.loads, default={}, help="JSON, of tests/gpu_check.py: see tests/gpu_hook.py"
    )
    parser.addoption(
        "--soak",
        type=int,
        default=600,
        metavar="REQUESTS",
        help="how long tests/lossless/test_soak.py and test_lives.py go on (default 600; 10000 is the whole soak)",
    )


def draft_always() -> None:
    """Make engines of tests draft as much as they may, with a head's own weights, unless a test says otherwise.

    Adaptive drafting profiles the machine first, and drafts as times tell it: ids would be compared without any draft,
    and a test's outcome would depend on time. Only calls from Python are changed: commands have their real defaults.
    """
    fixed = {ProposerConfig: {"adaptive": False}, EngineConfig: {"head_weights": "same", "draft_weights": "same"}}
    for schema, values in fixed.items():
        make: Any = schema.__init__
        names = [field.name for field in fields(schema)]
        make.__defaults__ = tuple(map(values.get, names[-len(make.__defaults__) :], make.__defaults__))


def train_tiny_tokenizer() -> Any:
    """Train a byte-level BPE: END, the 256 bytes and a few merges learned from the source of `textwrap`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(textwrap.__file__).read_text(encoding="utf-8")], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return `once(name, make)`: the folder that `make` has filled, for all workers of a run, as it takes seconds."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, make: Callable[[Path], object]) -> Path:
        place = base / f"once {name}"
        if not place.is_dir():
            folder = tmp_path_factory.mktemp("once")
            make(folder)
            with contextlib.suppress(OSError):  # another worker was first
                folder.rename(place)
        return place

    return made


@pytest.fixture(scope="session")
def make_target_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """Return `make(seed=0, dtype=torch.float32, **overrides)`: writes a random Llama; keys are LlamaConfig's."""
    tokenizer = train_tiny_tokenizer()

    def make(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        config = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": scaled(64, 32),
            "intermediate_size": scaled(128, 64),
            "num_hidden_layers": scaled(8, 3),  # with fewer than 8 the default aux layers coincide
            "num_attention_heads": scaled(4, 2),
            "num_key_value_heads": scaled(2, 1),
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "initializer_range": 0.1,  # large, so that argmax does not depend on the last bits
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        folder = tmp_path_factory.mktemp("target")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = LlamaForCausalLM(LlamaConfig(**(config | overrides)))
        model.to(dtype).save_pretrained(folder)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
        fast.chat_template = CHAT_TEMPLATE
        fast.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_target_folder(make_target_folder: MakeTarget) -> Path:
    return make_target_folder()


@pytest.fixture(scope="session")
def tiny_target(tiny_target_folder: Path) -> Any:
    """Shared: do not pack, train or move it."""
    from models.targets import load_target

    return load_target(str(tiny_target_folder))


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_target_folder: Path) -> Any:
    from models.tokenizer import Tokenizer

    return Tokenizer.load(tiny_target_folder)


@pytest.fixture(scope="session")
def tiny_head_folder(tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported random EAGLE-3 head for `tiny_target`, with a reduced draft vocabulary of 128."""
    from models.heads.eagle3.config import Eagle3Options
    from models.heads.eagle3.head import Eagle3Head
    from models.heads.files import save_head
    from models.vocab import build_draft_vocab

    counts = torch.arange(VOCAB_SIZE).flip(0) % 7  # an order whose most frequent ids are no prefix of the vocabulary
    aux: dict[str, Any] = {} if tiny_target.config.num_layers >= 8 else {"aux_layers": [0, 1, 2]}
    head = Eagle3Head(Eagle3Options(draft_vocab_size=128, **aux).for_target(tiny_target.config))
    set_vocabulary(head, *build_draft_vocab(counts, 128, forced_ids=[0]))
    initialize(head, tiny_target, from_target=True, seed=0)
    folder = tmp_path_factory.mktemp("head")
    save_head(
        head,
        folder,
        verifier=tiny_target.path,
        verifier_architecture=tiny_target.config.architecture,
        speculative_tokens=4,
        provenance={"target_fingerprint": tiny_target.fingerprint},
    )
    return folder


@pytest.fixture
def tiny_head(tiny_head_folder: Path, tiny_target: Any) -> Any:
    from models.heads.files import load_head

    return load_head(tiny_head_folder, target=tiny_target)


@pytest.fixture(scope="session")
def forked() -> Iterator[forking.Run]:
    """Return what runs a command in a process forked from one that has imported torch."""
    with forking.forks() as run:
        yield run


@pytest.fixture
def started_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Return a function that lists the processes that this test started, directly or not, and that have not ended."""
    mark = f"HEADWAY_TEST={uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))

    def started() -> list[int]:
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has just ended
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
        return pids

    return started


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return the id of dtypes and shapes: here, since a folder's hook counts for all that is collected after it, and
    tests/coverage.txt knows tests by their ids.
    """
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype | tuple) else None
