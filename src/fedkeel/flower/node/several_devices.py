"""A node with several devices trains its clients on all of them, each in a process of its own.

The first device is this process's, and evaluates too.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from torch import Tensor

from fedkeel import config
from fedkeel.data import batches
from fedkeel.engine.base import ServerModel, TrainingSetup
from fedkeel.engine.process.forking import ChildProcess, exit_reason, portable_error, start_child
from fedkeel.engine.process.interrupts import ignore_ctrl_c
from fedkeel.engine.spec import TensorSpec
from fedkeel.errors import FedkeelError, RunError, TrainingError
from fedkeel.flower.node.hardware import NodePlace
from fedkeel.flower.node.training import ClientStart, DeviceTraining, Trained
from fedkeel.flower.protocol import MAX_REASONS, NodeTraining
from fedkeel.method.context import ByPart, Message
from fedkeel.task.metrics.metric_set import Measured
from fedkeel.tree import Tree

ShareAnswer = tuple[list[Trained] | FedkeelError, NodeTraining, bool]
"""What a process says of its share: what came of it, how it trains, whether its device has failed.
"""


class SeveralDevices:
    """Trains the clients of a node on several devices; see `ClientTrainer`.

    Args:
        spec: shape and type of each tensor of a reply, by path, from `rehearse`.
        place: the devices, and the engine.
        parallel_clients: clients that a device trains side by side, at most.
        precision: of the factors of products.
    """

    def __init__(
        self,
        spec: Mapping[str, TensorSpec],
        place: NodePlace,
        parallel_clients: int,
        precision: config.Precision = "float32",
    ) -> None:
        places = [replace(place, devices=(name,)) for name in place.devices]
        self._arguments = [(spec, each, parallel_clients, precision) for each in places]
        self._first = DeviceTraining(*self._arguments.pop(0))
        self.together = self._first.together * len(places)
        self._children: list[ChildProcess] = []
        self._federation: object = None  # whose data the processes have
        self._reports: dict[int, NodeTraining] = {}
        self._others_are_broken = False

    @property
    def is_broken(self) -> bool:
        """Whether this process cannot use a device any more, and another one could."""
        return self._first.is_broken or self._others_are_broken

    @property
    def report(self) -> NodeTraining:
        """What the server is told of it."""
        others = sorted(self._reports.items())
        reports = [self._first.report, *(report for _, report in others)]
        reasons = tuple(dict.fromkeys(text for report in reports for text in report.reasons))
        named = {number: place.devices[0] for number, (_, place, *_) in enumerate(self._arguments)}
        of_others = named | {number: report.device for number, report in others}
        devices = [reports[0].device, *of_others.values()]
        return reports[0].model_copy(
            update={
                "device": ", ".join(devices)[:200],
                "name": ", ".join(dict.fromkeys(r.name for r in reports if r.name))[:100],
                "reasons": reasons[:MAX_REASONS],
            }
        )

    def train(
        self, setup: TrainingSetup, message: Message, clients: Sequence[ClientStart]
    ) -> list[Trained]:
        """Train clients from a message, each device a share of about the same work.

        Raises:
            FedkeelError: a client cannot be trained, or a process has ended.
        """
        own, *others = shares(setup, clients, 1 + len(self._arguments))
        children = self._processes(setup) if any(others) else []
        asked = [(i, child) for i, child in enumerate(children) if others[i]]
        for i, child in asked:
            order = pickle.dumps((message, others[i], setup.seed))
            with suppress(OSError):  # it has ended, which is noticed below
                child.pipe.send_bytes(order)
        done, failure = list[Trained](), None
        try:
            done += self._first.train(setup, message, own) if own else []
        except FedkeelError as error:
            failure = error
        for i, child in asked:  # in any case, so that no answer is left in a pipe
            try:
                done += self._answer(i, child)
            except FedkeelError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return done

    def _answer(self, number: int, child: ChildProcess) -> list[Trained]:
        """Return what a process has trained.

        Raises:
            FedkeelError: it could not, or has ended.
        """
        try:
            answer: ShareAnswer = pickle.loads(child.pipe.recv_bytes())
        except (EOFError, OSError):
            child.end(patience=5.0)
            code = child.exit_code
            self.close()  # all of them begin anew
            raise RunError(
                "A process that trains on a device of this node has ended.",
                got=f"exit code {code}",
                why=exit_reason(code),
            ) from None
        trained, self._reports[number], is_broken = answer
        self._others_are_broken |= is_broken
        if isinstance(trained, FedkeelError):
            raise trained
        return trained

    def _processes(self, setup: TrainingSetup) -> list[ChildProcess]:
        """Return the processes of the other devices, which have the data of the setup."""
        if self._federation is not setup.federation:
            self.close()
        for arguments in self._arguments[len(self._children) :]:
            child = start_child(
                _serve,
                [setup, *arguments],
                siblings=[other.pipe for other in self._children],
                what="The model or its loss cannot be sent to the processes of other devices.",
                do="define it at the top level of a module, or start the node with one device",
            )
            self._children.append(child)
        self._federation = setup.federation
        return list(self._children)

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.end()
        self._children.clear()
        self._federation = None

    def evaluate(self, setup: TrainingSetup, params: Tree, buffers: Tree) -> Measured:
        """Return what is measured of a model on the clients' own examples."""
        return self._first.evaluate(setup, params, buffers)

    def measure_client(
        self, setup: TrainingSetup, server: ServerModel, client: int, state: ByPart | None
    ) -> tuple[Tensor, Tensor]:
        """Return what is measured of a client's personal model."""
        return self._first.measure_client(setup, server, client, state)


def shares(
    setup: TrainingSetup, clients: Sequence[ClientStart], count: int
) -> list[list[ClientStart]]:
    """Return a share of the clients for each device, of about as many examples.

    The largest clients come first, each to the device that has the least to do so far.
    """
    local, sizes = setup.training.local, setup.federation.sizes
    work = {
        one.job.client: batches.count_examples(
            local, int(sizes[one.job.client]), one.job.steps_done
        )
        for one in clients
    }
    parts, loads = [list[ClientStart]() for _ in range(count)], [0] * count
    for one in sorted(clients, key=lambda one: -work[one.job.client]):  # stable
        least = loads.index(min(loads))
        parts[least].append(one)
        loads[least] += work[one.job.client]
    return parts


def _serve(
    setup: TrainingSetup,
    spec: Mapping[str, TensorSpec],
    place: NodePlace,
    parallel_clients: int,
    precision: config.Precision,
    pipe: Connection,
) -> None:
    """Train what comes through the pipe, until it is closed."""
    ignore_ctrl_c()
    training = DeviceTraining(spec, place, parallel_clients, precision)
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            message, clients, seed = pickle.loads(pipe.recv_bytes())
            seeded = setup if seed == setup.seed else replace(setup, seed=seed)
            trained: list[Trained] | FedkeelError
            try:
                trained = training.train(seeded, message, clients)
            except FedkeelError as error:
                trained = portable_error(error)
            except Exception as error:
                failure = TrainingError("Training on a device failed.")
                failure.__cause__ = error  # whose traceback the log of the node has
                trained = portable_error(failure)
            pipe.send_bytes(pickle.dumps((trained, training.report, training.is_broken)))
