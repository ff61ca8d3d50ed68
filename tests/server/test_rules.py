"""Rules checked on source files and schemas: bounded lists, no outgoing request, no client's regular expression."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import yaml

from infer.config import ServeConfig
from infer.options.cli import compose
from infer.server.api.tokens import DetokenizeRequest, TokenizeRequest
from infer.server.protocol.chat import ChatRequest
from infer.server.protocol.completions import CompletionRequest
from infer.server.protocol.messages import CountTokensRequest, MessagesRequest
from infer.server.protocol.responses import ResponsesRequest
from tests.server import patient
from tests.server.harness import Server

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "infer" / "server").rglob("*.py"))
DEPLOY = ROOT / "scripts" / "deploy"


def unbounded(schema: Any, path: str = "") -> list[str]:
    """Return arrays without maxItems and maps of free keys without maxProperties; a client's JSON schema is exempt."""
    paths = []
    if isinstance(schema, dict):
        if schema.get("type") == "array" and "maxItems" not in schema:
            paths.append(path)
        if isinstance(schema.get("additionalProperties"), dict) and "maxProperties" not in schema:
            paths.append(path)
        schema = list(schema.items())
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            name, inner = item if isinstance(item, tuple) else (index, item)
            paths += unbounded(inner, f"{path}/{name}")
    return paths


def test_every_list_of_the_wire_is_bounded() -> None:
    generating = (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)
    for kind in (*generating, CountTokensRequest, TokenizeRequest, DetokenizeRequest):
        assert unbounded(kind.model_json_schema()) == [], kind


def unbounded_numbers(schema: Any, path: str = "") -> list[str]:
    """Return the numbers without a minimum or a maximum."""
    paths = []
    if isinstance(schema, dict):
        ends = [{"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}]
        if schema.get("type") in ("integer", "number") and not all(end & set(schema) for end in ends):
            paths.append(path)
        schema = list(schema.items())
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            name, inner = item if isinstance(item, tuple) else (index, item)
            paths += unbounded_numbers(inner, f"{path}/{name}")
    return paths


def test_every_number_of_the_wire_is_bounded(server: Server) -> None:
    """Except for the ids of a prompt, which are checked against the vocabulary."""
    schemas = patient.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    paths = [path for path in unbounded_numbers(schemas) if "/CompletionRequest/properties/prompt/" not in path]
    assert [path for path in paths if not path.startswith("/ValidationError/")] == []
    assert len(schemas) > 20


def test_every_body_is_read_strictly(server: Server) -> None:
    """Every endpoint that reads a body refuses NaN as invalid JSON, even in a field that it does not use."""
    paths = patient.get(f"{server.url}/openapi.json").json()["paths"]
    reading = [path for path, methods in paths.items() if "requestBody" in methods.get("post", {})]
    assert len(reading) >= 5
    for path in reading:
        headers = {"content-type": "application/json"}
        response = patient.post(f"{server.url}{path}", content=b'{"of_no_api": [NaN]}', headers=headers)
        assert response.status_code == 400, path
        assert "of_no_api[0]: NaN is not JSON" in response.text, path


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_no_client_s_regular_expression_is_compiled() -> None:
    for path in SOURCES:
        for call in calls(ast.parse(path.read_text())):
            if ast.unparse(call.func).startswith("re."):
                assert isinstance(call.args[0], ast.Constant), f"{path}: {ast.unparse(call)}"


def test_the_server_asks_nobody() -> None:
    """The server has no HTTP client; it starts one process and binds one address."""
    clients = {"httpx", "requests", "urllib", "aiohttp", "http", "socketserver", "ftplib", "huggingface_hub"}
    binds, processes = [], []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not {name.split(".")[0] for name in names} & clients, path
        for call in calls(tree):
            function = ast.unparse(call.func)
            binds += [path.name] * function.endswith((".bind", ".create_server"))
            processes += [path.name] * ("subprocess" in function)
    assert binds == ["address.py", "ray_app.py"]  # the second is Ray's method for a deployment's arguments
    assert processes == ["grammar_check.py"]


def test_the_dashboard_asks_for_metrics_that_there_are(server: Server) -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queried = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"headway_\w+", target["expr"])
    }
    server.complete(max_tokens=10, ignore_eos=True)
    exported = {name.partition("{")[0] for name in server.metrics()}
    assert len(queried) > 12
    assert queried <= exported


def test_the_manifest_probes_what_is_there(server: Server) -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    (drain,) = (arg for arg in container["args"] if arg.startswith("server.drain_s="))
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > float(drain.split("=")[1]) + 10
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert compose("serve", ServeConfig, container["args"]).server.api_keys_file == "/keys/keys"
