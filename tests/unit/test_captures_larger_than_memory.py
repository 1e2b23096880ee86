"""Captures on disk are compared as they stream, and may be larger than memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tapcheck.capture import Capture, Columns, SiteRows
from tapcheck.request import Request
from tapcheck.sites import Site
from tapcheck.storage import _digest, load_capture, save_capture

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc about memory")

ROWS, WIDTH, LAYERS = 8_000, 2_048, 12
ALLOWED_MB = 128

# How far the memory that is not a mapped file's rose, at its highest.
COMPARE = """
import sys, threading
from tapcheck import load_capture
from tapcheck.checks.equivalence import compare_captures

def held():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) / 1024

compare_captures(*map(load_capture, sys.argv[3:5]))  # whatever is loaded once
before, highest, done = held(), 0.0, threading.Event()

def watch():
    global highest
    while not done.wait(0.002):
        highest = max(highest, held() - before)

watcher = threading.Thread(target=watch)
watcher.start()
found = compare_captures(*map(load_capture, sys.argv[1:3]))
done.set()
watcher.join()
named = [found.first_divergence.site, found.diagnoses[0].fault] if not found.passed else []
print(highest)
print(found.passed, found.rows_compared, *named)
"""


def saved(path: Path, rows: int, layers: list[int]) -> Path:
    """A capture whose layer at each place holds the values of the layer that is named there."""
    requests = (Request("a", tuple(range(rows))),)
    position = np.arange(rows, dtype=np.int64)
    columns = Columns(np.zeros_like(position), *[position] * 4)
    generator = torch.Generator()
    sites = {}
    for place, layer in enumerate(layers):
        values = torch.randn(rows, WIDTH, generator=generator.manual_seed(layer))
        sites[Site("resid_post", place)] = SiteRows(columns, values.bfloat16())
    save_capture(Capture(requests, sites), path)
    return path


def test_comparing_and_diagnosing_takes_a_part_of_the_memory_of_a_capture(tmp_path: Path) -> None:
    right = list(range(LAYERS))
    off = [*right[:6], *(layer ^ 1 for layer in right[6:])]
    healthy = saved(tmp_path / "healthy", ROWS, right)
    small = saved(tmp_path / "small", 8, right[:1])
    assert healthy.stat().st_size > 2.9 * (ALLOWED_MB << 20)
    for layers, verdict in (
        (right, f"True {ROWS * LAYERS}"),
        (off, f"False {ROWS * LAYERS} resid_post.6 layer_off_by_one"),
    ):
        other = saved(tmp_path / "other", ROWS, layers)
        done = subprocess.run(
            [sys.executable, "-c", COMPARE, other, healthy, small, small],
            capture_output=True,
            text=True,
            check=True,
        )
        rose, said = done.stdout.splitlines()
        assert said == verdict
        assert float(rose) < ALLOWED_MB


def test_a_file_that_is_larger_than_memory_is_loaded_and_read_in_parts(tmp_path: Path) -> None:
    """It is all holes: a disk need not have room for it."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    memory = dict(line.split(":", 1) for line in lines)
    too_much = 1024 * sum(int(memory[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
    width = too_much // 8 + (1 << 20)  # of 8 bytes a column, in four rows of bfloat16
    path = with_width(saved(tmp_path / "capture", 4, [0]), width)
    assert path.stat().st_size > too_much
    values = load_capture(path)["resid_post.0"].values
    assert values.shape == (4, width)
    assert values[3, -5:].tolist() == [0.0] * 5
    values[0, 0] = 1.0  # in memory, not in the file
    assert load_capture(path)["resid_post.0"].values[0, 0] == 0


def with_width(path: Path, width: int) -> Path:
    """The capture with rows of zeros of that width, and a header and checksum that say so."""
    with safe_open(path, framework="np") as file:
        said = dict(file.metadata())
        arrays = {n: file.get_tensor(n) for n in file.keys() if n.startswith(("col", "req"))}  # noqa: SIM118
    del said["sha256"]
    said["sites"] = json.dumps({"resid_post.0": ["bfloat16", [4, width]]})
    said["sha256"] = _digest(said, arrays)
    header: dict[str, object] = {"__metadata__": said}
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": "I64",
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    end = at + 8 * width
    header["values/resid_post.0"] = {
        "dtype": "BF16",
        "shape": [4, width],
        "data_offsets": [at, end],
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            out.write(array.tobytes())
        out.truncate(8 + len(text) + end)
    return path
