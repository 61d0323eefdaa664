"""An engine whose clients are on the nodes of a federation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.base.values import tensors_of
from fedkeel.config.flower import smallest_count
from fedkeel.engine.base import (
    ClientJob,
    PersonalScores,
    ReportProgress,
    ServerModel,
    Split,
    TrainedCohort,
    TrainingSetup,
)
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.engine.client_states import KeepsClientStates
from fedkeel.engine.evaluation import evaluate, split_examples
from fedkeel.engine.personal import scores_of
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.round_buffers import RoundBuffers
from fedkeel.errors import RunError
from fedkeel.flower.protocol import (
    EVALUATE,
    PERSONAL,
    PICTURES,
    SURVEY,
    TRAIN,
    MessageSpecs,
    NodeDescription,
    Request,
)
from fedkeel.flower.server.asking import Asking
from fedkeel.flower.server.connection import NodeConnection
from fedkeel.flower.server.judgement import outlying_reply, outlying_rows
from fedkeel.flower.server.kept_sums import KeptSums
from fedkeel.flower.server.membership import Membership, pack_descriptions
from fedkeel.flower.server.node_devices import NodeDevices
from fedkeel.flower.server.outliers import Outliers, answer_sizes, outlying_losses
from fedkeel.flower.server.plausible_means import PlausibleMeans
from fedkeel.flower.server.replies import (
    ReceivedReplies,
    ReplyReader,
    TakenReplies,
    missing_answer,
    read_counts,
    read_states,
)
from fedkeel.flower.server.requests import NewState, Requests
from fedkeel.flower.server.secure_exchange import SECURE_SUM
from fedkeel.flower.server.secure_rounds import SecureRounds
from fedkeel.flower.server.traffic import EVALUATION, SURVEY_STAGE, TrafficRecord
from fedkeel.flower.server.trainings import NodeTrainings
from fedkeel.flower.wire import TENSORS, WireError, of_client, sums_nbytes, unpack
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.task.metrics.metric_set import Measured, MetricSet
from fedkeel.tree import Tree, substates, walk

ROUND = "nodes/round"
"""Name in a checkpoint of the server's round."""


