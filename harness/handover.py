"""How a worker's packed rows reach the client's process on the same machine: shared memory.

The worker keeps one anonymous memory file (a memfd) and copies each drain into it; the client maps
the file once, by way of /proc, and copies the drain out. The file has no name in any file system:
the kernel frees it when both processes have let go of it, however they end. Only processes of the
same user can open it. It begins with a stamp, drawn anew for each drain and wiped while the worker
writes, so that a client can't take one drain for another.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tapcheck.errors import CaptureError

# Drains below this many bytes travel in the reply itself, which is as fast and needs no mapping.
SMALLEST_SHARED = 64 << 10

# How much of the memory file stays resident between drains: reusing pages is what makes it fast.
MOST_KEPT = 64 << 20

_STAMP_BYTES = 16
_BEGIN = 64  # where the drain begins: aligned as a cache line
_FIELDS = {"pid": int, "fd": int, "name": str, "capacity": int, "size": int, "stamp": str}


class HandoverError(CaptureError):
    """A drain that this process can't read from the worker's memory; the worker can resend it."""


class Sender:
    """The worker's side, one a process: holds one drain until it is received or another is sent."""

    def __init__(self) -> None:
        self._name = ""
        self._fd: int | None = None
        self._memory: mmap.mmap | None = None
        self._size = 0
        self._stamp = b""
        self._small = b""

    def send(self, parts: Sequence[memoryview]) -> dict[str, Any] | bytes:
        """Copy a drain into shared memory; returns the JSON-able handle for `Receiver.receive`.

        `parts` are the drain's bytes in pieces, as from `packed_parts`. Returns the bytes
        themselves when they are few, or this system has no such memory.
        """
        size = sum(part.nbytes for part in parts)
        memory = self._room_for(size) if size >= SMALLEST_SHARED else None
        if memory is None:
            plain = b"".join(parts)
            self._stamp, self._small = b"", plain if size < SMALLEST_SHARED else b""
            return plain
        memory[:_BEGIN] = bytes(_BEGIN)
        at = _BEGIN
        for part in parts:
            memory[at : at + part.nbytes] = part
            at += part.nbytes
        self._size, self._stamp = size, secrets.token_bytes(_STAMP_BYTES)
        memory[:_STAMP_BYTES] = self._stamp
        values = (os.getpid(), self._fd, self._name, len(memory), size, self._stamp.hex())
        return dict(zip(_FIELDS, values, strict=True))

    def resend(self) -> bytes:
        """The bytes of the last drain, for a client that can't receive it; none once received."""
        if not self._stamp:
            return self._small
        if self._memory is None or self._memory[:_STAMP_BYTES] != self._stamp:
            return b""
        return self._memory[_BEGIN : _BEGIN + self._size]

    def release(self) -> None:
        """Let go of the memory; a client that has it mapped can still receive the last drain."""
        if self._memory is not None:
            self._memory.close()
        if self._fd is not None:
            os.close(self._fd)
        self._memory, self._fd, self._stamp, self._small = None, None, b"", b""

    def _room_for(self, size: int) -> mmap.mmap | None:
        """The memory, made anew when it is too small; None where there is no such memory."""
        needed = _BEGIN + size
        if self._memory is not None and len(self._memory) >= needed:
            return self._memory
        self.release()
        if not hasattr(os, "memfd_create"):
            return None
        # Pages that were never written take no memory, so room to grow costs nothing.
        capacity = max(1 << needed.bit_length(), MOST_KEPT)
        self._name = f"tapcheck-{secrets.token_hex(8)}"
        try:
            self._fd = os.memfd_create(self._name)
            os.ftruncate(self._fd, capacity)
            self._memory = mmap.mmap(self._fd, capacity)
        except OSError:
            self.release()
        return self._memory


class Receiver:
    """The client's side: keeps each worker's memory mapped from one drain to the next."""

    def __init__(self) -> None:
        self._mapped: dict[int, tuple[str, mmap.mmap]] = {}

    def receive(self, drains: Sequence[Any]) -> list[bytes | memoryview]:
        """One drain of every worker, each as this process's own copy; bytes are left as they are.

        `drains` are what every worker's `Sender.send` returned; each can be received once. Raises
        HandoverError when a worker's memory is out of reach: none is received then, and each
        worker can `resend`. Raises CaptureError when a drain isn't in its memory any more.
        """
        handles = [drain if isinstance(drain, bytes) else _check(drain) for drain in drains]
        reached = [
            each if isinstance(each, bytes) else (each, self._memory(each)) for each in handles
        ]
        return [each if isinstance(each, bytes) else _take(*each) for each in reached]

    def close(self) -> None:
        """Unmap every worker's memory; drains that were received stay."""
        for _, memory in self._mapped.values():
            memory.close()
        self._mapped.clear()

    def _memory(self, handle: Mapping[str, Any]) -> mmap.mmap:
        """The worker's memory, mapped anew when the worker has made another."""
        pid, name = handle["pid"], handle["name"]
        if pid in self._mapped:
            known, memory = self._mapped[pid]
            if known == name and len(memory) == handle["capacity"]:
                return memory
            memory.close()
            del self._mapped[pid]
        memory = _map(handle)
        self._mapped[pid] = name, memory
        return memory


def _take(handle: Mapping[str, Any], memory: mmap.mmap) -> memoryview:
    """A writable copy of the drain, which is gone from the memory then."""
    size, stamp = handle["size"], bytes.fromhex(handle["stamp"])
    before = memory[:_STAMP_BYTES]
    drain = np.frombuffer(memory, np.uint8, size, _BEGIN).copy()
    if not before == stamp == memory[:_STAMP_BYTES]:
        raise CaptureError(
            f"worker {handle['pid']}: {size} bytes of rows were overwritten or received "
            "before they were read. Let one client at a time capture from an engine"
        )
    memory[:_STAMP_BYTES] = bytes(_STAMP_BYTES)
    surplus = _BEGIN + size - MOST_KEPT
    if surplus > 0:
        memory.madvise(mmap.MADV_REMOVE, MOST_KEPT, surplus)
    return memoryview(drain)


def _map(handle: Mapping[str, Any]) -> mmap.mmap:
    """The memory file of the handle, once it is sure to be that one."""
    path = f"/proc/{handle['pid']}/fd/{handle['fd']}"
    try:
        found = os.readlink(path)
        if found != f"/memfd:{handle['name']} (deleted)":
            raise HandoverError(f"can't read a worker's memory: {path} is {found!r} instead")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, handle["capacity"])
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: it is shorter than promised
        raise HandoverError(
            f"can't read a worker's memory: {error}. Worker {handle['pid']} has ended, or runs in "
            "another container, on another machine or as another user"
        ) from None


def _check(handle: Any) -> dict[str, Any]:
    """The handle, once its fields are what `Sender.send` makes them."""
    if isinstance(handle, dict) and set(handle) == set(_FIELDS):
        typed = all(type(handle[name]) is kind for name, kind in _FIELDS.items())
        if typed and _is_sane(handle):
            return handle
    raise CaptureError(f"{handle!r} is no handle of a worker's memory")


def _is_sane(handle: Mapping[str, Any]) -> bool:
    numbers = handle["pid"] > 0 and handle["fd"] >= 0 and handle["size"] >= 0
    fits = _BEGIN + handle["size"] <= handle["capacity"]
    try:
        return numbers and fits and len(bytes.fromhex(handle["stamp"])) == _STAMP_BYTES
    except ValueError:
        return False
