"""How pages are rendered from templates."""

from __future__ import annotations

from pathlib import Path

import jinja2


def templates(folder: Path) -> jinja2.Environment:
    """The templates in a folder: values are escaped, and one that is missing is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
