"""The clients of a server that does not wait: trained from the models of different rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel import tree
from fedkeel.data.cohort import Selection
from fedkeel.engine.base import ReportProgress, TrainedCohort, TrainingEngine
from fedkeel.engine.message_state import message_from_state, message_state
from fedkeel.engine.prepared import Prepared, learning_rate
from fedkeel.errors import RunError
from fedkeel.features.time.asynchronous import Asynchronous
from fedkeel.features.time.schedule import Due
from fedkeel.method.context import Ints, Message
from fedkeel.method.part import traits_of
from fedkeel.method.round_values import Replies, Server
from fedkeel.method.server_round import raw_weights, server_message
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.schedule import RoundSchedule
from fedkeel.tree import State

PREFIX = "versions/"
"""What the names of a checkpoint's arrays begin with that hold models which clients train from."""


class Arrivals(RoundSchedule):
    """The clients whose replies a server that does not wait takes in a step.

    It keeps the models that clients were sent, and trains clients when their replies are due. What
    a client makes of a model does not depend on when it is trained. So in a simulation, clients
    which began at one model, and whose replies are due for one step, are trained together at that
    moment. Nodes have trained by then.

    Args:
        prepared: a run whose method has a server policy.
        schedule: whose replies are due when.
    """

    def __init__(self, prepared: Prepared, schedule: Asynchronous) -> None:
        self._prepared, self._schedule = prepared, schedule
        self._messages: dict[int, Message] = {}

    @property
    def counts_at_once(self) -> bool:
        """Whether new state counts before the server's step: yes, as no client trains twice."""
        return True

    @property
    def phase(self) -> Literal["sampling", "train"]:
        """The phase in which `due` takes its time: nodes train while the server waits."""
        return "sampling" if self._schedule.trainings.is_remade else "train"

    def due(self, message: Message) -> Selection:
        """Return whose replies the server takes in its next step, and who was lost."""
        self._messages[message.round] = message
        self._schedule.trainings.offer(message)
        self._due = self._schedule.due(message.round)
        return self._due.cohort

    def train(
        self,
        engine: TrainingEngine,
        server: Server,
        message: Message,
        cohort: Selection,
        tick: ReportProgress,
    ) -> TrainedCohort:
        """Return the replies of a step; the clients' new state counts at once."""
        trainings, due = self._schedule.trainings, self._due
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

    def recorded(self, row: RoundRecord) -> RoundRecord:
        """Return the row with the time of the server's step, and how old its updates were."""
        added: dict[str, Any] = {}
        if self._schedule.trainings.virtual_seconds is not None:
            added["virtual_seconds"] = self._schedule.trainings.virtual_seconds
        if row.clients:
            is_used = np.isin(self._due.cohort.clients, row.clients)
            added["staleness"] = (row.round - 1 - self._due.versions[is_used]).tolist()
            if self._due.ages is not None:
                added["staleness_seconds"] = self._due.ages[is_used].tolist()
        return replace(row, features={**row.features, **added})

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the models that clients train from, for a checkpoint of a simulation."""
        if not self._schedule.trainings.is_remade:
            return {}
        return {
            f"{PREFIX}{version}/{path}": tensor.contiguous().numpy()
            for version, message in self._messages.items()
            for path, tensor in tree.walk(message_state(message))
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]], rows: Sequence[RoundRecord]) -> None:
        """Make the schedule again, and take the models that clients train from.

        Raises:
            RunError: a model is missing.
        """
        self._schedule.resume(rows[-1].round)
        like = server_message(self._prepared.plan, self._prepared.server, 1.0)
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
