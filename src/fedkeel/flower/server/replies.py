"""The nodes' replies: checked against what was asked for, and given to the engine's buffers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedkeel.data import batches
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.local import LocalResult
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.trainer import ReadRecord, TrainedClients, single_client
from fedkeel.flower.protocol import (
    LOST,
    OK,
    RESTARTED,
    ClientRequest,
    ClientResult,
    MessageSpecs,
    Request,
    TrainingReply,
)
from fedkeel.flower.server.connection import NodeReply
from fedkeel.flower.server.node_devices import NodeDevices
from fedkeel.flower.server.requests import NewState
from fedkeel.flower.server.traffic import TrafficRecord
from fedkeel.flower.wire import (
    DIAGNOSTICS,
    SCORES,
    TENSORS,
    WireError,
    numbers,
    of_client,
    read_sums,
    unpack,
)
from fedkeel.method.context import ByPart, Message
from fedkeel.method.local_loop import all_finite
from fedkeel.method.round_values import Reply
from fedkeel.records.score import LOSS
from fedkeel.task.metrics.base import CountMetric, SumMetric
from fedkeel.task.metrics.calibration import CalibrationError
from fedkeel.task.metrics.metric_set import MetricSet
from fedkeel.tree import State, Tree, substate, substates, tensors, unwalk


class ReceivedReplies:
    """A `Trainer` that does not train: it returns the replies of clients, whom nodes have trained.

    Args:
        setup: method, model and data.
        results: the replies by client.
    """

    def __init__(self, setup: TrainingSetup, results: Mapping[int, LocalResult]) -> None:
        self.parallel_clients, self.placed, self._results = 1, setup, results
        self.queue_length = 0
        self.reasons: list[str] = []

    def __call__(
        self, message: Message, jobs: Sequence[ClientJob], read: ReadRecord, sums: bool = False
    ) -> Iterator[TrainedClients]:
        """Return the replies that have come."""
        for job in jobs:
            yield single_client(job, self._results[job.client])


@dataclass(frozen=True)
class ReplyReader:
    """Reads the replies of a run.

    Args:
        prepared: the run.
        specs: shapes and types of what is sent.
        devices: takes what nodes say of how they train.
    """

    prepared: Prepared
    specs: MessageSpecs
    devices: NodeDevices = field(default_factory=NodeDevices)

    def header(self, content: RecordDict, request: Request) -> TrainingReply:
        """Return the header of a reply.

        Args:
            content: the reply of a node.
            request: what the node was asked for.

        Raises:
            WireError: it is not a reply to that request.
        """
        reply = TrainingReply.read(content)
        if (reply.run, reply.round) != (request.run, request.round):
            raise WireError("A reply belongs to another round or run.", got=f"round {reply.round}")
        if [item.client for item in reply.clients] != request.client_ids:
            raise WireError("A reply is for other clients than were asked.")
        self.devices.note(request.client_ids, reply.training)
        return reply

    def state(self, content: RecordDict, client: int) -> State:
        """Return the tensors of one client's reply.

        Raises:
            WireError: they are not the expected ones.
        """
        return unpack(content, of_client(TENSORS, client), self.specs.reply)

    def client(
        self, content: RecordDict, state: State, request: ClientRequest, result: ClientResult
    ) -> LocalResult:
        """Return one client's reply, checked.

        Args:
            content: the node's reply.
            state: the client's tensors.
            request: what the client was asked for.
            result: what the node says of it.

        Raises:
            WireError: it reports other work than was asked for, or cannot be decoded.
        """
        diagnostics = self.specs.diagnostics
        values = numbers(content, of_client(DIAGNOSTICS, request.client), {*diagnostics, "loss"})
        self.check_counts(request, result)
        update, loss = self._update(state), torch.tensor(values["loss"], dtype=torch.float64)
        noted = {k: torch.tensor(values[k], dtype=spec.dtype) for k, spec in diagnostics.items()}
        reply = Reply(
            update=update,
            buffers=tensors(substate(state, "buffers")),
            uploads=substates(substate(state, "uploads")),
            client_state={},
            loss=loss,
            finite=all_finite({**state, "update": dict(update), "numbers": {**noted, "": loss}}),
            diagnostics=noted,
        )
        return LocalResult(reply, result.steps, result.examples)

    def check_counts(self, request: ClientRequest, result: ClientResult) -> None:
        """Refuse a result that reports other work than was asked for.

        Raises:
            WireError: it does.
        """
        setup = self.prepared.setup
        size = int(setup.federation.sizes[request.client])
        local = setup.training.local
        expected = batches.count_examples(local, size, request.steps_done)
        is_possible = result.examples == expected and 0 < result.steps <= result.examples
        if setup.own is not None:  # which may do less than it was asked for
            is_possible = 0 < result.steps <= result.examples <= expected
        if local.sampling == "poisson":  # only the node knows how many were drawn
            steps = batches.count_steps(local, size)
            is_possible = result.steps == steps and 0 <= result.examples <= steps * size
        if not is_possible:
            raise WireError(
                "A reply reports other work than was asked for.",
                got=f"{result.steps} steps, {result.examples} examples",
            )
        if self.specs.client_state and not re.fullmatch("[0-9a-f]{16}", result.state_digest):
            raise WireError("A reply's digest is not one.")

    def _update(self, state: State) -> Tree:
        """Return the update of a reply, decoded where it was encoded."""
        codec = self.prepared.plan.codec
        if codec is None:
            return tensors(substate(state, "update"))
        try:
            encoded = substate(substate(state, "uploads"), codec.name)
            return codec.decode(encoded, self.prepared.server.params)
        except (RuntimeError, IndexError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise WireError("A reply's update cannot be decoded.", got=f"{first:.80}") from None


class TakenReplies:
    """Takes the replies of nodes that have trained, and records what is wrong with them.

    Args:
        reader: checks them.
        traffic: where bytes and faults are recorded.

    Attributes:
        results: the replies by client.
        states: the state that each of these clients has written.
        lost: clients that have lost their state.
    """

    def __init__(self, reader: ReplyReader, traffic: TrafficRecord) -> None:
        self._reader, self._traffic = reader, traffic
        self.results: dict[int, LocalResult] = {}
        self.states: dict[int, NewState] = {}
        self.lost: list[int] = []

    def take(self, reply: NodeReply, request: Request) -> None:
        """Take the reply of a node to a request."""
        try:
            content = reply.checked()
            header = self._reader.header(content, request)
        except WireError as error:
            self._traffic.add_fault(error.short(), request.client_ids)
            return
        for item, result in zip(request.clients, header.clients, strict=True):
            if result.status in (OK, RESTARTED):
                self._take_client(content, request, item, result)
                continue
            if result.status == LOST:
                self.lost.append(item.client)
            self._traffic.add_status(result)

    def drop(self, client: int) -> None:
        """Forget the reply of a client."""
        self.results.pop(client, None)
        self.states.pop(client, None)

    def _take_client(
        self, content: RecordDict, request: Request, item: ClientRequest, result: ClientResult
    ) -> None:
        try:
            state = self._reader.state(content, item.client)
            self._count_upload(state)
            self.results[item.client] = self._reader.client(content, state, item, result)
            self.states[item.client] = NewState(request.round + 1, result.state_digest)
        except WireError as error:
            self._traffic.add_fault(error.short(), [item.client])
            return
        if result.status == RESTARTED:
            self.lost.append(item.client)
            self._traffic.add_status(result)

    def _count_upload(self, state: State) -> None:
        """Count the bytes of a client's reply."""
        self._traffic.add_received("model", {k: substate(state, k) for k in ("update", "buffers")})
        for part, upload in substates(substate(state, "uploads")).items():
            self._traffic.add_received(part, {part: upload})


