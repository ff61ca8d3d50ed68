#!/usr/bin/env bash
# Package: uvicorn 0.54.0 (with h11 0.16.0)
# Behaviour: `limit_concurrency=N` refuses with 503 once N connections are OPEN, whether or not any of them has a
#   request. Three kept-alive connections whose requests have long been answered (a browser opens six) make the only
#   request of a fourth client a 503 under limit_concurrency=4, though nothing else runs. The refused connection itself
#   counts, so N allows N - 1 connections. And the 503 is sent only when a whole request has been read: the connections
#   themselves are not bounded, a fifth, sixth and seventh are accepted and kept open.
# One would have guessed: from its name and "maximum number of concurrent connections or tasks to allow, before issuing
#   503 responses", that at most N connections are open, or that N requests are served at once.
# Why it matters: a server of long streams sets it to what its engine can hold, and then refuses working clients because
#   of connections that wait for nothing, and has more descriptors in use than the number that it was given.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check uvicorn==0.54.0 h11==0.16.0 2>/dev/null
cat > "$folder/show.py" <<'PYTHON'
import asyncio
import socket

import uvicorn

LIMIT = 4
REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def app(scope, receive, send):
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def ask(reader, writer):
    writer.write(REQUEST)
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1])


async def main():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="off", log_config=None, limit_concurrency=LIMIT, timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    connections, statuses = [], []
    for _ in range(LIMIT):  # one after the other: each is answered before the next is opened
        connections.append(await asyncio.open_connection("127.0.0.1", port))
        statuses.append(await ask(*connections[-1]))
    print(f"limit_concurrency={LIMIT}, one request at a time, connections kept alive: {statuses}")
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * LIMIT)]
    while len(server.server_state.connections) < LIMIT - 1 + len(silent):
        await asyncio.sleep(0.01)
    opened = len(server.server_state.connections)
    print(f"connections that are open at once under limit_concurrency={LIMIT}: {opened}")
    for _, writer in [*connections, *silent]:
        writer.close()
    server.should_exit = True
    await serving
    assert statuses == [200] * (LIMIT - 1) + [503], statuses
    assert opened > LIMIT, opened


asyncio.run(main())
PYTHON
timeout 120 "$folder/venv/bin/python" "$folder/show.py"
