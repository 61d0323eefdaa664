"""The clients of a server that does not wait: trained from the models of different rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel import tree
from fedkeel.engine.base import ReportProgress, TrainedCohort, TrainingEngine
from fedkeel.engine.message_state import message_from_state, message_state
from fedkeel.engine.prepared import Prepared, learning_rate
from fedkeel.errors import RunError
from fedkeel.method.context import Ints, Message
from fedkeel.method.part import traits_of
from fedkeel.method.round_values import Replies, Server
from fedkeel.method.server_round import raw_weights
from fedkeel.system.asynchronous import Asynchronous
from fedkeel.system.schedule import Due
from fedkeel.tree import State

PREFIX = "versions/"
"""What the names of a checkpoint's arrays begin with that hold models which clients train from."""


class Arrivals:
    """Trains clients when their replies are due, and keeps the models that they were sent.

    What a client makes of a model does not depend on when it is trained. So in a simulation,
    clients which began at one model, and whose replies are due for one step, are trained together
    at that moment. Nodes have trained by then.

    Args:
        prepared: a run whose method has a server policy.
        schedule: whose replies are due when.
    """

    def __init__(self, prepared: Prepared, schedule: Asynchronous) -> None:
        self._prepared, self._schedule = prepared, schedule
        self._messages: dict[int, Message] = {}

    def due(self, message: Message) -> Due:
        """Return whose replies the server takes in its next step.

        Args:
            message: what it sends from now on.
        """
        self._messages[message.round] = message
        self._schedule.trainings.offer(message)
        return self._schedule.due(message.round)

    def train(
        self,
        engine: TrainingEngine,
        server: Server,
        message: Message,
        due: Due,
        tick: ReportProgress,
    ) -> TrainedCohort:
        """Return the replies of a step; the clients' new state counts at once.

        Args:
            engine: runs them.
            server: the server before its step.
            message: what it sends now.
            due: whose replies are due, and from which models.
            tick: called with the number of clients that have been trained since the last call.
        """
        trainings = self._schedule.trainings
        if trainings.is_remade:
            trained = self._trained_now(engine, due, tick)
        else:
            trained = _apart(engine.train(message, due.cohort.clients, tick))
            engine.commit(trained, self._counting(trained.replies))
        replies = self._as_policy_wants(trained.replies, server, due)
        needed = trainings.versions
        self._messages = {k: m for k, m in self._messages.items() if k in needed}
        return replace(trained, replies=replies)

    def _trained_now(self, engine: TrainingEngine, due: Due, tick: ReportProgress) -> TrainedCohort:
        """Train the clients of a step in a simulation, together where they began together."""
        groups = []
        for version in np.unique(due.versions).tolist():
            clients = due.cohort.clients[due.versions == version]
            trained = _apart(engine.train(self._messages[version], clients, tick))
            engine.commit(trained, self._counting(trained.replies))
            groups.append(trained)
        return _joined(groups)

    def _as_policy_wants(self, replies: Replies, server: Server, due: Due) -> Replies:
        """Return replies with their staleness, and as moves from the model that the policy says."""
        staleness, policy = server.round - due.versions, self._prepared.plan.policy
        update = dict(replies.update)
        if policy is not None and traits_of(policy).updates_from_present:
            for version in np.unique(due.versions[staleness > 0]).tolist():
                sent, rows = self._messages[version], torch.from_numpy(due.versions == version)
                for name, moves in update.items():
                    moves[rows] += sent.params[name] - server.params[name]
        return replace(replies, update=update, staleness=staleness)

    def _counting(self, replies: Replies) -> Ints:
        """Return the clients whose new state counts, as the server's round decides it."""
        weights = raw_weights(self._prepared.plan.weights, replies.examples, replies.processed)
        return replies.clients[replies.finite & (weights > 0.0)]

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the models that clients train from, for a checkpoint of a simulation."""
        if not self._schedule.trainings.is_remade:
            return {}
        return {
            f"{PREFIX}{version}/{path}": tensor.contiguous().numpy()
            for version, message in self._messages.items()
            for path, tensor in tree.walk(message_state(message))
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]], like: Message) -> None:
        """Take the models of a checkpoint.

        Args:
            arrays: what `snapshot` returned, among others.
            like: a message of the run, for names and order.

        Raises:
            RunError: a model is missing.
        """
        for version in sorted(self._schedule.trainings.versions):
            saved = {
                path: _saved(arrays, f"{PREFIX}{version}/{path}", tensor)
                for path, tensor in tree.walk(message_state(like))
            }
            lr = learning_rate(self._prepared.settings, self._prepared.setup.training, version)
            self._messages[version] = message_from_state(tree.unwalk(saved), version, lr)


def _saved(arrays: Mapping[str, NDArray[Any]], path: str, like: Tensor) -> Tensor:
    """Return a copy of an array in torch's own memory."""
    if path not in arrays or arrays[path].shape != tuple(like.shape):
        raise RunError(f"The checkpoint does not fit the run at {path}.")
    return torch.empty_like(like).copy_(torch.from_numpy(np.array(arrays[path])))


def _apart(trained: TrainedCohort) -> TrainedCohort:
    """Return replies apart from an engine's buffers."""
    replies = trained.replies
    return replace(
        trained,
        replies=replace(
            replies,
            update={name: t.clone() for name, t in replies.update.items()},
            buffers={name: t.clone() for name, t in replies.buffers.items()},
            uploads={k: tree.map_tensors(torch.clone, v) for k, v in replies.uploads.items()},
            finite=replies.finite.copy(),
        ),
    )


def _joined(groups: list[TrainedCohort]) -> TrainedCohort:
    """Return one cohort of several, its clients ascending."""
    if len(groups) == 1:
        return groups[0]
    replies = [group.replies for group in groups]
    order = np.argsort(np.concatenate([r.clients for r in replies]), kind="stable")

    def arrays(values: Iterator[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(list(values))[order]

    def tensors(states: list[State]) -> State:
        paths = [dict(tree.walk(state)) for state in states]
        index = torch.from_numpy(order)
        return tree.unwalk({p: torch.cat([s[p] for s in paths])[index] for p in paths[0]})

    seconds: dict[str, float] = {}
    for group in groups:
        for phase, value in group.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    processor = [g.processor_seconds for g in groups if g.processor_seconds is not None]
    return TrainedCohort(
        replies=Replies(
            clients=arrays(r.clients for r in replies),
            examples=arrays(r.examples for r in replies),
            processed=arrays(r.processed for r in replies),
            finite=arrays(r.finite for r in replies),
            update=tree.tensors(tensors([dict(r.update) for r in replies])),
            buffers=tree.tensors(tensors([dict(r.buffers) for r in replies])),
            uploads=tree.substates(tensors([dict(r.uploads) for r in replies])),
        ),
        loss=arrays(g.loss for g in groups),
        steps=arrays(g.steps for g in groups),
        diagnostics={
            name: arrays(g.diagnostics[name] for g in groups) for name in groups[0].diagnostics
        },
        seconds=seconds,
        processor_seconds=sum(processor) if len(processor) == len(groups) else None,
    )
