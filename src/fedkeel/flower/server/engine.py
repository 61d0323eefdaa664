"""An engine whose clients are on the nodes of a federation."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.cost.memory import estimate_run
from fedkeel.data.values import only_tensor
from fedkeel.engine.base import (
    ClientJob,
    PersonalScores,
    ReportProgress,
    ServerModel,
    Split,
    TrainedCohort,
    TrainingSetup,
)
from fedkeel.engine.client_states import KeepsClientStates
from fedkeel.engine.evaluation import evaluate, split_examples
from fedkeel.engine.local import LocalResult
from fedkeel.engine.message_state import message_state
from fedkeel.engine.personal import scores_of
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.round_buffers import RoundBuffers
from fedkeel.errors import RunError, TrainingError
from fedkeel.flower.data_on_nodes import NODES
from fedkeel.flower.protocol import (
    EVALUATE,
    LOST,
    OK,
    PERSONAL,
    PICTURES,
    RESTARTED,
    SURVEY,
    TRAIN,
    Agreement,
    ClientRequest,
    CommonScale,
    MessageSpecs,
    NodeDescription,
    Request,
)
from fedkeel.flower.secure_protocol import MASKED, SECURE
from fedkeel.flower.server.connection import NodeConnection, NodeReply
from fedkeel.flower.server.membership import Membership, pack_descriptions
from fedkeel.flower.server.outliers import (
    outlying_answers,
    outlying_numbers,
    outlying_replies,
)
from fedkeel.flower.server.replies import (
    ReceivedReplies,
    ReplyReader,
    missing_answer,
    read_counts,
    read_states,
)
from fedkeel.flower.server.secure_round import SECURE_SUM, SecureRound
from fedkeel.flower.server.traffic import EVALUATION, SURVEY_STAGE, TrafficRecord
from fedkeel.flower.wire import HEADER, TENSORS, WireError, of_client, pack, unpack
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.records.rows import NOT_NEEDED
from fedkeel.runner.early_stopping import smallest_count
from fedkeel.task.metrics.metric_set import Measured, MetricSet
from fedkeel.tree import State, Tree, nbytes, substate, substates, walk

STATE_ROUND, STATE_DIGEST = "nodes/state_round", "nodes/state_digest"
"""Names in a checkpoint of the round and the digest of each client's state."""

ROUND, RUN_NUMBER = "nodes/round", "nodes/run_number"
"""Names in a checkpoint of the server's round, and of a random number by which nodes tell this run
from another one of the same key."""


