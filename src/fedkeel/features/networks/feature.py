"""Clients with different networks as a feature of a run: which have which, and what is refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, Self

import numpy as np

from fedkeel import config
from fedkeel.engine.networks import OtherNetworks
from fedkeel.engine.prepared import Draft, Prepared, learning_rate
from fedkeel.engine.rehearsal import CLIENT_STATE_PREFIX, rehearse
from fedkeel.errors import CompositionError, ConfigError, ModelError, RunError
from fedkeel.features.networks.declaration import NetworkRecord, NetworksRecord
from fedkeel.method.compose import compose
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.part import Capability
from fedkeel.method.provided import provided_capabilities
from fedkeel.method.server_round import server_message
from fedkeel.runner.batch_checks import check_batches_of_one, check_evaluation_of_one
from fedkeel.runner.feature import Feature
from fedkeel.task.client_network import networks_of_clients
from fedkeel.task.network import Network
from fedkeel.tree import nbytes, numel


class DifferentNetworks(Feature):
    """Some clients have another network than the task's own, and all share no parameters.

    Args:
        settings: of the run.
        others: the networks; None before the run is wrapped.
    """

    settings: config.Run

    def __init__(self, settings: config.Run, others: OtherNetworks | None = None) -> None:
        super().__init__(settings)
        self.others = others

    @classmethod
    def of(cls, settings: config.Run, table: str) -> Self:
        """Return the feature: networks are the task's, which no setting of a run tells."""
        return cls(settings)

    def check_nodes(self, settings: config.Run) -> None:
        """Refuse different networks, and public inputs, in a federation of real nodes."""
        if isinstance(settings, config.Experiment) and settings.model.others:
            raise _on_nodes()
        data = getattr(settings, "data", None)
        if data is not None and (data.public is not None or data.public_fraction is not None):
            raise RunError(
                "Public inputs are for simulations.",
                got=f"data.public = {data.public!r}, public_fraction = {data.public_fraction}",
                why="no node says which public inputs it has, so they may differ",
                do="simulate the federation (fedkeel run), or leave them out",
            )

    def wrap(self, draft: Draft) -> Draft:
        """Return the run with the networks of its clients, or refuse what needs one for all.

        All examples in one place train the task's own network.
        """
        task, clients = draft.task, draft.clients
        if not task.others or len(draft.federation) != len(clients):
            return draft
        _check_draft(draft)
        trainings = []
        for name in task.others:
            network = task.of_network(name).network(
                clients.data, draft.settings.seed, draft.training.network.dtype
            )
            network.mixed = draft.training.network.mixed
            _check_network(draft, name, network)
            buffers = "local" if network.buffers else draft.training.buffers
            names = frozenset(network.names)
            trainings.append(
                replace(draft.training, network=network, personal=names, buffers=buffers)
            )
        seed = draft.settings.seed
        of_client = networks_of_clients(task.others, clients.names, len(clients), seed)
        others = OtherNetworks(tuple(task.others), tuple(trainings), of_client)
        feature = type(self)(self.settings, others)
        return replace(draft, others=others, judges="personal").with_feature(feature)

    def check(self, prepared: Prepared) -> None:
        """Refuse an engine for clients of one network; try one step of each network."""
        if prepared.settings.engine.kind == "ray":
            raise ConfigError(
                "The engine 'ray' cannot train clients with different networks.",
                expected="auto, sequential, workers or vectorized",
                why="it sends what clients keep as tensors of one shape",
                do="set engine.kind = 'auto'",
            )
        setup = prepared.setup
        rate = learning_rate(prepared.settings, setup.training, 0)
        message = server_message(prepared.plan, prepared.server, rate)
        for training in self._trainings:
            own = replace(setup, training=training, others=None)
            check_batches_of_one(training, setup.federation, prepared.settings.rounds)
            check_evaluation_of_one(own)
            sent = {k: s for k, s in rehearse(own, message).items() if _is_sent(k)}
            expected = {k: s for k, s in prepared.spec.items() if _is_sent(k)}
            if sent != expected:
                raise CompositionError(
                    f"'{prepared.plan.expression}' sends tensors of the network's shapes.",
                    why="clients with different networks have to send the same",
                    do="give all clients one network, or take a method such as fedproto or fedmd",
                )

    @property
    def _trainings(self) -> tuple[ClientTraining, ...]:
        return () if self.others is None else self.others.trainings

    def identity(self, values: object) -> dict[str, Any] | None:
        """Return what decides the numbers: the networks, their initial values, and whose they are.

        The settings of a run do not have them.
        """
        if self.others is None:
            return None
        digest = hashlib.blake2b(self.others.of_client.tobytes(), digest_size=16)
        for training in self.others.trainings:
            digest.update(training.network.describe().encode())
            network = training.network
            for values_of in (network.initial_state(), network.buffers, network.frozen):
                for name, tensor in sorted(values_of.items()):
                    digest.update(name.encode() + tensor.numpy().tobytes())
        return {"networks": digest.hexdigest()}

    def record(self, prepared: Prepared) -> NetworksRecord | None:
        """Return the networks, their sizes, and which clients have them."""
        if self.others is None:
            return None
        named = prepared.ingredients.task.others
        others = [
            NetworkRecord(
                name,
                _model_name(named[name].model),
                numel(training.network.params),
                nbytes(dict(training.network.params)),
                training.network.head,
                np.flatnonzero(self.others.of_client == number).tolist(),
            )
            for number, (name, training) in enumerate(
                zip(self.others.names, self.others.trainings, strict=True), start=1
            )
        ]
        return NetworksRecord(others)


