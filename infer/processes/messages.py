"""Messages between ranks: JSON, since what unpickles a message runs any code that its sender likes."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any


def send(connection: Connection, message: Any) -> None:
    """Send a message of JSON's types; tuples arrive as lists."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection, most: int | None = None) -> Any:
    """Wait for a message. Raises EOFError or OSError if there will be none, or if it has more than `most` bytes."""
    return json.loads(connection.recv_bytes(most))