class NodeClients(KeepsClientStates):
    """Trains and evaluates clients on the nodes of a federation.

    Args:
        prepared: the run.
        connection: how nodes are asked.
        membership: which nodes are connected.
        descriptions: where the data is on the nodes alone, so that they evaluate: what each
            client's node has said of its data. It is saved in the checkpoint, for a run that goes
            on without some nodes.
    """

    def __init__(
        self,
        prepared: Prepared,
        connection: NodeConnection,
        membership: Membership,
        descriptions: Mapping[int, NodeDescription] | None = None,
    ) -> None:
        setup, capacity = prepared.setup, prepared.largest_cohort
        self._prepared, self._setup = prepared, setup
        self._settings = prepared.settings.flower
        self._connection, self._membership = connection, membership
        self._descriptions = descriptions
        scale = setup.federation.data.scale if setup.federation.how["kind"] == NODES else None
        self._scale = scale and CommonScale(mean=scale[0], deviation=scale[1])
        needs = estimate_run(prepared)
        self._specs, self._agreement = MessageSpecs.of(prepared), Agreement.of(prepared)
        self._run_number = np.array([secrets.randbits(64)], dtype=np.uint64)
        self._reader = ReplyReader(prepared, self._specs)
        self._buffers = RoundBuffers(setup, prepared.spec, capacity, private_memory, on_nodes=True)
        self.clients = self._buffers.clients
        clients = len(setup.federation)
        self._state_round = np.zeros(clients, dtype=np.int64)  # [C] of each client's state
        self._state_digest = np.zeros(clients, dtype=np.uint64)  # [C]
        self._checkpoint_round = np.zeros(clients, dtype=np.int64)  # [C] at the last checkpoint
        self._new_digests: dict[int, str] = {}  # of a round that is not committed yet
        self.reasons: list[str] = []  # nodes train one client after the other, as was asked for
        self._round = 0
        secure = [SECURE_SUM] if self._settings.secure_aggregation else []
        self._traffic = TrafficRecord([*needs.down, *needs.up, *secure])

    # --- training --------------------------------------------------------------------------------

    def train(self, message: Message, clients: Ints, tick: ReportProgress) -> TrainedCohort:
        """Train clients [K] from a message; those that reply in time make the round.

        Raises:
            TrainingError: fewer than the quorum replied before the deadline.
        """
        jobs = {job.client: job for job in self.clients.begin_round(clients)}
        self._new_digests = {}
        self._traffic.begin_round(message.round)
        self._record_node_faults()
        if self._settings.secure_aggregation and jobs:
            return self._train_for_sum(message, jobs, tick)
        enough = smallest_count(self._settings.enough, len(clients))
        received: dict[int, LocalResult] = {}
        lost: list[int] = []
        asking = self._ask(
            TRAIN, message, jobs, received, is_enough=lambda: len(received) >= enough
        )
        for reply, request in asking:
            before = len(received)
            self._receive(reply, request, received, lost)
            tick(len(received) - before)
        self._check_quorum(message, len(clients), len({*received, *lost}))
        replied = np.array(sorted(received), dtype=np.int64)
        rows = [ClientJob(row, k, jobs[k].steps_done) for row, k in enumerate(replied.tolist())]
        trainer = ReceivedReplies(self._setup, received)
        self._buffers.train(trainer, message, rows, lambda count: None)
        trained = self._buffers.gather(replied)
        self._exclude_outliers(trained)
        self._round = message.round
        return replace(trained, remote=self._traffic.account(lost))

    def _train_for_sum(
        self, message: Message, jobs: Mapping[int, ClientJob], tick: ReportProgress
    ) -> TrainedCohort:
        """Train clients whose updates nobody sees but in a sum.

        Raises:
            TrainingError: too few of them, or of their nodes, replied before a deadline.
        """
        requests = self._requests(message, jobs)
        connected = [client for item in requests.values() for client in item.client_ids]
        self._record_absent(jobs, connected, 0.0, "")
        secure = SecureRound(
            self._prepared, self._connection, self._traffic, self._reader, requests
        )
        collector = secure.begin()
        further = secure.sum_requests(collector, list(jobs.values()))
        sent = {node: requests[node] for node in further}
        enough = smallest_count(self._settings.enough, len(jobs))
        replies = self._send(
            MASKED, message, sent, jobs, secure.replied, "", lambda: len(secure.trained) >= enough,
            {node: {SECURE: header.record()} for node, header in further.items()},
        )  # fmt: skip
        for reply, request in replies:
            before = len(secure.trained)
            secure.receive(reply, request, collector)
            tick(len(secure.trained) - before)
        self._check_quorum(message, len(jobs), len({*secure.trained, *secure.lost}))
        if secure.is_lost(collector):
            trained = self._buffers.gather(np.zeros(0, dtype=np.int64))
        else:
            trained = secure.finish(collector)
        self._new_digests = {k: item.state_digest for k, item in secure.trained.items()}
        self._round = message.round
        return replace(trained, remote=self._traffic.account(secure.lost))

    def _ask(
        self,
        kind: str,
        message: Message,
        jobs: Mapping[int, ClientJob],
        replied: Collection[int],
        stage: str = "",
        is_enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[NodeReply, Request]]:
        """Send a message to clients, and yield each node's reply with its request as it comes.

        At the end the clients that are absent from `replied` get a fault.
        """
        return self._send(
            kind, message, self._requests(message, jobs), jobs, replied, stage, is_enough
        )

    def _send(
        self,
        kind: str,
        message: Message,
        requests: Mapping[int, Request],
        jobs: Iterable[int],
        replied: Collection[int],
        stage: str,
        is_enough: Callable[[], bool],
        further: Mapping[int, Mapping[str, ConfigRecord]] | None = None,
    ) -> Iterator[tuple[NodeReply, Request]]:
        """Send a message with its requests, and with further records for each node; see `_ask`."""
        tensors = pack(message_state(message))
        contents = {
            node: RecordDict(
                {HEADER: request.record(), TENSORS: tensors, **(further or {}).get(node, {})}
            )
            for node, request in requests.items()
        }
        model: dict[str, State] = {"params": dict(message.params), "buffers": dict(message.buffers)}
        for _ in contents:
            self._traffic.add_sent(
                EVALUATION if kind in (EVALUATE, PERSONAL, PICTURES) else "model", model
            )
            for part, state in message.broadcast.items():
                self._traffic.add_sent(part, {part: state})
        started = time.monotonic()
        for reply in self._connection.ask(contents, kind, is_enough):
            yield reply, requests[reply.node]
        self._record_absent(list(jobs), replied, time.monotonic() - started, stage)

    def _requests(self, message: Message, jobs: Mapping[int, ClientJob]) -> dict[int, Request]:
        """Return the header of the request to each node."""
        size = nbytes(message_state(message))
        if size > self._settings.message_mb * 1e6:
            raise RunError(
                "A message to the clients is too large.",
                got=f"{size / 1e6:.0f} MB",
                expected=f"at most {self._settings.message_mb:g} MB",
                do="raise flower.message_mb, or use a smaller model",
            )
        wanted = set(jobs)
        self._membership.forget_disconnected()  # a node that was restarted may have another id
        if not wanted <= set(self._membership.node_by_client()):  # a node may have come back
            seconds = self._settings.deadline_seconds / 4
            self._membership.refresh(seconds, lambda by_client: wanted <= set(by_client))
        descriptions = self._membership.descriptions()
        return {
            node: Request(
                run=self._run,
                round=message.round,
                agreement=self._agreement,
                data_digest=descriptions[clients[0]].data_digest,
                lr=message.lr,
                clients=tuple(self._client_request(jobs[k]) for k in clients),
                scale=self._scale,
            )
            for node, clients in self._membership.clients_by_node(sorted(wanted)).items()
        }

    def _client_request(self, job: ClientJob) -> ClientRequest:
        return ClientRequest(
            client=job.client,
            steps_done=job.steps_done,
            state_round=int(self._state_round[job.client]),
            state_digest=f"{int(self._state_digest[job.client]):016x}",
            checkpoint_round=int(self._checkpoint_round[job.client]),
        )

    def _receive(
        self,
        reply: NodeReply,
        request: Request,
        received: dict[int, LocalResult],
        lost: list[int],
    ) -> None:
        """Take a node's clients into `received` and `lost`, or record why not."""
        try:
            content = reply.checked()
            header = self._reader.header(content, request)
        except WireError as error:
            self._traffic.add_fault(error.short(), request.client_ids)
            return
        for item, result in zip(request.clients, header.clients, strict=True):
            if result.status == LOST:
                lost.append(item.client)
                reason = "lost its client state; the method begins anew"
                self._traffic.add_fault(reason, [item.client])
            elif result.status not in (OK, RESTARTED):
                self._traffic.add_fault(f"failed: {result.status:.200}", [item.client])
            else:
                try:
                    state = self._reader.state(content, item.client)
                    self._count_upload(state)
                    received[item.client] = self._reader.client(content, state, item, result)
                    self._new_digests[item.client] = result.state_digest
                except WireError as error:
                    self._traffic.add_fault(error.short(), [item.client])
                    continue
                if result.status == RESTARTED:
                    lost.append(item.client)
                    self._traffic.add_fault("lost its client state, and began anew", [item.client])

    def _count_upload(self, state: State) -> None:
        """Count the bytes of a client's reply."""
        self._traffic.add_received("model", {k: substate(state, k) for k in ("update", "buffers")})
        for part, upload in substates(substate(state, "uploads")).items():
            self._traffic.add_received(part, {part: upload})

    def _exclude_outliers(self, trained: TrainedCohort) -> None:
        """Mark replies as not finite that are far from the others', and record them.

        The numbers that a client says of its training are screened as its update is.
        """
        replies, factor = trained.replies, self._settings.outlier_factor
        numbers = {
            "a training loss": torch.from_numpy(trained.loss),
            **{
                f"the diagnostic {name}": torch.from_numpy(values)
                for name, values in trained.diagnostics.items()
            },
        }
        outliers = {**outlying_numbers(numbers, factor), **outlying_replies(replies, factor)}
        for row, reason in outliers.items():
            replies.finite[row] = False
            self._traffic.add_fault(reason, [int(replies.clients[row])])
        for client in replies.clients[~replies.finite].tolist():
            if client not in self._traffic.clients_with_faults():
                self._traffic.add_fault("sent NaN or infinity", [client])

    def _check_quorum(self, message: Message, selected: int, replied: int) -> None:
        """Refuse a round with too few replies; that of a client with lost state is one of them."""
        needed = smallest_count(self._settings.quorum, selected)
        if replied >= needed:
            return
        faults = "; ".join(f"{key}: {clients}" for key, clients in self._traffic.faults.items())
        details = f" ({faults:.300})" if faults else ""
        raise TrainingError(
            f"Round {message.round + 1} has no quorum.",
            got=f"{replied} of {selected} clients answered{details}",
            expected=f"at least {needed} within {self._settings.deadline_seconds:g} s",
            do="see that the nodes are up, then go on with resume; everything is saved",
        )

    def _record_absent(
        self, clients: Iterable[int], replied: Collection[int], seconds: float, stage: str
    ) -> None:
        """Record clients that have not replied after some seconds and have no fault yet."""
        with_faults = self._traffic.clients_with_faults(stage)
        nodes = self._membership.node_by_client()
        for client in clients:
            if client in replied or client in with_faults:
                continue
            if client not in nodes:
                reason = self._membership.absence_reason(client)
            elif seconds >= self._settings.deadline_seconds:
                reason = "no reply before the deadline"
            else:
                reason = NOT_NEEDED
            self._traffic.add_fault(reason, [client], stage)

    def _record_node_faults(self) -> None:
        """Record replies that have come late, and nodes that were refused, since the last round."""
        nodes = self._membership.node_by_client()
        for late in self._connection.late_nodes():
            clients = [client for client, node in nodes.items() if node == late]
            self._traffic.add_fault(
                "a reply to an earlier round came late and was dropped", clients
            )
        for reason in self._membership.faults:
            self._traffic.add_fault(reason, [])
        self._membership.faults.clear()

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
        for reply, request in self._ask(SURVEY, message, jobs, answered, SURVEY_STAGE):
            try:
                content = reply.checked()
                header = Request.read(content)
                if (header.run, header.round) != (self._run, message.round):
                    raise WireError("A reply belongs to another round or run.")
            except WireError as error:
                self._traffic.add_fault(error.short(), request.client_ids, SURVEY_STAGE)
                continue
            answered |= {k for k in request.client_ids if self._take_answer(content, jobs[k])}
        self._check_quorum(message, len(clients), len(answered))
        answers = self._buffers.answers(clients)
        for row, reason in outlying_answers(answers, self._settings.outlier_factor).items():
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

    @property
    def _run(self) -> str:
        return f"{self._prepared.key}-{int(self._run_number[0]):016x}"

    # --- state -----------------------------------------------------------------------------------

    def commit(self, trained: TrainedCohort, keep: Ints) -> None:
        """Believe from now on in the states that the clients `keep` have written in this round."""
        super().commit(trained, keep)
        if self._specs.client_state:
            for client in keep.tolist():
                self._state_round[client] = self._round + 1
                self._state_digest[client] = int(self._new_digests[client], 16)
        self._new_digests = {}
        account = trained.remote
        if account is not None and account.lost and self._prepared.plan.client_sum_parts:
            self._state_round[:] = 0
            self._state_digest[:] = 0
        self._round += 1

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the server knows of the clients' states."""
        descriptions = {} if self._descriptions is None else pack_descriptions(self._descriptions)
        return {
            **super().state(),
            STATE_ROUND: self._state_round.copy(),
            STATE_DIGEST: self._state_digest.copy(),
            ROUND: np.array([self._round], dtype=np.int64),
            RUN_NUMBER: self._run_number.copy(),
            **descriptions,
        }

    def saved(self) -> None:
        """Note that the checkpoint of the last state is complete."""
        self._checkpoint_round[:] = self._state_round

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take what the server knew of the clients' states at a checkpoint."""
        super().restore(arrays)
        self._state_round[:] = arrays[STATE_ROUND]
        self._state_digest[:] = arrays[STATE_DIGEST]
        self._run_number[:] = arrays[RUN_NUMBER]
        self._checkpoint_round[:] = self._state_round
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
        counts = cast(Ints, examples.counts)  # see `placeholder`: it has numbers of examples alone
        personal = self._setup.training.personal
        params = {name: value for name, value in params.items() if name not in personal}
        message = Message(params, buffers, {}, self._round, 0.0)
        by_client = dict(zip(clients.tolist(), counts.tolist(), strict=True))
        states = self._states_of_nodes(kind, message, by_client, metrics)
        return Measured(states, torch.zeros(len(clients), 0, dtype=torch.float64))

    def measure_personal(self, setup: TrainingSetup, server: ServerModel) -> PersonalScores:
        """Return the scores of the clients' personal models, which the nodes measure."""
        metrics, sizes = self._setup.metrics.on_nodes(), split_examples(setup, "clients").sizes
        clients = np.flatnonzero(sizes)
        message = Message(server.params, server.buffers, {}, server.round, 0.0)
        by_client = dict(zip(clients.tolist(), sizes[clients].tolist(), strict=True))
        states = torch.full((len(sizes), metrics.state_size), math.nan, dtype=torch.float64)
        states[clients] = self._states_of_nodes(PERSONAL, message, by_client, metrics)
        return scores_of(metrics, states, sizes, torch.zeros(0, 0, dtype=torch.float64))

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
        states = torch.full((len(clients), metrics.state_size), math.nan, dtype=torch.float64)
        losses = torch.full((len(clients),), math.nan, dtype=torch.float64)
        jobs = {job.client: job for job in self.clients.jobs(clients)}
        replied: set[int] = set()
        for reply, request in self._ask(kind, message, jobs, replied, EVALUATION):
            try:
                content = reply.checked()
                for client in request.client_ids:
                    row, count = list(counts).index(client), counts[client]
                    if kind == PICTURES:
                        targets = split_examples(self._setup, "pictures").data.y
                        most = count * only_tensor(targets, "a picture")[0].numel()
                        states[row] = read_counts(content, client, most, metrics)
                    else:
                        states[row], losses[row] = read_states(content, client, count, metrics)
                    replied.add(client)
            except WireError as error:
                failed = set(request.client_ids) - replied
                self._traffic.add_fault(error.short(), failed, EVALUATION)
        outliers = outlying_numbers({"a loss": losses}, self._settings.outlier_factor)
        for row, reason in outliers.items():
            states[row] = math.nan
            self._traffic.add_fault(reason, [int(clients[row])], EVALUATION)
        return states

    def __enter__(self) -> NodeClients:
        return self

    def __exit__(self, *error: object) -> None:
        """The nodes go on running, so there is nothing to end."""
