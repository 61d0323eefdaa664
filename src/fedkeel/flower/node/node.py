"""A node: the clients it plays, what it needs to train them, and what they keep."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from flwr.app import MetricRecord, RecordDict

from fedkeel.engine.base import Job
from fedkeel.engine.local import (
    evaluate,
    evaluated,
    survey_client,
    train_client,
)
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import arithmetic
from fedkeel.engine.reply_rows import SURVEY
from fedkeel.engine.round_buffers import answered, flat, unflat
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.errors import DataError, FedkeelError, RunError
from fedkeel.flower.node.client_storage import Keep, LostError
from fedkeel.flower.node.local_data import NODES
from fedkeel.flower.server.membership import Presence
from fedkeel.flower.wire import (
    FORMAT,
    HEAD,
    TENSORS,
    Answer,
    Order,
    WireError,
    of_client,
    pack,
    unpack,
)
from fedkeel.method.context import ByPart, Message
from fedkeel.method.local_loop import wired
from fedkeel.method.plugins import fingerprint
from fedkeel.method.server_round import server_message
from fedkeel.records.folder import write_text
from fedkeel.task.metrics import by_group
from fedkeel.task.network import Network
from fedkeel.tree import walk
from fedkeel.version import __version__

LOG = "node.log"
"""File in a node's folder that says what went wrong."""

SCALE = "scale-{}-{}.json"
"""File there that says how a client's inputs are standardised in a run: nobody else knows it."""

SENT = ("update/", "buffers/", "uploads/")
OK, RESTARTED, LOST = "ok", "restarted", "lost"

Terms = str
"""Digests of what server and nodes have to agree on: version, method, local training; the model."""


def terms(prepared: Prepared) -> Terms:
    """Return digests of what server and nodes have to agree on; data are not part of it.

    The first is that of the experiment. The second is that of the model each end makes for itself:
    how it is written, and its numbers that are never sent.
    """
    settings = prepared.settings
    network: Network = prepared.setup.training.network
    client_info = {
        "version": __version__,
        "method": prepared.plan.expression,
        "own": fingerprint(prepared.plan.parts),
        "weights": prepared.plan.weights,
        "local": settings.local.model_dump(mode="json"),
        "seed": settings.seed,
        "dtype": settings.engine.dtype,
        "buffers": prepared.setup.training.buffers,
        "parameters": {k: list(v.shape) for k, v in network.params.items()},
    }
    digest = hashlib.blake2b(json.dumps(client_info).encode(), digest_size=8)
    return f"{digest.hexdigest()}-{_model(prepared)}"


