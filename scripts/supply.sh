#!/usr/bin/env bash
# Writes what .venv consists of: an SBOM (CycloneDX, JSON) and a table of licences (Markdown), by two published tools in an
# environment of their own. scripts/supply.sh [FOLDER, by default outputs/supply]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh serve,train

out="${1:-outputs/supply}" tools="$(mktemp -d)"
trap 'rm -rf "$tools"' EXIT
mkdir -p "$out"
say "installing cyclonedx-bom and pip-licenses into a temporary folder"
"$PYTHON" -m venv "$tools"
"$tools/bin/pip" install -qq cyclonedx-bom==7.5.0 pip-licenses==5.5.5
"$tools/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible -o "$out/sbom.json" "$PYTHON"
"$tools/bin/pip-licenses" --python "$PYTHON" --format markdown --with-urls --order license >"$out/licences.md"
say "$(grep -c '"bom-ref"' "$out/sbom.json") components in $out/sbom.json, licences in $out/licences.md"
