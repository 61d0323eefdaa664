"""The base of all settings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from fedkeel.base.error_messages import readable, table_of
from fedkeel.errors import ConfigError

DEEPEST = 32
"""Tables and lists that may be inside each other in settings."""


class RenamedSetting(FutureWarning):
    """A setting was given by its old name."""


class Settings(BaseModel):
    """Base of all settings: frozen, with no unknown keys and no silent conversions.

    Raises:
        ConfigError: names the setting, what was given and what is accepted.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    renamed: ClassVar[Mapping[str, str]] = {}
    """The current name of a setting, by its old name, which is still accepted."""

    renamed_values: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """The current value, by the current name of the setting and the old value."""

    def __init__(self, /, **values: Any) -> None:  # noqa: ANN401 - as pydantic's own
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise readable(type(self), error) from None

    # What `build` validates does not pass here: an error then names the whole path of a key.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, values: object) -> object:
        """Replace old names, and make tuples of lists and Python numbers of NumPy's."""
        if not isinstance(values, Mapping):
            return values
        check_bounds(values)
        return {
            key: cls._plain(key, value) for key, value in with_current_names(cls, values).items()
        }

    @classmethod
    def _plain(cls, key: str, value: object) -> object:
        field = cls.model_fields.get(key)
        if isinstance(value, str) and field is not None and field.annotation == tuple[str, ...]:
            return (value,)
        if hasattr(value, "dtype") and hasattr(value, "item"):  # a number of NumPy's
            return value.item() if getattr(value, "ndim", 1) == 0 else value
        return tuple(value) if isinstance(value, list) else value


def check_bounds(values: Mapping[str, object]) -> None:
    """Refuse settings that no later step can handle: whole numbers beyond 64 bits, deep nesting.

    Raises:
        ValueError: names the key.
    """
    for key, value in values.items():
        rest = [(value, 1)]
        while rest:
            value, depth = rest.pop()
            if depth > DEEPEST:
                raise ValueError(f"{key!r} has more than {DEEPEST} tables and lists in each other")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                digits = 1 + int(value.bit_length() * math.log10(2))
                raise ValueError(
                    f"{key!r} has a whole number of about {digits} digits, beyond 64 bits"
                )
            if isinstance(value, Mapping | list | tuple):
                inner = value.values() if isinstance(value, Mapping) else value
                rest += [(item, depth + 1) for item in inner]


def with_current_names(
    kind: type[BaseModel], values: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    """Replace the old names and old values of settings, and warn of each.

    Args:
        kind: the class of settings that `values` are for.
        values: plain values; tables may be nested.
        path: the dotted path of the table, with a dot at its end.

    Raises:
        ConfigError: a setting is given by its old and by its current name.
    """
    renamed: Mapping[str, str] = getattr(kind, "renamed", {})
    renamed_values: Mapping[str, Mapping[str, str]] = getattr(kind, "renamed_values", {})
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = renamed.get(key, key)
        if name != key:
            if name in values:
                raise ConfigError(
                    f"{path + key!r} is the old name of {path + name!r}, and both are given.",
                    do=f"drop {path + key}",
                )
            warn_once(f"The setting {path + key!r} is now called {path + name!r}.")
        if name in renamed_values and isinstance(value, str) and value in renamed_values[name]:
            new = renamed_values[name][value]
            warn_once(f"The value {value!r} of the setting {path + name!r} is now called {new!r}.")
            value = new
        table = table_of(kind, name)
        if table is not None and isinstance(value, Mapping):
            value = with_current_names(table, value, f"{path}{name}.")
        result[name] = value
    return result


@cache
def warn_once(message: str) -> None:
    """Warn of an old name, once in a process."""
    warnings.warn(f"{message} The old name works in this version only.", RenamedSetting, 2)


class Kinds(Settings):
    """Settings of which some mean something only for some kinds.

    Left over from another kind they are only told of (`idle`); beside a kind that nobody has given
    they are refused: it is the kind that has been forgotten.
    """

    belongs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For which kinds a setting means something."""

    @property
    def idle(self) -> dict[str, tuple[str, ...]]:
        """Settings that have been changed and mean nothing here, and the kinds they are for."""
        kind, fields = getattr(self, "kind", ""), type(self).model_fields
        changed = (name for name in self.belongs if getattr(self, name) != fields[name].default)
        return {name: self.belongs[name] for name in changed if kind not in self.belongs[name]}

    @model_validator(mode="after")
    def _has_kind(self) -> Self:
        if "kind" not in self.model_fields_set:
            for name, kinds in self.idle.items():
                words = f"'kind' is not given, and {name!r} is for " + " or ".join(map(repr, kinds))
                raise ValueError(words)
        return self
