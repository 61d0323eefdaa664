"""What a method sends and keeps, measured on one named model: a table's row, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedkeel import config
from fedkeel.cost.memory import estimate, size
from fedkeel.data.dataset import dataset
from fedkeel.data.partition.from_arrays import iid
from fedkeel.engine.base import ClientJob
from fedkeel.engine.local import survey_client, train_client
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.process.numerics import arithmetic
from fedkeel.engine.rehearsal import with_empty_answers
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
    """What a method sends and keeps.

    Args:
        estimate: bytes by part.
        gradients: what a client multiplies in matrix products for each example that it processes,
            in gradients of the loss, of which FedAvg takes one.
        parameters: entries of the model.
        model: its bytes.
    """

    estimate: Estimate
    gradients: float
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

    @property
    def server(self) -> int:
        """Bytes that the server keeps when it has seen every client."""
        return self.estimate.server_state + self.estimate.table * CLIENTS

    def items(self) -> list[tuple[str, str]]:
        """Return (what, how much) in words."""
        needs = self.estimate
        return [
            ("down", f"{_times(self.down)} ({_parts(needs.down)}) to each client in a round"),
            ("up", f"{_times(self.up)} ({_parts(needs.up)}) from each client in a round"),
            ("client", f"{_kept(needs.client_state, self.model)} kept by each client"),
            ("server", f"{_kept(self.server, self.model)} kept at the server"),
            ("cost", f"{self.gradients:.2f} x the multiplications of FedAvg for each example"),
            ("measured on", self.where),
        ]


@lru_cache(maxsize=256)
def footprint(method: str) -> Footprint:
    """Measure what a method sends and keeps.

    Raises:
        FedkeelError: the method cannot be composed, or not trained on this model.

    >>> footprint("scaffold").up
    2.0
    """
    settings, ingredients = _stand()
    with arithmetic("float32"):  # small tensors: more threads only wait for each other
        prepared = prepare(settings.model_copy(update={"method": method}), ingredients)
        gradients = _multiplications(prepared) / _gradient()
    params = prepared.setup.training.network.params
    return Footprint(estimate(prepared), gradients, numel(params), nbytes(dict(params)))


def multiply_adds(prepared: Prepared) -> float:
    """Return the multiply-adds of matrix products and convolutions in a client's round.

    Returns:
        For each example that the client processes, forward and backward; nothing else is counted.
    """
    with arithmetic("float32"):
        return _multiplications(prepared) / 2  # the one and the other


def _multiplications(prepared: Prepared) -> float:
    """Return a client's multiplications and additions in matrix products, for each example."""
    setup, job = prepared.setup, ClientJob(row=0, client=0, steps_done=0)
    message = with_empty_answers(server_message(prepared.plan, prepared.server, 1.0), prepared.spec)
    with _Counter() as counter:
        if prepared.plan.surveys:
            survey_client(setup, message, job, None)
        processed = train_client(setup, message, job, None).examples
    total: int = counter.total
    return total / processed


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what matrix products and convolutions multiply and add."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        """Count a call, and make it."""
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += int(count(*args, **(kwargs or {}), out_val=out))
        return out


@lru_cache(maxsize=1)
def _gradient() -> float:
    """Return what one gradient multiplies and adds for each example: FedAvg takes one."""
    settings, ingredients = _stand()
    return _multiplications(prepare(settings, ingredients))


def told(method: str) -> list[tuple[str, str]]:
    """Return what a method sends and keeps in words, or why that cannot be measured.

    Raises:
        CompositionError: the method cannot be composed.
    """
    parse(method)
    try:
        return footprint(method).items()
    except FedkeelError as error:
        got = "" if error.got is None else f" Got {error.got}."
        return [("not measured", error.what + got)]


@lru_cache(maxsize=1)
def _stand() -> tuple[config.Run, Ingredients]:
    """The model, local work and cohort of the digits preset, on noise: nothing depends on data."""
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


def _times(models: float) -> str:
    return f"{models:.2f} x model"


def _kept(count: int, model: int) -> str:
    return f"{_times(count / model)} ({size(count)})" if count else "nothing"


def _parts(sent: dict[str, int]) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in sent.items())
