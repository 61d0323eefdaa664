"""How the vectorized engine trains groups of clients: from whole compiled rounds to one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from fedkeel.engine.vectorized.facts import SetupFacts

RoundEnd = Literal["compiled", "side by side", "one by one"]
"""How groups end their round: compiled; for all clients at once as it is; client by client."""


@dataclass(frozen=True)
class Strategy:
    """How groups of clients are trained.

    From fast to plain: whole rounds are compiled; steps are compiled for several clients side by
    side; steps are compiled for one client; clients train one by one, as in the sequential engine.

    Args:
        parallel_clients: clients that are trained side by side, at most.
        is_compiled: whether steps are compiled; otherwise clients train one by one.
        whole_rounds_side_by_side: whether whole rounds are compiled for several clients.
        whole_rounds_single: whether whole rounds are compiled for one client.
        channels_last: whether a single client's images are laid out with channels last.
        round_end: how groups that are trained by steps end their round.
    """

    parallel_clients: int
    is_compiled: bool = True
    whole_rounds_side_by_side: bool = False
    whole_rounds_single: bool = False
    channels_last: bool = True
    round_end: RoundEnd = "compiled"

    @classmethod
    def choose(cls, facts: SetupFacts, parallel_clients: int, device: torch.device) -> Strategy:
        """Return the fastest strategy that the facts allow on a device.

        On a GPU clients that train alone have large networks. Their rounds are not compiled as a
        whole: that takes long, and gains nothing.
        """
        if facts.not_compilable:
            return ONE_BY_ONE
        short = facts.short_rounds
        return cls(
            parallel_clients,
            whole_rounds_side_by_side=short,
            whole_rounds_single=short and device.type == "cpu",
            channels_last=facts.channels_last,
        )

    def compiles_whole_round(self, clients: int) -> bool:
        """Return whether a group's round is compiled as a whole."""
        return self.whole_rounds_single if clients == 1 else self.whole_rounds_side_by_side

    def without_whole_rounds(self, clients: int) -> Strategy:
        """Return the strategy after a whole round of a group could not be compiled."""
        if clients == 1:
            return replace(self, whole_rounds_single=False)
        return replace(self, whole_rounds_side_by_side=False)

    def lowered(self, clients: int) -> Strategy:
        """Return the next plainer strategy after steps of a group could not be compiled."""
        if clients > 1:
            return replace(self, parallel_clients=1)
        if self.channels_last:  # a module may need the usual layout
            return replace(self, channels_last=False)
        return replace(self, is_compiled=False)

    def with_less_memory(self, clients: int) -> Strategy:
        """Return the strategy after a group has run out of memory."""
        return replace(self, parallel_clients=max(1, clients // 2), is_compiled=clients > 1)


ONE_BY_ONE = Strategy(1, is_compiled=False)
"""Clients train one by one, as in the sequential engine."""
