#!/usr/bin/env bash
# The main job: judge vLLM's activations against Transformers' on this machine, and record the run.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/gpu_check.sh [--device cuda|cpu] [--python PYTHON] [OPTION ...] [MODEL ...]

Judges vLLM's activations against Transformers' on this machine, row by row, and records the run as
a row of the compatibility matrix in compatibility/rows.

  --device cuda     use the GPU and the vLLM of an environment of yours; nothing is installed
  --device cpu      use vLLM's CPU build, in .venv, which is made first unless --python is given
                    (default: cuda where PYTHON has vLLM and sees a GPU; cpu where there is no GPU)
  --python PYTHON   the environment's interpreter (default: the active python3)
  -h, --help        show this

Whatever else is given goes to `tapcheck check`; so do MODELs, which are folders or hub ids.
Exit codes: 0 every check passed, 1 one did not, 2 bad use or a broken environment.
TEXT
}

fail() {
    echo "gpu_check: $*" >&2
    exit 2
}

misused() {
    echo "gpu_check: $*" >&2
    usage >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
device=
python=
rest=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --device | --python)
            [ $# -ge 2 ] || misused "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift
            ;;
        --device=* | --python=*)
            name=${1%%=*}
            printf -v "${name#--}" %s "${1#*=}"
            ;;
        *) rest+=("$1") ;;
    esac
    shift
done
case $device in
    '' | cuda | cpu) ;;
    *) misused "unknown device '$device': it is cuda or cpu" ;;
esac
if [ -n "$python" ] && ! command -v "$python" >/dev/null; then
    fail "--python $python: there is no such program"
fi

# Why this interpreter can't check on a GPU; nothing when it can.
unfit_for_cuda() {
    "$1" - <<'PY'
from importlib import metadata

try:
    metadata.version("vllm")
    import torch
except (metadata.PackageNotFoundError, ImportError):
    print("it has no vLLM (the distribution vllm, with torch)")
else:
    if not torch.cuda.is_available():
        print(f"its torch {torch.__version__} sees no CUDA GPU")
PY
}

# Checks run from this checkout, because the row names its commit.
require_this_tapcheck() {
    local found
    found=$(
        "$1" - <<'PY'
import importlib.util
import pathlib

spec = importlib.util.find_spec("tapcheck")
print(pathlib.Path(spec.origin).resolve().parents[1] if spec and spec.origin else "nothing")
PY
    ) || fail "$1 does not run"
    [ "$found" = "$root" ] ||
        fail "$1 finds tapcheck in $found, not in this checkout: run '$1 -m pip install -e $root'"
}

check() {
    exec "$1" -m tapcheck check --device "$2" --record "$root/compatibility/rows" "${rest[@]}"
}

if [ "$device" != cpu ]; then
    candidate=${python:-python3}
    reason=$(unfit_for_cuda "$candidate") || fail "$candidate does not run"
    if [ -z "$reason" ]; then
        require_this_tapcheck "$candidate"
        check "$candidate" cuda
    fi
    way_out="activate the environment of your vLLM or name its interpreter with --python; --device cpu checks vLLM's CPU build"
    [ "$device" != cuda ] || fail "can't check on a GPU with $candidate: $reason; $way_out"
    # A GPU that only the wrong environment hides is not passed over.
    if nvidia-smi --list-gpus >/dev/null 2>&1; then
        fail "this machine has a GPU, but $candidate can't use it: $reason; $way_out"
    fi
fi

if [ -z "$python" ]; then
    "$root/scripts/setup_env.sh"
    python=$root/.venv/bin/python
fi
require_this_tapcheck "$python"
check "$python" cpu
