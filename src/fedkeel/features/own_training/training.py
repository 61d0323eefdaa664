"""Local training by a function of the user's, as it is given and as it is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedkeel.base.fingerprint.reached_values import Description, describe_value
from fedkeel.base.named_code import ImportTarget, import_object
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.errors import ConfigError
from fedkeel.features.own_training.client_round import Train, train_client
from fedkeel.method.local_loop import ClientRound, LocalState
from fedkeel.method.round_values import Reply
from fedkeel.task.batch import Batch

_TRAIN = ImportTarget(
    "local.train",
    ConfigError,
    "my_training:train",
    lambda value: False,
    "a function of (model, data, round) that returns numbers",
    "write a function there: def train(model, data, round): ... return {'loss': loss}",
    arguments=3,
)


@dataclass(frozen=True)
class LocalTraining:
    """Local training by a function of yours, in place of fedkeel's own steps.

    Args:
        train: (model, data, round) -> a dict of numbers. `model` is a module of your own class with
            the parameters from which the client starts; its update is what they are afterwards
            minus what they were. `data` has the client's examples: a data set of torch, with all of
            them as `data.x` and `data.y`, and with the round's mini-batches as `data.batches`.
            `round` tells what the run asks for: `fedkeel.features.own_training.given` has both. Of
            the numbers, ``loss`` is the client's training loss. ``steps`` and ``examples`` say how
            much work was done; left out, they are what the settings ask for. All others are
            diagnostics of the run.

    Raises:
        ConfigError: `train` is not a function of three values.

    Example:
        >>> import fedkeel as fk, torch
        >>> from torch import nn
        >>> def train(model, data, round):
        ...     optimiser = torch.optim.SGD(model.parameters(), lr=round.lr)
        ...     for x, y in data.batches:
        ...         optimiser.zero_grad()
        ...         loss = round.loss(model(x), y)
        ...         loss.backward()
        ...         optimiser.step()
        ...     return {"loss": loss}
        >>> x, y = [[float(i % 3), 1.0] for i in range(60)], [i % 3 for i in range(60)]
        >>> fk.run(
        ...     "momentum",
        ...     task=fk.Task(nn.Linear(2, 3)),
        ...     clients=fk.iid(x, y, clients=4),
        ...     test=(x, y),
        ...     rounds=2,
        ...     local=fk.Local(lr=0.1, epochs=1),
        ...     local_training=fk.LocalTraining(train),
        ... ).record.status
        'finished'
    """

    train: Train

    def __post_init__(self) -> None:
        if not callable(self.train):
            raise ConfigError(
                "The local training is not a function.",
                got=repr(self.train),
                expected="(model, data, round) -> numbers",
                do="write def train(model, data, round): ... and give LocalTraining(train)",
            )

    @property
    def name(self) -> str:
        """What the function is called."""
        function = getattr(self.train, "func", self.train)  # of a functools.partial
        return str(getattr(function, "__name__", type(function).__name__))

    @cached_property
    def description(self) -> Description:
        """A text of all that decides what the function does."""
        return describe_value(self.train, "local_training")

    def train_client(
        self,
        setup: TrainingSetup,
        client: ClientRound,
        local: LocalState,
        job: ClientJob,
        make_batch: Callable[[int], Batch],
        work: tuple[int, int],
        is_trial: bool,
    ) -> tuple[Reply, int, int]:
        """Train a client, and end its round, as `engine.base.OwnTraining` says.

        Raises:
            TrainingError: the function raised an exception, or what it did cannot be used.
        """
        return train_client(self.train, setup, client, local, job, make_batch, work, is_trial)


def named_training(name: str, given: object) -> LocalTraining:
    """Return the function of a name as local training.

    Args:
        name: ``package.module:function``.
        given: what was given in Python; None where nothing was.

    Raises:
        ConfigError: there is no such function, or both are given.
    """
    if given is not None:
        raise ConfigError(
            "'local_training' and 'local.train' both say how clients train.",
            got=f"local.train = {name!r}",
            do="leave out one of them",
        )
    function: Any = import_object(name, _TRAIN)
    return LocalTraining(function)
