"""The settings of an early end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from fedkeel.config.base import Settings


class Stop(Settings):
    """When a run ends before its last round; whichever comes first. It never does by itself.

    Both look at the test accuracy of the rounds that are evaluated, so that going on after a kill
    ends at the same round. A trial of `fedkeel tune` on validation data looks at no test accuracy,
    and makes all its rounds.

    Args:
        target: end when the test accuracy has reached this, in (0, 1].
        patience: end when it has not risen for so many rounds.
        min_delta: smallest increase that counts as a rise, as a share in [0, 1), for `patience`. It
            is measured from the accuracy at the last rise, so that slow rises add up.
    """

    target: float | None = Field(None, gt=0.0, le=1.0)
    patience: int | None = Field(None, ge=1)
    min_delta: float = Field(0.0, ge=0.0, lt=1.0)

    renamed: ClassVar[Mapping[str, str]] = {"rise": "min_delta"}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.min_delta and self.patience is None:
            raise ValueError("'min_delta' needs 'patience', the number of rounds")
        return self
