"""The last step of a secure sum: nodes reveal what takes its masks off, and the sum is checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fedkeel.engine.base import ClientJob, TrainedCohort
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import TrainingError
from fedkeel.features.secure.collector import Collector
from fedkeel.features.secure.fixed_point import decoded
from fedkeel.features.secure.primitives import SecureSumError, WrongSecretError
from fedkeel.flower.secure_protocol import (
    UNMASK,
    SummedReplies,
    UnmaskReply,
    UnmaskRequest,
    VectorLayout,
)
from fedkeel.flower.server.asking import round_error
from fedkeel.flower.server.kept_sums import KeptShares, KeptSum, KeptSums
from fedkeel.flower.server.secure_exchange import SecureExchange, SkippedRoundError
from fedkeel.method.round_values import Replies
from fedkeel.tree import Tree, map_tensors, substate, substates, tensors

UNMASK_STAGE = "unmask"
"""Stage of a round after the masked vectors have come."""

TOLERANCE = 1e-6
"""Relative difference between what the sum says of its weight and what is known of it."""

NORM_SLACK = 1e-3
"""Share by which the norm of a sum may be above its bound, by rounding."""

LIES = "left out of this and all later rounds: it {}"
"""What a fault says of a node that has lied in a secure sum."""


@dataclass
class Unmasking:
    """Unmasks the sum of a round, and returns the round that it makes.

    Args:
        prepared: the run.
        exchange: how nodes are asked.
        sums: keeps what the nodes reveal.
        kept: the sum.
        collector: the same, with its vectors, and what was revealed before.
        is_resumed: whether an earlier process has begun with it.

    Attributes:
        liars: nodes that have revealed, or given to others, what they are not bound to.
    """

    prepared: Prepared
    exchange: SecureExchange
    sums: KeptSums
    kept: KeptSum
    collector: Collector
    is_resumed: bool = False
    liars: set[int] = field(default_factory=set)

    def make(self) -> TrainedCohort:
        """Return the round that the sum makes.

        Raises:
            SkippedRoundError: a node has lied so that nobody can unmask the sum; or the sum of an
                earlier process cannot be unmasked, or is not what it should be.
            TrainingError: too few nodes help to unmask the sum, or it is not what it should be.
        """
        try:
            return self._made()
        except SkippedRoundError:
            raise
        except TrainingError as error:
            if not self.is_resumed:
                raise
            raise SkippedRoundError(
                "skipped: the server stopped while this round was unmasked, and nodes help for a "
                f"round once ({error.what})"
            ) from None

    def _made(self) -> TrainedCohort:
        self._reveal()
        try:
            total = decoded(self.collector.unmasked())
        except WrongSecretError as error:
            self._put_out(error)
            raise SkippedRoundError(f"skipped: a node of the secure sum {error.what}") from None
        except SecureSumError as error:
            raise round_error(error.what, error.got, error.expected) from None
        layout = VectorLayout.of(self.prepared)
        summed = layout.read(total, self.kept.total_weight, self.kept.asked)
        trained = {item.client: item for item in self.kept.trained}
        clients = np.array(sorted(trained), dtype=np.int64)
        setup = self.prepared.setup
        examples = setup.federation.sizes[clients]
        processed = np.array([trained[k].examples for k in clients.tolist()])
        jobs = [ClientJob(row, k, 0) for row, k in enumerate(clients.tolist())]
        weight = float(setup.raw_weights(jobs, processed.tolist()).sum())
        self._check_sum(summed, weight, len(clients))
        count, update = len(clients), tensors(substate(summed.state, "update"))
        return TrainedCohort(
            replies=Replies(
                clients=clients,
                examples=examples,
                processed=processed,
                finite=np.ones(count, dtype=np.bool_),
                update={k: t[None] for k, t in update.items()},
                buffers=_same_for_all(tensors(substate(summed.state, "buffers")), weight, count),
                uploads={
                    part: map_tensors(lambda t: t[None], state)
                    for part, state in substates(substate(summed.state, "uploads")).items()
                },
                summed=True,
                noisy=self._noise() > 0.0,
            ),
            loss=np.full(count, summed.loss),
            steps=np.array([trained[k].steps for k in clients.tolist()]),
            diagnostics={k: np.full(count, value) for k, value in summed.diagnostics.items()},
        )

    def _reveal(self) -> None:
        """Ask the survivors for shares, until there are enough right ones of all."""
        collector = self.collector
        if collector.is_open:  # an earlier process has asked
            return
        requests = {
            node: UnmaskRequest(
                run=self.kept.run,
                round=self.kept.round,
                node=str(node),
                survivors=tuple(map(str, collector.survivors)),
                dropped=tuple(map(str, collector.dropped)),
            )
            for node in collector.survivors
            if node not in collector.revealed
        }
        replies = self.exchange.ask(
            UNMASK, requests, UnmaskReply, UNMASK_STAGE, lambda: collector.is_open
        )
        for node, reply in replies:
            try:
                collector.take_revealed(node, reply.revealed)
            except WrongSecretError as error:
                self._put_out(error)
            except SecureSumError as error:
                self.exchange.fault(node, error.what, UNMASK_STAGE)
            else:
                shares = KeptShares.of(collector.revealed, self.exchange.traffic)
                self.sums.keep_revealed(self.kept.round, shares)

    def _put_out(self, error: WrongSecretError) -> None:
        """Name a node that has lied, and have it left out from now on."""
        self.liars.add(error.number)
        self.exchange.fault(error.number, LIES.format(error.what), UNMASK_STAGE)

    def _check_sum(self, summed: SummedReplies, weight: float, count: int) -> None:
        """Refuse a sum that is not of the clients that it should be of, or is too long."""
        is_right = math.isclose(summed.weight, weight, rel_tol=TOLERANCE)
        if not is_right or not math.isclose(summed.clients, count, rel_tol=TOLERANCE):
            raise round_error(
                "The secure sum is not of the clients that it should be of.",
                f"{summed.clients:.6g} clients of weight {summed.weight:.6g}",
                f"{count} of weight {weight:.6g}",
            )
        largest = self.prepared.settings.flower.secure_norm
        update = tensors(substate(summed.state, "update"))
        norm = math.sqrt(sum(float(t.double().square().sum()) for t in update.values()))
        if largest is not None and not self._noise() and norm > (1 + NORM_SLACK) * weight * largest:
            raise round_error(
                "The secure sum of the updates is longer than all of them may be together.",
                f"norm {norm / weight:.3g} of the mean",
                f"at most {largest:g}, which is flower.secure_norm",
            )

    def _noise(self) -> float:
        return self.prepared.plan.reduction.sum_noise()


def _same_for_all(total: Tree, weight: float, count: int) -> Tree:
    """Return the mean of buffers as if each client had sent it."""
    return {name: (t / weight).expand(count, *t.shape) for name, t in total.items()}
