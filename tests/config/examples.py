"""Plain values of an experiment, as TOML would hold them."""

from __future__ import annotations

from typing import Any


def values(**changes: Any) -> dict[str, Any]:
    """A small experiment; a change is named by its path, with two underscores between tables.

    A change to `...` takes the key away.
    """
    made: dict[str, Any] = {
        "rounds": 3,
        "local": {"lr": 0.1, "epochs": 1},
        "data": {"source": "digits"},
        "partition": {"kind": "dirichlet", "clients": 5, "alpha": 0.5},
        "model": {"name": "mlp"},
    }
    for path, value in changes.items():
        *tables, key = path.split("__")
        here = made
        for table in tables:
            here = here.setdefault(table, {})
        if value is ...:
            del here[key]
        else:
            here[key] = value
    return made