class NodeClients(KeepsClientStates):
    """Trains and evaluates clients on the nodes of a federation.

    Args:
        prepared: the run.
        connection: how nodes are asked.
        membership: which nodes are connected.
        descriptions: where the data is only on the nodes, so that they evaluate: what each
            client's node has said of its data. It is saved in the checkpoint, for a run that goes
            on without some nodes.
        sums: keeps secure sums from one checkpoint to the next; None keeps none.

    Attributes:
        trainings: those of a server that does not wait for its clients, else None.
        devices: what the nodes say of how they train.
    """

    has_client_models = False
    """Whether the clients' own models are at hand: they stay on their nodes."""

    def __init__(
        self,
        prepared: Prepared,
        connection: NodeConnection,
        membership: Membership,
        descriptions: Mapping[int, NodeDescription] | None = None,
        sums: KeptSums | None = None,
    ) -> None:
        setup, capacity = prepared.setup, prepared.largest_cohort
        self._prepared, self._setup = prepared, setup
        self._settings = prepared.settings.flower
        self._connection, self._membership = connection, membership
        self._descriptions = descriptions
        needs = estimate_run(prepared)
        self._specs = MessageSpecs.of(prepared)
        self.devices = NodeDevices()
        for client, node in membership.descriptions().items():
            self.devices.note([client], node.training)
        self.reasons, self.warnings = self.devices.reasons, self.devices.warnings
        self._reader = ReplyReader(prepared, self._specs, self.devices)
        self._buffers = RoundBuffers(setup, prepared.spec, capacity, private_memory, on_nodes=True)
        self.clients = self._buffers.clients
        self._new_states: dict[int, NewState] = {}  # of a round that is not committed yet
        self._round = 0
        secure = [SECURE_SUM] if self._settings.secure_aggregation else []
        self._traffic = TrafficRecord([*needs.down, *needs.up, *secure])
        self._requests = Requests(prepared, membership, self._traffic)
        self._asking = Asking(self._settings, connection, membership, self._requests, self._traffic)
        self._sums = sums or KeptSums(None)
        self._requests.go_on_as(self._sums.run)
        self._means = PlausibleMeans(self._settings.outlier_factor)
        self._secure = SecureRounds(prepared, self._asking, self._reader, self._sums, self._means)
        self._outliers = Outliers(self._settings.outlier_factor, len(setup.federation))
        self.trainings: NodeTrainings | None = None
        if prepared.plan.policy is not None:
            self._taken = TakenReplies(self._reader, self._traffic)
            self.trainings = NodeTrainings(
                self._settings,
                connection,
                membership,
                self._requests,
                self._taken,
                self._traffic,
                self.clients.jobs,
                partial(outlying_reply, self._outliers, setup),
            )

    # --- training --------------------------------------------------------------------------------

    def train(self, message: Message, clients: Ints, tick: ReportProgress) -> TrainedCohort:
        """Train clients [K] from a message; those that reply in time make the round.

        Raises:
            TrainingError: fewer than the quorum replied before the deadline.
        """
        jobs = {job.client: job for job in self.clients.begin_round(clients)}
        self._new_states = {}
        self._traffic.begin_round(message.round)
        self._asking.record_node_faults()
        if self.trainings is not None:
            return self._train_received(message, clients, tick)
        if self._settings.secure_aggregation and jobs:
            no_replies = self._buffers.gather(np.zeros(0, dtype=np.int64))
            trained, self._new_states = self._secure.make(message, jobs, tick, no_replies)
            self._round = message.round
            return trained
        needed = smallest_count(self._settings.enough, len(clients))
        taken = TakenReplies(self._reader, self._traffic)
        asking = self._asking.ask(
            TRAIN, message, jobs, taken.results, is_enough=lambda: len(taken.results) >= needed
        )
        for reply, request in asking:
            before = len(taken.results)
            taken.take(reply, request)
            tick(len(taken.results) - before)
        self._asking.check_quorum(message, len(clients), len({*taken.results, *taken.lost}))
        return self._gathered(message, taken, taken.results)

    def _train_received(
        self, message: Message, clients: Ints, tick: ReportProgress
    ) -> TrainedCohort:
        """Return the replies of clients that have trained, each from the model that it was sent."""
        taken = self._taken
        trained = self._gathered(message, taken, clients.tolist())
        for client in clients.tolist():
            taken.drop(client)
        if taken.lost and self._prepared.plan.client_sum_parts and self.trainings is not None:
            self.trainings.drop_all()
        taken.lost = []
        tick(len(clients))
        return trained

    def _gathered(self, message: Message, taken: TakenReplies, of: Iterable[int]) -> TrainedCohort:
        """Return the replies of some clients as the server's step needs them."""
        results = {client: taken.results[client] for client in sorted(of)}
        replied = np.array(list(results), dtype=np.int64)
        self._buffers.train(
            ReceivedReplies(self._setup, results), message, self.clients.jobs(replied)
        )
        trained = self._buffers.gather(replied)
        if self.trainings is None:  # else each was judged when it came
            trained = self._without_outliers(trained, message)
        self._new_states = {client: taken.states[client] for client in results}
        self._round = message.round
        return replace(trained, remote=self._traffic.account(taken.lost))

    def _without_outliers(self, trained: TrainedCohort, message: Message) -> TrainedCohort:
        """Mark replies as not finite that are far from the others', and record them.

        Where all replies are outliers, the round changes nothing; where none is finite, training
        has diverged.
        """
        replies = trained.replies
        for client in replies.clients[~replies.finite].tolist():
            self._traffic.add_fault("sent NaN or infinity", [client])
        outlying = outlying_rows(self._outliers, self._setup, trained, message.lr, message.params)
        for row, reason in outlying.items():
            replies.finite[row] = False
            self._traffic.add_fault(reason, [int(replies.clients[row])])
        if outlying and not replies.finite.any():
            return self._buffers.gather(np.zeros(0, dtype=np.int64))
        return trained

    # --- surveys ---------------------------------------------------------------------------------

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys; NaN for a client without an answer.

        Raises:
            TrainingError: fewer than the quorum answered before the deadline.
        """
        self._traffic.begin_round(message.round)
        jobs = {job.client: job for job in self.clients.jobs(clients)}
        answered: set[int] = set()
        for job in jobs.values():
            self._buffers.rows.write_answers(job, missing_answer(self._specs.answer))
        for reply, request in self._asking.ask(SURVEY, message, jobs, answered, SURVEY_STAGE):
            try:
                content = reply.checked()
                header = Request.read(content)
                if (header.run, header.round) != (self._requests.run, message.round):
                    raise WireError("A reply belongs to another round or run.")
            except WireError as error:
                self._traffic.add_fault(error.short(), request.client_ids, SURVEY_STAGE)
                continue
            answered |= {k for k in request.client_ids if self._take_answer(content, jobs[k])}
        self._asking.check_quorum(message, len(clients), len(answered))
        answers = self._buffers.answers(clients)
        for row, reason in self._outliers.judge(clients, answer_sizes(answers)).items():
            for _, answer in walk(dict(answers)):
                answer[row] = math.nan
            self._traffic.add_fault(reason, [int(clients[row])], SURVEY_STAGE)
        return answers

    def _take_answer(self, content: RecordDict, job: ClientJob) -> bool:
        """Take one client's answer to the surveys, or record why not; return whether it was."""
        try:
            state = unpack(content, of_client(TENSORS, job.client), self._specs.answer)
        except WireError as error:
            self._traffic.add_fault(error.short(), [job.client], SURVEY_STAGE)
            return False
        self._buffers.rows.write_answers(job, substates(state))
        for part, answer in substates(state).items():
            self._traffic.add_received(part, {part: answer})
        return True

    # --- state -----------------------------------------------------------------------------------

    def commit(self, trained: TrainedCohort, keep: Ints) -> None:
        """Believe from now on in the states that the clients `keep` have written in this round."""
        super().commit(trained, keep)
        if self._specs.client_state:
            self._requests.take(self._new_states, keep.tolist())
        self._new_states = {}
        account = trained.remote
        if account is not None and account.lost and self._prepared.plan.client_sum_parts:
            self._requests.forget_states()
        self._round += 1

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the server knows of the clients' states."""
        descriptions = {} if self._descriptions is None else pack_descriptions(self._descriptions)
        return {
            **super().state(),
            **self._requests.state(),
            **self._outliers.state(),
            **self._means.state(),
            ROUND: np.array([self._round], dtype=np.int64),
            **descriptions,
        }

    def saved(self) -> None:
        """Note that the checkpoint of the last state is complete."""
        self._requests.saved()
        self._sums.discard(self._round)

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take what the server knew of the clients' states at a checkpoint."""
        super().restore(arrays)
        self._requests.restore(arrays)
        self._outliers.restore(arrays)
        self._means.restore(arrays)
        self._round = int(arrays[ROUND][0])

    # --- evaluation ------------------------------------------------------------------------------

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Measured:
        """Return what is measured of the examples of a split.

        Where the server has the data, it evaluates itself, exactly. Else there is a row of states
        for each client with examples: its sums, or NaN where it has not replied.
        """
        if self._descriptions is None:
            with use_numerics(self._setup.precision):
                return evaluate(self._setup, params, buffers, split)
        is_picture = split == "pictures"
        kind, metrics = EVALUATE, self._setup.metrics.on_nodes()
        if is_picture:
            kind, metrics = PICTURES, self._setup.metrics.of_pictures()
        examples = split_examples(self._setup, split)
        clients = examples.groups()
        counts = cast(Ints, examples.counts)  # see `placeholder`: it has only numbers of examples
        personal = self._setup.training.personal
        params = {name: value for name, value in params.items() if name not in personal}
        message = Message(params, buffers, {}, self._round, 0.0)
        by_client = dict(zip(clients.tolist(), counts.tolist(), strict=True))
        states = self._states_of_nodes(kind, message, by_client, metrics)
        return Measured(states, torch.zeros(len(clients), 0, dtype=torch.float64))

    def measure_personal(self, setup: TrainingSetup, server: ServerModel) -> PersonalScores:
        """Return the scores of the clients' personal models, which the nodes measure."""
        metrics, sizes = self._setup.metrics.on_nodes(), split_examples(setup, "clients").sizes
        states = self._personal_states(PERSONAL, setup, server, metrics)
        return scores_of(metrics, states, sizes, torch.zeros(0, 0, dtype=torch.float64))

    def count_personal(self, setup: TrainingSetup, server: ServerModel) -> Tensor:
        """Return [C, S] counts of what the clients' personal models answer, NaN of none.

        A node counts what the run is judged by: these models.
        """
        return self._personal_states(PICTURES, setup, server, setup.metrics.of_pictures())

    def personal_model(
        self, setup: TrainingSetup, server: ServerModel, client: int
    ) -> tuple[Tree, Tree]:
        """Refuse: a client's own model stays on its node.

        Raises:
            RunError: always.
        """
        raise RunError(
            "The server has no client's own model.",
            why="what a client keeps never leaves its node",
        )

    def _personal_states(
        self, kind: str, setup: TrainingSetup, server: ServerModel, metrics: MetricSet
    ) -> Tensor:
        """Return [C, S] sums of the clients' personal models, NaN where none have come."""
        sizes = split_examples(setup, "clients").sizes
        clients = np.flatnonzero(sizes)
        message = Message(server.params, server.buffers, server.broadcast, server.round, 0.0)
        by_client = dict(zip(clients.tolist(), sizes[clients].tolist(), strict=True))
        states = torch.full((len(sizes), metrics.state_size), math.nan, dtype=torch.float64)
        states[clients] = self._states_of_nodes(kind, message, by_client, metrics)
        return states

    def _states_of_nodes(
        self, kind: str, message: Message, counts: Mapping[int, int], metrics: MetricSet
    ) -> Tensor:
        """Return [n, S] the sums of clients that nodes measure, NaN where none have come.

        Args:
            kind: of the message: `EVALUATE`, `PERSONAL` or `PICTURES`.
            message: the model.
            counts: number of examples of each client.
            metrics: what is measured, as sums.
        """
        if self._setup.training.buffers != "average":  # else nodes use their own
            message = replace(message, buffers={})
        clients = np.array(list(counts), dtype=np.int64)
        rows = {client: row for row, client in enumerate(counts)}
        states = torch.full((len(clients), metrics.state_size), math.nan, dtype=torch.float64)
        losses = torch.full((len(clients),), math.nan, dtype=torch.float64)
        jobs = {job.client: job for job in self.clients.jobs(clients)}
        targets = split_examples(self._setup, "pictures").data.y
        places = sum(part[0].numel() for part in tensors_of(targets))
        replied: set[int] = set()
        for reply, request in self._asking.ask(kind, message, jobs, replied, EVALUATION):
            try:
                content = reply.checked()
                if kind != PICTURES:  # these come after the last record
                    self._traffic.add_received_bytes(EVALUATION, sums_nbytes(content))
                for client in request.client_ids:
                    row, count = rows[client], counts[client]
                    if kind == PICTURES:
                        states[row] = read_counts(content, client, count * places, metrics)
                    else:
                        states[row], losses[row] = read_states(
                            content, client, count, metrics, places
                        )
                    replied.add(client)
            except WireError as error:
                failed = set(request.client_ids) - replied
                self._traffic.add_fault(error.short(), failed, EVALUATION)
        outliers = outlying_losses(losses.numpy(), self._settings.outlier_factor)
        for row, reason in outliers.items():
            states[row] = math.nan
            self._traffic.add_fault(reason, [int(clients[row])], EVALUATION)
        return states

    def __enter__(self) -> NodeClients:
        return self

    def __exit__(self, *error: object) -> None:
        """The nodes go on running, so there is nothing to end."""
