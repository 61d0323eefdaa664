"""How a node trains its clients: as the `sequential` engine does, or on a device.

The trainer of a device is the simulator's. What it needs from one message to the next, the model
and the data on the device and compiled steps, lives as long as this object, see `trainer_process`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fedkeel import config
from fedkeel.engine.base import ClientJob, ServerModel, TrainingSetup
from fedkeel.engine.evaluation import evaluate
from fedkeel.engine.local import LocalResult, train_client
from fedkeel.engine.personal import measure_client
from fedkeel.engine.process.numerics import use_device, use_numerics
from fedkeel.engine.rehearsal import SURVEY_PREFIX, check_reply
from fedkeel.engine.reply_rows import started_ahead
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.trainer import TrainedClients
from fedkeel.engine.vectorized.batching import ClientGroup
from fedkeel.engine.vectorized.engine import VectorizedTrainer, one_by_one
from fedkeel.engine.vectorized.run_inputs import PlacedRun
from fedkeel.errors import RunError
from fedkeel.flower.node.hardware import NodePlace
from fedkeel.flower.protocol import MAX_REASONS, NodeTraining
from fedkeel.method.context import ByPart, Message
from fedkeel.method.round_values import Reply, reply_state
from fedkeel.task.metrics.metric_set import Measured
from fedkeel.tree import Tree, map_tensors, substate, substates, tensors

T = TypeVar("T")

CPU = torch.device("cpu")

OUT_OF_MEMORY = ("out of memory", "_STATUS_ALLOC_FAILED")
"""What errors of CUDA's libraries say where memory is lacking; torch's own have a type."""

PATIENCE = 2
"""Requests in a row for which a device has too little memory before it is not tried again, where
the processor may take its place."""


@dataclass(frozen=True)
class ClientStart:
    """A client that is to be trained, and what it kept from its last round, None the first time."""

    job: ClientJob
    state: ByPart | None


WAITING = 8
"""Clients that are given to a device at a time, at least: on a GPU, several may train at once even
where each trains by itself."""

Trained = tuple[ClientJob, LocalResult]


class ClientTrainer(Protocol):
    """Trains and evaluates the clients of a node."""

    @property
    def together(self) -> int:
        """Clients of a request that are trained together, and then sent: that bounds the memory."""

    @property
    def report(self) -> NodeTraining:
        """What the server is told of it."""

    @property
    def is_broken(self) -> bool:
        """Whether this process cannot use the device any more, and another one could."""

    def train(
        self, setup: TrainingSetup, message: Message, clients: Sequence[ClientStart]
    ) -> list[Trained]:
        """Train clients from a message; they may come in another order.

        Raises:
            FedkeelError: a client cannot be trained.
        """

    def evaluate(self, setup: TrainingSetup, params: Tree, buffers: Tree) -> Measured:
        """Return what is measured of a model on the clients' own examples."""

    def measure_client(
        self, setup: TrainingSetup, server: ServerModel, client: int, state: ByPart | None
    ) -> tuple[Tensor, Tensor]:
        """Return what is measured of a client's personal model: see `engine.personal`."""


class PlainTraining:
    """Trains one client after the other on the processor, with the bits of a simulation.

    Args:
        reasons: why the node does not train on a device.
    """

    together, is_broken = 1, False

    def __init__(self, reasons: Sequence[str] = ()) -> None:
        self._reasons = tuple(reasons)

    @property
    def report(self) -> NodeTraining:
        """What the server is told of it."""
        return NodeTraining(reasons=self._reasons)

    def train(
        self, setup: TrainingSetup, message: Message, clients: Sequence[ClientStart]
    ) -> list[Trained]:
        """Train clients from a message."""
        with use_numerics(setup.precision):
            return [(c.job, train_client(setup, message, c.job, c.state)) for c in clients]

    def evaluate(self, setup: TrainingSetup, params: Tree, buffers: Tree) -> Measured:
        """Return what is measured of a model on the clients' own examples."""
        with use_numerics(setup.precision):
            return evaluate(setup, params, buffers, "clients")

    def measure_client(
        self, setup: TrainingSetup, server: ServerModel, client: int, state: ByPart | None
    ) -> tuple[Tensor, Tensor]:
        """Return what is measured of a client's personal model."""
        with use_numerics(setup.precision):
            return measure_client(setup, server, client, state)


