"""The doctor's page: one HTML file in the style of the report."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedkeel.records.doctor import DoctorRecord
from fedkeel.report import palette
from fedkeel.report.chart_style import Chart, category_names, empty_figure, escaped, rounded
from fedkeel.report.doctor_text import compared, headline, overview, trial_text
from fedkeel.report.formatting import extreme_of, format_score, score_unit
from fedkeel.report.html import render_page, write_page
from fedkeel.report.partition_chart import label_chart

LEVELS = {"fine": "fine", "notable": "notable", "problem": "problem", "unknown": "not measured"}


def write_doctor_page(record: DoctorRecord, out: Path) -> Path:
    """Write the page; return the file.

    Raises:
        RunError: it cannot be written.
    """
    return write_page(render_doctor_page(record), out)


def render_doctor_page(record: DoctorRecord) -> str:
    """Return the page as HTML."""
    return render_page(
        "doctor.html.j2",
        record=record,
        headline=headline(record),
        overview=overview(record),
        levels=LEVELS,
        compared=compared,
        trial_text=trial_text,
        charts=charts(record),
        extreme=extreme_of(record.score),
        score_unit=score_unit(record.score),
    )


def charts(record: DoctorRecord) -> dict[str, Chart]:
    """Return the charts by name, without those for which there is nothing to draw."""
    histogram = np.array(record.histogram)
    is_counted = histogram.ndim == 2 and histogram.shape[1] > 0
    by_name = {
        "labels": label_chart(histogram, record.client_names, record.label_names)
        if is_counted
        else None,
        "sizes": None if is_counted else _bars(record, record.sizes, "examples"),
        "inputs": _bars(record, record.input_distances, "deviations"),
        "trials": _trials(record),
        "rates": _rates(record),
        "curves": _curves(record),
    }
    return {name: chart for name, chart in by_name.items() if chart is not None}


def _bars(record: DoctorRecord, values: tuple[float, ...], unit: str) -> Chart | None:
    if not values:
        return None
    names = category_names(record.client_names, len(values))
    figure = empty_figure(260, hovermode="closest")
    figure.add_bar(
        x=names,
        y=[rounded(value) for value in values],
        marker={"color": palette.rgba(palette.RAMP[0][0]), "line": {"width": 0}},
        hovertemplate=f"client %{{x}}: %{{y:.3g}} {unit}<extra></extra>",
    )
    figure.update_xaxes(title_text="client", type="category", showticklabels=len(names) <= 30)
    figure.update_yaxes(title_text=unit)
    low, high = min(values), max(values)
    return Chart(figure, f"{unit} of each of {len(values)} clients, {low:.3g} to {high:.3g}.")


def _trials(record: DoctorRecord) -> Chart | None:
    tried = [a.trial for a in (*record.advised, *record.not_advised) if a.trial is not None]
    known = [trial for trial in tried if trial.score is not None]
    if not known:
        return None
    known.reverse()  # the first bar is the lowest
    lengths = sorted({trial.rounds for trial in known})
    figure = empty_figure(60 + 24 * len(known), hovermode="closest")
    for length in lengths:
        of_length = [trial for trial in known if trial.rounds == length]
        opacity = (lengths.index(length) + 1) / len(lengths)
        figure.add_scatter(
            y=[escaped(trial.tuned) for trial in of_length],
            x=[rounded(record.score.scale * (trial.score or 0.0)) for trial in of_length],
            mode="markers",
            name=f"{length} rounds",
            marker={"color": palette.method_colour(0, opacity), "size": 11},
            hovertemplate=f"%{{y}}, {length} rounds: %{{x:.4g}}<extra></extra>",
        )
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.15})
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=[escaped(trial.tuned) for trial in known],
        automargin=True,
    )
    figure.update_xaxes(title_text=score_unit(record.score))
    best = "; ".join(
        f"{trial.tuned}: {format_score(trial.score, record.score)} in {trial.rounds} rounds"
        for trial in reversed(known)
    )
    return Chart(figure, f"Best trial of each method. {best}.")


def _rates(record: DoctorRecord) -> Chart | None:
    tried = [run for run in record.pilot if run.name.startswith("fedavg, lr ")]
    known = [run for run in tried if run.score is not None]
    if not known:
        return None
    scale = record.score.scale
    figure = empty_figure(300, hovermode="closest")
    figure.add_scatter(
        x=[run.lr for run in known],
        y=[rounded(scale * run.score) for run in known if run.score is not None],
        mode="lines+markers",
        line={"color": palette.rgba(palette.METHODS[0][0]), "width": 2},
        marker={"size": 8},
        hovertemplate="learning rate %{x}: %{y:.4g}<extra></extra>",
    )
    figure.update_xaxes(
        title_text="learning rate",
        type="log",
        tickvals=[run.lr for run in tried],
        ticktext=[f"{run.lr:g}" for run in tried],
    )
    figure.update_yaxes(title_text=score_unit(record.score))
    diverged = [f"{run.lr:g}" for run in tried if run.score is None]
    more = f" Diverged: {', '.join(diverged)}." if diverged else ""
    text = "; ".join(f"{run.lr:g}: {format_score(run.score, record.score)}" for run in known)
    return Chart(figure, f"FedAvg's score by learning rate. {text}.{more}")


def _curves(record: DoctorRecord) -> Chart | None:
    drawn = [run for run in record.pilot if len(run.curve) > 1 and " lr " not in run.name]
    if not drawn:
        return None
    figure = empty_figure(340, hovermode="closest")
    for index, run in enumerate(drawn):
        tone = palette.METHODS[index % len(palette.METHODS)][0]
        figure.add_scatter(
            x=list(range(1, len(run.curve) + 1)),
            y=[rounded(record.score.scale * value) for value in run.curve],
            mode="lines",
            name=escaped(run.name),
            line={"color": palette.rgba(tone), "width": 2, "dash": palette.dash(index)},
            hovertemplate=f"{escaped(run.name)}, round %{{x}}: %{{y:.4g}}<extra></extra>",
        )
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.25})
    figure.update_xaxes(title_text="round")
    figure.update_yaxes(title_text=score_unit(record.score))
    ends = "; ".join(f"{run.name}: {format_score(run.score, record.score)}" for run in drawn)
    return Chart(figure, f"Scores of the pilot by round. At the end {ends}.")
