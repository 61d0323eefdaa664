"""Numbers, names and sentences as the tables and the page show them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedkeel.errors import counted
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.records.statistics import Stat

MISSING = "–"
"""What is shown in place of a missing value."""

_FOLDERS = re.compile(
    r"""(?<![\w:/.~<])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/'",:;()]+[\\/])*(?=[^\s\\/])"""
)


@dataclass(frozen=True)
class Fact:
    """A name and a value that the page lists."""

    name: str
    value: str


def quoted(label: str) -> str:
    """Return a method's label between backticks, which the page sets in its own typeface."""
    return "`" + label.replace("`", "'") + "`"


def join_values(values: Sequence[str], limit: int) -> str:
    """Return values, and a count beyond `limit`.

    >>> join_values(["1", "2", "3"], 2)
    '1; 2; and one other'
    """
    more = [f"and {counted(len(values) - limit, 'other')}"] if len(values) > limit else []
    return "; ".join([*values[:limit], *more])


def format_number(value: float | None) -> str:
    """Return a number with about three significant digits and thousands separators.

    >>> [format_number(v) for v in (0.01234, 1.5, 43.21, 12345.6, 0.0, 2.4e-11, None)]
    ['0.0123', '1.50', '43.2', '12,346', '0', '2.4e-11', '–']
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value and not 1e-4 <= abs(value) < 1e9:
        return short(value)
    return f"{value:,.{_decimals(value)}f}"


def short(value: float) -> str:
    """Return a number with at most three significant digits, and no zeros that say nothing.

    >>> [short(v) for v in (0.594, 52.0, 1030.0, 2.4e-11, -2.1e12)]
    ['0.594', '52', '1,030', '2.4e-11', '-2.1e12']
    """
    if value and not 1e-4 <= abs(value) < 1e6:
        return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.3g}")
    return f"{float(f'{value:.3g}'):,.10g}"


def _decimals(value: float) -> int:
    """Return how many decimals show three significant digits."""
    size = abs(value)
    if size == 0 or size >= 99.95:
        return 0
    return 2 - math.floor(math.log10(size)) if size < 0.995 else 2 if size < 9.995 else 1


def format_percent(share: float | None, decimals: int = 1) -> str:
    """Return a share in [0, 1] as percent, without the sign.

    >>> format_percent(0.9123), format_percent(None)
    ('91.2', '–')
    """
    return MISSING if share is None else f"{100 * share:.{decimals}f}"


def format_stat(stat: Stat | None, *, scale: float = 1.0, decimals: int | None = None) -> str:
    """Return "mean ± deviation", or the mean where there is one seed.

    >>> format_stat(Stat(0.5, 0.01, 3, 0.49, 0.51), scale=100, decimals=1)
    '50.0 ± 1.0'
    """
    if stat is None:
        return MISSING
    mean = stat.mean * scale
    if stat.std is None:
        return format_signed(mean, decimals)
    std = stat.std * scale
    if decimals is None:
        decimals = _decimals(mean)
    if 0 < std < 0.5 * 10.0**-decimals:
        decimals += 1
    return f"{format_signed(mean, decimals)} ± {std:,.{decimals}f}"


def format_score(
    value: Stat | float | None, score: MetricInfo, decimals: int = 2, *, has_unit: bool = False
) -> str:
    """Return a score, or its mean and deviation over seeds.

    Args:
        value: the score.
        score: what it is.
        decimals: decimals of a share, in percent; other scores have about four significant digits.
        has_unit: whether the unit follows.

    >>> format_score(Stat(0.5, 0.01, 3, 0.49, 0.51), ACCURACY, 1, has_unit=True)
    '50.0 ± 1.0 %'
    >>> format_score(Stat(0.41234, 0.0125, 3, 0.4, 0.43), MetricInfo("mae", False))
    '0.4123 ± 0.0125'
    >>> format_score(3.14159, MetricInfo("distance", False, "mm"), has_unit=True)
    '3.142 mm'
    """
    stat = Stat(value, None, 1, value, value) if isinstance(value, int | float) else value
    if stat is None or not math.isfinite(stat.mean):
        return MISSING
    unit = f" {score.unit}".rstrip() if has_unit else ""
    if score.is_share:
        return format_stat(stat, scale=score.scale, decimals=decimals) + unit
    size = max(abs(stat.mean), stat.std or 0.0)
    if size >= 1e7 or 0 < size < 1e-4:
        std = "" if stat.std is None else f" ± {stat.std:.1e}"
        return f"{stat.mean:.3e}{std}{unit}"
    return format_stat(stat, decimals=_decimals(size) + (0 < size < 999.5)) + unit


def format_difference(difference: float, score: MetricInfo) -> str:
    """Return a difference of two scores without its sign, that of shares in percentage points.

    >>> [format_difference(d, ACCURACY) for d in (-0.0213, 0.0004, 0.01)]
    ['2.1 points', '0.04 points', '1.0 point']
    >>> format_difference(-0.0213, MetricInfo("mae", False))
    '0.0213'
    """
    size = abs(score.scale * difference)
    if not score.is_share:
        return f"{format_number(size)} {score.unit}".rstrip()
    text = f"{size:.1f}" if size >= 0.095 else f"{size:.2f}"
    return f"{text} point{'' if text == '1.0' else 's'}"


def format_target(target: float, score: MetricInfo) -> str:
    """Return a target as it was set, with its unit.

    >>> format_target(0.85, ACCURACY), format_target(0.4, MetricInfo("mae", False))
    ('85 %', '0.4')
    """
    return f"{score.scale * target:g} {score.unit}".rstrip()


def score_unit(score: MetricInfo) -> str:
    """Return what stands under the heading of a column of scores: name and unit.

    >>> [score_unit(s) for s in (ACCURACY, MetricInfo("auroc", True, "%"), MetricInfo("mae"))]
    ['%', 'AUROC, %', 'MAE']
    """
    if score == ACCURACY:
        return score.unit
    return ", ".join(filter(None, (shortened(score.label, 24), score.unit)))


def extreme_of(score: MetricInfo) -> str:
    """Return "highest" or "lowest": which values of a score are best."""
    return "highest" if score.higher_is_better else "lowest"


def capital(text: str) -> str:
    """Return a text that begins a sentence."""
    return text[:1].upper() + text[1:]


def shortened(label: str, length: int = 44) -> str:
    """Return a label that fits into a figure or a heading."""
    return label if len(label) <= length else label[: length - 1] + "…"


def format_signed(value: float, decimals: int | None = None) -> str:
    """Return a number with a minus sign as wide as a plus.

    >>> format_signed(-1.234, 2), format_signed(-0.001, 2)
    ('−1.23', '0.00')
    """
    text = format_number(value) if decimals is None else f"{value:,.{decimals}f}"
    is_negative = text.startswith("-") and text.strip("-0.,") != ""
    return f"−{text[1:]}" if is_negative else text.lstrip("-")


def format_bytes(count: float | None) -> str:
    """Return bytes as a size with its unit, by powers of ten.

    >>> format_bytes(1.5e6), format_bytes(2.5e9), format_bytes(900.0)
    ('1.50 MB', '2.50 GB', '900 B')
    """
    if count is None:
        return MISSING
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{format_number(count / size)} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float | None) -> str:
    """Return a duration in the unit that suits it.

    >>> format_duration(0.0123), format_duration(75.0), format_duration(7200.0)
    ('12.3 ms', '75.0 s', '2 h 0 min')
    """
    if seconds is None:
        return MISSING
    if seconds < 1:
        return f"{format_number(1000 * seconds)} ms"
    if seconds < 120:
        return f"{format_number(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    if hours < 365 * 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours / 24 / 365:.2g} years"


def without_folders(text: str) -> str:
    """Return text with each path cut to its last name, as a page may be passed on.

    >>> without_folders("no file /home/ann/data/x.npz, see https://a.b/c/d")
    'no file x.npz, see https://a.b/c/d'
    """
    return _FOLDERS.sub("", text)


def format_setting(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a setting as text: lists joined, paths cut to their last name."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_setting(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(format_setting(item) for item in value)
    return without_folders(str(value))
