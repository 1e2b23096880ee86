"""Drains cross to another process whole, and whoever dies on the way leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapcheck import handover
from tapcheck.errors import CaptureError
from tapcheck.handover import MOST_KEPT, SMALLEST_SHARED, HandoverError, Receiver, Sender

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="no anonymous memory files on this system"
)

# Sends a drain of as many bytes as each line says, all of them the drain's number.
WORKER = """
import json, sys
from tapcheck.handover import Sender

sender = Sender()
for number, line in enumerate(sys.stdin, 1):
    sent = sender.send([memoryview(bytes([number]) * int(line))])
    print(json.dumps(sent.hex() if isinstance(sent, bytes) else sent), flush=True)
"""

# Receives a drain, says so, and waits to be killed with the worker's memory mapped.
CLIENT = """
import json, sys
from tapcheck.handover import Receiver

receiver = Receiver()
[drain] = receiver.receive([json.loads(sys.stdin.readline())])
print(len(drain), flush=True)
sys.stdin.readline()
"""

Child = subprocess.Popen[str]
Start = Callable[[str], Child]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[Child] = []

    def child(script: str) -> Child:
        command = [sys.executable, "-c", script]
        pipe = subprocess.PIPE
        children.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return children[-1]

    yield child
    for each in children:
        each.kill()
        each.communicate()


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.release()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def ask(child: Child, request: object) -> Any:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{request}\n")
    child.stdin.flush()
    return json.loads(child.stdout.readline())


def kill(child: Child) -> None:
    child.kill()
    child.communicate()


def holders(name: str) -> set[int]:
    """The processes that have this memory file open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or another user's
            links = [str(link.readlink()) for link in (process / "fd").iterdir()]
            if any(name in held for held in [*links, (process / "maps").read_text()]):
                found.add(int(process.name))
    return found


def open_files() -> int:
    return psutil.Process().num_fds()


def take(receiver: Receiver, sent: Any) -> bytes | memoryview:
    [drain] = receiver.receive([sent])
    return drain


def drain_of(size: int, fill: int = 1) -> list[memoryview]:
    return [memoryview(bytes([fill]) * size)]


sizes = st.sampled_from([0, 1, 7, 4096, SMALLEST_SHARED, SMALLEST_SHARED + 1])


@given(st.lists(st.lists(st.tuples(sizes, st.integers(0, 255)), max_size=5), max_size=4))
def test_what_is_received_is_what_was_sent(drains: list[list[tuple[int, int]]]) -> None:
    sender, receiver = Sender(), Receiver()
    received = []
    for pieces in drains:
        parts = [memoryview(bytes([fill]) * size) for size, fill in pieces]
        whole = b"".join(parts)
        sent = sender.send(parts)
        assert isinstance(sent, bytes) == (len(whole) < SMALLEST_SHARED)
        sent = sent if isinstance(sent, bytes) else json.loads(json.dumps(sent))
        received.append((take(receiver, sent), whole))
    sender.release()
    receiver.close()
    for drain, whole in received:  # each has memory of its own, which outlives both sides
        assert drain == whole
        assert isinstance(drain, bytes) or not drain.readonly


def test_more_parts_than_one_system_call_takes_are_sent_whole(
    sender: Sender, receiver: Receiver
) -> None:
    parts = [memoryview(number.to_bytes(8, "little")) for number in range(SMALLEST_SHARED)]
    handle = sender.send(parts)
    assert take(receiver, handle) == b"".join(parts)


def test_drains_cross_from_another_process_as_they_grow_and_shrink(
    start: Start, receiver: Receiver
) -> None:
    worker = start(WORKER)
    names = []
    for number, size in enumerate([1 << 20, SMALLEST_SHARED, MOST_KEPT + 5, 3 << 20, 0], 1):
        handle = ask(worker, size)
        if size:
            assert take(receiver, handle) == bytes([number]) * size
            names.append(handle["name"])
        else:
            assert handle == ""
    assert names[0] == names[1] != names[2] == names[3]  # made anew only where it was too small


