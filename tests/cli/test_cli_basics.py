"""What holds for every command."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from commandline import Done

import tapcheck.__main__
from tapcheck.errors import CaptureError, EngineError
from tapcheck.terminal import quiet_engine

COMMANDS = ("check", "bisect", "capture", "diff", "matrix", "selftest", "env")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["check", "-h"], ["capture", "nothing"], ["env"], ["nope"]],
    ids=" ".join,
)
def test_light_commands_load_no_engine(arguments: list[str], tmp_path: Path) -> None:
    script = f"""
import sys
from tapcheck.cli import run
run({arguments!r})
sys.exit(", ".join({{"torch", "transformers", "vllm"}} & set(sys.modules)) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_console_script_and_the_module_are_one_command(command: Callable[..., Done]) -> None:
    script = Path(sys.executable).with_name("tapcheck")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == command("--version").out == f"tapcheck {version('tapcheck')}\n"


def test_help_names_every_command_and_fits_a_terminal(cli: Callable[..., Done]) -> None:
    done = cli("--help")
    assert done.code == 0
    assert re.findall(r"^  (\w+)  +[A-Z].*\.$", done.out, re.MULTILINE) == list(COMMANDS)
    for name in COMMANDS:
        text = cli(name, "--help").out
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'"),
        (["env", "--nope"], "No such option: --nope"),
        (["diff", "one"], "Missing argument 'EXPECTED'"),
        (["check", "--device", "tpu"], "'tpu' is not one of"),
        (["check", "--dtype", "int8"], "'int8' is not one of"),
        (["capture", "m"], "Missing option '-o'"),
    ],
)
def test_bad_use_is_refused_with_a_hint_to_the_help(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    err = refused(*arguments)
    assert message in err
    assert re.search(r"^Try 'tapcheck.* -h' for help\.$", err, re.MULTILINE)


def test_no_arguments_show_the_help_and_count_as_bad_use(cli: Callable[..., Done]) -> None:
    done = cli()
    assert done.code == 2
    assert "Commands:" in done.out + done.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(143), 143, "tapcheck: interrupted\n"),
        (CaptureError("request 'r' is lost"), 2, "tapcheck: request 'r' is lost\n"),
        (OSError(28, "No space left on device"), 2, "tapcheck: [Errno 28] No space left on device"),
    ],
)
def test_what_ends_a_command_is_one_message(
    error: BaseException,
    code: int,
    message: str,
    cli: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(_environment: object) -> None:
        raise error

    monkeypatch.setattr("tapcheck.cli.print_environment", end)
    done = cli("env")
    assert done.code == code
    assert done.err.lstrip("\n").startswith(message)
    assert "Traceback" not in done.err


def test_an_unforeseen_error_does_not_look_like_a_failed_check(
    cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tapcheck.cli.print_environment", lambda _environment: 1 / 0)
    done = cli("env")
    assert done.code == 2
    assert "ZeroDivisionError" in done.err
    assert "please report it" in done.err


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Signals raise KeyboardInterrupt until the command changes that; back to what was, then."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_unwinds_even_where_a_keyboard_interrupt_is_swallowed(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def start_engine(_arguments: list[str]) -> int:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:  # as vLLM does while its engine core starts
            pass
        finally:
            ended.append("engine")
        return 0

    monkeypatch.setattr("tapcheck.cli.run", start_engine)
    with pytest.raises(SystemExit) as exit_:
        tapcheck.__main__.main()
    assert exit_.value.code == 128 + number
    assert ended == ["engine"]


def test_a_reader_that_leaves_early_sees_no_traceback(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "tapcheck", "env"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def on_a_terminal(folder: Path, *arguments: str) -> str:
    """What a command prints to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        child = subprocess.Popen(
            [sys.executable, "-m", "tapcheck", *arguments],
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=os.environ | {"COLUMNS": "80", "TERM": "xterm-256color"},
        )
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = terminal.read(65536)
            except OSError:  # Linux's way to say that nobody writes any more
                break
            if not part:
                break
            shown += part
    assert child.wait() == 0
    return shown.decode()


def test_a_terminal_gets_lines_that_fit_it_and_a_pipe_gets_plain_ones(
    tmp_path: Path, command: Callable[..., Done]
) -> None:
    shown = on_a_terminal(tmp_path, "env")
    assert "\x1b[1m" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert max(map(len, plain.splitlines())) <= 80
    piped = command("env").out
    assert "\x1b" not in piped
    assert piped.split() == plain.split()


def test_an_engine_that_works_is_not_heard(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_engine("vllm"):
        os.write(1, b"loading\n")
        os.write(2, b"warning\n")
        subprocess.run([sys.executable, "-c", "print('worker')"], check=True)
    assert capfd.readouterr() == ("", "")


def test_an_engine_that_breaks_is_one_message_that_names_its_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def break_engine() -> None:
        with quiet_engine("vllm"):
            subprocess.run([sys.executable, "-c", "print('worker died')"], check=True)
            raise RuntimeError("no answer\nfrom the worker")

    with pytest.raises(EngineError) as caught:
        break_engine()
    assert capfd.readouterr() == ("", "")
    first, second = str(caught.value).splitlines()
    assert first == "vllm broke: RuntimeError: no answer"
    found = re.fullmatch(r"  what vllm printed is in (.*)", second)
    assert found is not None
    log = Path(found[1])
    text = log.read_text(encoding="utf-8")
    log.unlink()
    assert "worker died" in text
    assert "Traceback" in text


def test_a_deliberate_error_of_a_capture_passes_a_quiet_engine_unchanged() -> None:
    with pytest.raises(CaptureError, match=r"^no rows$"), quiet_engine("hf"):
        raise CaptureError("no rows")
