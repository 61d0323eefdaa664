"""The settings of an early end."""

from __future__ import annotations

from typing import Self

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
        rise: how much more than at the last rise counts as risen, as a share in [0, 1), for
            `patience`; slow rises add up.
    """

    target: float | None = Field(None, gt=0.0, le=1.0)
    patience: int | None = Field(None, ge=1)
    rise: float = Field(0.0, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.rise and self.patience is None:
            raise ValueError("'rise' needs 'patience', the number of rounds")
        return self
