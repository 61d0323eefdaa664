"""What the last models predict: confusion matrices, ROC curves, and predicted against true values.

The counts of a method's seeds are added up; ROC curves are averaged, as the scores in the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fedkeel.records.baselines import LOCAL
from fedkeel.records.pictures import BINS, MeanCurve, Pictures, area_below, roc_curve
from fedkeel.report import palette
from fedkeel.report.chart_style import (
    Chart,
    LegendItem,
    category_names,
    empty_figure,
    escaped,
    evenly_spaced,
    rounded,
)
from fedkeel.report.formatting import format_number, format_percent, quoted
from fedkeel.report.runs import MethodResults, RunResults

MAX_NUMBERED_CLASSES = 12
"""Classes up to which the shares stand in the cells of a confusion matrix."""

_MAX_TICKS = 25
_OWN = "each client's own examples"

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


def prediction_charts(methods: Sequence[MethodResults]) -> dict[str, Chart]:
    """Return the charts by name: ``roc`` of all methods, ``predictions0`` and so on of each one."""
    charts = {"roc": roc_chart(methods)}
    for method in methods:
        chart = confusion_chart(method) or quantity_chart(method)
        charts[f"predictions{method.index}"] = chart
    return {name: chart for name, chart in charts.items() if chart is not None}


def _pictures(method: MethodResults) -> list[Pictures]:
    return [run.pictures for run in method.runs if run.pictures is not None]


def _total(
    method: MethodResults, name: Literal["confusion", "quantities", "unanswered"]
) -> _Ints | None:
    """Return counts added up over seeds, None where no run has any."""
    tables = [table for p in _pictures(method) if (table := getattr(p, name)) is not None]
    alike = [table for table in tables if table.shape == tables[0].shape]
    total: _Ints | None = np.sum(alike, axis=0) if alike and np.sum(alike) > 0 else None
    return total


def _unanswered(method: MethodResults, length: int) -> _Ints:
    """Return the numbers of answers that are NaN, [Y] by true class or [1] of quantities."""
    counts = _total(method, "unanswered")
    return np.zeros(length, np.int64) if counts is None else counts


def whose(method: MethodResults) -> str:
    """Return whose answers are shown, in words, "" for the global model's on the test set."""
    if method.record.judges == "personal":
        return f" (on {_OWN})"
    if method.record.method == LOCAL:
        return " (each client's own model, on the test set)"
    return ""


def tested_on(methods: Sequence[MethodResults]) -> str:
    """Return the examples on which the methods are scored, in words."""
    if all(method.record.judges == "personal" for method in methods):
        return _OWN
    return "the test set"


def whose_predictions(methods: Sequence[MethodResults]) -> str:
    """Return a sentence on the models and the examples that the counts are of."""
    texts = [
        "the test set" if not (text := whose(method)) else f"{quoted(method.label)}{text}"
        for method in methods
        if _pictures(method)
    ]
    if tested_on(methods) == _OWN:
        return f"Counts of {_OWN}, by the model that the client is judged by."
    return f"Counts of {', '.join(dict.fromkeys(texts))}."


# ---- classes ------------------------------------------------------------------------------------


def has_numbers(method: MethodResults) -> bool:
    """Return whether its confusion matrix has numbers in its cells."""
    counts = _total(method, "confusion")
    return counts is not None and len(counts) <= MAX_NUMBERED_CLASSES


