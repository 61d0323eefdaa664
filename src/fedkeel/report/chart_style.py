"""What all figures share: looks, thinning, escaping, and the mean over seeds."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from fedkeel.records.rows import RoundRecord
from fedkeel.report import palette
from fedkeel.report.runs import Entry
from fedkeel.report.summary import Stat

POINTS = 400
"""Points of a line that are drawn; longer runs are thinned."""

FEW_SEEDS = 4
"""Seeds from which a band shows ± one deviation; below, it shows the range."""

FONT = "Inter, ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif"


@dataclass(frozen=True)
class Key:
    """One entry of a figure's key.

    Args:
        label: what the colour stands for.
        light: colour on a light page.
        dark: colour on a dark page.
        grade: whether it stands for a scale, from nothing to this colour.
        pattern: what tells it from another of the same colour, a name that page.css draws.
    """

    label: str
    light: str
    dark: str
    grade: bool = False
    pattern: str = ""


@dataclass(frozen=True)
class Drawing:
    """A figure with what stands beside it.

    Args:
        figure: the figure, in the colours of a light page.
        alt: what it shows, in words, for those who do not see it.
        key: colours and what they stand for, where these are not the methods.
    """

    figure: go.Figure
    alt: str
    key: tuple[Key, ...] = ()

    def to_json(self) -> str:
        """Return the figure as JSON that may stand within a script element."""
        text = json.dumps(self.figure.to_plotly_json(), separators=(",", ":"), allow_nan=False)
        for sign in "<>&\u2028\u2029":
            text = text.replace(sign, f"\\u{ord(sign):04x}")
        return text


@dataclass(frozen=True)
class Curve:
    """A figure over rounds, over the seeds of a method.

    Args:
        rounds: evaluated rounds, ascending, thinned for drawing.
        megabytes: mean traffic until then, both ways and all clients.
        middle: mean over seeds; None where a seed's value is not finite.
        low: lower edge of the band.
        high: upper edge of the band.
        seeds: how many seeds have the round.
        stretches: runs of places with the same seeds and a value: lines are not drawn across, so
            that a run that stopped does not look like a jump.
    """

    rounds: tuple[int, ...]
    megabytes: tuple[float, ...]
    middle: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    seeds: tuple[int, ...]
    stretches: tuple[range, ...]


def curve(entry: Entry, value: Callable[[RoundRecord], float | None]) -> Curve:
    """Return a figure of the test rows over rounds.

    The band is the range for fewer than four seeds, else the mean ± one sample deviation.
    """
    values: dict[int, dict[int, float | None]] = {}
    sent: dict[int, list[float]] = {}
    for place, run in enumerate(entry.runs):
        total = 0
        for row in run.rows:
            total += sum(row.bytes_down.values()) + sum(row.bytes_up.values())
            if row.test is not None:
                values.setdefault(row.round, {})[place] = value(row)
                sent.setdefault(row.round, []).append(total / 1e6)
    every = sorted(values)
    rounds = [every[i] for i in thin(len(every), peak=_peak([values[r] for r in every]))]
    stats = [_stat(list(values[r].values())) for r in rounds]
    bands = [_band(stat) for stat in stats]
    return Curve(
        rounds=tuple(rounds),
        megabytes=tuple(short(sum(sent[r]) / len(sent[r])) for r in rounds),
        middle=tuple(stat.mean if stat else None for stat in stats),
        low=tuple(band[0] for band in bands),
        high=tuple(band[1] for band in bands),
        seeds=tuple(len(values[r]) for r in rounds),
        stretches=_stretches(
            [tuple(values[r]) if stat else None for r, stat in zip(rounds, stats, strict=True)]
        ),
    )


def _stretches(who: Sequence[tuple[int, ...] | None]) -> tuple[range, ...]:
    """Return the stretches of equal entries, those of None left out."""
    edges = [i for i in range(len(who)) if i == 0 or who[i] != who[i - 1]]
    return tuple(range(a, b) for a, b in pairwise([*edges, len(who)]) if who[a] is not None)


def thin(length: int, limit: int = POINTS, *, peak: int | None = None) -> list[int]:
    """Return at most about `limit` indices, evenly spaced, with the first, the last and the peak.

    >>> thin(5), thin(10, 4), thin(10, 4, peak=5)
    ([0, 1, 2, 3, 4], [0, 3, 6, 9], [0, 3, 5, 6, 9])
    """
    if length <= limit:
        return list(range(length))
    kept = {round(i * (length - 1) / (limit - 1)) for i in range(limit)}
    return sorted(kept if peak is None else kept | {peak})


def short(value: float) -> float:
    """Return a number with six significant digits: enough to draw."""
    return float(f"{value:.6g}")


def text(label: object) -> str:
    """Return text as plotly takes it: a label is text, never markup.

    >>> text("<b>x</b>")
    '&lt;b&gt;x&lt;/b&gt;'
    """
    return html.escape(str(label), quote=False)


def bare(height: int, **layout: Any) -> go.Figure:  # noqa: ANN401 - plotly's own values
    """Return an empty figure in the look of the page."""
    axis = {
        "gridcolor": palette.rgba(palette.GRID[0]),
        "linecolor": palette.rgba(palette.GRID[0]),
        "tickfont": {"color": palette.rgba(palette.MUTED[0]), "size": 12},
        "title": {"font": {"color": palette.rgba(palette.MUTED[0]), "size": 13}},
        "zeroline": False,
        "automargin": True,
    }
    figure = go.Figure()
    figure.update_layout(
        template=None,
        height=height,
        margin={"l": 52, "r": 12, "t": 12, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 13, "color": palette.rgba(palette.INK[0])},
        hoverlabel={
            "bgcolor": palette.rgba(palette.LIGHT_PAGE, 0.96),
            "bordercolor": palette.rgba(palette.GRID[0]),
            "font": {"family": FONT, "size": 12, "color": palette.rgba(palette.INK[0])},
            "namelength": -1,
        },
        showlegend=False,
        modebar={
            "bgcolor": "rgba(0,0,0,0)",
            "color": palette.rgba(palette.MUTED[0]),
            "activecolor": palette.rgba(palette.INK[0]),
        },
        xaxis={**axis, "showgrid": False, "showline": True, "ticks": "outside", "ticklen": 4},
        yaxis=axis,
    )
    figure.update_layout(**layout)
    figure.update_xaxes(tickcolor=palette.rgba(palette.GRID[0]))
    return figure


def tag(entry: Entry) -> str:
    """Return a method's label with a dot in its colour, for use within a figure."""
    colour = palette.method(entry.index)
    return f'<span style="color:{colour}">●</span> {text(cut(entry.label))}'


def cut(label: str, length: int = 44) -> str:
    """Return a label that fits into a figure."""
    return label if len(label) <= length else label[: length - 1] + "…"


def _stat(values: Sequence[float | None]) -> Stat | None:
    known = [value for value in values if value is not None]
    return Stat.of(known) if len(known) == len(values) else None


def _peak(values: Sequence[Mapping[int, float | None]]) -> int | None:
    """Return where the mean over seeds is highest, among the places where all seeds have one."""
    means = []
    for i, by_seed in enumerate(values):
        known = [v for v in by_seed.values() if v is not None]
        if known and len(known) == len(by_seed):
            means.append((sum(known) / len(known), i))
    return max(means)[1] if means else None


def _band(stat: Stat | None) -> tuple[float | None, float | None]:
    if stat is None or stat.std is None:
        return None, None
    if stat.count < FEW_SEEDS:
        return stat.min, stat.max
    return stat.mean - stat.std, stat.mean + stat.std
