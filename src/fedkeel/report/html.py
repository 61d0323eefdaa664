"""How pages are made of templates, and written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from plotly.offline import get_plotlyjs

from fedkeel.base.named_files import writing
from fedkeel.errors import counted
from fedkeel.records.files import write_text
from fedkeel.report import palette
from fedkeel.report.formatting import (
    capital,
    format_duration,
    format_number,
    format_percent,
    format_score,
    format_stat,
)

_HERE = Path(__file__).parent


def render_page(template: str, *, folder: Path = _HERE, **values: Any) -> str:  # noqa: ANN401
    """Return a page as HTML: a template that extends ``base.html.j2``.

    What it shows is escaped, and has to be given. A page with ``charts`` has the script that draws
    them.

    Args:
        template: name of the template.
        folder: where it is.
        **values: what it shows.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _HERE]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": _breakable,
        "count": lambda number, noun: counted(number, noun),
        "colour": lambda index: index % len(palette.METHODS),
        "line_style": palette.line_style,
        "mark": lambda index: palette.mark(index)[0],
        "capital": capital,
        "duration": format_duration,
        "number": format_number,
        "percent": format_percent,
        "score": format_score,
        "stat": format_stat,
    }
    css = (_HERE / "page.css").read_text(encoding="utf-8")
    plotly = get_plotlyjs() if "charts" in values else ""
    page = environment.get_template(template)
    return page.render(css=css, plotly=plotly, palette=palette, **values)


def _breakable(label: str) -> markupsafe.Markup:
    """Return a label, escaped, with possible line breaks after "+" and ","."""
    pieces = re.split(r"(?<=[+,])", label)
    return markupsafe.Markup("<wbr>").join(pieces)


def write_page(html: str, file: Path) -> Path:
    """Write a page, in a folder that is made where it is not there; return the file.

    Raises:
        RunError: it cannot be written.
    """
    text = html.encode(errors="backslashreplace").decode()  # names of files may not be in UTF-8
    elsewhere = "see that the disk has room, or write it elsewhere: fedkeel report RUN --out FILE"
    with writing(f"The page {file} cannot be written.", elsewhere):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    return file
