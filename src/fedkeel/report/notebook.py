"""What a notebook shows of a result: a table, learning curves, the whole report page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go

from fedkeel.base.named_files import expanded
from fedkeel.errors import RunError, did_you_mean
from fedkeel.records.files import write_text
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.report.learning_curves import curve_charts
from fedkeel.report.page import render_report
from fedkeel.report.runs import MethodResults, RunResults
from fedkeel.report.summary import summarise
from fedkeel.report.tables import result_rows, result_table


def run_results(record: RunRecord, rows: Sequence[RoundRecord], folder: str = "") -> RunResults:
    """Return a run as the report takes it, also of one that is not on disk."""
    summary = summarise(
        rows,
        record.target,
        score=record.score,
        loss=record.task.loss,
        judges=record.judges,
        model_bytes=record.model.bytes,
    )
    return RunResults(folder, record, tuple(rows), summary)


def by_method(runs: Iterable[RunResults]) -> list[MethodResults]:
    """Group runs by method in the order given, the seeds of each in their order."""
    groups: dict[str, list[RunResults]] = {}
    for run in runs:
        groups.setdefault(run.record.method, []).append(run)
    return [
        MethodResults(method, index, tuple(sorted(group, key=lambda run: run.record.seed)))
        for index, (method, group) in enumerate(groups.items())
    ]


def run_html(results: RunResults) -> str:
    """Return what ran, how it ended and its figures."""
    record = results.record
    head = f"<b><code>{html.escape(record.method)}</code></b>, seed {record.seed}: {results.state}"
    if not results.summary.evaluations:
        return f"<p>{head}</p>"
    rows = result_rows([method.summary for method in by_method([results])])
    return f"<p>{head}</p>" + result_table(rows).html()


def curves(methods: Sequence[MethodResults], metric: str | None = None) -> go.Figure:
    """Return the learning curves, a line for each method with a band over its seeds.

    Args:
        methods: the methods.
        metric: name of a metric; None takes the score.

    Raises:
        RunError: there is no such metric, or no round was evaluated.
    """
    task = methods[0].record.task
    known = [info.name for info in task.metrics]
    name = task.score if metric is None else metric
    if name not in known:
        raise RunError(f"The runs have no metric {name!r}.", do=did_you_mean(name, known))
    charts = curve_charts(methods, task.metric(name), methods[0].record.target)
    if not charts:
        raise RunError("There is nothing to draw.", got="no evaluated round")
    figure = charts["rounds"].figure
    figure.for_each_trace(lambda trace: trace.update(showlegend=False), {"fill": "toself"})
    return figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.2})


@dataclass(frozen=True, repr=False)
class Page:
    """A report page, which a notebook shows in a frame.

    Args:
        html: the page, which needs no other file and no network.
        height: height of the frame in pixels.
    """

    html: str
    height: int = 800

    @classmethod
    def of(cls, methods: Sequence[MethodResults], title: str | None = None) -> Page:
        """Return the page of runs."""
        return cls(render_report(methods, title=title))

    def save(self, path: str | Path) -> Path:
        """Write the page to a file."""
        file = expanded(path)
        write_text(file, self.html)
        return file

    def __repr__(self) -> str:
        return f"<report page of {len(self.html):,} characters; save(path) writes it>"

    def _repr_html_(self) -> str:
        source = html.escape(self.html, quote=True)
        style = f"width:100%;height:{self.height}px;border:1px solid #8888"
        return f'<iframe title="report" srcdoc="{source}" style="{style}"></iframe>'
