"""Colours of the page and its figures, for a light and a dark page.

The eight colours of methods have a contrast of at least 3 : 1 to the page, and readers with
deuteranopia or protanopia can distinguish them (`tests/report/test_palette.py` measures both).
Figures are made in the light colours. Where the reader's system is dark, the page replaces each by
its dark counterpart.
"""

from __future__ import annotations

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#15181d"

METHODS: tuple[tuple[str, str], ...] = (
    ("#3144bd", "#7371f0"),
    ("#ee6228", "#f79a6e"),
    ("#2b9c8a", "#63e0d2"),
    ("#7a2169", "#d8569a"),
    ("#6a560f", "#ecd94f"),
    ("#9b72f5", "#c3adfc"),
    ("#06749b", "#3fa4da"),
    ("#4b2a02", "#b08439"),
)
"""Colours of methods, in order: (light, dark)."""

RAMP: tuple[tuple[str, str], ...] = (
    ("#8593a8", "#6f7f97"),
    ("#c98a1b", "#d9a441"),
    ("#4f7f52", "#8fc093"),
    ("#b3587c", "#e08fae"),
    ("#3f5f8f", "#9db9e6"),
    ("#8a6fae", "#bfa6df"),
)
"""Colours of parts and phases; the first, a grey one, is the model or the training."""

INK = ("#23272e", "#e6e8eb")
MUTED = ("#5d6470", "#a3abb8")
GRID = ("#e4e6ea", "#2b3038")
HEAT = ("#1d4e9e", "#86b6ff")
"""Text, secondary text, grid lines, and the full tone of heat maps: (light, dark)."""

LINE_STYLES: dict[str, str] = {
    "solid": "solid",
    "dash": "dash",
    "dot": "dot",
    "dashdot": "dashdot",
    "longdash": "longdash",
    "longdashdot": "longdashdot",
    "dashdots": "7px,3px,2px,3px,2px,3px",
    "sparse": "2px,7px",
}
"""Line styles, by which methods differ also without colour: class in page.css -> plotly's dash."""

MARKS = (
    ("disc", "●"),
    ("ring", "○"),
    ("square", "■"),
    ("frame", "□"),
    ("diamond", "◆"),
    ("lozenge", "◇"),
    ("triangle", "▲"),
    ("delta", "△"),
)
"""Marks before the names of methods, one for each line style: a class in page.css, a character."""


def triplet(colour: str) -> str:
    """Return a hex colour as the numbers of ``rgb()``.

    >>> triplet("#3144bd")
    '49,68,189'
    """
    return ",".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))


def rgba(colour: str, opacity: float = 1.0) -> str:
    """Return a hex colour as ``rgba()``, the form of all colours in figures."""
    return f"rgba({triplet(colour)},{opacity:g})"


def method_colour(index: int, opacity: float = 1.0) -> str:
    """Return the colour of the method at this place."""
    return rgba(METHODS[index % len(METHODS)][0], opacity)


def line_style(index: int) -> str:
    """Return the line style of the method at this place: its class in page.css."""
    return list(LINE_STYLES)[_place(index)]


def dash(index: int) -> str:
    """Return the line style of the method at this place, as plotly writes it."""
    return LINE_STYLES[line_style(index)]


def mark(index: int) -> tuple[str, str]:
    """Return the mark of the method at this place: its class in page.css, its character."""
    return MARKS[_place(index)]


def _place(index: int) -> int:
    """Return which of the eight styles a method has; the ninth has another than the first."""
    return (index + index // len(METHODS)) % len(LINE_STYLES)


def dark_counterparts() -> dict[str, str]:
    """Return light colours -> their dark counterparts, as `triplet` writes them."""
    pairs = (*METHODS, *RAMP, INK, MUTED, GRID, HEAT, (LIGHT_PAGE, DARK_PAGE))
    return {triplet(light): triplet(dark) for light, dark in pairs}
