"""What a method sends and keeps, measured on one named model: a table's row, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedkeel import config
from fedkeel.data.dataset import dataset
from fedkeel.data.divide.arrays import iid
from fedkeel.errors import FedkeelError
from fedkeel.experiment.prepare import Estimate, Ingredients, estimate, prepare, size
from fedkeel.method.grammar import parse
from fedkeel.task.models import make
from fedkeel.task.task import Task
from fedkeel.tree import nbytes, numel

CLIENTS, PER_ROUND = 20, 5
SHAPE, CLASSES = (1, 8, 8), 10
MODEL = "mlp"


@dataclass(frozen=True)
class Footprint:
    """What a method sends and keeps.

    Args:
        estimate: bytes by part.
        parameters: entries of the model.
        model: its bytes.
    """

    estimate: Estimate
    parameters: int
    model: int

    @property
    def where(self) -> str:
        """What was measured."""
        return (
            f"the {MODEL} of the digits preset ({self.parameters:,} parameters, "
            f"{size(self.model)}), {CLIENTS} clients, {PER_ROUND} in a round"
        )

    @property
    def down(self) -> float:
        """Models sent to a client in a round."""
        return sum(self.estimate.down.values()) / self.model

    @property
    def up(self) -> float:
        """Models sent by a client in a round."""
        return sum(self.estimate.up.values()) / self.model

    def items(self) -> list[tuple[str, str]]:
        """Return (what, how much) in words."""
        needs = self.estimate
        return [
            ("down", f"{_times(self.down)} ({_parts(needs.down)}) to each client in a round"),
            ("up", f"{_times(self.up)} ({_parts(needs.up)}) from each client in a round"),
            ("client", f"{_kept(needs.client_state, self.model)} kept by each client"),
            ("server", f"{_kept(needs.server_state, self.model)} kept at the server"),
            ("measured on", self.where),
        ]


def footprint(method: str) -> Footprint:
    """Measure what a method sends and keeps.

    Raises:
        FedkeelError: the method cannot be composed, or not trained on this model.

    >>> footprint("scaffold").up
    2.0
    """
    settings, ingredients = _stand()
    prepared = prepare(settings.model_copy(update={"method": method}), ingredients)
    params = prepared.world.bench.network.params
    return Footprint(estimate(prepared), numel(params), nbytes(dict(params)))


def told(method: str) -> list[tuple[str, str]]:
    """Return what a method sends and keeps in words, or why that cannot be measured.

    Raises:
        CompositionError: the method cannot be composed.
    """
    parse(method)
    try:
        return footprint(method).items()
    except FedkeelError as error:
        return [("not measured", error.what)]


@lru_cache(maxsize=1)
def _stand() -> tuple[config.Run, Ingredients]:
    """The model and the cohort of the digits preset, on noise: bytes do not depend on data."""
    count = 10 * CLIENTS
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


def _times(models: float) -> str:
    return f"{models:.2f} x model"


def _kept(count: int, model: int) -> str:
    return f"{_times(count / model)} ({size(count)})" if count else "nothing"


def _parts(sent: dict[str, int]) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in sent.items())
