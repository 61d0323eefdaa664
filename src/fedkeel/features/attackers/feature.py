"""Simulated attackers as a feature of a run: they change examples, and updates that are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

from fedkeel import config
from fedkeel.data.federation import Federation
from fedkeel.engine.prepared import Draft, Prepared
from fedkeel.errors import ConfigError, RunError, counted
from fedkeel.features.attackers.attack import Attack, attackers
from fedkeel.features.attackers.declaration import AttackersDeclaration
from fedkeel.features.attackers.hooks import SUCCESS, AttackersOfRound, has_success_rate
from fedkeel.features.attackers.settings import ALONE, KNOWING, Adversary
from fedkeel.method.compose import Plan, expression_of
from fedkeel.records.score import MetricInfo
from fedkeel.runner.defence_warnings import defences, ways, without_effect
from fedkeel.runner.feature import Feature

FOR_ANY_MODEL = "label_flip"
"""Kind of an attack that goes with updates which begin at different models."""


class Attackers(Feature):
    """Attackers among the clients that settings ask for."""

    settings: Adversary
    on_processor = True

    @classmethod
    def of(cls, settings: config.Run, table: str) -> Self | None:
        """Return the attackers, None where there are none."""
        adversary = adversary_of(settings)
        return None if adversary.kind == "none" else cls(adversary)

    def attack(self, clients: Federation, seed: int) -> Attack:
        """Return who of the clients attacks, and how.

        Raises:
            ConfigError: the settings name nobody who exists.
        """
        return Attack(self.settings, attackers(self.settings, len(clients), seed), seed)

    def divided(self, clients: Federation, seed: int) -> Federation:
        """Return the clients with the attackers' examples as they train on them."""
        if clients.how["kind"] == "nodes":
            raise ConfigError(
                "Attackers can be simulated only where the examples are divided by the experiment.",
                got="partition.kind = 'nodes'",
                why="the attackers of an experiment are clients that it makes itself",
                do="leave out [adversary], or try the attack on examples of one data set",
            )
        return self.attack(clients, seed).poison(clients)

    def wrap(self, draft: Draft) -> Draft:
        """Return the run with single updates kept, where attackers change theirs."""
        _check_method(self.settings, draft.training.plan)
        keeps = draft.keeps_updates or self.settings.changes_updates
        return replace(draft, keeps_updates=keeps).with_feature(self)

    @classmethod
    def warnings(cls, prepared: Prepared) -> list[str]:
        """Return which parts of the method are made for fewer attackers than a round may have."""
        attack = attack_of(prepared)
        return [] if attack is None else list(_weak_defences(prepared, len(attack.attackers)))

    def check_nodes(self, settings: config.Run) -> None:
        """Refuse attackers that have to know other clients' updates, which no node does."""
        if self.settings.kind in KNOWING:
            raise RunError(
                f"The attack {self.settings.kind!r} cannot be made in a federation of nodes.",
                why="its attackers know the updates of the honest clients, and a node sees its own",
                do=f"simulate it with fedkeel run, or choose one of label_flip, {', '.join(ALONE)}",
            )

    def record(self, prepared: Prepared) -> str:
        """Return what the attackers do, and who they are."""
        return self.attack(prepared.clients, prepared.settings.seed).description

    def scores(self, prepared: Prepared) -> list[MetricInfo]:
        """Return the attack success rate, where it is measured."""
        return [SUCCESS] if has_success_rate(prepared, self.settings) else []

    def hooks(self, prepared: Prepared) -> AttackersOfRound:
        """Return what the attackers do in a round."""
        attack = self.attack(prepared.clients, prepared.settings.seed)
        return AttackersOfRound(prepared, attack)


def adversary_of(settings: config.Run) -> Adversary:
    """Return the attackers that settings ask for, of kind ``none`` where they ask for none."""
    adversary: Adversary = getattr(settings, AttackersDeclaration.table)
    return adversary


def attack_of(prepared: Prepared) -> Attack | None:
    """Return the attackers of a run, None where there are none."""
    feature = prepared.feature(Attackers)
    if feature is None:
        return None
    return feature.attack(prepared.clients, prepared.settings.seed)


def _check_method(settings: Adversary, plan: Plan) -> None:
    """Refuse attackers that change an encoded update, or updates that begin at several models."""
    if settings.changes_updates and plan.codec is not None:
        raise ConfigError(
            f"The attack {settings.kind!r} does not fit {plan.codec.name!r}.",
            why="it changes the update that the server decodes, which cannot be encoded again",
            do="choose an attack on examples, 'label_flip' or 'backdoor', or leave out the codec",
        )
    if plan.policy is not None and settings.kind != FOR_ANY_MODEL:
        raise ConfigError(
            f"Attacks on updates do not go with {plan.policy.name}.",
            got=f"adversary.kind = {settings.kind!r}",
            why="they are made of the updates of a round, which begin at one model",
            do="leave out [adversary]",
        )


def _weak_defences(prepared: Prepared, attackers: int) -> Iterator[str]:
    """Yield where a round may have more attackers than a part of the method is made for."""
    most_attackers: int | None = None
    for part, count in defences(prepared):
        if most_attackers is None:
            most_attackers = min(attackers, count)
        most = part.withstands(count)
        if without_effect(part, count) or most is None or most_attackers <= most:
            continue
        remedy = ways(part, count, most_attackers)
        yield (
            f"{expression_of([part])} withstands {most} of {counted(count, 'client')}, and a round "
            f"may have {counted(most_attackers, 'attacker')} ([adversary])"
            + (f": {remedy}" if remedy else "")
        )