class DeviceTraining:
    """Trains clients by the simulator's own trainer on a device.

    Where the device has too little memory, the trainer first takes fewer clients at once and then
    steps that are not compiled. Where that does not help, the processor trains if it may, and else
    the client fails with that reason. The node lives on in any case.

    Args:
        spec: shape and type of each tensor of a reply, by path, from `rehearse`.
        place: the device, and the engine.
        parallel_clients: clients that are trained side by side, at most.
        precision: of the factors of products.
    """

    def __init__(
        self,
        spec: Mapping[str, TensorSpec],
        place: NodePlace,
        parallel_clients: int,
        precision: config.Precision = "float32",
    ) -> None:
        self._spec, self._place, self._parallel = spec, place, parallel_clients
        self._precision = precision
        self._device = torch.device(place.devices[0])
        self._plain = PlainTraining()
        self._trainer: VectorizedTrainer | None = None
        self._federation: object = None  # whose data lie on the device
        self._refusals = 0  # requests in a row for which the device had too little memory
        self._has_trained_plainly = False
        self._reasons: list[str] = []
        self.is_broken = False
        self.together = max(parallel_clients, WAITING)

    @property
    def report(self) -> NodeTraining:
        """What the server is told of it: nothing that an error of the user's code says."""
        of_trainer = [] if self._trainer is None else self._trainer.reasons
        reasons = [*self._reasons, *(reason.partition(":")[0] for reason in of_trainer)]
        distinct = tuple(dict.fromkeys(reasons))[:MAX_REASONS]
        if self._has_trained_plainly:
            return NodeTraining(reasons=distinct)
        return NodeTraining(
            engine=self._place.engine,
            device=str(self._device),
            name=device_name(self._device),
            precision=self._precision,
            reasons=distinct,
        )

    def train(
        self, setup: TrainingSetup, message: Message, clients: Sequence[ClientStart]
    ) -> list[Trained]:
        """Train clients from a message, side by side where the trainer does."""
        return self._there_or_here(
            lambda: self._train(setup, message, clients),
            lambda: self._plain.train(setup, message, clients),
        )

    def _train(
        self, setup: TrainingSetup, message: Message, clients: Sequence[ClientStart]
    ) -> list[Trained]:
        trainer = self._trainer_of(setup)
        run = trainer.run
        if setup.seed != run.setup.seed:  # a site's own noise, see `Guard.admit`
            run = PlacedRun(setup, replace(trainer.placed, seed=setup.seed))
        states = {client.job.client: client.state for client in clients}

        def read(client: int) -> ClientRecord | None:
            state = states[client]
            return None if state is None else ClientRecord.of(dict(state))

        jobs, done = [client.job for client in clients], list[Trained]()
        with use_numerics(setup.precision):
            inputs = trainer.inputs(run, message, read)
            groups = trainer.train(ClientGroup.single_clients(inputs, jobs))
            for each in started_ahead(trainer, (group.clients for group in groups)):
                done += results_of(each)
        form = {k: v for k, v in self._spec.items() if not k.startswith(SURVEY_PREFIX)}
        for job, result in done:
            check_reply(specs_of(reply_state(result.reply)), job.client, form)
        return done

    def evaluate(self, setup: TrainingSetup, params: Tree, buffers: Tree) -> Measured:
        """Return what is measured of a model on the clients' own examples."""

        def there() -> Measured:
            placed, device = self._placed(setup), self._device
            own = {k: t.to(device) for k, t in params.items()}
            averaged = {k: t.to(device) for k, t in buffers.items()}
            with use_numerics(setup.precision):
                measured = evaluate(placed, own, averaged, "clients", setup.shard)
            return Measured(measured.states.cpu(), measured.kept.cpu())

        return self._there_or_here(there, lambda: self._plain.evaluate(setup, params, buffers))

    def measure_client(
        self, setup: TrainingSetup, server: ServerModel, client: int, state: ByPart | None
    ) -> tuple[Tensor, Tensor]:
        """Return what is measured of a client's personal model."""

        def there() -> tuple[Tensor, Tensor]:
            placed = self._placed(setup)
            params, buffers = (
                {k: t.to(self._device) for k, t in one.items()}
                for one in (server.params, server.buffers)
            )
            others = map_tensors(lambda t: t.to(self._device), dict(server.broadcast))
            moved = ServerModel(params, buffers, server.round, substates(others))
            kept = state and substates(map_tensors(lambda t: t.to(self._device), dict(state)))
            with use_numerics(setup.precision):
                states, values = measure_client(placed, moved, client, kept)
            return states.cpu(), values.cpu()

        return self._there_or_here(
            there, lambda: self._plain.measure_client(setup, server, client, state)
        )

    def _there_or_here(self, there: Callable[[], T], here: Callable[[], T]) -> T:
        """Return what is computed on the device; on the processor where the device cannot.

        Raises:
            RunError: the device cannot, and the processor may not.
        """
        may_be_cpu = self._place.may_be_cpu
        if not self.is_broken and (self._refusals < PATIENCE or not may_be_cpu):
            try:
                result = there()
            except Exception as error:
                self._accept(error)
            else:
                self._refusals, self._has_trained_plainly = 0, False
                return result
            self._release()  # no frame of the error holds tensors any more
        if not may_be_cpu:
            raise self._unusable("has failed before")
        self._has_trained_plainly = True
        return here()

    def _accept(self, error: Exception) -> None:
        """Note why the processor has to train, or raise why nothing can.

        Raises:
            RunError: the device cannot, and the processor may not.
        """
        if lacks_memory(error):
            self._refusals += 1
            what = "has too little memory"
        elif has_failed(error):
            self.is_broken = True
            what = "has failed"
        else:
            raise error
        reason = f"{self._kind} {what}"
        self._reasons = list(dict.fromkeys([*self._reasons, reason]))
        if not self._place.may_be_cpu:
            self._release()
            got = next(iter(str(error).splitlines()), type(error).__name__)
            raise self._unusable(what, got) from None

    @property
    def _kind(self) -> str:
        return "the GPU" if self._device.type == "cuda" else "compiled training"

    def _unusable(self, what: str, got: str | None = None) -> RunError:
        """Return why nothing can train where the processor may not."""
        return RunError(
            f"{self._kind[0].upper()}{self._kind[1:]} of this node {what}.",
            got=got,
            why="the operator has asked for it, so the processor does not take its place",
            do="end what else uses the GPU, start the node with --device auto or cpu, or take "
            "smaller batches",
        )

    def _release(self) -> None:
        """Leave the memory of the device to others."""
        self._trainer = self._federation = None
        gc.collect()
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # a device that has failed has nothing to give
                torch.cuda.empty_cache()

    def _trainer_of(self, setup: TrainingSetup) -> VectorizedTrainer:
        """Return what trains on the device; its data are placed, and its steps compiled, once."""
        if self._trainer is None or self._federation is not setup.federation:
            self._release()
            use_device(self._device)
            if self._place.engine == "sequential":
                self._trainer = one_by_one(setup, str(self._device))
            else:
                self._trainer = VectorizedTrainer(setup, self._parallel, str(self._device))
            self._federation = setup.federation
        return self._trainer

    def _placed(self, setup: TrainingSetup) -> TrainingSetup:
        placed = self._trainer_of(setup).placed
        return replace(placed, metrics=setup.metrics, seed=setup.seed)


