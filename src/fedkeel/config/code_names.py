"""Which settings name code, and which name a place: a file, an address, something to download."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fedkeel.base.feature import declarations
from fedkeel.base.user_code import is_import_path
from fedkeel.config.settings import Experiment, Run

HUBS = ("hf:", "timm:")
"""What names of networks of other libraries begin with. Only `model.name` has such names: anywhere
else they name the user's modules ``hf`` and ``timm``."""

PLACES = (
    *("data.source", "data.test", "data.public", "data.text.tokenizer"),
    "engine.address",
    *(f"{table}.{name}" for table, kind in declarations().items() for name in kind.places),
)
"""Keys of settings that name a file, a folder, an address, or what is downloaded."""

CODE = (
    "method",
    "model.name",
    "model.others.name",  # of each network, read under the key of the first one
    "task.loss",
    "task.metrics",
    "task.score",
    "data.augment",
    "local.train",
)
"""Keys of settings that may name code, with those of a comparison and of a search."""

ADDRESS = "engine.address"
"""Key of the address of a Ray cluster."""

_QUOTED = re.compile(r"'(\\.|[^'\\])*'|\"(\\.|[^\"\\])*\"", re.DOTALL)
IMPORT_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
"""An import path in an expression or in a list."""


def code_names(settings: Run) -> set[tuple[str, str]]:
    """Return the import paths in settings, ``package.module:Name``, each with its key.

    >>> from fedkeel.config import Local, Run
    >>> code_names(Run(rounds=1, local=Local(lr=0.1, epochs=1), method="fedgh+mine:Slow(rate=0.5)"))
    {('method', 'mine:Slow')}
    """
    return {(key, name) for key, text in _texts(settings) for name in _names_in(key, text)}


def names_to_trust(settings: Run) -> set[tuple[str, str]]:
    """Return what needs the user's trust: names of code, and a cluster that sends pickled objects.

    A pickle can run any code when it is read.
    """
    address = settings.engine.address
    return code_names(settings) | (set() if address is None else {(ADDRESS, address)})


def _names_in(key: str, text: str) -> list[str]:
    """Return the import paths in a setting: all that would be imported, with its exact name."""
    if key == "method":
        return IMPORT_PATH.findall(_QUOTED.sub("", text))
    is_hub = key == "model.name" and text.startswith(HUBS)
    return [text] if is_import_path(text) and not is_hub else []


def value_at(settings: Run, key: str) -> Any:  # noqa: ANN401 - any setting
    """Return the setting with a dotted key, None where its table is not set."""
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _texts(settings: Run) -> Iterator[tuple[str, str]]:
    """Yield the texts that may name code, by their keys."""
    for key in CODE:
        for text in _in(value_at(settings, key)):
            yield key, text
    if not isinstance(settings, Experiment):
        return
    for other in settings.model.others.values():
        yield "model.name", other.name
    for text in (*settings.compare.methods, *settings.tune.method):
        yield "method", text
    for key, choices in settings.tune.space.items():
        for text in _in(choices) if key in CODE else ():
            yield key, text


def _in(value: object) -> Iterator[str]:
    """Yield the texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _in(item)


def texts_by_place(value: object, place: str = "") -> dict[str, str]:
    """Return the texts in nested tables and lists, by where they stand.

    >>> texts_by_place({"a": 1, "b": ["x", {"c": "y"}]})
    {'.b.0': 'x', '.b.1.c': 'y'}
    """
    if isinstance(value, str):
        return {place: value}
    if isinstance(value, Mapping):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list | tuple) else []
    texts: dict[str, str] = {}
    for name, item in items:
        texts |= texts_by_place(item, f"{place}.{name}")
    return texts
