"""Numbers and names in the words of the tables, the page and the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from fedkeel.report.summary import Stat

NOTHING = "–"
"""What stands where a figure is missing."""

_PATH = re.compile(r"""(?<![\w:/.~<])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/'",:;()]+[\\/])*(?=[^\s\\/])""")


class Name(str):
    """A method's label within a sentence, which the page sets in its own face."""


Sentence = tuple[str, ...]
"""Pieces of text, some of which are a `Name`."""


def plain(sentence: Sentence) -> str:
    """Return a sentence as text."""
    return "".join(sentence)


def join(items: Sequence[Sentence], limit: int = 3) -> Sentence:
    """Return a list in words: "a, b and c", and a count beyond `limit`.

    >>> plain(join([("a",), ("b",), ("c",)]))
    'a, b and c'
    >>> plain(join([("a",), ("b",), ("c",), ("d",), ("e",)]))
    'a, b, c and 2 others'
    """
    shown = list(items) if len(items) <= limit + 1 else list(items[:limit])
    if len(shown) < len(items):
        shown.append((f"{len(items) - limit} others",))
    pieces: list[str] = []
    for index, item in enumerate(shown):
        if index:
            pieces.append(" and " if index == len(shown) - 1 else ", ")
        pieces.extend(item)
    return tuple(pieces)


def names(labels: Sequence[str]) -> Sentence:
    """Return labels in words."""
    return join([(Name(label),) for label in labels])


def number(value: float | None) -> str:
    """Return a number with about three significant digits and thousands separators.

    >>> [number(v) for v in (0.01234, 1.5, 43.21, 12345.6, 0.0, None)]
    ['0.0123', '1.50', '43.2', '12,346', '0', '–']
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:,.{_digits(value)}f}"


def _digits(value: float) -> int:
    """Return how many decimals show three significant digits."""
    size = abs(value)
    if size == 0 or size >= 99.95:
        return 0
    return 2 - math.floor(math.log10(size)) if size < 0.995 else 2 if size < 9.995 else 1


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share in [0, 1] as percent, without the sign.

    >>> percent(0.9123), percent(None)
    ('91.2', '–')
    """
    return NOTHING if value is None else f"{100 * value:.{digits}f}"


def spread(stat: Stat | None, *, scale: float = 1.0, digits: int | None = None) -> str:
    """Return "mean ± std", or the mean where there is one seed.

    >>> spread(Stat(0.5, 0.01, 3, 0.49, 0.51), scale=100, digits=1)
    '50.0 ± 1.0'
    """
    if stat is None:
        return NOTHING
    mean = stat.mean * scale
    if stat.std is None:
        return signed(mean, digits)
    std = stat.std * scale
    if digits is None:
        digits = _digits(mean)
        if 0 < std < 0.5 * 10.0**-digits:
            digits += 1
    return f"{signed(mean, digits)} ± {std:,.{digits}f}"


def signed(value: float, digits: int | None = None) -> str:
    """Return a number with a minus sign as wide as a plus.

    >>> signed(-1.234, 2), signed(-0.001, 2)
    ('−1.23', '0.00')
    """
    told = number(value) if digits is None else f"{value:,.{digits}f}"
    return f"−{told[1:]}" if told.startswith("-") and told.strip("-0.,") else told.lstrip("-")


def points(difference: float) -> str:
    """Return a difference of accuracy in percentage points, without its sign.

    >>> points(-0.0213), points(0.0004), points(0.01)
    ('2.1 points', '0.04 points', '1.0 point')
    """
    size = abs(100 * difference)
    text = f"{size:.1f}" if size >= 0.095 else f"{size:.2f}"
    return f"{text} point{'' if text == '1.0' else 's'}"


def megabytes(value: float | None) -> str:
    """Return bytes as a size with its unit, by powers of ten.

    >>> megabytes(1.5e6), megabytes(2.5e9), megabytes(900.0)
    ('1.50 MB', '2.50 GB', '900 B')
    """
    if value is None:
        return NOTHING
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float | None) -> str:
    """Return a duration in the unit that suits it.

    >>> duration(0.0123), duration(75.0), duration(7200.0)
    ('12.3 ms', '75.0 s', '2 h 0 min')
    """
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{number(1000 * seconds)} ms"
    if seconds < 120:
        return f"{number(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return (
        f"{hours // 24} d {hours % 24} h" if hours < 365 * 24 else f"{hours / 24 / 365:.2g} years"
    )


def without_folders(text: str) -> str:
    """Return text with paths cut to their last name: a page may travel further than its machine.

    >>> without_folders("no file /home/ann/data/x.npz, see https://a.b/c/d")
    'no file x.npz, see https://a.b/c/d'
    """
    return _PATH.sub("", text)


def setting(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a setting as text: lists joined, paths cut to their last name."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {setting(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(setting(entry) for entry in value)
    return without_folders(str(value))
