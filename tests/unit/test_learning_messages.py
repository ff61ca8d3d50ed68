"""Messages between a server and the process that trains its head arrive whole, or are refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save

from infer.learning.messages import MOST_BYTES, Message, receive, send

Pair = tuple[socket.socket, socket.socket]
TENSORS = {
    "ids": torch.arange(5),
    "states": torch.randn(5, 2, 3).bfloat16(),
    "top_log_probs": torch.full((5, 1), -torch.inf).half(),
}


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def framed(content: bytes, size: int | None = None) -> bytes:
    return (len(content) if size is None else size).to_bytes(8, "little") + content


def test_messages_arrive_in_order_as_they_were_sent(pair: Pair) -> None:
    sent = [Message("example", TENSORS, {"prompt": "3", "seed": str(2**63)}), Message("load", {}, {"running": "1"})]
    for message in sent:
        send(pair[0], message)
    pair[0].close()
    for message in sent:
        received = receive(pair[1])
        assert received is not None
        assert (received.kind, received.facts) == (message.kind, message.facts)
        assert received.tensors.keys() == message.tensors.keys()
        for name, value in message.tensors.items():
            assert received.tensors[name].dtype == value.dtype
            assert torch.equal(received.tensors[name], value)
    assert receive(pair[1]) is None


def test_a_message_larger_than_the_socket_holds(pair: Pair) -> None:
    values = torch.randn(2**20)
    sender = threading.Thread(target=send, args=(pair[0], Message("candidate", {"values": values}, {})))
    sender.start()
    received = receive(pair[1])
    sender.join()
    assert received is not None
    assert torch.equal(received.tensors["values"], values)


@pytest.mark.parametrize("missing", [1, 30, 300])
def test_a_stream_that_ends_within_a_message(pair: Pair, missing: int) -> None:
    whole = framed(save(TENSORS, {"kind": "example"}))
    pair[0].sendall(whole[:-missing])
    pair[0].close()
    with pytest.raises(ValueError, match=f"ends within a message, after {len(whole) - missing} bytes"):
        receive(pair[1])


def test_a_stream_that_ends_within_a_size(pair: Pair) -> None:
    pair[0].sendall(b"\1\0\0")
    pair[0].close()
    with pytest.raises(ValueError, match="ends within a message, after 3 bytes"):
        receive(pair[1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (framed(b"", MOST_BYTES + 1), f"states {MOST_BYTES + 1} bytes; the most are {MOST_BYTES}"),
        (b"\xff" * 8, "states 18446744073709551615 bytes"),
        (framed(b""), "a message of 0 bytes cannot be read"),
        (framed(b"\x80\x04N." * 8), "a message of 32 bytes cannot be read"),  # a pickle
        (framed(save(TENSORS, {"kind": "example"})[:-3]), "cannot be read"),  # shorter than its own header says
        (framed(save(TENSORS)), "states no kind"),
        (framed(save(TENSORS, {"prompt": "3"})), "states no kind"),
    ],
)
def test_a_broken_message_is_refused(pair: Pair, content: bytes, message: str) -> None:
    pair[0].sendall(content)
    with pytest.raises(ValueError, match=message):
        receive(pair[1])


def test_a_reader_that_is_gone(pair: Pair) -> None:
    send(pair[0], Message("load", {}, {}))
    send(pair[1], Message("status", {}, {}))
    pair[1].close()  # with a message unread
    assert receive(pair[0]) is not None
    assert receive(pair[0]) is None
    with pytest.raises(BrokenPipeError):
        send(pair[0], Message("load", {}, {}))
