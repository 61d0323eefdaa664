"""What an attacker sees of one round, taken from a real run on the reference engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedkeel import tree
from fedkeel.config.audit import View
from fedkeel.engine.base import ReportProgress, TrainedCohort
from fedkeel.engine.client_inputs import batch_plans
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.sequential import Sequential
from fedkeel.errors import RunError
from fedkeel.method.context import ByPart, Floats, Ints, Message
from fedkeel.method.local_loop import local_path_length
from fedkeel.method.round_values import Replies
from fedkeel.method.server_round import raw_weights
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.task.network import Network
from fedkeel.tree import Tree


@dataclass(frozen=True)
class Observation:
    """What an attacker sees of a round, and what is compared with what the attacker makes of it.

    Args:
        view: what the attacker sees.
        network: the model and its loss, which are public in a federation.
        params: the model that the clients received.
        buffers: its buffers.
        broadcast: what the server's parts sent beside it, by part.
        update: end - start: of the client, the weighted mean of the clients', or of the model.
        lr: local learning rate of the round.
        path_length: mean length of the local paths, see `Round.path_length`: 1 for one plain step.
        round: the round, counted from 1.
        clients: [K] the clients behind the update.
        shares: [K] weight of each client in the update, sum 1.
        steps: [K] local steps of each.
        examples: [K] examples that each processed.
        rows: for each client the distinct rows of the training set that it used in the round. The
            attacker does not know them.
    """

    view: View
    network: Network
    params: Tree
    buffers: Tree
    broadcast: ByPart
    update: Tree
    lr: float
    path_length: float
    round: int
    clients: Ints
    shares: Floats
    steps: Ints
    examples: Ints
    rows: tuple[Ints, ...]

    @property
    def gradient(self) -> Tree:
        """What the update is per unit of learning rate and path: the gradient of one plain step."""
        return tree.scale(self.update, -1.0 / (self.lr * self.path_length))

    @property
    def rounding(self) -> float:
        """Squared norm that rounding errors of the update have in `gradient`, at most."""
        eps = max(torch.finfo(tensor.dtype).eps for tensor in self.params.values())
        size = float(tree.dot(self.params, self.params))
        return 100.0 * size * (eps / (self.lr * self.path_length)) ** 2

    @property
    def all_rows(self) -> Ints:
        """Rows of the training set that are behind the update."""
        return np.concatenate(self.rows)


@dataclass(frozen=True)
class Overheard:
    """One round of a real run: all that was sent, and what the server made of it.

    Args:
        prepared: the run.
        message: what the clients received.
        replies: what the clients sent.
        steps: [K] local steps of each client.
        rows: for each client of `replies` the distinct rows that it used.
        after: the global model after the round.
        record: the record of the round, with scores and epsilon.
    """

    prepared: Prepared
    message: Message
    replies: Replies
    steps: Ints
    rows: tuple[Ints, ...]
    after: Tree
    record: RoundRecord

    def client(self, k: int) -> Observation:
        """Return what is seen of client `k` where its update arrives by itself."""
        place = np.flatnonzero(self.replies.clients == k)
        update = tree.map_tensors(lambda t: t[place[0]], dict(self.replies.update))
        return self._seen("client", tree.tensors(update), place)

    def sum(self) -> Observation:
        """Return what is seen where only the weighted mean of the round's updates arrives."""
        shares = torch.from_numpy(self._shares(np.arange(len(self.steps))))
        update = {
            name: torch.einsum("k,k...->...", shares.to(tensor.dtype), tensor)
            for name, tensor in self.replies.update.items()
        }
        return self._seen("sum", update, np.arange(len(self.steps)))

    def release(self) -> Observation:
        """Return what is seen by who has the models before and after the round."""
        update = tree.sub(self.after, self.message.params)
        return self._seen("release", update, np.arange(len(self.steps)))

    def see(self, view: View, client: int) -> Observation:
        """Return one of the three views; `client` matters only to the first."""
        if view == "client":
            return self.client(client)
        return self.sum() if view == "sum" else self.release()

    def _shares(self, places: Ints) -> Floats:
        examples, processed = self.replies.examples[places], self.replies.processed[places]
        weights = raw_weights(self.prepared.plan.weights, examples, processed)
        shares: Floats = weights / weights.sum()
        return shares

    def _seen(self, view: View, update: Tree, places: Ints) -> Observation:
        training, message = self.prepared.setup.training, self.message
        lengths = [float(local_path_length(training, message, int(s))) for s in self.steps[places]]
        shares = self._shares(places)
        return Observation(
            view=view,
            network=training.network,
            params=message.params,
            buffers=message.buffers or training.network.buffers,
            broadcast=message.broadcast,
            update=update,
            lr=message.lr,
            path_length=float(np.dot(shares, lengths)),
            round=message.round + 1,
            clients=self.replies.clients[places],
            shares=shares,
            steps=self.steps[places],
            examples=self.replies.processed[places],
            rows=tuple(self.rows[int(place)] for place in places),
        )


