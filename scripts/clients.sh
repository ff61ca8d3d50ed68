#!/usr/bin/env bash
# Installs the client programs that scripts/clients/ names into .clients/, starts a server and lets each of them talk to
# it with its default settings:
#
#   ./scripts/clients.sh                       # all of them; exit code 1 if one fails
#   ./scripts/clients.sh openai litellm        # some; --help lists them
#
# Fast when there is nothing to install. PYTHON=... takes another Python than .venv's for the server.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${PYTHON:-}" ]]; then
    source scripts/setup_env.sh serve
fi
exec "$PYTHON" -m scripts.clients "$@"
