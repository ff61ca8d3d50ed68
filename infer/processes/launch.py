"""Starts the ranks of a tensor parallel target: rank 0 starts the others, or torchrun has started all of them.

    engine = Engine.load(model, engine=EngineConfig(tensor_parallel=2))                   # starts rank 1
    torchrun --nproc_per_node 2 infer/generate.py model=demo engine.tensor_parallel=2     # torchrun starts both

Ranks run on one machine and communicate over loopback, each on a GPU of its own or all on the CPU.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener

import torch
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from infer.config import EngineConfig, ModelConfig
from infer.devices import resolve_device, resolve_dtype, use_device
from infer.processes import messages
from infer.processes.children import Children
from infer.processes.comm import Channel, RankLost, Ranks
from infer.processes.exactness import probe_exactness
from infer.processes.launched import launched_rank
from infer.processes.liveness import FAILED
from infer.processes.process_end import end_at_once
from infer.processes.target_worker import Shard
from infer.processes.tensor_parallel import follow
from infer.processes.threads import plan_threads
from models.targets import load_target

MEET = timedelta(minutes=5)


@contextmanager
def ranks_of(model: ModelConfig, engine: EngineConfig) -> Iterator[Ranks | None]:
    """On rank 0: yield its `Ranks`, None if it is alone. The block makes an engine; if it fails, the ranks end."""
    if engine.tensor_parallel == 1:
        yield None
        return
    ranks = lead(model, engine)
    try:
        yield ranks
    except BaseException:
        ranks.close(FAILED)
        raise


def lead(model: ModelConfig, engine: EngineConfig) -> Ranks:
    """Return rank 0's `Ranks`; the other ranks start to load their parts. Raises ValueError if that is impossible."""
    count, rank = engine.tensor_parallel, launched_rank(engine)
    if rank:
        raise ValueError(
            f"engine.tensor_parallel={count}: rank {rank} has no engine; call infer.processes.launch.follow_launched"
        )
    device = rank_device(model, 0, count)
    if rank == 0:
        return Ranks(0, count, *_meet(0, count), device)
    folder = tempfile.TemporaryDirectory(prefix="headway-")
    store = os.path.join(folder.name, "store")
    engine = replace(engine, threads=engine.threads or torch.get_num_threads())
    children = Children([(rank, asdict(model), asdict(engine), store) for rank in range(1, count)], folder)
    channels = {rank: Channel(*ends) for rank, ends in enumerate(children.connections, start=1)}
    return Ranks(0, count, FileStore(store, count), channels, device, children)


def follow_launched(model: ModelConfig, engine: EngineConfig) -> None:
    """Under torchrun, on a rank other than 0: run a part of the target until rank 0's engine is closed or ends."""
    rank = launched_rank(engine)
    assert rank
    count = engine.tensor_parallel
    device = rank_device(model, rank, count)
    _follow(Ranks(rank, count, *_meet(rank, count), device, leave=end_at_once), model, engine)


def follow_parent(commands: Connection, liveness: Connection) -> None:
    """In a process that `lead` started: run a part of the target, with the settings received from rank 0."""
    rank, model_keys, engine_keys, store = messages.receive(commands)
    model, engine = ModelConfig(**model_keys), EngineConfig(**engine_keys)
    count, channels = engine.tensor_parallel, {0: Channel(commands, liveness)}
    device = rank_device(model, rank, count)
    # rank 0 may have ended without removing it
    remove_store = functools.partial(shutil.rmtree, os.path.dirname(store), ignore_errors=True)

    def leave_nothing(why: str) -> None:
        remove_store()
        end_at_once(why)

    try:
        _follow(Ranks(rank, count, FileStore(store, count), channels, device, leave=leave_nothing), model, engine)
    finally:
        remove_store()


def _follow(ranks: Ranks, model: ModelConfig, engine: EngineConfig) -> None:
    what = FAILED
    try:
        try:
            shard = load_shard(ranks, model, engine)
        except ValueError as error:
            ranks.connect(str(error))  # rank 0 raises it
            what = ""
            return
        ranks.connect()
        for number in (signal.SIGINT, signal.SIGTERM):  # from now on rank 0 decides when this process ends
            signal.signal(number, signal.SIG_IGN)
        follow(shard, ranks)
        what = ""
    except RankLost as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        ranks.disconnect(what)


def load_shard(ranks: Ranks, model: ModelConfig, engine: EngineConfig) -> Shard:
    """Load and pack this rank's part of the target, and run the same probes as rank 0."""
    use_device(ranks.device)
    target = load_target(
        model.path_or_hub_id,
        revision=model.revision,
        dtype=resolve_dtype(model),
        device=ranks.device,
        part=ranks.part,
        context=engine.max_model_len,
    )
    shard = Shard(target, **engine.packing)
    threads = plan_threads(engine, shard).plan
    torch.set_num_threads(threads.many)
    if engine.exact:
        probe_exactness(shard, threads)
    return shard


def rank_device(model: ModelConfig, rank: int, count: int) -> torch.device:
    device = resolve_device(model.device)
    if device.type == "cpu":
        return device
    if device.index is not None:
        raise ValueError(
            f"model.device={model.device}: engine.tensor_parallel={count} gives each rank its own; say auto"
        )
    if torch.cuda.device_count() < count:
        raise ValueError(
            f"engine.tensor_parallel={count}: this machine has {torch.cuda.device_count()} GPUs; use at most as many "
            "ranks, or model.device=cpu"
        )
    return torch.device("cuda", rank)


def _meet(rank: int, count: int) -> tuple[Store, dict[int, Channel]]:
    """Under torchrun: return its store, and this rank's channels as `Ranks` needs them."""
    store, _, _ = next(rendezvous("env://", timeout=MEET))
    if rank:
        address = store.get("headway").decode()
        ends = Channel(Client(address), Client(address))
        for field, connection in zip(Channel._fields, ends, strict=True):
            messages.send(connection, [rank, field])
        return store, {0: ends}
    accepted: dict[int, dict[str, Connection]] = {peer: {} for peer in range(1, count)}
    with Listener(family="AF_UNIX", backlog=2 * count) as listener:
        store.set("headway", str(listener.address))
        for _ in range(2 * (count - 1)):
            connection = listener.accept()
            peer, field = messages.receive(connection)
            accepted[peer][field] = connection
    return store, {peer: Channel(**ends) for peer, ends in accepted.items()}
