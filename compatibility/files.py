"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str, *, exclusive: bool = False) -> None:
    """Write UTF-8 text to `path` by way of a temporary file in the same folder, which must exist.

    Readers see the old file or the new one. With `exclusive`, FileExistsError when it is there.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # mkstemp's 0600 would hide the file from other users
        if exclusive:
            os.link(temporary, path)  # unlike os.replace, fails when the target exists
        else:
            os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
