"""The partition chart: which client has which classes, and how many examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.errors import counted
from fedkeel.records.histogram import Histogram
from fedkeel.records.run_record import RunRecord
from fedkeel.report import palette
from fedkeel.report.chart_style import (
    Chart,
    LegendItem,
    category_names,
    empty_figure,
    evenly_spaced,
)
from fedkeel.report.formatting import Fact, format_percent

MAX_CLIENTS = 600
MAX_CLASSES = 120
MAX_NAMED_CLIENTS = 30
"""Clients up to which the chart names them and keeps their order; more are sorted by class."""


@dataclass(frozen=True)
class PartitionSummary:
    """How the data are divided among the clients.

    Args:
        seed: seed of the partition.
        chart: label shares by client as a heat map, client sizes above it.
        caption: what the chart shows and what it leaves out.
        facts: figures of the partition.
    """

    seed: int
    chart: Chart
    caption: str
    facts: tuple[Fact, ...]


def partition_summary(
    record: RunRecord, counts: Histogram | None = None
) -> PartitionSummary | None:
    """Return the partition of a run, or None where there is no histogram of the labels.

    Args:
        record: what ran.
        counts: the histogram, where it is too large for the record.
    """
    rows = record.partition.histogram
    if rows and rows[0]:
        counts = Histogram.of_rows(rows)
    histogram = None if counts is None else counts.table()  # [C, Y]
    if histogram is None:
        return None
    chart = label_chart(histogram, record.partition.names, record.data.label_names)
    return PartitionSummary(record.seed, chart, _caption(histogram), _facts(histogram))


def label_chart(
    histogram: NDArray[Any], clients: Sequence[object], labels: Sequence[object]
) -> Chart:
    """Return the shares of labels by client as a heat map, with the clients' sizes above it.

    Args:
        histogram: [C, Y] examples by client and label.
        clients: C names; empty where clients are numbers.
        labels: Y names, likewise.
    """
    order = _client_order(histogram)
    shown = [order[i] for i in evenly_spaced(len(order), MAX_CLIENTS)]
    classes = _shown_classes(histogram)
    sizes = histogram.sum(axis=1)
    client_names = category_names(clients, len(histogram))
    class_names = category_names(labels, histogram.shape[1])
    x, y = [client_names[k] for k in shown], [class_names[c] for c in classes]
    counts = histogram[np.ix_(shown, classes)]
    shares = (counts / np.maximum(sizes[shown], 1)[:, None]).T.round(3)  # [Y, C]
    height = 170 + max(120, min(520, 24 * len(classes)))
    figure = empty_figure(height, hovermode="closest", bargap=0.12 if len(shown) < 80 else 0)
    figure.add_bar(
        x=x,
        y=sizes[shown].tolist(),
        yaxis="y2",
        marker={"color": palette.rgba(palette.RAMP[0][0]), "line": {"width": 0}},
        hovertemplate="client %{x}: %{y:,} examples<extra></extra>",
    )
    figure.add_heatmap(
        x=x,
        y=y,
        z=shares.tolist(),
        customdata=counts.T.tolist(),
        hovertemplate="client %{x}, class %{y}: %{customdata:,} examples, %{z:.0%}<extra></extra>",
        colorscale=[[0, palette.rgba(palette.HEAT[0], 0)], [1, palette.rgba(palette.HEAT[0])]],
        zmin=0,
        zmax=1,
        showscale=False,
        xgap=1 if len(shown) <= 120 else 0,
        ygap=1 if len(classes) <= 30 else 0,
    )
    figure.update_layout(_axes(height, len(shown), len(classes)))
    scale = LegendItem("share of the client's examples, 0 to 100 %", *palette.HEAT, is_scale=True)
    drawn = "" if len(shown) == len(sizes) else f"; {len(shown):,} of them are drawn"
    description = (
        f"Share of each of {histogram.shape[1]:,} classes by client. "
        f"{counted(len(sizes), 'client')} with {_range(sizes)} examples each{drawn}."
    )
    return Chart(figure, description, (scale,))


def _axes(height: int, clients: int, classes: int) -> dict[str, Any]:
    """Return the layout of the axes: sizes on top, the heat map below."""
    bars = 90 / (height - 60)
    muted = palette.rgba(palette.MUTED[0])
    has_names = clients <= MAX_NAMED_CLIENTS
    return {
        "yaxis": {
            "domain": [0, 1 - bars - 0.04],
            "autorange": "reversed",
            "showgrid": False,
            "title": {"text": "class"},
            "ticks": "",
            "type": "category",
            "dtick": 1 if classes <= 24 else None,
        },
        "yaxis2": {
            "domain": [1 - bars, 1],
            "gridcolor": palette.rgba(palette.GRID[0]),
            "tickfont": {"color": muted, "size": 12},
            "title": {"text": "examples", "font": {"color": muted, "size": 13}},
            "nticks": 4,
            "zeroline": False,
            "automargin": True,
        },
        "xaxis": {
            "title": {"text": "client" if has_names else "clients, sorted by most frequent class"},
            "type": "category",
            "showticklabels": has_names,
            "dtick": 1,
            "ticks": "",
            "showline": False,
            "anchor": "y",
        },
    }


def _caption(histogram: NDArray[np.int32]) -> str:
    clients, classes = histogram.shape
    sentences = [
        "Each column is a client; the stronger the colour, the larger the class's share of it."
    ]
    if clients > MAX_NAMED_CLIENTS:
        sentences.append("Clients are sorted by their most frequent class.")
    if clients > MAX_CLIENTS:
        sentences.append(f"The figure shows {MAX_CLIENTS} of {clients:,} clients, evenly chosen.")
    if classes > MAX_CLASSES:
        sentences.append(f"The figure shows the {MAX_CLASSES} largest of {classes:,} classes.")
    return " ".join(sentences)


def _facts(histogram: NDArray[np.int32]) -> tuple[Fact, ...]:
    sizes = histogram.sum(axis=1)
    filled = histogram[sizes > 0]
    classes = (filled > 0).sum(axis=1)
    top_shares = filled.max(axis=1) / filled.sum(axis=1) if len(filled) else np.zeros(1)
    top_share = format_percent(float(np.median(top_shares)), 0)
    return (
        Fact("clients", f"{len(sizes):,}"),
        Fact("examples of a client", _range(sizes)),
        Fact("classes of a client", f"{_range(classes)} of {histogram.shape[1]:,}"),
        Fact("share of its most frequent class", f"{top_share} % (median)"),
    )


def _range(values: NDArray[Any]) -> str:
    if not len(values):
        return "none"
    low, middle, high = int(values.min()), float(np.median(values)), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}, median {middle:,g}"


def _client_order(histogram: NDArray[Any]) -> list[int]:
    """Return clients in their order where they are few, else by their most frequent class."""
    numbers = np.arange(len(histogram))
    if len(histogram) > MAX_NAMED_CLIENTS:
        share = histogram.max(axis=1) / np.maximum(histogram.sum(axis=1), 1)
        numbers = np.lexsort((numbers, -share, histogram.argmax(axis=1)))
    return [int(number) for number in numbers]


def _shown_classes(histogram: NDArray[Any]) -> list[int]:
    """Return the most frequent classes, in their order."""
    by_frequency = np.argsort(-histogram.sum(axis=0), kind="stable")
    return sorted(int(number) for number in by_frequency[:MAX_CLASSES])
