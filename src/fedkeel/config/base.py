"""The base of all settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from fedkeel.config.error_messages import readable


class Settings(BaseModel):
    """Base of all settings: frozen, with no unknown keys and no silent conversions.

    Raises:
        ConfigError: names the setting, what was given and what is accepted.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    def __init__(self, /, **values: Any) -> None:  # noqa: ANN401 - as pydantic's own
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise readable(type(self), error) from None

    # What `build` validates does not pass here: an error then names the whole path of a key.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, values: object) -> object:
        """Take TOML's arrays as tuples, one text as a list, and NumPy's numbers as Python's."""
        if not isinstance(values, Mapping):
            return values
        texts = {k for k, field in cls.model_fields.items() if field.annotation == tuple[str, ...]}

        def plain(key: str, value: object) -> object:
            if isinstance(value, str) and key in texts:
                return (value,)
            if hasattr(value, "dtype") and hasattr(value, "item"):  # a number of NumPy's
                return value.item() if getattr(value, "ndim", 1) == 0 else value
            return tuple(value) if isinstance(value, list) else value

        return {k: plain(k, v) for k, v in values.items()}


class Kinds(Settings):
    """Settings of which some mean something for some kinds alone.

    Left over from another kind they are only told of (`idle`); beside a kind that nobody has given
    they are refused: it is the kind that has been forgotten.
    """

    belongs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For which kinds a setting means something."""

    @property
    def idle(self) -> dict[str, tuple[str, ...]]:
        """Settings that have been changed and mean nothing here, and the kinds they are for."""
        kind, own = getattr(self, "kind", ""), type(self).model_fields
        changed = (name for name in self.belongs if getattr(self, name) != own[name].default)
        return {name: self.belongs[name] for name in changed if kind not in self.belongs[name]}

    @model_validator(mode="after")
    def _has_kind(self) -> Self:
        if "kind" not in self.model_fields_set:
            for name, kinds in self.idle.items():
                words = f"'kind' is not given, and {name!r} is for " + " or ".join(map(repr, kinds))
                raise ValueError(words)
        return self
