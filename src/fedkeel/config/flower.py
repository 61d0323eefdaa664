"""The settings of a Flower federation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from fedkeel.config.base import Settings


class Flower(Settings):
    """How rounds are run in a Flower federation. Results depend on it only where nodes fail.

    Args:
        deadline_seconds: time that a round, or an evaluation, waits for its clients.
        quorum: share of the selected clients that have to reply by then, in (0, 1]. With fewer the
            run stops, and can go on later. The score of an evaluation on fewer nodes is recorded,
            and ends no run by `stop`.
        enough: share of the selected clients whose replies end a round, in (0, 1]. With less than 1
            (over-selection) more clients are selected than needed, and the first to reply count. An
            evaluation by nodes waits for all of them, until the deadline: see `evaluation.every`.
        outlier_factor: a reply is left out where the norm of its update, or of a part's upload or
            answer, is more than this many times the median of the round. So is one whose loss or
            diagnostic is, where the median counts as 1 at least.
        poll_seconds: time between looks for new replies.
        message_mb: the largest message that is sent, in 10^6 bytes.
        secure_aggregation: whether the server may see sums of updates alone. It is refused:
            fedkeel does not use Flower's SecAgg+ yet.
    """

    deadline_seconds: float = Field(600.0, gt=0.0)
    quorum: float = Field(0.5, gt=0.0, le=1.0)
    enough: float = Field(1.0, gt=0.0, le=1.0)
    outlier_factor: float = Field(1000.0, gt=1.0)
    poll_seconds: float = Field(0.2, gt=0.0)
    message_mb: float = Field(1000.0, gt=0.0)
    secure_aggregation: bool = False

    renamed: ClassVar[Mapping[str, str]] = {"screen": "outlier_factor"}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.enough < self.quorum:
            raise ValueError("'enough' must be at least 'quorum'")
        return self
