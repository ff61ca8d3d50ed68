#!/usr/bin/env bash
# Installs the client programs of tests/clients/ into .clients/, starts a server and runs each client against it with
# the client's default settings:
#
#   ./scripts/clients.sh                       # all of them; exit code 1 if one fails
#   ./scripts/clients.sh openai litellm        # some; --help lists them
#
# Installs nothing if all is up to date. PYTHON=... runs the server with another Python than that of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${PYTHON:-}" ]]; then
    source scripts/setup_env.sh serve
fi
exec "$PYTHON" -m tests.clients "$@"
