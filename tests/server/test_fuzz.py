"""Schemathesis fuzzes the server from its OpenAPI description: no request causes a 500 or a hang."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.harness import MakeServer, wait_until

EXPECTED = {200, 400, 404, 405, 413, 429, 503, 504}  # 504: an output may be as long as the context


def test_no_500_and_no_hang(make_server: MakeServer) -> None:
    with make_server(request_timeout_s=0.3) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) >= 12
        for operation in operations:
            try_out(operation)
        wait_until(lambda: not server.engine.has_work)
        assert server.complete(max_tokens=1).status_code == 200


def try_out(operation: Any) -> None:
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        response = case.call(timeout=300)
        assert response.status_code in EXPECTED, response.text
        if response.status_code >= 400 and case.path not in ("/health", "/ready"):
            anthropic = case.path.startswith("/v1/messages")
            assert set(response.json()) == ({"error", "request_id", "type"} if anthropic else {"error"})

    send()
