"""A node: the clients it plays, and its replies to the server's requests."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from flwr.app import MetricRecord, RecordDict
from torch import Tensor

from fedkeel.base.values import only_tensor
from fedkeel.data.dataset import Dataset
from fedkeel.data.read.scaling import Scale, recorded_width
from fedkeel.engine.base import ClientJob, ServerModel, TrainingSetup
from fedkeel.engine.evaluation import node_states, split_examples, states_by_client
from fedkeel.engine.local import LocalResult
from fedkeel.engine.message_state import message_from_state
from fedkeel.engine.personal import scores_of
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.survey import survey_client
from fedkeel.errors import FedkeelError, RunError
from fedkeel.features.attackers.feature import attack_of
from fedkeel.features.secure.primitives import Words
from fedkeel.flower.data_on_nodes import NODES
from fedkeel.flower.node.choose_training import make_training
from fedkeel.flower.node.client_storage import ClientStorage, LostStateError
from fedkeel.flower.node.description import describe, needs_scale
from fedkeel.flower.node.guard import DEVICE, Guard
from fedkeel.flower.node.hardware import PLAIN, NodePlace
from fedkeel.flower.node.log import log_error, public_reason
from fedkeel.flower.node.secure_sums import SecureSums, refuse_single_updates
from fedkeel.flower.node.signing import UNSIGNED, Signing
from fedkeel.flower.node.statistics import OwnData, SiteCounter
from fedkeel.flower.node.training import ClientStart, ClientTrainer
from fedkeel.flower.protocol import (
    DESCRIBE,
    DESCRIBE_DATA,
    EVALUATE,
    LOST,
    OK,
    PERSONAL,
    PICTURES,
    RESTARTED,
    SURVEY,
    TRAIN,
    UNTOLD,
    Agreement,
    ClientRequest,
    ClientResult,
    CommonScale,
    MessageSpecs,
    NodeTraining,
    Request,
    TrainingReply,
)
from fedkeel.flower.secure_protocol import KEYS, MASKED, SHARES, UNMASK, VECTOR, KeysRequest
from fedkeel.flower.statistics_protocol import (
    STATISTICS,
    TOTALS,
    StatisticsReply,
    StatisticsRequest,
    TotalsRequest,
)
from fedkeel.flower.wire import (
    DIAGNOSTICS,
    HEADER,
    SCORES,
    TENSORS,
    WireError,
    of_client,
    pack,
    sums_record,
    unpack,
)
from fedkeel.method.context import ByPart, Message
from fedkeel.method.round_values import Reply, uploaded_state
from fedkeel.records.files import write_text
from fedkeel.tree import State, walk

SCALE = "scale-{}-{}.json"
"""File in the node's folder that says how a client's inputs are standardised in a run. The server
does not know it."""


@dataclass(frozen=True)
class _Begun:
    """A client that may train: its files, its status, its setup, and what it trains from."""

    storage: ClientStorage
    status: str
    setup: TrainingSetup
    start: ClientStart


@dataclass(frozen=True)
class Node:
    """Trains and evaluates the clients of a node.

    Args:
        prepared: the run, as the node sees it.
        clients: the clients that it plays.
        folder: where client state and the log are.
        name: the node's name, "" for none.
        guard: enforces the site's own policy, None where it has none.
        signing: signs the node's keys in secure sums, and says whose keys it takes.
        place: where the clients are trained, and by which engine.
        own_data: the node's own data as they are, for statistics; None where it has none.
    """

    prepared: Prepared
    clients: frozenset[int]
    folder: Path
    name: str = ""
    guard: Guard | None = None
    signing: Signing = UNSIGNED
    place: NodePlace = PLAIN
    own_data: OwnData | None = None

    @cached_property
    def training(self) -> ClientTrainer:
        """What trains the clients; it may keep a device."""
        return make_training(self.prepared, self.place, len(self.clients))

    @property
    def _report(self) -> NodeTraining:
        """How the clients are trained, as far as the site lets the server know."""
        may_tell = self.guard is None or self.guard.lets_out(DEVICE)
        return self.training.report if may_tell else UNTOLD

    @cached_property
    def _scaled(self) -> dict[CommonScale, TrainingSetup]:
        """The setup with inputs by the scale of the last request."""
        return {}

    @cached_property
    def specs(self) -> MessageSpecs:
        """Shapes and types of what is sent."""
        return MessageSpecs.of(self.prepared)

    @cached_property
    def agreement(self) -> Agreement:
        """What server and node have to agree on. It is made once: a user's loss may count calls."""
        return Agreement.of(self.prepared)

    def reply(self, kind: str, content: RecordDict) -> RecordDict:
        """Return the reply to a message of Flower.

        Args:
            kind: its type: `TRAIN`, `SURVEY`, `EVALUATE`, `PERSONAL`, `PICTURES`, `STATISTICS`,
                `DESCRIBE` or `DESCRIBE_DATA`; or a step of a secure sum: `KEYS`, `SHARES`,
                `MASKED`, `TOTALS` or `UNMASK`.
            content: what it holds.

        Raises:
            WireError: it is not a request of this run, or not for this node.
            PolicyError: the site's policy does not allow an answer.
        """
        if self.guard is not None:
            self.guard.check_run(kind)
            self.guard.check_message(kind)
        refuse_single_updates(self.prepared, kind)
        if kind == DESCRIBE:
            if self.guard is not None:
                self.guard.check_plan(self.clients)
            return self.describe()
        if kind == DESCRIBE_DATA:
            return self.describe(has_sums=False)
        handlers = {
            TRAIN: self.train,
            SURVEY: self.survey,
            EVALUATE: self.evaluate,
            PICTURES: self.count_answers,
            PERSONAL: self.evaluate_personal,
            KEYS: self.begin_sum,
            SHARES: self._secure_sums.share,
            MASKED: self.train_for_sum,
            UNMASK: self._secure_sums.unmask,
            STATISTICS: self.count_examples,
            TOTALS: self.count_for_sum,
        }
        return handlers[kind](content)

    @property
    def _secure_sums(self) -> SecureSums:
        return SecureSums(
            self.prepared, self.folder, self.clients, self.agreement.experiment, self.signing
        )

    def train(self, content: RecordDict) -> RecordDict:
        """Train the clients of a request and return their replies.

        Raises:
            WireError: it is not a request of this run, or not for this node.
        """
        request, message = self._read(content, self.specs.training)
        records = RecordDict()
        results = []
        for result, sent in self._trained(request, message):
            results.append(result)
            if sent is None:
                continue
            tensors = uploaded_state(self.prepared.plan, sent)
            records[of_client(TENSORS, result.client)] = pack(tensors)
            diagnostics = {name: float(t) for name, t in sent.diagnostics.items()}
            records[of_client(DIAGNOSTICS, result.client)] = MetricRecord(
                {**diagnostics, "loss": float(sent.loss)}
            )
        reply = TrainingReply(
            run=request.run, round=request.round, clients=tuple(results), training=self._report
        )
        records[HEADER] = reply.record()
        return records

    def begin_sum(self, content: RecordDict) -> RecordDict:
        """Return new public keys for a secure sum.

        Raises:
            WireError: it is not a request of this run, or not for this node.
        """
        request = KeysRequest.read(content)
        self._check(request)
        return self._secure_sums.begin(request)

    def train_for_sum(self, content: RecordDict) -> RecordDict:
        """Train the clients of a request and return the masked sum of what they would send.

        Raises:
            WireError: it is not a request of this run, or not for this node.
            SecureSumError: the node has no part in this sum.
        """
        request, message = self._read(content, self.specs.training)
        subject = self._subject(request, message)
        trained = self._trained(request, message)
        return self._secure_sums.masked(content, request, subject, trained, lambda: self._report)

    def _subject(self, request: Request, message: Message) -> str:
        """Return a digest of the model from which clients train, and of how they do."""
        facts = [self.agreement.experiment, request.round, sorted(request.client_ids)]
        digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
        model: State = {"params": dict(message.params), "buffers": dict(message.buffers)}
        for path, tensor in walk(model):
            digest.update(path.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _trained(
        self, request: Request, message: Message
    ) -> Iterator[tuple[ClientResult, Reply | None]]:
        """Train the clients of a request; yield its result, and its reply if it has one."""
        setup, items = self._setup(request), list(enumerate(request.clients))
        self._write_scale(request, setup.federation.data)
        size = self.training.together
        for first in range(0, len(items), size):
            yield from self._train_clients(setup, request, items[first : first + size], message)

    def _train_clients(
        self,
        setup: TrainingSetup,
        request: Request,
        items: Sequence[tuple[int, ClientRequest]],
        message: Message,
    ) -> Iterator[tuple[ClientResult, Reply | None]]:
        """Train some clients of a request, each with its row, and yield what comes of each."""
        begun, failed = dict[int, _Begun](), dict[int, ClientResult]()
        for row, item in items:
            try:
                begun[item.client] = self._begin(setup, request, item, row)
            except FedkeelError as error:
                failed[item.client] = self._failed(item.client, error)
        waiting = [one for one in begun.values() if one.status != LOST]
        outcomes = dict[int, LocalResult | FedkeelError]()
        for own in {id(one.setup): one.setup for one in waiting}.values():
            together = [one.start for one in waiting if one.setup is own]
            outcomes.update(self._outcomes(own, message, together))
        for _, item in items:
            client = item.client
            if client in begun and begun[client].status == LOST:
                yield ClientResult(client=client, status=LOST), None
                continue
            outcome = outcomes.get(client)
            try:
                if isinstance(outcome, LocalResult):
                    yield self._finish(request, begun[client], outcome)
                    continue
            except FedkeelError as error:
                outcome = error
            if isinstance(outcome, FedkeelError):
                failed[client] = self._failed(client, outcome)
            yield failed[client], None

    def _failed(self, client: int, error: FedkeelError) -> ClientResult:
        """Return the result of a client that has failed; the full message stays on the node."""
        log_error(self.folder, error)
        return ClientResult(client=client, status=public_reason(error))

    def _begin(
        self, setup: TrainingSetup, request: Request, item: ClientRequest, row: int
    ) -> _Begun:
        """Return what a client trains from. From here on the site has spent what that costs."""
        storage = ClientStorage(self.folder, request.run, item.client)
        storage.remove_unneeded(item.state_round, item.checkpoint_round)
        client_state, status = self._load_state(item, storage)
        if status != LOST and self.guard is not None:
            setup = self.guard.admit(setup, request, item)
        job = ClientJob(row, item.client, item.steps_done)
        return _Begun(storage, status, setup, ClientStart(job, client_state))

    def _outcomes(
        self, setup: TrainingSetup, message: Message, clients: Sequence[ClientStart]
    ) -> Iterator[tuple[int, LocalResult | FedkeelError]]:
        """Train clients, and yield what came of each. One that fails leaves the others."""
        try:
            trained = self.training.train(setup, message, clients)
        except FedkeelError as error:
            if len(clients) == 1:
                yield clients[0].job.client, error
                return
            for client in clients:
                yield from self._outcomes(setup, message, [client])
        else:
            yield from ((job.client, result) for job, result in trained)

    def _finish(
        self, request: Request, begun: _Begun, result: LocalResult
    ) -> tuple[ClientResult, Reply]:
        """Return what a client sends after training; what it keeps is written."""
        client, reply, attack = begun.start.job.client, result.reply, attack_of(self.prepared)
        if attack is not None and attack.lies_alone(client):
            update = attack.change(reply.update, request.round, client)
            reply = replace(reply, update=update)
        if self.guard is not None:
            reply = self.guard.protected(reply)
        digest = ""
        if self.specs.client_state:
            digest = begun.storage.store(request.round + 1, reply.client_state)
        done = ClientResult(
            client=client,
            status=begun.status,
            steps=result.steps,
            examples=result.examples,
            state_digest=digest,
        )
        return done, reply

    def _load_state(self, item: ClientRequest, storage: ClientStorage) -> tuple[ByPart | None, str]:
        """Return a client's state, None where it starts anew, and its status."""
        if not item.state_round:
            return None, OK
        try:
            state = storage.load(item.state_round, item.state_digest, self.specs.client_state)
        except LostStateError as error:
            log_error(self.folder, error)
            return None, LOST if self.prepared.plan.client_sum_parts else RESTARTED
        return state, OK

    def survey(self, content: RecordDict) -> RecordDict:
        """Return the clients' answers to the surveys, without those of clients that fail.

        Raises:
            WireError: it is not a request of this run, or not for this node.
        """
        request, message = self._read(content, self.specs.survey)
        setup = self._setup(request)
        records = RecordDict({HEADER: request.record()})
        for row, item in enumerate(request.clients):
            storage = ClientStorage(self.folder, request.run, item.client)
            job = ClientJob(row, item.client, item.steps_done)
            try:
                client_state, _ = self._load_state(item, storage)
                with use_numerics(setup.precision):
                    answers = survey_client(setup, message, job, client_state)
            except FedkeelError as error:
                log_error(self.folder, error)
                continue
            records[of_client(TENSORS, item.client)] = pack(dict(answers))
        return records

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Return sums that make the metrics of the clients of a request on their own examples.

        Raises:
            WireError: it is not a request of this run, or not for this node.
        """
        request, message = self._read(content, self.specs.evaluation)
        setup = self._setup(request)
        buffers = message.buffers or setup.training.network.buffers
        params = {**message.params, **setup.training.personal_params}
        measured = self.training.evaluate(setup, params, buffers)
        with use_numerics(setup.precision):
            states = node_states(setup, measured)
        records = RecordDict({HEADER: request.record()})
        for client in request.client_ids:
            records[of_client(SCORES, client)] = sums_record(states[client])
        return records

    def evaluate_personal(self, content: RecordDict) -> RecordDict:
        """Return sums that make the metrics of clients' personal models, without those that fail.

        A client that has lost its state is evaluated as one that has not taken part.

        Raises:
            WireError: it is not a request of this run, or not for this node.
        """
        request, message = self._read(content, self.specs.personal)
        setup = self._setup(request)
        sizes = split_examples(setup, "clients").sizes
        records = RecordDict({HEADER: request.record()})
        for client, states, kept in self._personal_states(setup, request, message):
            scores = scores_of(setup.metrics, states[None], sizes[client : client + 1], kept)
            owners = torch.zeros(len(kept), dtype=torch.int64)
            sums = setup.metrics.node_states(states[None], kept, owners, scores.per_client)[0]
            records[of_client(SCORES, client)] = sums_record(sums)
        return records

    def _personal_states(
        self, setup: TrainingSetup, request: Request, message: Message
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each client of a request with what `measure_client` says, but for those that fail.

        A client that has lost its state is evaluated as one that has not taken part.
        """
        model = message.params, message.buffers
        server = ServerModel(*model, request.round, message.broadcast)
        for item in request.clients:
            storage = ClientStorage(self.folder, request.run, item.client)
            try:
                client_state, _ = self._load_state(item, storage)
                states, kept = self.training.measure_client(
                    setup, server, item.client, client_state
                )
            except FedkeelError as error:
                log_error(self.folder, error)
                continue
            yield item.client, states, kept

    def count_answers(self, content: RecordDict) -> RecordDict:
        """Return the counts for the pictures of a report of the clients of a request.

        Raises:
            WireError: it is not a request of this run, or not for this node.
        """
        is_personal = self.prepared.judges == "personal"
        specs = self.specs.personal if is_personal else self.specs.evaluation
        request, message = self._read(content, specs)
        setup = self.prepared.setup
        setup = replace(setup, metrics=setup.metrics.of_pictures())
        records = RecordDict({HEADER: request.record()})
        if is_personal:
            for client, states, _ in self._personal_states(setup, request, message):
                records[of_client(SCORES, client)] = sums_record(states)
            return records
        buffers = message.buffers or setup.training.network.buffers
        params = {**message.params, **setup.training.personal_params}
        measured = self.training.evaluate(setup, params, buffers)
        counts = states_by_client(setup, measured)
        for client in request.client_ids:
            records[of_client(SCORES, client)] = sums_record(counts[client])
        return records

    def describe(self, has_sums: bool = True) -> RecordDict:
        """Return what the node says of itself: its clients, and what their data look like.

        Args:
            has_sums: whether the sums of the inputs are in it, which only a training needs.
        """
        of = self.prepared, self.clients, self.name, self.agreement
        description = describe(*of, self._report if has_sums else UNTOLD)
        if not has_sums:
            description = description.model_copy(update={"sums": None})
        return RecordDict({HEADER: description.record()})

    @cached_property
    def _statistics(self) -> SiteCounter:
        policy = None if self.guard is None else self.guard.policy
        return SiteCounter(policy, self.own_data, self.folder)

    def count_examples(self, content: RecordDict) -> RecordDict:
        """Return the statistics of this site that its policy consents to.

        Raises:
            WireError: it is not a request of this run, or not for this node.
            PolicyError: the site's operator has not consented.
        """
        header, words = self._counted(StatisticsRequest.read(content))
        return _vector_content(header, words)

    def count_for_sum(self, content: RecordDict) -> RecordDict:
        """Return the same under a mask, for a secure sum.

        Raises:
            WireError: it is not a request of this run, or not for this node.
            PolicyError: the site's operator has not consented.
            SecureSumError: the node has no part in this sum.
        """
        request = TotalsRequest.read(content)
        header, words = self._counted(request)
        subject = self._statistics.subject(self.clients)
        return _vector_content(header, self._secure_sums.masked_counts(request, words, subject))

    def _counted(self, request: StatisticsRequest) -> tuple[StatisticsReply, Words]:
        """Return the answer to a request for statistics, without a mask."""
        self._check(request)
        of = self.prepared, self.clients, self.name, self.agreement
        return self._statistics.answer(request, describe(*of, UNTOLD))

    def _setup(self, request: Request) -> TrainingSetup:
        """Return the setup with inputs as a request wants them: standardised like all nodes'.

        Raises:
            WireError: the request has no scale, or one of other inputs.
        """
        setup = self.prepared.setup
        if not needs_scale(self.prepared):
            return setup
        data, scale = setup.federation.data, request.scale
        if scale in self._scaled:
            return self._scaled[scale]
        x = only_tensor(data.x, "standardising").clone()
        is_last = setup.federation.how.get("channels") == "last"
        width = recorded_width(x.shape[1:], "last" if is_last else "first")
        if scale is None or {len(scale.mean), len(scale.deviation)} != {width}:
            raise WireError(
                "The server does not say how inputs are standardised.",
                got=None if scale is None else f"{len(scale.mean)} means",
                expected=f"{width} means and deviations",
                do="use the same experiment file at the server and here",
            )
        pair = scale.mean, scale.deviation
        Scale.of(*pair).apply_(x)
        data = replace(data, x=x, scale=pair)
        scaled = replace(setup, federation=replace(setup.federation, data=data))
        self._scaled.clear()
        self._scaled[scale] = scaled
        return scaled

    def _write_scale(self, request: Request, data: Dataset) -> None:
        """Write down how the inputs of the node's own data were standardised."""
        if data.scale is None or self.prepared.setup.federation.how["kind"] != NODES:
            return
        mean, deviation = data.scale
        values = {"columns": data.columns, "mean": mean, "deviation": deviation}
        key = "".join(re.findall("[0-9a-f]", request.run.partition("-")[0]))[:32]  # no path
        try:
            for client in request.client_ids:
                file = self.folder / SCALE.format(client, key)
                if not file.exists():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    write_text(file, json.dumps(values))
        except OSError as error:  # the node can train without the file
            problem = "The scale of the inputs cannot be written."
            log_error(self.folder, RunError(problem, got=error))

    def _read(
        self, content: RecordDict, specs: Mapping[str, TensorSpec]
    ) -> tuple[Request, Message]:
        """Return the header and the tensors of a request that this node can carry out.

        Raises:
            WireError: it is for another experiment, model, data or client, or has other tensors.
        """
        request = Request.read(content)
        self._check(request)
        tensors = unpack(content, TENSORS, specs)
        return request, message_from_state(tensors, request.round, request.lr)

    def _check(self, request: Request) -> None:
        """Refuse a request that this node cannot carry out.

        Raises:
            WireError: it is for another experiment, model, data or client.
        """
        if request.agreement.experiment != self.agreement.experiment:
            raise WireError(
                "The server runs another experiment than this node.",
                got=f"digest {request.agreement.experiment}",
                expected=self.agreement.experiment,
                do="use the same experiment file and version of fedkeel at the server and here",
            )
        if request.agreement.model != self.agreement.model:
            raise WireError(
                "This node makes another model than the server.",
                got=f"digest {request.agreement.model}",
                expected=self.agreement.model,
                why="its code, its attributes, or frozen parameters or buffers differ",
                do="have the same files here; in its constructor draw with torch, which is seeded",
            )
        if request.data_digest != self.prepared.setup.federation.data.fingerprint():
            raise WireError(
                "The data of this node are not those that the run began with.",
                why="they have changed since, or a function draws new data each time",
                do="restore the data of the beginning, or begin another run",
            )
        others = set(request.client_ids) - self.clients
        if others:
            raise WireError(
                "A request is for a client that this node does not play.",
                got=min(others),
                expected=f"one of {sorted(self.clients)[:8]}",
            )


def _vector_content(header: StatisticsReply, words: Words) -> RecordDict:
    tensors = pack({VECTOR: torch.from_numpy(words.view(np.int64))})
    return RecordDict({HEADER: header.record(), TENSORS: tensors})
