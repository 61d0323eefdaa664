"""Figures for a paper, as SVG and PDF with text that stays text: they need matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from fedkeel.base.named_files import writing
from fedkeel.errors import RunError
from fedkeel.records.ranks import RankTest
from fedkeel.records.score import MetricInfo
from fedkeel.report import palette
from fedkeel.report.claims import Claims
from fedkeel.report.formatting import format_target, shortened
from fedkeel.report.learning_curves import Curve, CurveAxis, learning_curve, x_axis
from fedkeel.report.runs import MethodResults
from fedkeel.report.summary import shared_score

Axes = Any
"""Axes of matplotlib, which is imported where a figure is drawn: an extra of the package."""

_WIDTH = 4.6
"""Width of a figure in inches."""

_DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "longdash": (0, (8, 2)),
    "longdashdot": (0, (8, 2, 2, 2)),
    "dashdots": (0, (4, 2, 1, 2, 1, 2)),
    "sparse": (0, (1, 4)),
}
_STYLE: Any = {
    "svg.fonttype": "none",  # text, not outlines
    "svg.hashsalt": "fedkeel",  # the same file each time
    "pdf.fonttype": 42,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def save_figures(
    methods: Sequence[MethodResults], claims: Claims | None, folder: Path
) -> list[Path]:
    """Write the figures of runs: curves by round, traffic and time, and differences.

    Args:
        methods: the runs.
        claims: what may be claimed; None leaves the differences out.
        folder: where ``curves-rounds.svg``, ``.pdf`` and so on go; it is made.

    Returns:
        The files. There are no curves where nothing has been evaluated, or scores differ.

    Raises:
        RunError: matplotlib is not installed, or a file cannot be written.
    """
    files: list[Path] = []
    score = shared_score([method.summary for method in methods])
    if score is not None:
        curves = [c for m in methods if (c := learning_curve(m, score)).segments]
        target = next((m.summary.target for m in methods if m.summary.target is not None), None)
        timed = [curve for curve in curves if curve.has_time]
        for axis in get_args(CurveAxis):
            drawn = timed if axis == "time" else curves
            if not drawn:
                continue
            draw = partial(_draw_curves, curves=drawn, score=score, axis=axis, target=target)
            files += _save(draw, folder / f"curves-{axis}", 3.0)
    if claims is not None and claims.claims:
        draw = partial(_draw_differences, claims=claims)
        files += _save(draw, folder / "differences", 0.8 + 0.28 * len(claims.claims))
    return files


def save_rank_figure(test: RankTest, path: Path) -> list[Path]:
    """Write the picture of critical differences (Demsar 2006, Figure 1a) as SVG and PDF.

    Methods stand at their mean ranks, the best on the left; a bar joins those that lie within one
    critical difference.

    Args:
        test: the ranks.
        path: of the files, without their ending.

    Raises:
        RunError: matplotlib is not installed, or a file cannot be written.
    """
    height = 0.9 + 0.2 * ((len(test.methods) + 1) // 2) + 0.1 * len(test.groups)
    return _save(partial(_draw_ranks, test=test), path, height)


def _save(draw: Callable[[Axes], None], path: Path, height: float) -> list[Path]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError(
            "Figures as SVG and PDF need matplotlib.", do="pip install 'fedkeel[figures]'"
        ) from None
    files = [path.with_name(f"{path.name}.{ending}") for ending in ("svg", "pdf")]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height))
        draw(figure.add_subplot())
        with writing(f"The figure {path} cannot be written."):
            path.parent.mkdir(parents=True, exist_ok=True)
            for file, date in zip(files, ("Date", "CreationDate"), strict=True):
                figure.savefig(file, bbox_inches="tight", metadata={date: None})
    return files


def _draw_curves(
    axes: Axes, curves: Sequence[Curve], score: MetricInfo, axis: CurveAxis, target: float | None
) -> None:
    title, factor = x_axis(curves, axis)
    for curve in curves:
        index = curve.method.index
        look: dict[str, Any] = {
            "color": _colour(index),
            "linestyle": _DASHES[palette.line_style(index)],
            "linewidth": 1.3,
        }
        label: str | None = _text(curve.method.label)
        for segment in curve.segments:
            x = [p.place(axis, factor) for p in segment]
            axes.plot(x, [p.stat.mean for p in segment], label=label, **look)
            label = None  # one item of the legend for each method
            bands = [p.band for p in segment]
            if len(segment) > 1 and None not in bands:
                low, high = zip(*(band for band in bands if band is not None), strict=True)
                axes.fill_between(x, low, high, color=_colour(index), alpha=0.14, linewidth=0)
    if target is not None:
        muted = palette.MUTED[0]
        axes.axhline(score.scale * target, color=muted, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"target {format_target(target, score)}",
            (0.01, score.scale * target),
            xycoords=("axes fraction", "data"),
            va="bottom",
            color=muted,
            fontsize=8,
        )
    axes.set_xlabel(title)
    axes.set_ylabel(_text(", ".join(filter(None, (f"test {score.label}", score.unit)))))
    axes.legend(frameon=False, fontsize=8)


def _draw_differences(axes: Axes, claims: Claims) -> None:
    """Draw the mean difference of each method with its t-interval, filled where it is a claim."""
    for place, claim in enumerate(reversed(claims.claims)):
        scale, interval = claim.score.scale, claim.difference.interval
        mean = scale * claim.difference.stat.mean
        colour = _colour(0) if claim.outcome in ("better", "worse") else palette.MUTED[0]
        if interval is not None:
            axes.plot(
                [scale * interval.low, scale * interval.high], [place, place], "-", color=colour
            )
        axes.plot([mean], [place], "o", color=colour, markersize=4)
    margin = claims.claims[0].margin
    if margin is not None:
        limit = claims.claims[0].score.scale * margin
        axes.axvspan(-limit, limit, color=palette.GRID[0], linewidth=0)
    axes.axvline(0, color=palette.INK[0], linewidth=0.8)
    names = [_text(shortened(claim.method)) for claim in reversed(claims.claims)]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    points = claims.claims[0].score.unit_of_difference
    unit = f" ({points})" if points else ""
    axes.set_xlabel(_text(f"difference to {claims.reference}{unit}, 95 % interval"))


def _draw_ranks(axes: Axes, test: RankTest) -> None:
    ink, count = palette.INK[0], len(test.methods)
    axes.set_axis_off()
    axes.set_xlim(0.0, count + 1.0)
    axes.plot([1, count], [0, 0], color=ink, linewidth=1)
    for tick in range(1, count + 1):
        axes.plot([tick, tick], [0, 0.15], color=ink, linewidth=1)
        axes.text(tick, 0.2, str(tick), ha="center", va="bottom")
    for level, (first, last) in enumerate(test.groups):
        height = -0.2 - 0.2 * level
        ends = [test.ranks[first] - 0.05, test.ranks[last] + 0.05]
        axes.plot(ends, [height, height], color=ink, linewidth=3, solid_capstyle="butt")
    left = (count + 1) // 2
    base = -0.3 - 0.2 * len(test.groups)
    for place, (name, rank) in enumerate(zip(test.methods, test.ranks, strict=True)):
        is_left = place < left
        height = base - 0.4 * (place if is_left else count - 1 - place)
        edge = 0.8 if is_left else count + 0.2
        axes.plot([rank, rank, edge], [0, height, height], color=ink, linewidth=0.7)
        text = _text(f"{shortened(name, 30)} ({rank:.2f})")
        axes.text(edge, height, text, ha="right" if is_left else "left", va="center")
    width = test.critical_difference
    axes.plot([1, 1 + width], [0.75, 0.75], color=ink, linewidth=1.5)
    axes.text(1 + width / 2, 0.8, f"CD {width:.2f}", ha="center", va="bottom")


def _colour(index: int) -> str:
    return palette.METHODS[index % len(palette.METHODS)][0]


def _text(label: str) -> str:
    """Return a label as matplotlib sets it, which reads mathematics between dollar signs."""
    return label.replace("$", r"\$")
