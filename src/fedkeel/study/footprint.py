"""The footprint of a method: bytes sent and stored, and multiplications, on one named model.

It is measured without a run, for a row in a table of methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedkeel import config
from fedkeel.base.memory import format_bytes
from fedkeel.data.dataset import dataset
from fedkeel.data.partition.from_arrays import iid
from fedkeel.engine.base import ClientJob
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.engine.choose.work import MultiplyAdds
from fedkeel.engine.local import train_client
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.rehearsal import with_empty_answers
from fedkeel.engine.survey import survey_client
from fedkeel.errors import FedkeelError
from fedkeel.method.grammar import parse
from fedkeel.method.server_round import server_message
from fedkeel.records.run_record import Estimate
from fedkeel.runner.prepare import prepare
from fedkeel.task.models import make
from fedkeel.task.task import Task
from fedkeel.tree import nbytes, numel

CLIENTS, PER_ROUND = 20, 5
SHAPE, CLASSES = (1, 8, 8), 10
MODEL = "mlp"


@dataclass(frozen=True)
class Footprint:
    """What a method sends, stores and computes.

    Args:
        estimate: bytes by part.
        gradients: multiplications in matrix products for each example that a client processes, in
            gradients of the loss, of which FedAvg takes one.
        parameters: entries of the model.
        model_bytes: bytes of the model.
    """

    estimate: Estimate
    gradients: float
    parameters: int
    model_bytes: int

    @property
    def setting(self) -> str:
        """The model and the federation of the measurement."""
        return (
            f"the {MODEL} of the digits preset ({self.parameters:,} parameters, "
            f"{format_bytes(self.model_bytes)}), {CLIENTS} clients, {PER_ROUND} in a round"
        )

    @property
    def down(self) -> float:
        """Models sent to a client in a round."""
        return sum(self.estimate.down.values()) / self.model_bytes

    @property
    def up(self) -> float:
        """Models sent by a client in a round."""
        return sum(self.estimate.up.values()) / self.model_bytes

    @property
    def server_bytes(self) -> int:
        """Bytes that the server keeps when every client has taken part."""
        return self.estimate.server_state + self.estimate.table * CLIENTS

    def lines(self) -> list[tuple[str, str]]:
        """Return (quantity, amount) as text."""
        down, up = (
            ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
            for parts in (self.estimate.down, self.estimate.up)
        )
        stored = self._stored
        return [
            ("down", f"{self.down:.2f} x model ({down}) to each client in a round"),
            ("up", f"{self.up:.2f} x model ({up}) from each client in a round"),
            ("client", f"{stored(self.estimate.client_state)} kept by each client"),
            ("server", f"{stored(self.server_bytes)} kept at the server"),
            ("cost", f"{self.gradients:.2f} x the multiplications of FedAvg for each example"),
            ("measured on", self.setting),
        ]

    def _stored(self, count: int) -> str:
        return (
            f"{count / self.model_bytes:.2f} x model ({format_bytes(count)})"
            if count
            else "nothing"
        )


@lru_cache(maxsize=256)
def footprint(method: str) -> Footprint:
    """Measure the footprint of a method.

    Raises:
        FedkeelError: the method cannot be composed, or cannot be trained on this model.

    >>> footprint("scaffold").up
    2.0
    """
    settings, ingredients = _federation()
    with use_numerics("float32"):  # small tensors: more threads only wait for each other
        prepared = prepare(settings.model_copy(update={"method": method}), ingredients)
        gradients = _multiplications(prepared) / _multiplications_of_fedavg()
    params = prepared.setup.training.network.params
    return Footprint(estimate_run(prepared), gradients, numel(params), nbytes(dict(params)))


def footprint_lines(method: str) -> list[tuple[str, str]]:
    """Return the footprint of a method as text, or why it cannot be measured.

    Raises:
        CompositionError: the method cannot be composed.
    """
    parse(method)
    try:
        return footprint(method).lines()
    except FedkeelError as error:
        got = "" if error.got is None else f" Got {error.got}."
        return [("not measured", error.what + got)]


def _multiplications(prepared: Prepared) -> float:
    """Return a client's multiply-adds in matrix products, for each example."""
    setup, job = prepared.setup, ClientJob(row=0, client=0, steps_done=0)
    message = with_empty_answers(server_message(prepared.plan, prepared.server, 1.0), prepared.spec)
    counter = MultiplyAdds()
    with counter:
        if prepared.plan.surveys:
            survey_client(setup, message, job, None)
        processed = train_client(setup, message, job, None).examples
    return counter.total / processed


@lru_cache(maxsize=1)
def _multiplications_of_fedavg() -> float:
    """Return the multiplications of one gradient for each example: FedAvg takes one."""
    return _multiplications(prepare(*_federation()))


@lru_cache(maxsize=1)
def _federation() -> tuple[config.Run, Ingredients]:
    """Return model, local work and cohort of the digits preset, with noise as data."""
    count = 60 * CLIENTS
    x = np.random.default_rng(0).normal(size=(count, *SHAPE)).astype(np.float32)
    y = np.arange(count) % CLASSES
    clients = iid(x, y, clients=CLIENTS)
    task = Task(lambda: make(MODEL, SHAPE, CLASSES))
    settings = config.Run(
        method="fedavg",
        rounds=60,
        weights="examples",
        local=config.Local(lr=0.1, epochs=5, batch_size=20),
        cohort=config.Cohort(clients=PER_ROUND),
    )
    return settings, Ingredients(task, lambda _: clients, dataset(x, y), MODEL)
