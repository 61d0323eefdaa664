"""The base of all settings."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    """Base of all settings: frozen, with no unknown keys and no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, values: object) -> object:
        """Take TOML's arrays as the tuples that frozen settings are made of."""
        if not isinstance(values, Mapping):
            return values
        return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
