"""The partition picture: which client has which classes, and how many examples."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fedkeel.errors import counted
from fedkeel.records.run_record import RunRecord
from fedkeel.report import palette
from fedkeel.report.chart_style import Drawing, Key, bare, cut, text, thin
from fedkeel.report.formatting import percent

SHOWN_CLIENTS = 600
SHOWN_CLASSES = 120
NAMED_CLIENTS = 30
"""Clients up to which the picture keeps their order and names them; more are sorted by class."""


def partition(record: RunRecord) -> Drawing | None:
    """Return label shares by client as a heat map, client sizes above it.

    Above 30 clients they are sorted by their most frequent class, so that the structure shows;
    above 600 an even choice of them is drawn.
    """
    histogram = _histogram(record)
    if histogram is None:
        return None
    order = _order(histogram)
    kept = [order[i] for i in thin(len(order), SHOWN_CLIENTS)]
    classes = _classes(histogram)
    sizes = histogram.sum(axis=1)
    labels = _labels(record, histogram.shape[0])
    names = _class_names(record, histogram.shape[1])
    figure = bare(_height(len(classes)), hovermode="closest", bargap=0.12 if len(kept) < 80 else 0)
    x, y = [labels[c] for c in kept], [names[c] for c in classes]
    figure.add_trace(
        go.Bar(
            x=x,
            y=[int(sizes[c]) for c in kept],
            yaxis="y2",
            marker={"color": palette.rgba(palette.RAMP[0][0]), "line": {"width": 0}},
            hovertemplate="client %{x}: %{y:,} examples<extra></extra>",
        )
    )
    counts = histogram[np.ix_(kept, classes)]
    figure.add_trace(
        go.Heatmap(
            x=x,
            y=y,
            z=_shares(counts, sizes[kept]),
            customdata=counts.T.tolist(),
            hovertemplate="client %{x}, class %{y}: %{customdata:,} examples, %{z:.0%}"
            "<extra></extra>",
            colorscale=[[0, palette.rgba(palette.HEAT[0], 0)], [1, palette.rgba(palette.HEAT[0])]],
            zmin=0,
            zmax=1,
            showscale=False,
            xgap=1 if len(kept) <= 120 else 0,
            ygap=1 if len(classes) <= 30 else 0,
        )
    )
    _axes(figure, x, y)
    return Drawing(figure, _told(histogram, len(kept)), _key())


def caption(record: RunRecord) -> str:
    """Return what the picture shows and what it leaves out, in words."""
    histogram = _histogram(record)
    if histogram is None:
        return ""
    clients, classes = histogram.shape
    said = ["Each column is a client; the stronger the colour, the larger the class's share of it."]
    if clients > NAMED_CLIENTS:
        said.append("Clients are sorted by their most frequent class.")
    if clients > SHOWN_CLIENTS:
        said.append(f"An even choice of {SHOWN_CLIENTS} of {clients:,} clients is drawn.")
    if classes > SHOWN_CLASSES:
        said.append(f"The {SHOWN_CLASSES} most frequent of {classes:,} classes are drawn.")
    return " ".join(said)


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return figures of the partition as (name, value)."""
    histogram = _histogram(record)
    if histogram is None:
        return []
    sizes = histogram.sum(axis=1)
    filled = histogram[sizes > 0]
    own = (filled > 0).sum(axis=1)
    top = (filled.max(axis=1) / filled.sum(axis=1)) if len(filled) else np.zeros(1)
    return [
        ("clients", f"{len(sizes):,}"),
        ("examples of a client", _range(sizes)),
        ("classes of a client", f"{_range(own)} of {histogram.shape[1]:,}"),
        ("share of its most frequent class", f"{percent(float(np.median(top)), 0)} % (median)"),
    ]


def _range(values: NDArray[Any]) -> str:
    if not len(values):
        return "none"
    low, middle, high = int(values.min()), float(np.median(values)), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}, median {middle:,g}"


def _histogram(record: RunRecord) -> NDArray[np.int64] | None:
    """Return examples by client and class [C, Y], or None where the record has none."""
    rows = record.partition.histogram
    if not rows or not rows[0]:
        return None
    return np.asarray(rows, dtype=np.int64)


def _order(histogram: NDArray[np.int64]) -> list[int]:
    if len(histogram) <= NAMED_CLIENTS:
        return list(range(len(histogram)))
    sizes = np.maximum(histogram.sum(axis=1), 1)
    first = histogram.argmax(axis=1)
    share = histogram.max(axis=1) / sizes
    return [int(i) for i in np.lexsort((np.arange(len(first)), -share, first))]


def _classes(histogram: NDArray[np.int64]) -> list[int]:
    count_of = histogram.sum(axis=0)
    if len(count_of) <= SHOWN_CLASSES:
        return list(range(len(count_of)))
    return sorted(int(i) for i in np.argsort(-count_of, kind="stable")[:SHOWN_CLASSES])


def _labels(record: RunRecord, clients: int) -> list[str]:
    given = record.partition.names
    return _own(given if len(given) == clients else list(range(clients)))


def _class_names(record: RunRecord, classes: int) -> list[str]:
    given = record.data.label_names
    return _own(given if len(given) == classes else list(range(classes)))


def _own(names: list[Any]) -> list[str]:
    """Return names as a category axis takes them: short, escaped, each of them different."""
    cuts = [text(cut(str(name), 18)) for name in names]
    twice = {name for name, n in Counter(cuts).items() if n > 1}
    return [f"{name} ({i})" if name in twice else name for i, name in enumerate(cuts)]


def _shares(counts: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[list[float]]:
    """Return shares [Y, C] of each client's examples."""
    share = counts / np.maximum(sizes, 1)[:, None]
    return [[round(float(v), 3) for v in row] for row in share.T]


def _height(classes: int) -> int:
    return 170 + max(120, min(520, 24 * classes))


def _axes(figure: go.Figure, clients: list[str], classes: list[str]) -> None:
    share = 90 / (figure.layout.height - 60)
    muted = palette.rgba(palette.MUTED[0])
    named = len(clients) <= NAMED_CLIENTS
    figure.update_layout(
        yaxis={
            "domain": [0, 1 - share - 0.04],
            "autorange": "reversed",
            "showgrid": False,
            "title": {"text": "class"},
            "ticks": "",
            "type": "category",
            "dtick": 1 if len(classes) <= 24 else None,
        },
        yaxis2={
            "domain": [1 - share, 1],
            "gridcolor": palette.rgba(palette.GRID[0]),
            "tickfont": {"color": muted, "size": 12},
            "title": {"text": "examples", "font": {"color": muted, "size": 13}},
            "nticks": 4,
            "zeroline": False,
            "automargin": True,
        },
        xaxis={
            "title": {"text": "client" if named else "clients, sorted by most frequent class"},
            "type": "category",
            "showticklabels": named,
            "dtick": 1,
            "ticks": "",
            "showline": False,
            "anchor": "y",
        },
    )


def _told(histogram: NDArray[np.int64], drawn: int) -> str:
    sizes = histogram.sum(axis=1)
    told = f"{counted(len(sizes), 'client')} with {_range(sizes)} examples each"
    part = "" if drawn == len(sizes) else f"; {drawn:,} of them are drawn"
    return f"Share of each of {histogram.shape[1]:,} classes by client. {told}{part}."


def _key() -> tuple[Key, ...]:
    return (Key("share of the client's examples, 0 to 100 %", *palette.HEAT, grade=True),)
