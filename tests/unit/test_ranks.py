"""Communication between ranks: three in one process, one thread each, over real gloo on loopback."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore

from infer.config import EngineConfig, ModelConfig
from infer.processes.comm import Channel, RankLost, Ranks
from infer.processes.launch import rank_device
from infer.processes.launched import launched_rank
from infer.processes.tensor_parallel import join_rows, split_rows
from kernels.rows import AttentionRows
from tests.pairwise import parametrize_pairs

COUNT = 3
CPU = torch.device("cpu")


def make(folder: Path) -> list[Ranks]:
    pairs = {rank: zip(*(Pipe() for _ in Channel._fields), strict=True) for rank in range(1, COUNT)}
    ends = {rank: [Channel(*ends) for ends in pair] for rank, pair in pairs.items()}
    channels = [{rank: near for rank, (near, _) in ends.items()}, *({0: far} for _, far in ends.values())]
    return [Ranks(rank, COUNT, FileStore(str(folder / "store"), COUNT), channels[rank], CPU) for rank in range(COUNT)]


def run_on_all(ranks, function):
    with ThreadPoolExecutor(COUNT) as pool:
        return [future.result() for future in [pool.submit(function, comm) for comm in ranks]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    comms = make(tmp_path_factory.mktemp("ranks"))
    run_on_all(comms, lambda comm: comm.connect())
    return comms


@parametrize_pairs(
    {
        "sizes": [(4, 4, 4), (64, 64, 5), (2, 1, 3)],
        "dtype": [torch.float32, torch.bfloat16, torch.float16, torch.int64],
        "lead": [(1,), (7,), (2, 3)],
    }
)
def test_parts_are_put_side_by_side(ranks, sizes, dtype, lead):
    full = torch.randint(-99, 99, (*lead, sum(sizes))).to(dtype)
    parts = full.split(sizes, dim=-1)
    for gathered in run_on_all(ranks, lambda comm: comm.gather(parts[comm.rank], sizes)):
        assert torch.equal(gathered, full)
    first, *others = run_on_all(ranks, lambda comm: comm.gather(parts[comm.rank], sizes, everywhere=False))
    assert torch.equal(first, full)
    assert all(other.shape == (*lead, 0) for other in others)


def test_no_bit_changes_on_the_way(ranks):
    odd = torch.tensor([[0.0, -0.0, float("inf"), float("nan"), 1e-45, -1e-45]])
    for gathered in run_on_all(ranks, lambda comm: comm.gather(odd, [6] * COUNT)):
        assert torch.equal(gathered.view(torch.int32), odd.repeat(1, COUNT).view(torch.int32))


@pytest.mark.parametrize(
    ("values", "tensors"),
    [
        ([], []),
        ([1, -5, 2**40], []),
        ([[1, "a"], None], [torch.randn(3, 5).bfloat16(), None]),
        ([7], [torch.arange(6).view(2, 3).T, torch.tensor([[1, 2]]).T[0], torch.zeros(0, 4, dtype=torch.int64)]),
    ],
)
def test_a_command_comes_as_it_was_sent(ranks, values, tensors):
    def pass_on(comm):
        return comm.receive() if comm.rank else comm.send("logits", values, tensors)

    for command in run_on_all(ranks, pass_on)[1:]:
        assert command is not None
        operation, received_values, received = command
        assert (operation, received_values) == ("logits", values)
        assert all(a is b or torch.equal(a, b) for a, b in zip(received, tensors, strict=True))


@pytest.mark.parametrize("tree_mask", [None, torch.tensor([1, 3, -1, 1])])
def test_rows_are_made_again_of_their_parts(tree_mask):
    table = torch.arange(40).view(2, 20)
    rows = AttentionRows.blocks(table, [5, 30], [3, 1], page_size=4, tree_mask=tree_mask, first=1)
    scalars, tensors = split_rows(rows)
    again = join_rows(json.loads(json.dumps(scalars)), tensors)
    assert again.counts == rows.counts
    assert torch.equal(again.slots, rows.slots)
    assert torch.equal(again.table, table[:, :8])  # 31 positions, in pages of 4
    assert (again.tree_mask is None) == (tree_mask is None)
    assert (again.page_size, again.longest, again.first) == (4, 31, 1)


def test_free_memory_is_shared_on_a_cpu(ranks):
    assert run_on_all(ranks, lambda comm: comm.least(900 + comm.rank)) == [300] * COUNT
    assert run_on_all(ranks, lambda comm: comm.least(None)) == [None] * COUNT


def test_a_rank_that_cannot_load_tells_rank_0(tmp_path):
    ranks = make(tmp_path)

    ranks[2].connect("weights: rank 2 has none")
    with pytest.raises(ValueError, match="rank 2 has none"):
        ranks[0].connect()


def test_a_rank_that_goes_is_an_error_and_stays_one(tmp_path):
    ranks = make(tmp_path)
    run_on_all(ranks, lambda comm: comm.connect())
    ranks[2].disconnect()
    with pytest.raises(RankLost, match=r"engine\.tensor_parallel=3: a rank has ended"):
        ranks[0].gather(torch.zeros(1), [1] * COUNT)
    with pytest.raises(RankLost, match="make a new engine"):
        ranks[0].send("free")
    with pytest.raises(RankLost, match=r"engine\.tensor_parallel=3: rank 0 has failed"):
        ranks[1].receive()
    ranks[0].close()


def test_closing_ends_the_commands(tmp_path):
    ranks = make(tmp_path)
    run_on_all(ranks, lambda comm: comm.connect())
    assert run_on_all(ranks, lambda comm: comm.receive() if comm.rank else comm.close()) == [None] * COUNT


def test_a_rank_that_goes_before_it_has_loaded(tmp_path):
    ranks = make(tmp_path)
    ranks[2].disconnect()
    with pytest.raises(RankLost, match=r"engine\.tensor_parallel=3: a rank has ended"):
        ranks[0].connect()
    with pytest.raises(RankLost):
        ranks[1].connect()


def test_what_torchrun_started_must_fit(monkeypatch):
    engine = EngineConfig(tensor_parallel=2)
    assert launched_rank(engine) is None
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert launched_rank(engine) == 1
    with pytest.raises(ValueError, match=r"engine\.tensor_parallel=1: started as 2 processes; say engine"):
        launched_rank(EngineConfig())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="several machines"):
        launched_rank(engine)


def test_the_cpu_is_every_ranks_device():
    model = ModelConfig(name="tiny", path="tiny", device="cpu")
    assert [rank_device(model, rank, 2) for rank in range(2)] == [CPU, CPU]
