"""Every method with its parts, each imported when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from fedkeel.errors import CompositionError
from fedkeel.method.part import Part
from fedkeel.method.parts.index import ALIASES, METHODS, installed_methods
from fedkeel.method.plugins import load_parts

T = TypeVar("T")

_HOME = "fedkeel.method.parts."


@dataclass(frozen=True)
class Recipe:
    """A named method.

    Args:
        paper: citation key.
        title: one line.
        parts: short part name -> class; a method of one part calls it "".
        defaults: hyper-parameters that differ from the parts' own defaults, by short part name.
    """

    paper: str
    title: str
    parts: Mapping[str, type[Part]] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class _Imported(Mapping[str, type[Part]]):
    """Classes of the package by name, each imported when it is asked for."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths

    def __getitem__(self, name: str) -> type[Part]:
        module, _, kind = self._paths[name].partition(":")
        part: type[Part] = getattr(import_module(_HOME + module), kind)
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _by_short_name(parts: Mapping[str, T]) -> dict[str, T]:
    """Return parts by the last word of their name; a single one by ""."""
    if len(parts) == 1:
        return dict(zip([""], parts.values(), strict=True))
    return {name.rpartition(".")[2]: part for name, part in parts.items()}


REGISTRY: Mapping[str, Recipe] = {
    name: Recipe(entry.paper, entry.title, _Imported(_by_short_name(entry.parts)), entry.defaults)
    for name, entry in METHODS.items()
}
"""Every method by name, in the order in which they are listed."""


def find_recipe(name: str) -> Recipe | None:
    """Return the recipe of a method by name, alias or import path, None where there is none.

    Raises:
        CompositionError: a method of one's own that cannot be found or used, or takes a name that
            is taken.
    """
    if ":" in name:
        return _user_recipe(name)
    known, paths = REGISTRY.get(ALIASES.get(name, name)), installed_methods().get(name, ())
    if len(paths) + (known is not None) > 1:
        raise CompositionError(
            f"Several methods are called '{name}'.",
            got=" and ".join([*(["fedkeel's own"] if known else []), *paths]),
            do=f"write '{paths[0]}' for that one, or uninstall its package",
        )
    return _user_recipe(paths[0]) if paths else known


def _user_recipe(path: str) -> Recipe:
    kinds = load_parts(path)
    listed = {
        name: _HOME + path for entry in METHODS.values() for name, path in entry.parts.items()
    }
    reserved_names = {*METHODS, *ALIASES, *listed}
    for kind in kinds:
        is_listed = f"{kind.__module__}:{kind.__qualname__}" in listed.values()
        if kind.name in reserved_names and not is_listed:
            raise CompositionError(
                f"method {path!r}: {kind.__name__} calls itself '{kind.name}'.",
                why="a method of fedkeel has that name, for its state and its messages",
                do=f"give it a name of its own, e.g. name = 'my_{kind.name.replace('.', '_')}'",
            )
    title = (kinds[0].__doc__ or "").strip().splitlines()[0].rstrip(".")
    return Recipe(kinds[0].paper, title, _by_short_name({kind.name: kind for kind in kinds}))
