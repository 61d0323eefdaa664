"""Packages that a user may leave out: imported when they are needed, or refused with the extra."""

from __future__ import annotations

import importlib
from typing import Any

from fedkeel.errors import ConfigError

_EXTRAS = {
    "datasets": "fedkeel[hf]",
    "transformers": "fedkeel[hf]",
    "peft": "fedkeel[hf]",
    "timm": "timm",
}
"""What to install for a package."""


def imported(package: str, what: str) -> Any:  # noqa: ANN401 - a module
    """Return a package.

    Args:
        package: its name.
        what: what needs it, as the user wrote it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"{what} needs the package {package!r}.",
            got="it is not installed",
            do=f"pip install '{_EXTRAS.get(package, package)}'",
        ) from None
