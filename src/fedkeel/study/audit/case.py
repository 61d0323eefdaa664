"""One case of an audit: the run that was overheard, and what all attacks on it share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedkeel import config
from fedkeel.base.rng import generator, torch_seed
from fedkeel.base.values import rows_of
from fedkeel.data.dataset import Dataset
from fedkeel.errors import printable
from fedkeel.method.context import Ints
from fedkeel.method.parts.fedreg import FedReg
from fedkeel.study.audit.matching import GradientModel
from fedkeel.study.audit.observation import Observation, Overheard
from fedkeel.study.audit.quality import Units
from fedkeel.study.audit.simulated import FedRegModel, find_fedreg
from fedkeel.task.losses import cross_entropy

TARGETS = {
    "client": "client {client}",
    "sum": "the mean of {count} clients",
    "release": "the model's change by {count} clients",
}

DRAWN = ("iid", "dirichlet", "dirichlet_gradma", "dirichlet_prior", "classes")
"""Partitions by chance: of one label, examples of clients and of the test set are alike."""


@dataclass(frozen=True)
class Others:
    """Examples that nobody trained on, which members are told from.

    Args:
        data: where they are.
        rows: [N] their rows in it.
        groups: [N] the client of each, as a place among those behind the update; zeros where
            members are compared with others of any client.
        member_groups: [n] the same of the examples behind the update.
        says: what they are, in words.
        alike: whether they differ from the members only in that nobody trained on them. Else an
            attack that tells clients apart seems to tell members.
    """

    data: Dataset
    rows: Ints
    groups: Ints
    member_groups: Ints
    says: str
    alike: bool

    def inputs(self, places: Ints) -> Tensor:
        """Return the inputs of some of them, by their places among all."""
        x = rows_of(self.data.x, torch.from_numpy(self.rows[places]))
        if not isinstance(x, Tensor):
            raise TypeError("several inputs by name")
        return x


@dataclass(frozen=True)
class Case:
    """What an attack is made on.

    Args:
        overheard: one round of the run.
        settings: what is tried.
        client: the client that is attacked, in view ``client``.
    """

    overheard: Overheard
    settings: config.Audit
    client: int

    @cached_property
    def seen(self) -> Observation:
        """What the attacker sees."""
        return self.overheard.see(self.settings.view, self.client)

    @cached_property
    def model(self) -> GradientModel:
        """The gradient of made-up examples, or what the method makes of it, and the one seen."""
        part = self.simulated
        return GradientModel(self.seen) if part is None else FedRegModel(part, self.seen)

    @cached_property
    def simulated(self) -> FedReg | None:
        """The method whose step an attacker makes who knows it; None for the plain gradient."""
        prepared = self.overheard.prepared
        if not self.settings.adaptive:
            return None
        return find_fedreg(prepared.plan, prepared.setup.training.local, self.seen)

    @property
    def target(self) -> str:
        """Whose message is attacked, in words."""
        names = self.overheard.prepared.setup.federation.names
        name = printable(names[self.client]) if names else self.client
        return TARGETS[self.settings.view].format(client=name, count=len(self.seen.clients))

    @property
    def count(self) -> int:
        """Number of examples behind the update."""
        return len(self.seen.all_rows)

    @property
    def sent(self) -> str:
        """How much work is behind the update, in words."""
        steps = sorted(set(self.seen.steps.tolist()))
        number = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        plural = "" if steps == [1] else "s"
        examples = f"{self.count:,} example{'' if self.count == 1 else 's'}"
        return f"{examples}, {number} local step{plural}"

    @cached_property
    def classes(self) -> int:
        """Y where targets are labels under the cross-entropy; else 0."""
        data = self.overheard.prepared.setup.federation.data
        has_labels = data.has_labels and self.seen.network.task_loss is cross_entropy
        return data.classes if has_labels else 0

    @cached_property
    def originals(self) -> Tensor:
        """[n, ...] inputs behind the update, as the network takes them."""
        return self._train("x", self.seen.all_rows)

    @cached_property
    def labels(self) -> Tensor:
        """[n] labels behind the update."""
        return self._train("y", self.seen.all_rows)

    @cached_property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest number of a training input, as the network takes it."""
        x = self._values("x")
        return float(x.min()), float(x.max())

    @cached_property
    def units(self) -> Units:
        """What the inputs' numbers mean."""
        return Units.of(self._values("x"), self.overheard.prepared.setup.federation.data.scale)

    @cached_property
    def test(self) -> Others:
        """The test set, which may have examples of all clients."""
        setup = self.overheard.prepared.setup
        alike = setup.federation.how["kind"] in DRAWN
        says = "test examples" if alike else "test examples of any client"
        rows = np.arange(len(setup.test))
        return Others(setup.test, rows, 0 * rows, np.zeros(self.count, np.int64), says, alike)

    @cached_property
    def others(self) -> Others:
        """Examples of the clients behind the update where they have some, else the test set."""
        if self.test.alike:
            return self.test
        federation, clients = self.overheard.prepared.setup.federation, self.seen.clients
        if federation.holdout_rows is not None:
            data, rows = federation.data, [federation.own_rows(int(k)) for k in clients]
        else:
            data, by_client = self.test.data, federation.how["kind"] == "client"
            ids = data.client_ids if by_client else data.source_ids
            names = data.clients if by_client else data.sources
            numbers = {name: number for number, name in enumerate(names)}
            own = [numbers.get(federation.names[k], -1) for k in clients if federation.names]
            rows = [np.flatnonzero(ids == number) for number in own]
        if sum(map(len, rows)) < 2:
            return self.test
        places = np.arange(len(clients))
        return Others(
            data,
            np.concatenate(rows),
            np.repeat(places, [len(of_client) for of_client in rows]),
            np.repeat(places, [len(of_client) for of_client in self.seen.rows]),
            "held-out examples of the same client" + ("" if len(clients) == 1 else "s"),
            True,
        )

    @cached_property
    def kinds(self) -> tuple[Ints, Ints]:
        """[n] and [N]: within what members and others are compared.

        That is the label, and the client where the others are of the same ones.
        """
        others = self.others
        return (
            others.member_groups * self.classes + self.labels.numpy(),
            others.groups * self.classes + others.data.labels[others.rows],
        )

    def inputs_of(self, others: Others, count: int) -> Tensor:
        """Return at most so many inputs that nobody trained on."""
        return others.inputs(self.random("test").permutation(len(others.rows))[:count])

    def random(self, purpose: str) -> np.random.Generator:
        """Return the attacker's random numbers for a purpose."""
        return generator(self.settings.seed, f"audit.{purpose}", client=max(self.client, 0))

    def torch_random(self, purpose: str) -> torch.Generator:
        """Return the same for torch."""
        seed = torch_seed(self.settings.seed, f"audit.{purpose}", client=max(self.client, 0))
        return torch.Generator().manual_seed(seed)

    def _values(self, name: str) -> Tensor:
        values = getattr(self.overheard.prepared.setup.federation.data, name)
        if not isinstance(values, Tensor):
            raise TypeError("several tensors by name")
        return values

    def _train(self, name: str, rows: Ints) -> Tensor:
        return self._values(name)[torch.from_numpy(rows)]
