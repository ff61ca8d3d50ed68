"""Messages between a server and the process that trains its head: safetensors, which run no code of their sender.

A message is its size in 8 bytes, little-endian, and a safetensors file, whose metadata states its kind and facts. The
two sides send at the same time, so one of them at least must read while it sends.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

SIZE_BYTES = 8  # of a message's size, and of a safetensors header's
MOST_BYTES = 2**32  # of a message: the embedding and LM head of a head may be most of it
CHUNK_BYTES = 2**20  # read at a time: a size that is not true takes no memory
KIND = "kind"


class Message(NamedTuple):
    kind: str
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, str]


def send(stream: socket.socket, message: Message) -> None:
    """Send a message. Raises ValueError for one above MOST_BYTES, OSError if nobody reads any more."""
    content = save(dict(message.tensors), {**message.facts, KIND: message.kind})
    if len(content) > MOST_BYTES:
        raise ValueError(f"{message.kind}: a message of {len(content)} bytes; the most are {MOST_BYTES}")
    stream.sendall(len(content).to_bytes(SIZE_BYTES, "little"))
    stream.sendall(content)


def receive(stream: socket.socket) -> Message | None:
    """Wait for a message; None at the end of the stream. Raises ValueError for one that is broken or too large."""
    start = _read(stream, SIZE_BYTES)
    if not start:
        return None
    size = int.from_bytes(start, "little")
    if size > MOST_BYTES:
        raise ValueError(f"a message states {size} bytes; the most are {MOST_BYTES}")
    content = _read(stream, size)
    if len(start) < SIZE_BYTES or len(content) < size:
        raise ValueError(f"the stream ends within a message, after {len(start) + len(content)} bytes")
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ValueError(f"a message of {size} bytes cannot be read ({error})") from error
    end = SIZE_BYTES + int.from_bytes(content[:SIZE_BYTES], "little")
    facts = json.loads(content[SIZE_BYTES:end]).get("__metadata__", {})
    if KIND not in facts:
        raise ValueError(f"a message of {size} bytes states no kind")
    return Message(facts.pop(KIND), tensors, facts)


def _read(stream: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes, fewer if the stream ends before."""
    parts, left = [], size
    try:
        while left and (part := stream.recv(min(left, CHUNK_BYTES))):
            parts.append(part)
            left -= len(part)
    except ConnectionResetError:  # it ended before it had read all that it was sent
        pass
    return b"".join(parts)