def confusion_chart(method: MethodResults) -> Chart | None:
    """Return the share of each true class that is predicted as each class."""
    counts = _total(method, "confusion")
    if counts is None:
        return None
    classes = len(counts)
    sizes = counts.sum(axis=1) + _unanswered(method, classes)
    shares = counts / np.maximum(sizes, 1)[:, None]
    names = category_names(method.record.data.label_names, classes)
    is_numbered = has_numbers(method)
    tone = palette.HEAT[0]
    ink = palette.rgba(palette.INK[0])
    figure = empty_figure(150 + max(230, min(470, 30 * classes)), hovermode="closest")
    figure.add_heatmap(
        z=shares.round(4).tolist(),
        customdata=[
            [[names[i], names[j], int(counts[i, j])] for j in range(classes)]
            for i in range(classes)
        ],
        text=[[f"{100 * share:.0f}" if share else "" for share in row] for row in shares],
        texttemplate="%{text}" if is_numbered else "",
        textfont={"color": ink, "size": 12},
        hovertemplate="true %{customdata[0]}, predicted %{customdata[1]}: %{customdata[2]:,}, "
        "%{z:.1%}<extra></extra>",
        # half of the tone leaves the numbers readable on a light and on a dark page
        colorscale=[[0, palette.rgba(tone, 0)], [1, palette.rgba(tone, 0.5 if is_numbered else 1)]],
        zmin=0,
        zmax=1,
        showscale=False,
        xgap=1,
        ygap=1,
    )
    step = 1 if classes <= _MAX_TICKS else 5
    ticks = {
        "tickvals": list(range(0, classes, step)),
        "ticktext": names[::step],
        "showgrid": False,
        "constrain": "domain",
        "ticks": "",
        "showline": False,
    }
    figure.update_xaxes(title_text="predicted class", **ticks)
    figure.update_yaxes(
        title_text="true class", autorange="reversed", scaleanchor="x", scaleratio=1, **ticks
    )
    scale = LegendItem("share of a true class, 0 to 100 %", *palette.HEAT, is_scale=True)
    return Chart(
        figure, _confusion_text(method, counts, shares, names), () if is_numbered else (scale,)
    )


def _confusion_text(
    method: MethodResults, counts: _Ints, shares: _Floats, names: Sequence[str]
) -> str:
    unanswered = _unanswered(method, len(counts))
    occurring = counts.sum(axis=1) + unanswered > 0
    recall = format_percent(float(shares.diagonal()[occurring].mean()))
    name = f"{method.label}{whose(method)}"
    text = f"Confusion matrix of {name}: of a class {recall} % are recognised on average."
    wrong = shares - np.diag(shares.diagonal())
    true, predicted = divmod(int(wrong.argmax()), len(wrong))
    if wrong[true, predicted] > 0:
        share = format_percent(float(wrong[true, predicted]))
        text += f" Most often wrong: {share} % of {names[true]} are taken for {names[predicted]}."
    if unanswered.any():
        text += f" {int(unanswered.sum()):,} answers are NaN: they are in no column, and are wrong."
    return text


# ---- probabilities of two classes ---------------------------------------------------------------