def overhear(prepared: Prepared, round: int, callbacks: Sequence[Callback] = ()) -> Overheard:
    """Make a run up to a round on the reference engine, and return what was sent in that round.

    The settings stay those of the whole run, so noise that is calibrated for all planned rounds,
    and learning rates that change with the round, are what they are in the run.

    Args:
        prepared: the run, checked.
        round: the round, counted from 1.
        callbacks: follow the run.

    Raises:
        TrainingError: training cannot go on.
        RunError: the run ends before the round, such as one whose privacy budget is spent.
        KeyboardInterrupt: the run was interrupted before the round.
    """
    engine = _Recorder(prepared, round)
    last = _LastRound(round)
    result = start(prepared, None, callbacks=[last, *callbacks], engine=engine)
    if engine.message is None or engine.trained is None or last.record is None:
        raise _ended_before(result, round)
    return Overheard(
        prepared,
        engine.message,
        engine.trained.replies,
        engine.trained.steps,
        engine.rows,
        last.params,
        last.record,
    )


class _Recorder(Sequential):
    """The reference engine, which keeps what is sent in one round."""

    def __init__(self, prepared: Prepared, round: int) -> None:
        super().__init__(prepared.setup, prepared.spec, prepared.largest_cohort)
        self._round = round
        self.message: Message | None = None
        self.trained: TrainedCohort | None = None
        self.rows: tuple[Ints, ...] = ()

    def train(
        self, message: Message, clients: Ints, report_progress: ReportProgress
    ) -> TrainedCohort:
        """Train clients [K] from a message."""
        trained = super().train(message, clients, report_progress)
        if message.round + 1 == self._round:
            federation, jobs = self._setup.federation, self.clients.jobs(clients)
            plans = batch_plans(self._setup, message, jobs)
            self.rows = tuple(
                federation.client(job.client)[np.unique(np.concatenate(plan))]
                for job, plan in zip(jobs, plans, strict=True)
            )
            self.message = replace(
                message, params=tree.clone(message.params), buffers=tree.clone(message.buffers)
            )
            self.trained = trained
        return trained


class _LastRound(Callback):
    """Ends a run after a round, and keeps its model."""

    def __init__(self, round: int) -> None:
        self._round = round
        self.params: Tree = {}
        self.record: RoundRecord | None = None

    def stop_reason(self, row: RoundRecord) -> str:
        """Return a reason after the round."""
        return "the round was made that is attacked" if row.round >= self._round else ""

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        """Keep the model of the round."""
        if row.round == self._round:
            self.params, self.record = tree.clone(model.params), row


def overhear_model(prepared: Prepared, round: int) -> tuple[Tree, Tree]:
    """Make a run up to a round, and return the global model's parameters and buffers."""
    last = _LastRound(round)
    result = start(prepared, None, callbacks=[last])
    if last.record is None:
        raise _ended_before(result, round)
    return last.params, result.buffers


def _ended_before(result: Result, round: int) -> BaseException:
    """Return what to raise where a run ended before the round that is attacked."""
    if result.record.status == "interrupted":
        return KeyboardInterrupt()
    return RunError(
        "The run ended before the round that is attacked.",
        got=result.record.message or f"{result.rows[-1].round} rounds",
        expected=f"round {round}",
        do="attack an earlier round: --round, or fedkeel.Audit(round=...)",
    )
