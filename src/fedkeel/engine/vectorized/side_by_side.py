"""Several runs of a process whose clients train side by side.

A small network leaves most of a processor or a GPU idle: the time goes into starting operations.
Runs of one structure, such as those of several seeds, train in one group: its axis holds the
clients of all of them, each with the model, the rate and the data of its own run. Everything else,
the servers' rounds, evaluation, files, stays with each run.

All batches are padded to one size, and each client has a model and a rate of its own. So the bits
of most runs do not depend on which others train beside them, and a study that is stopped and
continued, where some runs are further than others or have ended, gives the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.choose.parallel_runs import structure_of
from fedkeel.engine.process.lane import Answer, Lane, current_lane
from fedkeel.engine.process.lockstep import in_lockstep
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.trainer import ReadRecord, TrainedClients, Trainer
from fedkeel.engine.vectorized.batching import ClientGroup, PaddedSizes
from fedkeel.engine.vectorized.engine import MAX_REASON, TrainedGroup, VectorizedTrainer
from fedkeel.engine.vectorized.facts import establish, has_short_rounds
from fedkeel.engine.vectorized.run_inputs import PlacedRun, RunInputs
from fedkeel.engine.vectorized.transfers import to_device
from fedkeel.method.context import Message
from fedkeel.task.network import Network
from fedkeel.tree import State, Tree, unwalk, walk

T = TypeVar("T")


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Make several runs of the vectorized engine whose clients train side by side.

    Args:
        tasks: each makes one run, with the engine that `trainer_of` gives it.

    Raises:
        BaseException: the first error that one of the tasks raises. The others are interrupted.
    """
    return in_lockstep(tasks, _answered) if len(tasks) > 1 else [task() for task in tasks]


def trainer_of(
    setup: TrainingSetup,
    parallel_clients: int,
    device: str,
    runs: int,
    varied: tuple[str, ...] = (),
) -> Trainer:
    """Return what trains the clients of a run, beside those of other runs where there are any.

    Args:
        setup: method, model, data and seed.
        parallel_clients: clients of a run that are trained side by side, at most.
        device: where they train.
        runs: runs whose clients are trained side by side, at most; 1 for a run by itself. A run
            that is the last of several has the same bits as if the others were there.
        varied: names of the numbers of the method in which the runs may differ.
    """
    if runs == 1:
        return VectorizedTrainer(setup, parallel_clients, device)
    lane = current_lane()
    trainers = [] if lane is None else lane.shared.setdefault("side by side", [])
    for trainer in trainers:
        if trainer.takes(setup, parallel_clients, device, varied):
            return _Joined(trainer, lane, setup)
    trainers.append(JoinedTrainer(setup, parallel_clients, device, runs, varied))
    return _Joined(trainers[-1], lane, setup)


@dataclass(frozen=True, eq=False)
class _Request:
    """Clients of a run that are to be trained."""

    trainer: JoinedTrainer
    run: RunInputs
    jobs: Sequence[ClientJob]


