"""The tables of features in the settings of a run."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any, TypeVar

from pydantic import create_model

from fedkeel.base.feature import declared_tables
from fedkeel.base.settings import Settings

_S = TypeVar("_S", bound=Settings)


def with_tables(base: type[_S], name: str, module: str) -> type[_S]:
    """Return settings that have a table for each feature beside those of `base`.

    Args:
        base: the settings that every run has.
        name: name of the new class, under which `module` holds it.
        module: full name of that module.
    """
    tables: dict[str, Any] = {}
    for kind in declared_tables().values():
        values = kind.settings_class
        tables[kind.table] = (values if kind.default else values | None, kind.default)
    made = create_model(name, __base__=base, __module__=module, **tables)
    lines = [f"    {table}: {kind.meaning}" for table, kind in declared_tables().items()]
    made.__doc__ = "\n".join([cleandoc(base.__doc__ or ""), *lines])  # indented before Python 3.13
    return made