def read_states(
    content: RecordDict, client: int, count: int, metrics: MetricSet, places: int = 1
) -> tuple[Tensor, float]:
    """Return [S] the sums of a client's metrics, and its mean loss.

    Args:
        content: the reply of its node.
        client: which client.
        count: the number of examples that it was measured on.
        metrics: the metrics, as `MetricSet.on_nodes` has them.
        places: number of targets of one example.

    Raises:
        WireError: there are no sums, or they cannot be those of so many examples.
    """
    states = read_sums(content, of_client(SCORES, client), metrics.state_size)
    scores = metrics.scores(
        states[None], torch.tensor([count]), torch.zeros(0, 0), torch.zeros(0, dtype=torch.int64)
    )[0]
    for metric, part in zip(metrics.summed, torch.split(states, list(metrics.sizes)), strict=True):
        value = scores[metric.name]
        in_range = math.isnan(value) or -1e-9 <= value <= 1 + 1e-9
        if metric.unit == "%" and not (in_range and bool(part.isfinite().all())):
            raise WireError("A score is not a share.", got=f"{metric.name} {value}")
        is_count = isinstance(metric, CountMetric | CalibrationError) or (
            isinstance(metric, SumMetric) and metric.unit == "%" and metric.finish is not None
        )
        has_count = metric.name == LOSS and len(part) == 2  # of the examples whose value counts
        if has_count or (isinstance(metric, SumMetric) and metric.leaves_out_nan):
            is_count, part = True, part[1:]
        most = count * max(1, places) * (1 + 1e-9)
        if is_count and not bool(((part >= 0) & (part <= most)).all()):
            raise WireError(
                "The sums of a score do not fit the number of examples.",
                got=f"{metric.name}: {count}",
            )
    return states, scores[LOSS]


def read_counts(content: RecordDict, client: int, most: int, metrics: MetricSet) -> Tensor:
    """Return [S] a client's counts for the pictures of a report.

    Args:
        content: the reply of its node.
        client: which client.
        most: the number of its targets.
        metrics: the pictures.

    Raises:
        WireError: there are no counts, or they cannot be those of so many targets.
    """
    counts = read_sums(content, of_client(SCORES, client), metrics.state_size)
    sums = [part.sum() for part in torch.split(counts, list(metrics.sizes))]
    if not all(0 <= total <= most for total in sums) or not (counts == counts.floor().abs()).all():
        raise WireError("The counts of predictions do not fit the number of examples.", got=most)
    return counts


def missing_answer(specs: Mapping[str, TensorSpec]) -> ByPart:
    """Return the answer of a client that has given none to a survey: NaN everywhere."""
    answer = {k: torch.full(spec.shape, math.nan, dtype=spec.dtype) for k, spec in specs.items()}
    return substates(unwalk(answer))
