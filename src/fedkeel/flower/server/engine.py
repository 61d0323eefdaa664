"""An engine whose clients are far away: `experiment` drives it as it drives any other."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.cost.memory import estimate
from fedkeel.engine.base import Job, Split, Tick, Trained
from fedkeel.engine.local import evaluate, evaluated
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import arithmetic
from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.round_buffers import RoundBuffers, flat
from fedkeel.errors import RunError, TrainingError
from fedkeel.flower.node.node import LOST, OK, RESTARTED, Forms, terms
from fedkeel.flower.server.arrivals import Arrived, Took
from fedkeel.flower.server.exchange import EVALUATE, SURVEY, TRAIN, Exchange, Reply
from fedkeel.flower.server.membership import Presence, Roster, written
from fedkeel.flower.server.outliers import odd_answers, outliers
from fedkeel.flower.server.replies import Reader, nothing, scores
from fedkeel.flower.server.traffic import ASKED, EVALUATION, Ledger
from fedkeel.flower.wire import (
    FORMAT,
    HEAD,
    TENSORS,
    Order,
    WireError,
    of_client,
    pack,
    unpack,
)
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.records.rows import NOT_NEEDED
from fedkeel.runner.early_stopping import least
from fedkeel.tree import State, Tree, nbytes, substate, substates, walk

KEPT, DIGEST, ROUND, BEGUN = "nodes/kept", "nodes/digest", "nodes/round", "nodes/begun"
"""Names in a checkpoint: the round of each client's state, its digest, the server's round, and a
number by which nodes tell this run from another of the same key."""


class Nodes:
    """Trains clients on the nodes of a federation.

    Args:
        prepared: the run.
        exchange: how nodes are asked.
        roster: who is there.
        said: where the data is on the nodes alone, so that they evaluate, what each client's node
            has said of its data; it is in the checkpoint, for a run that goes on without some.
    """

    def __init__(
        self,
        prepared: Prepared,
        exchange: Exchange,
        roster: Roster,
        said: Mapping[int, Presence] | None = None,
    ) -> None:
        setup, capacity = prepared.setup, prepared.population.per_round
        self._prepared, self._setup = prepared, setup
        self._settings = prepared.settings.flower
        self._exchange, self._roster, self._said = exchange, roster, said
        needs = estimate(prepared)
        self._forms, self._terms = Forms.of(prepared), terms(prepared)
        self._begun = np.array([secrets.randbits(64)], dtype=np.uint64)
        self._reader = Reader(prepared, self._forms)
        self._buffers = RoundBuffers(setup, prepared.spec, capacity, private_memory, away=True)
        clients = len(setup.federation)
        self._kept = np.zeros(clients, dtype=np.int64)  # [C] round of each client's state
        self._digest = np.zeros(clients, dtype=np.uint64)  # [C] its digest
        self._back = np.zeros(clients, dtype=np.int64)  # [C] its round at the last checkpoint
        self._pending: dict[int, str] = {}  # digests of a round that is not yet taken
        self.reasons: list[str] = []  # nodes train one client after the other, as was asked for
        self._round = 0
        self._ledger = Ledger([*needs.down, *needs.up])

    # --- training --------------------------------------------------------------------------------

    def train(self, message: Message, clients: Ints, tick: Tick) -> Trained:
        """Train clients [K] from a message; those that answer in time are the round's.

        Raises:
            TrainingError: fewer than the quorum answered before the deadline.
        """
        jobs = {job.client: job for job in self._buffers.begin(clients)}
        enough = least(self._settings.enough, len(clients))
        took: dict[int, Took] = {}
        lost: list[int] = []
        self._ledger.open(message.round)
        self._latecomers()
        orders = self._orders(message, jobs)
        started = time.monotonic()
        for reply in self._exchange.ask(orders, TRAIN, lambda: len(took) >= enough):
            before = len(took)
            self._receive(reply, Order.read(orders[reply.node]), took, lost)
            tick(len(took) - before)
        self._missing(clients, took, time.monotonic() - started)
        self._quorum(message, len(clients), len({*took, *lost}))
        found = np.array(sorted(took), dtype=np.int64)
        final = [Job(row, k, jobs[k].done) for row, k in enumerate(found.tolist())]
        self._pending = {client: one.digest for client, one in took.items()}
        self._buffers.run(Arrived(self._setup, took), message, final, lambda count: None)
        trained = self._buffers.gather(found)
        self._screen(trained)
        account = self._ledger.account(lost)
        self._round = message.round
        return Trained(**{**vars(trained), "account": account})

    def _orders(
        self, message: Message, jobs: Mapping[int, Job], whose: str = "model"
    ) -> dict[int, RecordDict]:
        """Return what each node is sent, and count it; the model for `whose` sake."""
        wanted = sorted(jobs)
        self._roster.look()  # a node that was started anew may have another id
        route = self._roster.route(wanted)
        if sum(map(len, route.values())) < len(wanted):  # somebody may have come back
            there = set(wanted)
            self._roster.refresh(
                self._settings.deadline_seconds / 4, lambda where: there <= set(where)
            )
            route = self._roster.route(wanted)
        arrays, said = pack(flat(message)), self._roster.said()
        size = nbytes(flat(message))
        if size > self._settings.message_mb * 1e6:
            raise RunError(
                "A message to the clients is too large.",
                got=f"{size / 1e6:.0f} MB",
                expected=f"at most {self._settings.message_mb:g} MB",
                do="raise flower.message_mb, or use a smaller model",
            )
        orders = {}
        for node, own in route.items():
            head = Order(
                format=FORMAT,
                run=self._run,
                round=message.round,
                terms=self._terms,
                data=said[own[0]].digest,
                lr=message.lr,
                clients=tuple(own),
                done=tuple(jobs[k].done for k in own),
                kept=tuple(int(self._kept[k]) for k in own),
                digest=tuple(f"{int(self._digest[k]):016x}" for k in own),
                back=tuple(int(self._back[k]) for k in own),
            )
            orders[node] = RecordDict({HEAD: head.record(), TENSORS: arrays})
            self._ledger.sent(whose, {"p": dict(message.params), "b": dict(message.buffers)})
            for part, state in message.broadcast.items():
                self._ledger.sent(part, {part: state})
        return orders

    def _receive(self, reply: Reply, order: Order, took: dict[int, Took], lost: list[int]) -> None:
        """Take what a node replied to an order, or write down why not."""
        meant = order.clients
        try:
            if reply.content is None:
                raise WireError(reply.fault)
            answer = self._reader.answer(reply.content, order)
        except WireError as error:
            self._ledger.fault(error.short(), meant)
            return
        for place, client in enumerate(meant):
            status = answer.status[place]
            if status == LOST:
                lost.append(client)
                self._ledger.fault("lost what it had kept; the method begins anew", [client])
            elif status not in (OK, RESTARTED):
                self._ledger.fault(f"failed: {status:.200}", [client])
            else:
                try:
                    state = self._reader.state(reply.content, client)
                    self._count(state)
                    done = order.done[place]
                    took[client] = self._reader.took(reply.content, state, answer, place, done)
                except WireError as error:
                    self._ledger.fault(error.short(), [client])
                    continue
                if status == RESTARTED:
                    lost.append(client)
                    self._ledger.fault("lost what it had kept, and began anew", [client])

    def _count(self, state: State) -> None:
        """Count the tensors of a client's reply."""
        self._ledger.came("model", {k: substate(state, k) for k in ("update", "buffers")})
        for part, own in substates(substate(state, "uploads")).items():
            self._ledger.came(part, {part: own})

    def _screen(self, trained: Trained) -> None:
        """Take replies out whose norm is far from the others'."""
        replies = trained.replies
        for row, words in outliers(replies, self._settings.screen).items():
            replies.finite[row] = False
            self._ledger.fault(words, [int(replies.clients[row])])
        for row in np.flatnonzero(~replies.finite).tolist():
            client = int(replies.clients[row])
            if client not in self._ledger.named():
                self._ledger.fault("sent NaN or infinity", [client])

    def _quorum(self, message: Message, asked: int, came: int) -> None:
        """Refuse a round that too few have answered; who has lost what it kept has answered."""
        needed = least(self._settings.quorum, asked)
        if came >= needed:
            return
        said = "; ".join(f"{words}: {clients}" for words, clients in self._ledger.faults.items())
        raise TrainingError(
            f"Round {message.round + 1} has no quorum.",
            got=f"{came} of {asked} clients answered" + (f" ({said:.300})" if said else ""),
            expected=f"at least {needed} within {self._settings.deadline_seconds:g} s",
            do="see that the nodes are up, then go on with resume; everything is saved",
        )

    def _missing(
        self, clients: Ints, came: Collection[int], seconds: float, stage: str = ""
    ) -> None:
        """Write down who has not answered, and is not written down already."""
        named = self._ledger.named(stage)
        where = self._roster.where()
        for client in clients.tolist():
            if client in came or client in named:
                continue
            if client not in where:
                words = self._roster.why_not(client)
            elif seconds >= self._settings.deadline_seconds:
                words = "no reply before the deadline"
            else:
                words = NOT_NEEDED
            self._ledger.fault(words, [client], stage)

    def _latecomers(self) -> None:
        said = self._roster.said()
        where = self._roster.where()
        for node in self._exchange.late():
            clients = [c for c in said if where[c] == node]
            self._ledger.fault("a reply to an earlier round came late and was dropped", clients)
        for words in self._roster.faults:
            self._ledger.fault(words, [])
        self._roster.faults.clear()

    @staticmethod
    def _meant(orders: Mapping[int, RecordDict], node: int) -> tuple[int, ...]:
        return Order.read(orders[node]).clients

    # --- surveys ---------------------------------------------------------------------------------

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys; NaN for who does not answer.

        Raises:
            TrainingError: fewer than the quorum answered before the deadline.
        """
        self._ledger.open(message.round)
        jobs = {job.client: job for job in self._buffers.jobs(clients)}
        orders = self._orders(message, jobs)
        came: set[int] = set()
        for job in jobs.values():
            self._buffers.rows.put_answers(job, nothing(self._forms))
        started = time.monotonic()
        for reply in self._exchange.ask(orders, SURVEY):
            meant = self._meant(orders, reply.node)
            try:
                if reply.content is None:
                    raise WireError(reply.fault)
                head = Order.read(reply.content)
                if (head.run, head.round) != (self._run, message.round):
                    raise WireError("A reply belongs to another round or run.")
            except WireError as error:
                self._ledger.fault(error.short(), meant, stage=ASKED)
                continue
            came |= {c for c in meant if self._answered(reply.content, jobs[c])}
        self._missing(clients, came, time.monotonic() - started, stage=ASKED)
        self._quorum(message, len(clients), len(came))
        answers = self._buffers.answers(clients)
        for row, words in odd_answers(answers, self._settings.screen).items():
            for _, answer in walk(dict(answers)):
                answer[row] = math.nan
            self._ledger.fault(words, [int(clients[row])], stage=ASKED)
        return answers

    def _answered(self, content: RecordDict, job: Job) -> bool:
        """Take what one client answered to the surveys, or write down why not."""
        try:
            state = unpack(content, of_client(TENSORS, job.client), self._forms.answer)
        except WireError as error:
            self._ledger.fault(error.short(), [job.client], stage=ASKED)
            return False
        self._buffers.rows.put_answers(job, substates(state))
        for part, own in substates(state).items():
            self._ledger.came(part, {part: own})
        return True

    @property
    def _run(self) -> str:
        return f"{self._prepared.key}-{int(self._begun[0]):016x}"

    # --- state -----------------------------------------------------------------------------------

    def done(self, clients: Ints) -> Ints:
        """Return [K] local steps that clients have made in earlier rounds."""
        return self._buffers.done(clients)

    def commit(self, trained: Trained, keep: Ints) -> None:
        """Take the round: believe in the states that the clients `keep` have written for it."""
        self._buffers.commit(trained, keep)
        if self._forms.client_state:
            for client in keep.tolist():
                self._kept[client] = self._round + 1
                self._digest[client] = int(self._pending[client], 16)
        self._pending = {}
        account = trained.account
        if account is not None and account.lost and self._prepared.plan.mirrored:
            self._kept[:] = 0
            self._digest[:] = 0
        self._round += 1

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the server knows of the clients' states."""
        return {
            **self._buffers.state(),
            KEPT: self._kept.copy(),
            DIGEST: self._digest.copy(),
            ROUND: np.array([self._round], dtype=np.int64),
            BEGUN: self._begun.copy(),
            **({} if self._said is None else written(self._said)),
        }

    def saved(self) -> None:
        """Hear that the checkpoint of the last state is complete."""
        self._back[:] = self._kept

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take what the server knew of the clients' states at a checkpoint."""
        self._buffers.restore(arrays)
        self._kept[:] = arrays[KEPT]
        self._digest[:] = arrays[DIGEST]
        self._begun[:] = arrays[BEGUN]
        self._back[:] = self._kept
        self._round = int(arrays[ROUND][0])

    # --- evaluation ------------------------------------------------------------------------------

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Tensor:
        """Return [N, 3] of the examples of a split: of each client the means, NaN for who is away.

        Where the server has the data, it evaluates itself, and exactly.
        """
        if self._said is None:
            with arithmetic(self._setup.precision):
                return evaluate(self._setup, params, buffers, split)
        _, group, _ = evaluated(self._setup, "clients")
        measured = torch.full((len(group), 3), math.nan, dtype=torch.float64)
        clients = np.unique(group)
        sent = buffers if self._setup.training.buffers == "average" else {}  # nodes have their own
        message = Message(params, sent, {}, self._round, 0.0)
        jobs = {job.client: job for job in self._buffers.jobs(clients)}
        orders = self._orders(message, jobs, EVALUATION)
        came: set[int] = set()
        started = time.monotonic()
        for reply in self._exchange.ask(orders, EVALUATE):
            meant = self._meant(orders, reply.node)
            try:
                if reply.content is None:
                    raise WireError(reply.fault)
                for client in meant:
                    own = np.flatnonzero(group == client)
                    measured[own] = scores(reply.content, client, len(own))
                    came.add(client)
            except WireError as error:
                self._ledger.fault(error.short(), set(meant) - came, stage=EVALUATION)
        self._missing(clients, came, time.monotonic() - started, stage=EVALUATION)
        return measured

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end: the nodes live on."""
