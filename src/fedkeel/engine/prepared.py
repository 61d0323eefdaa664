"""A run that is ready to begin, and what it is made of, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from fedkeel import config
from fedkeel.data.augment import Transform
from fedkeel.data.cohort import largest_cohort
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.engine.base import OwnTraining, TrainingSetup
from fedkeel.engine.networks import OtherNetworks
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.method.compose import Plan
from fedkeel.method.context import Population
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.part import Capability
from fedkeel.method.round_values import Server
from fedkeel.method.server_memory import initial_table_row
from fedkeel.task.network import Network
from fedkeel.task.task import Task
from fedkeel.tree import Tree

RUNNING_STATISTICS = ("running_mean", "running_var")
"""How the names of the buffers end that a layer learns and normalises with."""

StatePlace = Literal["memory", "disk"]
"""Where the clients' state lives."""

Judged = Literal["global", "personal"]
"""Which model a run is judged by."""


@dataclass(frozen=True)
class Ingredients:
    """Data and model, before a seed and a method are chosen.

    Args:
        task: model, loss, head, buffers.
        clients: gives the clients for a seed.
        test: the test set.
        model: what to call the model.
        augment: a transform of each batch in training; True crops and mirrors images at random.
        model_args: the arguments that a model which is made by its name was given.
        own: the user's own local training, where it is given in Python.
        public: inputs that all clients have, None for none.
    """

    task: Task
    clients: Callable[[int], Federation]
    test: Dataset
    model: str
    augment: bool | Transform = False
    model_args: Mapping[str, Any] = field(default_factory=dict)
    own: OwnTraining | None = None
    public: Dataset | None = None


_F = TypeVar("_F")


@dataclass(frozen=True)
class Draft:
    """A run that is being made, with all that its features may change.

    Args:
        settings: what was asked for.
        clients: the clients as the data are divided, whoever trains on them.
        federation: the clients that train.
        cohort: who takes part in a round.
        training: method, model and local training.
        provides: what task and engine provide.
        augment: a transform of each batch in training; True crops and mirrors images at random.
        make_server_seed: gives the seed of cohorts and of what the server's parts draw.
        task: model, loss, head, buffers.
        step_size: updates that make a step of the server; None: those of the clients of a round.
        is_baseline: whether the run sends nothing, and methods are compared to it.
        keeps_updates: whether the updates of single clients are kept, see `TrainingSetup`.
        judges: the model by which the run is judged: the ``global`` one, or each client's
            ``personal`` one.
        own: the user's own local training, None for local steps.
        others: networks of clients that have another one; None where all have the same.
        features: the features so far.
    """

    settings: config.Run
    clients: Federation
    federation: Federation
    cohort: config.Cohort
    training: ClientTraining
    provides: frozenset[Capability]
    augment: bool | Transform
    make_server_seed: Callable[[], int]
    task: Task
    step_size: int | None = None
    is_baseline: bool = False
    keeps_updates: bool = False
    judges: Judged = "global"
    own: OwnTraining | None = None
    others: OtherNetworks | None = None
    features: tuple[object, ...] = ()

    @property
    def networks(self) -> list[Network]:
        """The networks of all clients, the task's own first."""
        others = () if self.others is None else self.others.trainings
        return [one.network for one in (self.training, *others)]

    def with_feature(self, feature: object) -> Draft:
        """Return the run with one feature more."""
        return replace(self, features=(*self.features, feature))


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Args:
        settings: what was asked for.
        setup: method, model, data and seed.
        server: the server before the first round.
        spec: what a client's reply looks like.
        clients: the clients as the data are divided, whoever trains on them.
        cohort: who takes part in a round.
        population: how many clients there are, and in a round.
        ingredients: what it was made of.
        make_server_seed: gives the seed of cohorts and of what the server's parts draw.
        key: digest of all that decides the numbers.
        state: where client state lives.
        unseen: where values of the user's code are that could not be read in full, so that the
            run is never taken for an earlier one.
        is_baseline: whether the run sends nothing, and methods are compared to it.
        judges: the model by which the run is judged: the ``global`` one, or each client's
            ``personal`` one.
        data_digest: digest of the examples as they were given; features may have changed them.
        step_size: updates that make a step of the server; None: those of the clients of a round.
        on_nodes: whether a federation of real nodes makes the run, and no simulation.
        features: what the run does beside training.
    """

    settings: config.Run
    setup: TrainingSetup
    server: Server
    spec: dict[str, TensorSpec]
    clients: Federation
    cohort: config.Cohort
    population: Population
    ingredients: Ingredients
    make_server_seed: Callable[[], int]
    key: str = ""
    state: StatePlace = "memory"
    unseen: tuple[str, ...] = ()
    is_baseline: bool = False
    judges: Judged = "global"
    data_digest: str = ""
    step_size: int | None = None
    on_nodes: bool = False
    features: tuple[object, ...] = ()

    def feature(self, kind: type[_F]) -> _F | None:
        """Return the run's feature of a kind, None where it has none."""
        return next((item for item in self.features if isinstance(item, kind)), None)

    @property
    def engine_has_clients(self) -> bool:
        """Whether the clients as the data are divided are those that an engine trains."""
        return self.clients is self.setup.federation

    @cached_property
    def server_seed(self) -> int:
        """The seed of cohorts and of what the server's parts draw."""
        return self.make_server_seed()

    @cached_property
    def largest_cohort(self) -> int:
        """The largest number of clients that train for one step of the server."""
        if self.step_size is not None:
            return self.step_size
        sizes, rounds = self.setup.federation.sizes, self.settings.rounds
        return largest_cohort(self.cohort, sizes, self.server_seed, rounds)

    def state_dict(self, server: Server) -> Tree:
        """Return the state dict of the run's model; empty where none is whole."""
        if not self.is_whole:
            return {}
        return self.setup.training.network.state_dict(server.params, server.buffers)

    @property
    def is_whole(self) -> bool:
        """Whether the server's model has all that is trained, so that it can be handed out."""
        return not self.client_parameters

    @property
    def client_parameters(self) -> list[str]:
        """Names of the parameters, and of the statistics, of which each client has its own."""
        training, several = self.setup.training, self.plan.receiver is not None
        names = [k for k in training.network.names if several or k in training.personal]
        if training.buffers == "local":
            names += [k for k in training.network.buffers if k.endswith(RUNNING_STATISTICS)]
        return names

    @property
    def plan(self) -> Plan:
        """The method."""
        return self.setup.training.plan

    @property
    def table(self) -> dict[str, TensorSpec]:
        """What the server remembers of one client, by path."""
        return specs_of(dict(initial_table_row(self.plan, self.server.params)))


def learning_rate(settings: config.Run, training: ClientTraining, round: int) -> float:
    """Return the local learning rate of a round, counted from 0."""
    return training.local.lr * training.local.schedule.factor(round, settings.rounds)
