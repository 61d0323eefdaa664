"""The settings of an early end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from fedkeel.base.settings import Settings


class Stop(Settings):
    """When a run ends before its last round; whichever comes first. It never does by itself.

    `target` and `patience` look at the test score of the rounds that are evaluated, so that going
    on after a kill ends at the same round. A trial of `fedkeel tune` on validation data looks at no
    test score, and makes all its rounds.

    Args:
        target: end when the test score has reached this: accuracy is a share in (0, 1].
        patience: end when it has not become better for so many rounds.
        min_delta: smallest change that counts as better, for `patience`. It is measured from the
            score at the last one, so that slow changes add up.
        hours: end with the first round that ends after so many hours of virtual time, see
            `System`.
    """

    target: float | None = Field(None, allow_inf_nan=False)
    patience: int | None = Field(None, ge=1)
    min_delta: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    hours: float | None = Field(None, gt=0.0)

    renamed: ClassVar[Mapping[str, str]] = {"rise": "min_delta"}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.min_delta and self.patience is None:
            raise ValueError("'min_delta' needs 'patience', the number of rounds")
        return self
