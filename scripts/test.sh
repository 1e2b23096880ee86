#!/usr/bin/env bash
# Runs the whole test suite in .venv, which is made first: what starts no engine on every core, then
# the rest in two processes (one on a GPU, whose memory an engine takes for itself), each file in one
# of them. Arguments go to pytest, which is then run once.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup_env.sh"
cd "$root"
# The plugin gives gpu and engine tests longer; no other test takes five minutes unless it hangs.
pytest=(.venv/bin/python -m pytest --timeout 300 -ra)
if [ $# -gt 0 ]; then
    exec "${pytest[@]}" "$@"
fi
code=0
engines=2
[ ! -e /dev/nvidiactl ] || engines=0
# One thread each: on as many cores as there are processes, torch's own threads only wait.
export OMP_NUM_THREADS=1
"${pytest[@]}" -n auto tests/unit || code=$?
"${pytest[@]}" -n "$engines" --dist loadfile --ignore tests/unit || code=$?
exit "$code"