def _model_name(model: object) -> str:
    """Return what to call a model: a network that is known by name has it as an argument."""
    arguments = getattr(model, "args", ())
    if arguments:
        return str(arguments[0])
    return getattr(model, "__name__", None) or type(model).__name__


def _is_sent(path: str) -> bool:
    return not path.startswith(CLIENT_STATE_PREFIX)


def _on_nodes() -> RunError:
    return RunError(
        "Clients with different networks are for simulations.",
        got="model.others, and a federation of nodes",
        why="server and nodes work out the form of every message from one network",
        do="simulate the federation (fedkeel run), or give all clients one network",
    )


def _check_draft(draft: Draft) -> None:
    """Refuse methods and settings that need one network for all clients."""
    training, settings = draft.training, draft.settings
    shared = [name for name in training.network.names if name not in training.personal]
    if shared:
        raise CompositionError(
            f"'{settings.method}' shares parameters, and clients have different networks.",
            got=f"{shared[0]!r} and {len(shared) - 1} more",
            expected="a method in which all parameters stay at the clients",
            do="take fedproto, fedmd or the baseline local, or drop model.others",
        )
    if draft.own is not None:
        raise ConfigError(
            "Local training of your own does not go with different networks.",
            why="what it keeps of each network cannot be told before it has trained",
            do="leave out local_training, or drop model.others",
        )
    if settings.evaluation.model == "global":
        raise ConfigError(
            "There is no global model to judge where clients have different networks.",
            got='evaluation.model = "global"',
            do='set evaluation.model = "personal", or leave it out',
        )
    if training.buffers == "average" and training.network.buffers:
        raise ConfigError(
            "Buffers of different networks cannot be averaged.",
            do='set model.buffers = "local"',
        )


def _check_network(draft: Draft, name: str, network: Network) -> None:
    """Refuse a network whose answers or features do not fit those of the task's own."""
    own, plan = draft.training.network, draft.training.plan
    if network.scores_shape != own.scores_shape:
        raise ModelError(
            f"The network {name!r} answers in another form than the task's own.",
            got=f"scores of shape {list(network.scores_shape)}",
            expected=f"{list(own.scores_shape)}",
        )
    data = draft.clients.data
    missing = provided_capabilities(own, data) - provided_capabilities(network, data)
    compose(plan.parts, draft.provides - missing, plan.weights)
    if Capability.FEATURES in plan.needs and network.head_shape != own.head_shape:
        raise ModelError(
            f"The network {name!r} has features of another width than the task's own.",
            got=f"{network.head_shape[1]} inputs of its classifier {network.head!r}",
            expected=f"{own.head_shape[1]}, as of {own.head!r}",
            why="clients share the mean features of their classes",
            do="put a linear layer of that width before the classifier of each network",
        )