def results_of(trained: TrainedClients) -> list[Trained]:
    """Return what came of each of some clients, in memory of its own on the processor."""
    trained.wait()
    state = map_tensors(lambda t: t.to(CPU), {**trained.state})
    kept = map_tensors(lambda t: t.to(CPU), dict(trained.client_state.state))
    loss, finite = trained.loss.to(CPU), trained.finite.to(CPU)
    results = []
    for i, job in enumerate(trained.jobs):
        own, kept_here = (map_tensors(lambda t, i=i: t[i].clone(), one) for one in (state, kept))  # type: ignore[misc]
        reply = Reply(
            update=tensors(substate(own, "update")),
            buffers=tensors(substate(own, "buffers")),
            uploads=substates(substate(own, "uploads")),
            client_state=substates(kept_here),
            loss=loss[i].clone(),
            finite=finite[i].clone(),
            diagnostics=dict(tensors(substate(own, "diagnostics"))),
        )
        results.append((job, LocalResult(reply, trained.steps[i], trained.examples[i])))
    return results


def device_name(device: torch.device) -> str:
    """Return what the maker calls a GPU, "" for the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error comes from a device without memory left."""
    return any(
        isinstance(one, torch.OutOfMemoryError)
        or (isinstance(one, RuntimeError) and any(text in str(one) for text in OUT_OF_MEMORY))
        for one in _chain(error)
    )


def has_failed(error: BaseException) -> bool:
    """Return whether an error leaves a GPU unusable for the process."""
    return any(isinstance(one, RuntimeError) and "CUDA error" in str(one) for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those from which it was raised."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__
