"""The rounds of a run whose updates the server sees only in sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedkeel.config.flower import smallest_count
from fedkeel.engine.base import ClientJob, ReportProgress, TrainedCohort
from fedkeel.engine.prepared import Prepared
from fedkeel.flower.protocol import ClientResult
from fedkeel.flower.secure_protocol import MASKED, SECURE
from fedkeel.flower.server.asking import Asking
from fedkeel.flower.server.kept_sums import KeptSums
from fedkeel.flower.server.plausible_means import PlausibleMeans
from fedkeel.flower.server.replies import ReplyReader
from fedkeel.flower.server.requests import NewState
from fedkeel.flower.server.secure_exchange import SkippedRoundError
from fedkeel.flower.server.secure_round import SecureRound, resumed
from fedkeel.method.context import Message


@dataclass
class SecureRounds:
    """Makes rounds of secure sums. It remembers which nodes have lied, and leaves them out.

    Args:
        prepared: the run.
        asking: how nodes are asked.
        reader: checks what nodes say of their clients.
        sums: keeps sums from one checkpoint to the next.
        means: compares what the sums say of losses.
    """

    prepared: Prepared
    asking: Asking
    reader: ReplyReader
    sums: KeptSums
    means: PlausibleMeans
    _liars: set[int] = field(default_factory=set)

    def make(
        self,
        message: Message,
        jobs: Mapping[int, ClientJob],
        tick: ReportProgress,
        no_replies: TrainedCohort,
    ) -> tuple[TrainedCohort, dict[int, NewState]]:
        """Train clients whose updates are seen only in a sum.

        Args:
            message: what they train from.
            jobs: what each client is asked for.
            tick: is told how many more have trained.
            no_replies: what a round without replies has trained.

        Returns:
            The round, and the state that each of its clients has written.

        Raises:
            TrainingError: too few of them, or of their nodes, replied before a deadline.
        """
        traffic = self.asking.traffic
        kept = self.sums.load(self.asking.requests.run, message.round)
        trained, lost = no_replies, list[int]()
        results: Sequence[ClientResult] = ()
        try:
            if kept is None:
                secure = self._masked(message, jobs, tick)
                lost = secure.lost
                unmasking = None if secure.is_lost else secure.unmasking(self.sums)
            else:
                lost = list(kept[0].lost)
                unmasking = resumed(
                    self.prepared, self.asking.connection, traffic, self.sums, *kept
                )
            if unmasking is not None:
                try:
                    trained = unmasking.make()
                    results = unmasking.kept.trained
                finally:
                    self._liars |= unmasking.liars
        except SkippedRoundError as error:
            traffic.add_fault(error.what, jobs)
        trained, left_out = self.means.checked(trained)
        for reason in left_out:
            traffic.add_fault(reason, [])
        states = {item.client: NewState(message.round + 1, item.state_digest) for item in results}
        return replace(trained, remote=traffic.account(lost)), states

    def _masked(
        self, message: Message, jobs: Mapping[int, ClientJob], tick: ReportProgress
    ) -> SecureRound:
        """Have clients train, and return the round with the masked sum of what they send.

        Raises:
            SkippedRoundError: nodes have answered for this round before.
            TrainingError: too few clients, or nodes, replied before a deadline.
        """
        asking, settings = self.asking, self.prepared.settings.flower
        requests = asking.requests_of(message, jobs)
        for node in self._liars & set(requests):
            asking.traffic.add_fault("left out: its node has lied", requests.pop(node).client_ids)
        connected = [client for item in requests.values() for client in item.client_ids]
        asking.record_absent(jobs, connected, 0.0, "")
        secure = SecureRound(
            self.prepared, asking.connection, asking.traffic, self.reader, requests
        )
        secure.begin()
        further = secure.sum_requests(list(jobs.values()))
        sent = {node: requests[node] for node in further}
        needed = smallest_count(settings.enough, len(jobs))
        replies = asking.send(
            MASKED, message, sent, jobs, secure.replied, "", lambda: len(secure.trained) >= needed,
            {node: {SECURE: header.record()} for node, header in further.items()},
        )  # fmt: skip
        for reply, request in replies:
            before = len(secure.trained)
            secure.receive(reply, request)
            tick(len(secure.trained) - before)
        asking.check_quorum(message, len(jobs), len({*secure.trained, *secure.lost}))
        return secure
