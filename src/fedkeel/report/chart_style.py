"""What all charts share: their look, labels, legends, and the choice of points to draw."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import markupsafe
import numpy as np
import plotly.graph_objects as go
from jinja2.utils import htmlsafe_json_dumps

from fedkeel.records.files import finite_values
from fedkeel.report import palette
from fedkeel.report.formatting import shortened
from fedkeel.report.runs import MethodResults

MAX_POINTS = 400
"""Points that are drawn of a line."""

_FONT = "Inter, ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif"


@dataclass(frozen=True)
class LegendItem:
    """One item of a chart's legend.

    Args:
        label: what the colour stands for.
        light: colour on a light page.
        dark: colour on a dark page.
        is_scale: whether it stands for a scale, from nothing to this colour.
        pattern: pattern that distinguishes it from others of its colour, a class in page.css.
    """

    label: str
    light: str
    dark: str
    is_scale: bool = False
    pattern: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure with its description and legend.

    Args:
        figure: the figure, in the colours of a light page.
        description: what it shows, in words, for readers who cannot see it.
        legend: colours and what they stand for, where these are not the methods.
    """

    figure: go.Figure
    description: str
    legend: tuple[LegendItem, ...] = ()

    def to_json(self) -> markupsafe.Markup:
        """Return the figure as JSON that is safe within a script element; infinity becomes null."""
        figure = finite_values(self.figure.to_plotly_json())
        return htmlsafe_json_dumps(figure, separators=(",", ":"), allow_nan=False)


def evenly_spaced(length: int, limit: int = MAX_POINTS, *, include: int | None = None) -> list[int]:
    """Return about `limit` indices of a sequence, with the first, the last and `include`.

    >>> evenly_spaced(5), evenly_spaced(10, 4), evenly_spaced(10, 4, include=5)
    ([0, 1, 2, 3, 4], [0, 3, 6, 9], [0, 3, 5, 6, 9])
    """
    if length <= limit:
        return list(range(length))
    chosen = set(np.linspace(0, length - 1, limit).round().astype(int).tolist())
    return sorted(chosen if include is None else chosen | {include})


def rounded(value: float) -> float:
    """Return a number with six significant digits: enough to draw."""
    return float(f"{value:.6g}")


def escaped(label: object) -> str:
    """Return a label as plotly takes it, which reads markup in texts.

    >>> escaped("<b>x</b>")
    '&lt;b&gt;x&lt;/b&gt;'
    """
    return html.escape(str(label), quote=False)


def category_names(names: Sequence[object], count: int) -> list[str]:
    """Return names as a category axis takes them: short, escaped, unique; numbers without names."""
    known = names if len(names) == count else range(count)
    labels = [escaped(shortened(str(name), 18)) for name in known]
    repeated = {label for label, n in Counter(labels).items() if n > 1}
    return [f"{label} ({i})" if label in repeated else label for i, label in enumerate(labels)]


def empty_figure(height: int, **layout: Any) -> go.Figure:  # noqa: ANN401 - plotly's own values
    """Return a figure without data in the style of the page."""
    colours = (palette.INK, palette.MUTED, palette.GRID)
    ink, muted, grid = (palette.rgba(light) for light, _ in colours)
    transparent = "rgba(0,0,0,0)"
    axis = {
        "gridcolor": grid,
        "linecolor": grid,
        "tickfont": {"color": muted, "size": 12},
        "title": {"font": {"color": muted, "size": 13}},
        "zeroline": False,
        "automargin": True,
    }
    figure = go.Figure()
    figure.update_layout(
        template=None,
        height=height,
        margin={"l": 52, "r": 12, "t": 12, "b": 48},
        paper_bgcolor=transparent,
        plot_bgcolor=transparent,
        font={"family": _FONT, "size": 13, "color": ink},
        hoverlabel={
            "bgcolor": palette.rgba(palette.LIGHT_PAGE, 0.96),
            "bordercolor": grid,
            "font": {"family": _FONT, "size": 12, "color": ink},
            "namelength": -1,
        },
        showlegend=False,
        modebar={"bgcolor": transparent, "color": muted, "activecolor": ink},
        xaxis={**axis, "showgrid": False, "showline": True, "ticks": "outside", "ticklen": 4},
        yaxis=axis,
    )
    figure.update_layout(**layout)
    figure.update_xaxes(tickcolor=grid)
    return figure


def add_method_rows(figure: go.Figure, methods: Sequence[MethodResults], step: float) -> None:
    """Lay the y axis out in one row for each method, `step` high, the first on top."""
    for place, method in enumerate(methods):
        colour, (_, character) = palette.method_colour(method.index), palette.mark(method.index)
        name = escaped(shortened(method.label))
        figure.add_annotation(
            x=0,
            xref="paper",
            xanchor="left",
            y=0.85 - step * place,
            text=f'<span style="color:{colour}">{character}</span> {name}',
            hovertext=escaped(method.label),
            showarrow=False,
            font={"size": 13},
        )
    figure.update_layout(margin_l=8)
    figure.update_xaxes(showgrid=True)
    figure.update_yaxes(
        range=[1.4 - step * len(methods), 1.3], tickvals=[], showgrid=False, fixedrange=True
    )