def test_two_workers_are_read_side_by_side(start: Start, receiver: Receiver) -> None:
    workers = [start(WORKER), start(WORKER)]
    ask(workers[1], 1)
    for number in (1, 2):
        handles = [ask(worker, SMALLEST_SHARED) for worker in workers]
        fills = [drain[-1] for drain in receiver.receive(handles)]
        assert fills == [number, number + 1]


def test_many_drains_leave_no_file_open_and_no_memory_held(
    sender: Sender, receiver: Receiver
) -> None:
    take(receiver, sender.send(drain_of(1 << 20)))
    before = open_files()
    kept = [take(receiver, sender.send(drain_of(1 << 20))) for _ in range(20)]
    assert open_files() == before
    assert len(kept) == 20
    sender.release()
    receiver.close()
    assert open_files() == before - 3


def test_a_large_drain_gives_its_memory_back_once_received(
    start: Start, receiver: Receiver
) -> None:
    worker = start(WORKER)
    handle = ask(worker, 2 * MOST_KEPT)
    file = Path(f"/proc/{handle['pid']}/fd/{handle['fd']}")
    assert file.stat().st_blocks * 512 >= 2 * MOST_KEPT
    take(receiver, handle)
    assert file.stat().st_blocks * 512 == MOST_KEPT


def test_a_client_killed_after_or_before_it_receives_costs_the_worker_nothing(
    start: Start, receiver: Receiver
) -> None:
    worker = start(WORKER)
    handle = ask(worker, 1 << 20)
    held = Path(f"/proc/{worker.pid}/fd/{handle['fd']}").stat().st_blocks
    for _ in range(3):
        client = start(CLIENT)
        assert ask(client, json.dumps(handle)) == 1 << 20
        kill(client)
        handle = ask(worker, 1 << 20)  # one that nobody receives
        handle = ask(worker, 1 << 20)
    assert Path(f"/proc/{worker.pid}/fd/{handle['fd']}").stat().st_blocks == held
    assert take(receiver, handle) == bytes([7]) * (1 << 20)


def test_a_worker_killed_before_the_client_receives_is_named(
    start: Start, receiver: Receiver
) -> None:
    worker = start(WORKER)
    handle = ask(worker, 1 << 20)
    kill(worker)
    with pytest.raises(HandoverError, match=f"{worker.pid} has ended"):
        take(receiver, handle)


def test_a_drain_sent_before_the_worker_was_killed_is_still_received(
    start: Start, receiver: Receiver
) -> None:
    worker = start(WORKER)
    take(receiver, ask(worker, 1 << 20))
    handle = ask(worker, 1 << 20)
    kill(worker)
    assert take(receiver, handle) == bytes([2]) * (1 << 20)


@pytest.mark.parametrize("received", [True, False])
def test_nothing_is_left_when_both_are_killed(start: Start, received: bool) -> None:
    worker, client = start(WORKER), start(CLIENT)
    handle = ask(worker, 1 << 20)
    if received:
        ask(client, json.dumps(handle))
    assert holders(handle["name"]) == ({worker.pid, client.pid} if received else {worker.pid})
    kill(worker)
    kill(client)
    assert holders(handle["name"]) == set()  # nor has it a name, so the kernel has freed it
    assert not [name for name in os.listdir("/dev/shm") if "tapcheck" in name]


def test_a_drain_overtaken_by_the_next_is_refused(sender: Sender, receiver: Receiver) -> None:
    first = sender.send(drain_of(1 << 20))
    second = sender.send(drain_of(1 << 20, 2))
    with pytest.raises(CaptureError, match="one client at a time"):
        take(receiver, first)
    assert take(receiver, second) == bytes([2]) * (1 << 20)


