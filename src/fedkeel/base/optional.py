"""Packages that a user may leave out: imported when they are needed, or refused with the extra."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from fedkeel.errors import ConfigError

_EXTRAS = {
    "datasets": "fedkeel[hf]",
    "transformers": "fedkeel[hf]",
    "peft": "fedkeel[hf]",
    "tensorboard": "fedkeel[tensorboard]",
    "mlflow": "fedkeel[mlflow]",
    "wandb": "fedkeel[wandb]",
}
"""What to install for a package, where that is not the package itself."""


def imported(package: str, what: str) -> Any:  # noqa: ANN401 - a module
    """Return a package.

    Args:
        package: its name, or that of a module in it.
        what: what needs it, as the user wrote it.

    Raises:
        ConfigError: it is not installed.
    """
    name = package.partition(".")[0]
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise _not_installed(name, what) from None


def check_installed(package: str, what: str) -> None:
    """Refuse a package that is not installed (ConfigError), without importing it.

    The arguments are those of `imported`.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of this name is not a package
        raise _not_installed(package, what)


def _not_installed(package: str, what: str) -> ConfigError:
    return ConfigError(
        f"{what} needs the package {package!r}.",
        got="it is not installed",
        do=f"pip install '{_EXTRAS.get(package, package)}'",
    )
