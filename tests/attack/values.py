"""Values that nobody expects, and places in a document to put them."""

from __future__ import annotations

import random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 0.5, -0.5, 1e-300, 1e308, -1e308, 5e-324, 2**31, 2**53 + 1, 2**63 - 1, 2**63,
    -(2**63) - 1, 10**18, 10**400, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip

OTHERS: tuple[Any, ...] = (
    None, True, False, "", "x", "a" * 100_000, "\x00", "\x1b[2J", "../../etc/passwd", "/dev/zero",
    "os:system", "12 %", "1e5", "ä" * 300, [], [[]], [None], [1, "a"], [0] * 100_000, {}, {"a": 1},
    {"": {"": {}}}, "nan", "%s%s%n", "{0.__class__}", "$(touch marker)",
)  # fmt: skip


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a document of mappings and lists."""
    paths = [path] if path else []
    if isinstance(document, dict):
        for key, value in document.items():
            paths += places(value, (*path, key))
    elif isinstance(document, list):
        for i, value in enumerate(document[:50]):
            paths += places(value, (*path, i))
    return paths


def value_at(document: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a place."""
    for step in path:
        document = document[step]
    return document


def damage(document: Any, draw: random.Random) -> str:
    """Change one place of a document; return what was done in words."""
    paths = places(document)
    if not paths:
        return "nothing"
    path = draw.choice(paths)
    parent, last = value_at(document, path[:-1]), path[-1]
    name, way = ".".join(map(str, path)), draw.random()
    if way < 0.12:
        del parent[last]
        return f"without {name}"
    if way < 0.2 and isinstance(parent, dict):
        parent[f"{last}x"] = parent.pop(last)
        return f"{name} renamed"
    if way < 0.3:
        other = value_at(document, draw.choice(paths))
        parent[last] = other
        return f"{name} = another value of the document"
    old = parent[last]
    numeric = isinstance(old, int | float) and not isinstance(old, bool)
    pool = NUMBERS if numeric and draw.random() < 0.7 else (*NUMBERS, *OTHERS)
    parent[last] = draw.choice(pool)
    return f"{name} = {parent[last]!r:.40}"
