"""Progress bars in a Jupyter notebook, in one output that is written again and again.

Rich shows its bars there by ipywidgets, which not every notebook has; this needs only IPython.
"""

from __future__ import annotations

import html
import io
import time
from typing import Any, Self

from rich.console import Console

from fedkeel.base.optional import imported
from fedkeel.features.progress.display import ProgressBars
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import ACCURACY, MetricInfo

_SECONDS = 0.2
"""Seconds between two pictures of the bars."""


class NotebookBars(ProgressBars):
    """The bars of a terminal, drawn into the output of a notebook's cell."""

    def __init__(self) -> None:
        self._picture = Console(
            file=io.StringIO(), record=True, width=100, force_jupyter=False, force_terminal=True
        )
        super().__init__(self._picture)
        self._lines: list[str] = []
        self._shown_at = 0.0
        self._handle: Any = None  # of IPython, None before the first picture

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._show(final=True)

    def prepare(self) -> None:
        """Show a bar without an end."""
        super().prepare()
        self._show()

    def begin(self, run: str, rounds: int, done: int, score: MetricInfo = ACCURACY) -> None:
        """Show the bar of a run."""
        super().begin(run, rounds, done, score)
        self._show()

    def clients(self, run: str, trained: int, count: int) -> None:
        """Move the bar."""
        super().clients(run, trained, count)
        self._show()

    def row(self, run: str, row: RoundRecord) -> None:
        """Move the bars by a round."""
        super().row(run, row)
        self._show()

    def step(self, run: str, done: int, unit: str) -> None:
        """Move the bars."""
        super().step(run, done, unit)
        self._show()

    def _print(self, text: str) -> None:
        self._lines.append(f"{self._prefix}{text}")
        self._shown_at = 0.0

    def _show(self, final: bool = False) -> None:
        """Draw the bars where it is time to; at the end only the lines that were printed."""
        now = time.monotonic()
        if not final and now - self._shown_at < _SECONDS:
            return
        self._shown_at = now
        shown = "".join(f"<div>{html.escape(line)}</div>" for line in self._lines)
        if not final:
            self._picture.file = io.StringIO()  # the picture before is not kept
            self._picture.print(self._progress.get_renderable())
            shown += self._picture.export_html(
                inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>'
            )
        ipython = imported("IPython.display", "progress in a notebook")
        if self._handle is None:
            self._handle = ipython.display(ipython.HTML(shown), display_id=True)
        else:
            self._handle.update(ipython.HTML(shown))
