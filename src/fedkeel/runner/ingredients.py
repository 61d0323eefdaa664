"""Loading the data of an experiment, and making its task: what a run is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from fedkeel import config
from fedkeel.base.values import shape_of
from fedkeel.data.augment import named_transform
from fedkeel.data.dataset import Dataset
from fedkeel.data.partition.recipes import divide
from fedkeel.data.read.hugging_face import load_any
from fedkeel.data.read.public import with_public
from fedkeel.engine.prepared import Ingredients
from fedkeel.task.client_network import ClientNetwork
from fedkeel.task.losses import (
    OF_QUANTITIES,
    make_loss,
)
from fedkeel.task.models import make
from fedkeel.task.models.lora import AdaptedBuilder
from fedkeel.task.task import Task


def gather(experiment: config.Experiment) -> Ingredients:
    """Load the data of an experiment and look up its model.

    Raises:
        DataError: the data cannot be found, read or used.
        ModelError: there is no such model, or it cannot be made.
    """
    train, test = load_any(experiment.data, experiment.partition.holdout_by)
    train, public = with_public(experiment.data, train)
    return replace(ingredients(experiment, train, test), public=public)


def ingredients(experiment: config.Experiment, train: Dataset, test: Dataset) -> Ingredients:
    """Look up the model of an experiment whose data have been loaded.

    Raises:
        ModelError: as `gather`.
    """
    return Ingredients(
        task=task(experiment, train),
        clients=lambda seed: divide(train, experiment.partition, seed),
        test=test,
        model=experiment.model.name,
        augment=named_transform(experiment.data.augment),
        model_args=experiment.model.args,
    )


def task(experiment: config.Experiment, train: Dataset) -> Task:
    """Return the task of an experiment, for data of the form of `train`.

    Raises:
        ModelError: there is no such model.
    """
    settings = experiment.model
    shape = train.shape if isinstance(train.shape, tuple) else ()
    outputs = train.classes
    if make_loss(experiment.task.loss) in OF_QUANTITIES or not outputs:
        width = shape_of(train.y)
        outputs = math.prod(width) if isinstance(width, tuple) else 1
    build: Callable[[], nn.Module] = partial(make, settings.name, shape, outputs, settings.args)
    others = {
        name: ClientNetwork(
            partial(make, other.name, shape, outputs, other.args),
            other.clients,
            other.share,
            other.head,
        )
        for name, other in settings.others.items()
    }
    if settings.lora is not None:
        build = AdaptedBuilder(build, settings.lora)
    wanted = experiment.task
    return Task(
        build,
        head=settings.head,
        loss=wanted.loss,
        buffers=settings.buffers,
        metrics=wanted.metrics,
        score=wanted.score,
        others=others,
    )