class JoinedTrainer:
    """Trains the clients of several runs, which have one structure, side by side.

    Args:
        setup: method, model, data and seed of the first run.
        parallel_clients: clients of a run that are trained side by side, at most.
        device: where they train.
        runs: runs whose clients are trained side by side, at most.
        varied: names of the numbers of the method in which the runs may differ.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        parallel_clients: int,
        device: str,
        runs: int,
        varied: tuple[str, ...] = (),
    ) -> None:
        self.parallel_clients, self._device, self._varied = parallel_clients, device, varied
        self._first, self._form = setup, _form(setup)
        is_short, sizes = self._form
        facts = replace(establish(setup), short_rounds=is_short)
        self.trainer = VectorizedTrainer(
            setup, parallel_clients * runs, device, facts=facts, fixed=sizes, varied=varied
        )

    def takes(
        self, setup: TrainingSetup, parallel_clients: int, device: str, varied: tuple[str, ...]
    ) -> bool:
        """Return whether the clients of a run may train beside those of the first run."""
        mine = self.parallel_clients, self._device, self._varied
        is_like_mine = (parallel_clients, device, varied) == mine and _form(setup) == self._form
        return is_like_mine and are_alike(self._first, setup, varied)

    def place(self, setup: TrainingSetup) -> PlacedRun:
        """Return a run on the device, with the data that lie there already."""
        if setup is self._first:
            return self.trainer.run
        first, device = self.trainer.placed, self.trainer.device
        training = replace(setup.training, network=setup.training.network.on(device))
        federation = replace(setup.federation, data=first.federation.data)
        test = first.test if setup.test is self._first.test else setup.test.on(device)
        placed = replace(setup, training=training, federation=federation, test=test)
        return PlacedRun(setup, placed, self._varied)

    def train(self, requests: Sequence[_Request]) -> list[Answer]:
        """Train the clients of some runs; a run gets the error that its own clients raise."""
        began = time.perf_counter()
        try:
            trained = self.together(requests)
        except Exception as error:  # of one run: each trains by itself, and raises its own
            answers = [self._by_itself(request) for request in requests]
            if not any(isinstance(answer.value, BaseException) for answer in answers):
                reason = f"runs train by themselves: {error}"[:MAX_REASON]
                self.trainer.reasons += [reason] * (reason not in self.trainer.reasons)
            return answers
        seconds, count = time.perf_counter() - began, sum(len(r.jobs) for r in requests)
        return [
            Answer(trained[request.run], seconds * len(request.jobs) / max(count, 1))
            for request in requests
        ]

    def _by_itself(self, request: _Request) -> Answer:
        began = time.perf_counter()
        try:
            trained: object = self.together([request])[request.run]
        except Exception as error:
            trained = error
        return Answer(trained, time.perf_counter() - began)

    def together(self, requests: Sequence[_Request]) -> dict[RunInputs, TrainedClients]:
        """Train the clients of some runs side by side, and return those of each."""
        with use_numerics(self._first.precision):
            return self._together(requests)

    def _together(self, requests: Sequence[_Request]) -> dict[RunInputs, TrainedClients]:
        waiting = [
            group
            for request in requests
            for group in ClientGroup.single_clients(request.run, request.jobs)
        ]
        began, done = time.thread_time(), []
        for group in self.trainer.train(waiting):
            group.clients.wait()
            done.append(group)
        seconds = time.thread_time() - began
        return {
            request.run: _of_run(request, done, len(request.jobs) / len(waiting) * seconds)
            for request in requests
        }


def _of_run(
    request: _Request, done: Sequence[TrainedGroup], processor_seconds: float
) -> TrainedClients:
    """Return the clients of one run in the order of its request, whatever groups they were in."""
    seconds: dict[str, float] = {}
    parts: list[tuple[TrainedClients, list[int]]] = []  # groups, with the rows of this run
    for each in done:
        rows = [i for i, run in enumerate(each.group.runs) if run is request.run]
        for phase, value in each.clients.seconds.items():
            share = value * len(rows) / len(each.group)
            seconds[phase] = seconds.get(phase, 0.0) + share
        if rows:
            parts.append((each.clients, rows))
    jobs = [clients.jobs[i] for clients, rows in parts for i in rows]
    steps = [clients.steps[i] for clients, rows in parts for i in rows]
    examples = [clients.examples[i] for clients, rows in parts for i in rows]
    places = {job: place for place, job in enumerate(jobs)}
    order = [places[job] for job in request.jobs]

    def together(of: Callable[[TrainedClients], Tensor]) -> Tensor:
        pieces = [_rows(of(clients), rows) for clients, rows in parts]
        return _rows(torch.cat(pieces) if len(pieces) > 1 else pieces[0], order)

    def all_together(of: Callable[[TrainedClients], State]) -> Tree:
        flat = {id(clients): dict(walk(of(clients))) for clients, _ in parts}
        paths = flat[id(parts[0][0])]
        return {path: together(lambda c, path=path: flat[id(c)][path]) for path in paths}  # type: ignore[misc]

    return TrainedClients(
        jobs=request.jobs,
        state=unwalk(all_together(lambda c: c.state)),
        client_state=ClientRecord(dict(all_together(lambda c: dict(c.client_state.state)))),
        loss=together(lambda c: c.loss),
        finite=together(lambda c: c.finite),
        steps=[steps[i] for i in order],
        examples=[examples[i] for i in order],
        seconds=seconds,
        processor_seconds=processor_seconds,
    )


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    if list(rows) == list(range(len(tensor))):
        return tensor
    return tensor.index_select(0, to_device(torch.tensor(rows), tensor.device))


class _Joined:
    """The trainer of one run among several.

    Args:
        joined: trains the clients of all of them.
        lane: where the run is made; None where no other run is made beside it.
        setup: method, model, data and seed of the run.
    """

    def __init__(self, joined: JoinedTrainer, lane: Lane | None, setup: TrainingSetup) -> None:
        self._joined, self._lane = joined, lane
        self._run = joined.place(setup)
        self.placed, self.parallel_clients = self._run.placed, joined.parallel_clients

    @property
    def queue_length(self) -> int:
        """Groups of clients that may wait for a GPU while the next one is started."""
        return self._joined.trainer.queue_length

    @property
    def reasons(self) -> list[str]:
        """Why clients were trained in a plainer way than was asked for."""
        return self._joined.trainer.reasons

    def __call__(
        self,
        message: Message,
        jobs: Sequence[ClientJob],
        read: ReadRecord,
        sums: bool = False,
    ) -> Iterator[TrainedClients]:
        """Train clients from a message, beside those of the other runs."""
        run = self._joined.trainer.inputs(self._run, message, read)
        request = _Request(self._joined, run, jobs)
        if self._lane is None:
            yield self._joined.together([request])[run]
        else:
            yield self._lane.ask(request)


def _answered(requests: Sequence[Any]) -> list[Answer]:
    """Train the clients of all requests, those of each trainer side by side."""
    answers: dict[int, Answer] = {}
    for trainer in dict.fromkeys(request.trainer for request in requests):
        places = [i for i, request in enumerate(requests) if request.trainer is trainer]
        answers.update(zip(places, trainer.train([requests[i] for i in places]), strict=True))
    return [answers[i] for i in range(len(requests))]


# ---- which runs have one structure --------------------------------------------------------------


def _form(setup: TrainingSetup) -> tuple[bool, PaddedSizes]:
    """Return whether whole rounds are compiled, and what clients are padded to."""
    sizes = setup.federation.sizes
    is_uniform = len(np.unique(sizes[sizes > 0])) == 1
    return is_uniform and has_short_rounds(setup), PaddedSizes.of(setup)


def are_alike(first: TrainingSetup, second: TrainingSetup, varied: Collection[str] = ()) -> bool:
    """Return whether one compiled step serves the clients of two runs.

    They may differ in seed, initial parameters, learning rate, numbers that only the server
    computes with or that are named in `varied`, and in who has which examples.
    """
    one, other = first.training, second.training
    if (
        structure_of(first, varied) != structure_of(second, varied)
        or one.personal != other.personal
    ):
        return False
    if [type(part) for part in one.plan.parts] != [type(part) for part in other.plan.parts]:
        return False  # two classes of one name
    if (one.buffers, one.rounds) != (other.buffers, other.rounds):
        return False
    options = [(s.augment, s.precision, s.keeps_updates) for s in (first, second)]
    data, other_data = first.federation.data, second.federation.data
    return (
        options[0] == options[1]
        and (data is other_data or data.fingerprint() == other_data.fingerprint())
        and _compute_the_same(one.network, other.network)
    )


def _compute_the_same(first: Network, second: Network) -> bool:
    """Return whether two networks differ in nothing but their trained parameters."""
    if first.describe() != second.describe() or first.unseen or second.unseen:
        return False
    forms = [(n.mixed, n.dtype, n.channels_last, n.traits) for n in (first, second)]
    if forms[0] != forms[1]:
        return False
    one, other = (
        {
            k: t
            for k, t in {**n.initial_state(), **n.buffers, **n.frozen}.items()
            if k not in n.params
        }
        for n in (first, second)
    )
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
