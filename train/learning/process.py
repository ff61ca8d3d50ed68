"""The process beside a server: examples come in over a socket, heads that draft better go out.

It needs the target's embedding and LM head alone unless there is a replay, and computes on one CPU thread, while few
requests run.
"""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from infer.devices import resolve_dtype
from infer.learning.messages import Message, receive, send
from infer.options.exported_heads import head_folder, lacks_head, learned_folder
from infer.processes.threads import cpu_threads
from models.heads import HEADS
from models.heads.base import Head
from models.heads.files import load_head
from models.heads.measured_tree import RANK_ACCURACY
from models.heads.weights import checkpoint_tensors
from models.targets import load_target
from train.config import LearnConfig
from train.evaluation import rank_accuracies
from train.learning.examples import batch_of, read_example
from train.learning.learner import Learner, check_kind
from train.learning.replay import open_replay
from train.learning.saving import untrained, write_head
from train.storage import atomic

Save = Callable[[Head, dict[str, str]], int]  # writes a head with facts of it; returns its number


def learn(config: LearnConfig, stream: socket.socket) -> None:
    """Learn from the messages of `stream` until it ends, if there is no head yet with an untrained one, whose folder is
    sent. Raises ValueError for a broken message or configuration.
    """
    if config.head.name not in HEADS:
        raise ValueError(f"head={config.head.name}: there is no head to train; heads: {', '.join(HEADS)}")
    check_kind(config.head.name)
    where = config.output_dir, config.model
    folder, place = head_folder(config.head, *where), learned_folder(config.head.name, where[0], config.model.name)
    if lacks_head(config.head, *where):
        folder = untrained(config, place / "0")
        send(stream, Message("head", {}, {"folder": str(folder)}))
    load = partial(load_target, config.model.path_or_hub_id, revision=config.model.revision)
    target = load(layers=())
    head = load_head(folder, name=config.head.name, target=target, allow_mismatch=config.head.allow_mismatch)
    dtype, kept = resolve_dtype(config.model), config.learning
    size = len(set(head.config.aux_layers)) * head.config.target_hidden_size * dtype.itemsize
    replay = None
    if kept.replay is not None:
        replay = open_replay(kept, target.fingerprint, partial(load, dtype=dtype), head.config.aux_layers, size)
    learner = Learner(kept, head, config.draft_tokens, size, replay)
    # that of the head in use, if it learnt before
    first = int(folder.name) if folder.parent.name == place.name and folder.name.isdecimal() else 0

    def save(candidate: Head, facts: dict[str, str]) -> int:
        numbers = sorted(int(path.name) for path in place.glob("*") if path.name.isdigit())
        number = max(first, *numbers, 0) + 1
        pairs = (batch_of([each], head.config.aux_layers) for each in learner.judged.examples)
        record = {"learned": facts, RANK_ACCURACY: rank_accuracies(candidate, pairs, learner.steps)}
        write_head(candidate, place / str(number), config, target, record)
        for old in [*numbers, number][: -kept.keep]:
            if old != first:  # with which the server starts again
                atomic.discard(place / str(old))
        return number

    with cpu_threads(1), suppress(BrokenPipeError, ConnectionResetError):  # the server has ended
        exchange(learner, stream, kept.pause_above, save if kept.save else None, first)


def exchange(learner: Learner, stream: socket.socket, pause_above: int, save: Save | None, sent: int = 0) -> None:
    """Take messages as they come, and compute between them while no more than `pause_above` requests run.

    Heads are numbered from `sent` + 1.
    """
    running = 0
    send(stream, status(learner, learner.tau))
    while True:
        paused = running > pause_above or not (learner.update_due or learner.comparison_due)
        if paused or select.select([stream], [], [], 0)[0]:
            message = receive(stream)
            if message is None:
                return
            if message.kind == "example":
                learner.add(read_example(message, learner.used.config))
            elif message.kind == "load":
                running = read_load(message)
            else:
                raise ValueError(f"{message.kind}: no message for a trainer; these are example and load")
        elif not learner.comparison_due:
            learner.update()
            send(stream, status(learner, math.nan))
        else:
            comparison = learner.compare()
            if comparison.better:
                taus = {"tau_before": comparison.before, "tau_after": comparison.after}
                facts = {name: f"{tau:.4f}" for name, tau in taus.items()}
                facts |= {name: str(getattr(learner, name)) for name in ("examples", "tokens", "updates")}
                if comparison.replay is not None:
                    facts["replay_before"], facts["replay_after"] = map("{:.4f}".format, comparison.replay)
                sent = save(learner.used, facts) if save else sent + 1
                send(stream, Message("candidate", checkpoint_tensors(learner.used), {"number": str(sent), **facts}))
            send(stream, status(learner, learner.tau))


def status(learner: Learner, tau: float) -> Message:
    """`tau`: of the head in use as it was just judged, else nan."""
    facts = {
        "buffered": str(learner.trained.tokens + learner.judged.tokens),
        "examples": str(learner.examples),
        "updates": str(learner.updates),
        "tau": f"{tau:.4f}",
        "seconds": f"{learner.seconds:.1f}",
    }
    return Message("status", {}, facts)


def read_load(message: Message) -> int:
    """Return how many requests run. Raises ValueError if the message does not say."""
    count = message.facts.get("running", "")
    if not count.isdecimal():
        raise ValueError(f"load: running={count!r} must be the number of requests")
    return int(count)
