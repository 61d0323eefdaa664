"""Measuring the footprint of a method, with a model and a federation, and without a run."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fedkeel import config
from fedkeel.data.dataset import dataset
from fedkeel.data.partition.from_arrays import iid
from fedkeel.engine.base import ClientJob
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.engine.choose.work import OperationCounter
from fedkeel.engine.local import train_client
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.rehearsal import with_empty_answers
from fedkeel.engine.survey import survey_client
from fedkeel.features.root.feature import root_for
from fedkeel.method.server_round import server_message
from fedkeel.runner.prepare import prepare
from fedkeel.study.footprint import CLIENTS, MODEL, PER_ROUND, Footprint
from fedkeel.task.models import make
from fedkeel.task.task import Task
from fedkeel.tree import nbytes, numel

SHAPE, CLASSES, PUBLIC = (1, 8, 8), 10, 200


def measure(method: str) -> Footprint:
    """Measure the footprint of a method.

    Raises:
        FedkeelError: the method cannot be composed, or cannot be trained on this model.
    """
    settings, ingredients = _federation()
    with use_numerics("float32"):  # small tensors: more threads only wait for each other
        asked = {"method": method, "root": root_for(method, CLIENTS)}
        prepared = prepare(settings.model_copy(update=asked), ingredients)
        gradients = _multiplications(prepared) / _multiplications_of_fedavg()
    params = prepared.setup.training.network.params
    return Footprint(estimate_run(prepared), gradients, numel(params), nbytes(dict(params)))


def _multiplications(prepared: Prepared) -> float:
    """Return a client's multiply-adds in matrix products, for each example."""
    setup, job = prepared.setup, ClientJob(row=0, client=0, steps_done=0)
    message = with_empty_answers(server_message(prepared.plan, prepared.server, 1.0), prepared.spec)
    counter = OperationCounter()
    with counter:
        if prepared.plan.surveys:
            survey_client(setup, message, job, None)
        processed = train_client(setup, message, job, None).examples
    return counter.multiply_adds / processed


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
    public = dataset(x[:PUBLIC], y[:PUBLIC])
    return settings, Ingredients(task, lambda _: clients, dataset(x, y), MODEL, public=public)
