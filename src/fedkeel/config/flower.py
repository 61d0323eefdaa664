"""The settings of a Flower federation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from fedkeel.base.settings import Settings


class Flower(Settings):
    """How rounds are run in a Flower federation. Results depend on it only where nodes fail.

    Args:
        deadline_seconds: time that a round, or an evaluation, waits for its clients. For `fedbuff`
            and `fedasync`, time after which another client trains in the place of a silent one.
        quorum: share of the selected clients, or of a buffer, that have to reply by then, in
            (0, 1]. With fewer the run stops, and can go on later. The score of an evaluation on
            fewer nodes is recorded, and ends no run by `stop`.
        enough: share of the selected clients whose replies end a round, in (0, 1]. With less than 1
            (over-selection) more clients are selected than needed, and the first to reply count. An
            evaluation by nodes waits for all of them, until the deadline: see `evaluation.every`.
        outlier_factor: a reply is left out where the norm of its update, of its buffers, or of a
            part's upload or answer, is more than this many times the median of the other clients
            (with fewer than 32 in the round, also of those that replied before). Where norms are
            alike, less is enough: for updates the root of this factor, times the spread; for other
            tensors, and beside fewer than 4 others, its power 2/3. What a client itself has sent
            last counts too. A loss or diagnostic is compared by the factor as it is, where the
            median counts as 1 at least.
        poll_seconds: time between looks for new replies.
        message_mb: the largest message that is sent, in 10^6 bytes.
        secure_aggregation: whether the server sees only sums over the nodes, and no single update:
            see the guide on security for what that protects. A simulation has the same sums without
            masks.
        secure_minimum: smallest number of nodes in such a sum; None for more than half of the nodes
            that are asked, which is the least in any case. With fewer the run stops, and can go on
            later.
        secure_norm: largest norm of a client's update in such a sum, over the whole model. The node
            keeps back one that is longer; the norm of the sum is checked, too. None for no bound.
    """

    deadline_seconds: float = Field(600.0, gt=0.0)
    quorum: float = Field(0.5, gt=0.0, le=1.0)
    enough: float = Field(1.0, gt=0.0, le=1.0)
    outlier_factor: float = Field(1000.0, gt=1.0)
    poll_seconds: float = Field(0.2, gt=0.0)
    message_mb: float = Field(1000.0, gt=0.0)
    secure_aggregation: bool = False
    secure_minimum: int | None = Field(None, ge=2)
    secure_norm: float | None = Field(None, gt=0.0)

    renamed: ClassVar[Mapping[str, str]] = {"screen": "outlier_factor"}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.enough < self.quorum:
            raise ValueError("'enough' must be at least 'quorum'")
        if not self.secure_aggregation:
            for name in ("secure_minimum", "secure_norm"):
                if getattr(self, name) is not None:
                    raise ValueError(f"'{name}' needs secure_aggregation = true")
        return self


def smallest_count(share: float, count: int) -> int:
    """Return the smallest whole number that is at least this share of `count`.

    >>> smallest_count(0.5, 3), smallest_count(0.56, 25)
    (2, 14)
    """
    return math.ceil(round(share * count, 9))  # 0.56 * 25 is a little more than 14