def _model(prepared: Prepared) -> str:
    """Return a digest of a model, without the numbers that every message brings."""
    network: Network = prepared.setup.training.network
    sent = prepared.server.buffers
    own = {k: v for k, v in network.buffers.items() if k not in sent}
    digest = hashlib.blake2b(network.describe().encode(), digest_size=8)
    for path, tensor in walk({"frozen": dict(network.frozen), "own": dict(own)}):
        digest.update(path.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Forms:
    """Shapes and types of what is sent, by path, which both ends work out for themselves.

    Args:
        message: of what clients receive before they train.
        question: of what they receive before a survey.
        model: of what they receive to evaluate.
        reply: of what each sends after training.
        diagnostics: of the diagnostics that go with it.
        answer: of an answer to a survey.
        client_state: of what each keeps.
    """

    message: Mapping[str, TensorSpec]
    question: Mapping[str, TensorSpec]
    model: Mapping[str, TensorSpec]
    reply: Mapping[str, TensorSpec]
    diagnostics: Mapping[str, TensorSpec]
    answer: Mapping[str, TensorSpec]
    client_state: Mapping[str, TensorSpec]

    @classmethod
    def of(cls, prepared: Prepared) -> Forms:
        """Return the forms of a run."""
        spec = prepared.spec
        message = server_message(prepared.plan, prepared.server, 1.0)
        sent = SENT if prepared.plan.codec is None else SENT[1:]  # see `method.local_loop.wired`

        def under(prefix: str) -> dict[str, TensorSpec]:
            return {k.removeprefix(prefix): v for k, v in spec.items() if k.startswith(prefix)}

        return cls(
            message=specs_of(flat(answered(message, spec))),
            question=specs_of(flat(message)),
            model=specs_of(flat(replace(message, params=prepared.server.params, broadcast={}))),
            reply={k: v for k, v in spec.items() if k.startswith(sent)},
            diagnostics=under("diagnostics/"),
            answer=under(SURVEY),
            client_state=under("client_state/"),
        )


@dataclass(frozen=True)
class Site:
    """What a node needs to answer.

    Args:
        prepared: the run, as the node sees it.
        clients: the clients that it plays.
        root: folder of what they keep.
        name: what the node is called, "" for nothing.
    """

    prepared: Prepared
    clients: frozenset[int]
    root: Path
    name: str = ""

    @cached_property
    def forms(self) -> Forms:
        """Shapes and types of what is sent."""
        return Forms.of(self.prepared)

    @cached_property
    def terms(self) -> Terms:
        """Digests of what server and node have to agree on, made once: a loss may count calls."""
        return terms(self.prepared)

    def train(self, content: RecordDict) -> RecordDict:
        """Train the clients of an order and return their replies.

        Raises:
            WireError: the order is not one of this run, or not for this node.
        """
        order = self._order(content)
        message = unflat(unpack(content, TENSORS, self.forms.message), order.round, order.lr)
        self._scale(order)
        records = RecordDict()
        rows = []
        for place in range(len(order.clients)):
            try:
                rows.append(self._train(order, place, message, records))
            except FedkeelError as error:
                note(self.root, error)  # all it says stays on the node
                rows.append((outward(error), 0, 0, ""))
        columns = [tuple(column) for column in zip(*rows, strict=True)] or [()] * 4
        head = Answer(
            format=FORMAT,
            run=order.run,
            round=order.round,
            clients=order.clients,
            **dict(zip(("status", "steps", "seen", "digest"), columns, strict=True)),
        )
        records[HEAD] = head.record()
        return records

    def _train(
        self, order: Order, place: int, message: Message, records: RecordDict
    ) -> tuple[str, int, int, str]:
        """Train one client of an order and add its tensors to the records."""
        client = order.clients[place]
        keep = Keep(self.root, order.run, client)
        keep.tidy(order.kept[place], order.back[place])
        client_state, status = self._client_state(order, place, keep)
        if status == LOST:
            return status, 0, 0, ""
        with arithmetic(self.prepared.setup.precision):
            job = Job(place, client, order.done[place])
            reply, steps, seen = train_client(self.prepared.setup, message, job, client_state)
        digest = keep.store(order.round + 1, reply.client_state) if self.forms.client_state else ""
        records[of_client(TENSORS, client)] = pack(wired(self.prepared.plan, reply))
        notes = {name: float(t) for name, t in reply.diagnostics.items()}
        records[of_client("diagnostics", client)] = MetricRecord(
            {**notes, "loss": float(reply.loss)}
        )
        return status, steps, seen, digest

    def _client_state(self, order: Order, place: int, keep: Keep) -> tuple[ByPart | None, str]:
        """Return what a client kept, None where it begins anew, and whether that was asked for."""
        if not order.kept[place]:
            return None, OK
        try:
            return keep.load(order.kept[place], order.digest[place], self.forms.client_state), OK
        except LostError as error:
            note(self.root, error)
            return None, LOST if self.prepared.plan.mirrored else RESTARTED

    def survey(self, content: RecordDict) -> RecordDict:
        """Return the answers of the clients of an order to the surveys; none of one that fails.

        Raises:
            WireError: the order is not one of this run, or not for this node.
        """
        order = self._order(content)
        message = unflat(unpack(content, TENSORS, self.forms.question), order.round, order.lr)
        records = RecordDict()
        for place, client in enumerate(order.clients):
            keep = Keep(self.root, order.run, client)
            job = Job(place, client, order.done[place])
            try:
                client_state, _ = self._client_state(order, place, keep)
                with arithmetic(self.prepared.setup.precision):
                    answers = survey_client(self.prepared.setup, message, job, client_state)
            except FedkeelError as error:
                note(self.root, error)
                continue
            records[of_client(TENSORS, client)] = pack(dict(answers))
        records[HEAD] = order.record()
        return records

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Return the mean scores of the clients of an order on their own examples.

        Raises:
            WireError: the order is not one of this run, or not for this node.
        """
        order = self._order(content)
        received = unflat(unpack(content, TENSORS, self.forms.model), order.round, order.lr)
        setup = self.prepared.setup
        buffers = received.buffers or setup.training.network.buffers
        with arithmetic(self.prepared.setup.precision):
            measured = evaluate(setup, received.params, buffers, "clients")
        _, group, groups = evaluated(setup, "clients")
        found = by_group(measured, torch.from_numpy(group), groups)
        records = RecordDict({HEAD: order.record()})
        for client in order.clients:
            score = found[client]
            records[of_client("scores", client)] = MetricRecord(
                {"top1": score.top1, "top3": score.top3, "loss": score.loss}
            )
        return records

    def hello(self) -> RecordDict:
        """Return what the node says of itself: its clients, and the form of their data."""
        federation, clients = self.prepared.setup.federation, tuple(sorted(self.clients))
        _, group, groups = evaluated(self.prepared.setup, "clients")
        held = np.bincount(group, minlength=groups)
        data = federation.data
        said = Presence(
            format=FORMAT,
            run="",
            round=0,
            clients=clients,
            examples=tuple(int(federation.sizes[k]) for k in clients),
            held=tuple(int(held[k]) for k in clients),
            shape=data.shape,
            classes=data.classes,
            labels=data.label_names,
            columns=data.columns,
            tokens=not data.x.is_floating_point(),
            digest=data.fingerprint(),
            name=self.name,
            version=__version__,
            terms=self.terms,
        )
        return RecordDict({HEAD: said.record()})

    def _scale(self, order: Order) -> None:
        """Write down what the inputs of a node's own data were standardised by: it stays here."""
        data = self.prepared.setup.federation.data
        if data.scale is None or self.prepared.setup.federation.how["kind"] != NODES:
            return
        mean, deviation = data.scale
        client_info = {"columns": data.columns, "mean": mean, "deviation": deviation}
        key = "".join(re.findall("[0-9a-f]", order.run.partition("-")[0]))[:32]  # no path
        try:
            for client in order.clients:
                file = self.root / SCALE.format(client, key)
                if not file.exists():
                    self.root.mkdir(parents=True, exist_ok=True)
                    write_text(file, json.dumps(client_info))
        except (OSError, RunError) as error:  # a node trains without it
            note(self.root, RunError("The scale of the inputs is not written down.", got=error))

    def _order(self, content: RecordDict) -> Order:
        order = Order.read(content)
        count = len(order.clients)
        columns = (order.done, order.kept, order.digest, order.back)
        if any(len(column) != count for column in columns):
            raise WireError("An order's columns differ in length.")
        own = self.terms
        if order.terms.partition("-")[0] != own.partition("-")[0]:
            raise WireError(
                "The server runs another experiment than this node.",
                got=f"terms {order.terms:.40}",
                expected=own,
                do="use the same experiment file and version of fedkeel at the server and here",
            )
        if order.terms != own:
            raise WireError(
                "This node makes another model than the server.",
                got=f"terms {order.terms:.40}",
                expected=own,
                why="its code, its attributes, or frozen parameters or buffers differ",
                do="have the same files here; in its constructor draw with torch, which is seeded",
            )
        if order.data != self.prepared.setup.federation.data.fingerprint():
            raise WireError(
                "The data of this node are not those that the run began with.",
                why="they have changed since it said what it has, or a function draws them anew",
                do="give it back the data of the beginning, or begin another run",
            )
        strangers = set(order.clients) - self.clients
        if strangers:
            raise WireError(
                "An order is for a client that this node does not play.",
                got=min(strangers),
                expected=f"one of {sorted(self.clients)[:8]}",
            )
        return order


def outward(error: FedkeelError) -> str:
    """Return what of an error may leave the node: what is wrong with data may name a patient."""
    if isinstance(error, DataError):
        return "DataError: the node's data cannot be used; its node.log says why"
    return f"{type(error).__name__}: {error.what}"[:200]


def note(root: Path, error: FedkeelError) -> None:
    """Tell whoever runs the node of an error: in its log, and in the SuperNode's output.

    The first megabyte of the log is kept. Where it cannot be written, the output says so too.
    """
    file, text = root / LOG, "\n".join([datetime.now(UTC).isoformat(), *error.lines(), ""])
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.stat().st_size < 1_000_000:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(text)
    except OSError as refused:
        text += f"{file} cannot be written to ({refused.strerror or type(refused).__name__})\n"
    with suppress(OSError):  # which may be on the same full disk
        print(text, end="", file=sys.stderr, flush=True)
