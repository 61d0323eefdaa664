"""How pages are made of templates, and written."""

from __future__ import annotations

from pathlib import Path

import jinja2

from fedkeel.errors import RunError
from fedkeel.records.files import write_text


def templates(folder: Path) -> jinja2.Environment:
    """Return the templates of a folder; what they show is escaped, and has to be given."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def write_page(html: str, file: Path) -> Path:
    """Write a page, in a folder that is made where it is not there; return the file.

    Raises:
        RunError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, html)
    except OSError as error:
        raise RunError(
            f"The page {file} cannot be written.", got=error, do="see that the disk has room"
        ) from None
    return file