def roc_chart(methods: Sequence[MethodResults]) -> Chart | None:
    """Return the receiver operating characteristic of each method; None without two classes."""
    figure = empty_figure(380, hovermode="closest")
    muted = palette.rgba(palette.MUTED[0])
    figure.add_scatter(
        x=[0, 100],
        y=[0, 100],
        mode="lines",
        line={"color": muted, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
    texts, legend = [], []
    for method in methods:
        curve = _roc(method)
        if curve is None:
            continue
        false_alarms, hits, area = curve
        figure.add_trace(_roc_line(method, false_alarms, hits))
        text = f"{method.label}{whose(method)}: AUROC {format_percent(area)} %"
        texts.append(text)
        light, dark = palette.METHODS[method.index % len(palette.METHODS)]
        legend.append(LegendItem(text, light, dark))
    if not texts:
        return None
    figure.update_xaxes(
        title_text="false positive rate, %", range=[-1, 101], showgrid=True, constrain="domain"
    )
    figure.update_yaxes(title_text="true positive rate, %", range=[-1, 101])
    return Chart(figure, f"ROC curves of the last models. {'; '.join(texts)}.", tuple(legend))


def _roc(method: MethodResults) -> tuple[_Floats, _Floats, float] | None:
    """Return false positive and true positive rates, and the AUROC; None without two classes.

    Of several runs they are means, as the scores in the table are.
    """
    curves = []
    for run in method.runs:
        one = run.pictures
        if one is None:
            continue
        if one.curve is not None:
            rates, area = (one.curve.false_alarms, one.curve.hits), one.curve.area
        elif one.probabilities is not None and one.probabilities.sum(axis=0).all():
            rates = roc_curve(one.probabilities)
            area = area_below(*rates)
        else:
            continue
        curves.append((*rates, _measured_area(run, area)))
    if len(curves) < 2:
        return curves[0] if curves else None
    mean = MeanCurve.mean([(x, y) for x, y, _ in curves], [area for _, _, area in curves])
    return mean.false_alarms, mean.hits, mean.area


def _measured_area(run: RunResults, of_counts: float) -> float:
    """Return the AUROC of the last row, which is of scores; without one, that of the counts."""
    last = run.rows[-1].test if run.rows else None
    area = math.nan if last is None else last.values.get("auroc", math.nan)
    return of_counts if math.isnan(area) else area


def _roc_line(method: MethodResults, false_alarms: _Floats, hits: _Floats) -> go.Scatter:
    shown = evenly_spaced(len(hits))
    return go.Scatter(
        x=[rounded(100 * float(false_alarms[i])) for i in shown],
        y=[rounded(100 * float(hits[i])) for i in shown],
        mode="lines",
        name=escaped(method.label),
        line={
            "color": palette.method_colour(method.index),
            "width": 2.25,
            "dash": palette.dash(method.index),
        },
        hovertemplate="%{y:.1f} % found at %{x:.1f} % false positives"
        "<extra>%{fullData.name}</extra>",
    )


# ---- quantities ---------------------------------------------------------------------------------


def quantity_chart(method: MethodResults) -> Chart | None:
    """Return how often each predicted value occurs with each true one."""
    counts = _total(method, "quantities")
    if counts is None:
        return None
    first = next(p for p in _pictures(method) if p.quantities is not None)
    low, high = first.low, first.high
    width = (high - low) / BINS
    centres = [rounded(low + (i + 0.5) * width) for i in range(BINS)]
    tone = palette.HEAT[0]
    figure = empty_figure(380, hovermode="closest")
    figure.add_heatmap(
        x=centres,
        y=centres,
        z=np.sqrt(counts.T).round(3).tolist(),  # few examples are seen beside many
        customdata=counts.T.tolist(),
        hovertemplate="true %{x:.4g}, predicted %{y:.4g}: %{customdata:,}<extra></extra>",
        colorscale=[[0, palette.rgba(tone, 0)], [1, palette.rgba(tone)]],
        zmin=0,
        showscale=False,
    )
    figure.add_scatter(
        x=[rounded(low), rounded(high)],
        y=[rounded(low), rounded(high)],
        mode="lines",
        line={"color": palette.rgba(palette.MUTED[0]), "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
    edges: dict[str, Any] = {"range": [rounded(low), rounded(high)], "constrain": "domain"}
    figure.update_xaxes(title_text="true value", **edges)
    figure.update_yaxes(title_text="predicted value", showgrid=False, **edges)
    bins = np.arange(BINS)
    near = int(counts[abs(bins[:, None] - bins) <= 1].sum())
    share = format_percent(near / int(counts.sum()), 0)
    text = (
        f"Predicted against true values of {method.label}{whose(method)}, from "
        f"{format_number(low)} to {format_number(high)}, in {BINS} bins: {share} % lie in the bin "
        "of the true value or beside it."
    )
    if unanswered := int(_unanswered(method, 1).sum()):
        text += f" {unanswered:,} answers are NaN, and are left out."
    most = f"{int(counts.max()):,}"
    scale = LegendItem(f"examples in a cell, 0 to {most}", *palette.HEAT, is_scale=True)
    return Chart(figure, text, (scale,))
