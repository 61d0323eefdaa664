"""The sequential engine: a plain loop over clients. It is the reference for all other engines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import torch

from fedkeel import tree
from fedkeel.base.clock import Clock
from fedkeel.engine.base import ReportProgress, Split, TrainedCohort, TrainingSetup
from fedkeel.engine.client_states import ClientStates, KeepsClientStates
from fedkeel.engine.evaluation import evaluate
from fedkeel.engine.local import PHASES, train_client
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.rehearsal import (
    CLIENT_STATE_PREFIX,
    SURVEY_PREFIX,
    check_reply,
    spec_of_client,
    specs_below,
)
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.engine.store.record import ClientRecord, RowCodec
from fedkeel.engine.survey import survey_client
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.method.round_values import Replies, reply_state
from fedkeel.task.metrics.metric_set import Measured
from fedkeel.tree import State, Tree


class Sequential(KeepsClientStates):
    """Trains the clients of a round in this process, one after the other.

    Args:
        setup: method, model, data and seed.
        spec: shape and type of each tensor of a reply, by path, from `rehearse`.
        capacity: the largest cohort.
        file: where client state is stored; None for memory.
        codec: stores some of the clients' state in compact form; None stores it as it is.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        spec: Mapping[str, TensorSpec],
        capacity: int,
        *,
        file: Path | None = None,
        codec: RowCodec | None = None,
    ) -> None:
        self._setup = setup
        self._reply_spec = {k: v for k, v in spec.items() if not k.startswith(SURVEY_PREFIX)}
        self._sent_spec = {
            k: v for k, v in self._reply_spec.items() if not k.startswith(CLIENT_STATE_PREFIX)
        }
        self._answer_spec = specs_below(spec, SURVEY_PREFIX)
        state_spec = specs_below(spec, CLIENT_STATE_PREFIX)
        self.clients = ClientStates(
            len(setup.federation), state_spec, capacity, private_memory, file, codec, setup.others
        )
        varies = setup.training.network.traits.why_calls_differ
        self.reasons = [varies] if varies else []
        self._survey_seconds = 0.0  # processor time of this round's survey

    def train(
        self, message: Message, clients: Ints, report_progress: ReportProgress
    ) -> TrainedCohort:
        """Train clients [K] from a message."""
        rows = _empty_rows(self._sent_spec, len(clients))
        losses, finite, steps, examples = [], [], [], []
        seconds = dict.fromkeys(PHASES, 0.0)
        processor_seconds, self._survey_seconds = self._survey_seconds, 0.0
        with use_numerics(self._setup.precision):
            for job in self.clients.begin_round(clients):
                clock, began = Clock(), time.thread_time()
                client_state = self.clients.store.read_state(job.client)
                result = train_client(self._setup, message, job, client_state, clock=clock)
                reply = reply_state(result.reply)
                expected = spec_of_client(self._setup, self._reply_spec, job.client)
                check_reply(specs_of(reply), job.client, expected)
                new_state = ClientRecord.of(tree.stack([result.reply.client_state]))
                self.clients.store.write(np.array([job.client]), new_state)
                _write_row(rows, job.row, {**reply, "client_state": {}})
                losses.append(float(result.reply.loss))
                finite.append(bool(result.reply.finite))
                steps.append(result.steps)
                examples.append(result.examples)
                clock.lap("upload")
                for phase in PHASES:
                    seconds[phase] += clock.seconds[phase]
                processor_seconds += time.thread_time() - began
                report_progress(1)
        sent = tree.unwalk(rows)
        replies = Replies(
            clients=clients,
            examples=self._setup.federation.sizes[clients],
            processed=np.array(examples, dtype=np.int64),
            finite=np.array(finite, dtype=np.bool_),
            update=tree.tensors(tree.substate(sent, "update")),
            buffers=tree.tensors(tree.substate(sent, "buffers")),
            uploads=tree.substates(tree.substate(sent, "uploads")),
        )
        diagnostics = tree.tensors(tree.substate(sent, "diagnostics"))
        return TrainedCohort(
            replies=replies,
            loss=np.array(losses, dtype=np.float64),
            steps=np.array(steps, dtype=np.int64),
            diagnostics={name: t.double().numpy() for name, t in diagnostics.items()},
            seconds=seconds,
            processor_seconds=processor_seconds,
        )

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys."""
        rows, began = _empty_rows(self._answer_spec, len(clients)), time.thread_time()
        with use_numerics(self._setup.precision):
            for job in self.clients.jobs(clients):
                client_state = self.clients.store.read_state(job.client)
                answers = survey_client(self._setup, message, job, client_state)
                check_reply(specs_of(dict(answers)), job.client, self._answer_spec)
                _write_row(rows, job.row, dict(answers))
        self._survey_seconds = time.thread_time() - began
        return tree.substates(tree.unwalk(rows))

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Measured:
        """Return what is measured of the examples of a split."""
        with use_numerics(self._setup.precision):
            return evaluate(self._setup, params, buffers, split)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: there are no other processes to end."""


def _empty_rows(spec: Mapping[str, TensorSpec], count: int) -> Tree:
    """Return uninitialised tensors [count, ...], by path, of which each client fills a row."""
    return {
        path: torch.empty((count, *tensor.shape), dtype=tensor.dtype)
        for path, tensor in spec.items()
    }


def _write_row(rows: Tree, row: int, state: State) -> None:
    for path, tensor in tree.walk(state):
        rows[path][row] = tensor
