#!/usr/bin/env bash
# Runs the whole test suite in .venv, which is made first. Arguments go to pytest.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup_env.sh"
cd "$root"
# The plugin gives gpu and engine tests longer; no other test takes five minutes unless it hangs.
exec .venv/bin/python -m pytest --timeout 300 -ra "$@"
