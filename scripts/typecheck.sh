#!/usr/bin/env bash
# Checks the built package, as a user gets it: the arrows between its parts, then its types.
# Needs .venv (scripts/setup_env.sh) and no network.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bin=$root/.venv/bin
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
cd "$root"

# By way of an sdist: a wheel built in place would take in what an earlier build left in build/.
"$bin/python" -m build --no-isolation --outdir "$built" . >"$built/log" 2>&1 || {
    cat "$built/log" >&2
    exit 1
}
"$bin/python" -m pip --disable-pip-version-check -q install --no-deps --target "$built/site" "$built"/*.whl
PYTHONPATH=$built/site "$bin/lint-imports" --no-cache
cd "$built/site"
"$bin/mypy" --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" --package tapcheck
