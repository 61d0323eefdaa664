"""Frames of pandas, which is loaded when somebody wants one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedkeel.base.optional import imported


def data_frame(rows: Iterable[Mapping[str, Any]]) -> Any:  # noqa: ANN401 - a pandas.DataFrame
    """Return rows as a frame.

    Raises:
        ConfigError: pandas is not installed.
    """
    return imported("pandas", "to_frame()").DataFrame(list(rows))