def test_a_drain_overwritten_while_it_is_copied_is_refused(
    sender: Sender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = sender.send(drain_of(1 << 20))
    real = handover.np.frombuffer

    def overtaken(*arguments: Any) -> Any:
        sender.send(drain_of(1 << 20, 2))
        return real(*arguments)

    monkeypatch.setattr(handover.np, "frombuffer", overtaken)
    with pytest.raises(CaptureError, match="overwritten"):
        take(receiver, handle)


def test_a_drain_is_received_once(sender: Sender, receiver: Receiver) -> None:
    handle = sender.send(drain_of(1 << 20))
    take(receiver, handle)
    with pytest.raises(CaptureError, match="received before"):
        take(receiver, handle)


def test_a_drain_that_can_not_be_received_is_sent_again_as_bytes(
    sender: Sender, receiver: Receiver
) -> None:
    handle = sender.send(drain_of(1 << 20))
    assert sender.resend() == bytes([1]) * (1 << 20)
    take(receiver, handle)
    assert sender.resend() == b""  # its memory may be given back by now
    sender.send(drain_of(1 << 20))
    sender.send(drain_of(8))
    assert sender.resend() == bytes([1]) * 8
    sender.release()
    assert sender.resend() == b""


def test_where_one_worker_is_out_of_reach_none_is_received_and_each_can_resend(
    start: Start, sender: Sender, receiver: Receiver
) -> None:
    other, far = Sender(), start(WORKER)
    sent = [sender.send(drain_of(1 << 20)), other.send(drain_of(8, 2)), ask(far, 1 << 20)]
    kill(far)
    with pytest.raises(HandoverError):
        receiver.receive(sent)
    assert [each.resend() for each in (sender, other)] == [b"\1" * (1 << 20), b"\2" * 8]


@pytest.mark.parametrize("error", [OSError("out of files"), None])
def test_without_memory_files_a_drain_travels_in_the_reply(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    def refuse(_name: str) -> int:
        assert error is not None
        raise error

    if error is None:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", refuse)
    before = open_files()
    assert sender.send(drain_of(1 << 20)) == bytes([1]) * (1 << 20)
    assert open_files() == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pid": 2**22 + 1}, "another container"),
        ({"fd": 10**6}, "another container"),
        ({"fd": 0}, "instead"),
        ({"name": "tapcheck-other"}, "instead"),
        ({"capacity": 1 << 40}, "can't read a worker's memory"),
    ],
)
def test_memory_that_is_not_the_workers_is_not_mapped(
    sender: Sender, receiver: Receiver, changes: dict[str, Any], reason: str
) -> None:
    handle = sender.send(drain_of(1 << 20))
    assert isinstance(handle, dict)
    before = open_files()
    with pytest.raises(HandoverError, match=reason):
        take(receiver, {**handle, **changes})
    assert open_files() == before
    assert take(receiver, handle) == bytes([1]) * (1 << 20)


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": "1"},
        {"pid": -1},
        {"fd": True},
        {"fd": -1},
        {"size": -1},
        {"size": 1 << 40},
        {"name": None},
        {"stamp": "00"},
        {"stamp": "zz" * 16},
        {"more": 1},
    ],
)
def test_a_malformed_handle_is_refused(
    sender: Sender, receiver: Receiver, changes: dict[str, Any]
) -> None:
    handle = sender.send(drain_of(1 << 20))
    assert isinstance(handle, dict)
    with pytest.raises(CaptureError, match="is no handle"):
        take(receiver, {**handle, **changes})
    with pytest.raises(CaptureError, match="is no handle"):
        take(receiver, list(handle.values()))


def test_the_memory_has_no_name_that_another_user_could_open(sender: Sender) -> None:
    handle = sender.send(drain_of(1 << 20))
    assert isinstance(handle, dict)
    path = Path(f"/proc/{handle['pid']}/fd/{handle['fd']}")
    assert path.readlink().name == f"memfd:{handle['name']} (deleted)"
    assert path.stat().st_nlink == 0
    assert path.parent.stat().st_mode & 0o077 == 0
