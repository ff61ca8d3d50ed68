#!/usr/bin/env bash
# Package: anthropic 2.14.0
# Behaviour: client.beta.messages.tool_runner puts {"thread": {"type": "create"}} into its first request by default, and
#   from the second request on sends {"thread": {"type": "continue"}} with the tool's result as the only message. Any 200
#   counts as a server that holds the thread. Only a 400 whose error has details.error_code
#   "thread_unsupported_request" makes it send the whole conversation.
# One would have guessed: base_url may name any server of the Messages API, which is stateless: each request has all turns
#   unless the caller asks for a thread.
# Why it matters: a compatible server that ignores fields it does not know answers a bare tool result. The conversation
#   is lost from the second turn on, without an error or a warning on either side.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check anthropic==2.14.0 2>/dev/null
cat > "$folder/run.py" <<'PYTHON'
import http.server
import json
import threading

import anthropic

bodies = []


class Stateless(http.server.BaseHTTPRequestHandler):
    """Answers like the Messages API; fields that it does not know are ignored."""

    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}}
        content = [call] if len(bodies) == 1 else [{"type": "text", "text": "done"}]
        message = {"id": f"msg_{len(bodies)}", "type": "message", "role": "assistant", "model": "m", "content": content}
        message |= {"stop_reason": "tool_use" if len(bodies) == 1 else "end_turn", "stop_sequence": None}
        answer = json.dumps(message | {"usage": {"input_tokens": 1, "output_tokens": 1}}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stateless)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none")
question = [{"role": "user", "content": "What is 1+2?"}]
client.beta.messages.tool_runner(model="m", max_tokens=9, tools=[add], messages=question).until_done()
for body in bodies:
    print("thread:", body.get("thread"), "| messages:", json.dumps(body["messages"]))
assert bodies[0]["thread"] == {"type": "create"}, "the runner no longer begins a thread by default"
(turn,) = bodies[1]["messages"]
assert turn["content"][0]["type"] == "tool_result", "the second request is no longer the result alone"
PYTHON
env -u HTTP_PROXY -u http_proxy "$folder/env/bin/python" "$folder/run.py"
