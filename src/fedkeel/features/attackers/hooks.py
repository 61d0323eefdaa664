"""What attackers do in a round: they change the updates that are sent, and a backdoor is tried."""

from __future__ import annotations

from dataclasses import replace

from fedkeel.engine.base import TrainedCohort
from fedkeel.engine.evaluation import evaluate, scores_by_group
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.features.attackers.attack import Attack
from fedkeel.features.attackers.poison import triggered
from fedkeel.features.attackers.settings import Adversary
from fedkeel.method.round_values import Server
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.runner.feature_hooks import Hooks

SUCCESS = MetricInfo("attack_success", False, "%")
"""Share of the test examples of other labels that get the label of a backdoor with its trigger."""


def has_success_rate(prepared: Prepared, settings: Adversary) -> bool:
    """Whether the success of an attack is measured: of a backdoor, in a model that is whole."""
    is_one = not prepared.setup.training.personal and prepared.plan.receiver is None
    return settings.kind == "backdoor" and is_one


class AttackersOfRound(Hooks):
    """Attacks in each round, and says who of its clients did.

    Args:
        prepared: the run.
        attack: its attackers.
    """

    def __init__(self, prepared: Prepared, attack: Attack) -> None:
        self._prepared, self._attack = prepared, attack

    def received(self, trained: TrainedCohort, round: int) -> TrainedCohort:
        """Return the replies with the updates that attackers send written over their own ones.

        Nodes lie themselves.
        """
        if trained.remote is None and not self._prepared.is_baseline:
            self._attack.apply(trained.replies, round)
        return trained

    def recorded(self, row: RoundRecord) -> RoundRecord:
        """Return the row with the attackers among its clients."""
        attackers = sorted({*row.clients} & {*self._attack.attackers.tolist()})
        if not attackers or self._prepared.is_baseline:
            return row
        return replace(row, features={**row.features, "attackers": attackers})

    def scored(self, row: RoundRecord, server: Server) -> RoundRecord:
        """Return the row with the attack success rate among its test scores."""
        setup, settings = self._prepared.setup, self._attack.settings
        if row.test is None or not has_success_rate(self._prepared, settings):
            return row
        network, train = setup.training.network, setup.federation.data
        task = replace(self._prepared.ingredients.task, metrics=(ACCURACY.name,), score=None)
        setup = replace(
            setup,
            test=triggered(setup.test, train, settings),
            metrics=task.metric_set(network, train),
        )
        with use_numerics(setup.precision):
            measured = evaluate(setup, server.params, server.buffers or network.buffers, "test")
        rate = scores_by_group(setup, "test", measured, of_all=True)[0][ACCURACY.name]
        scores = replace(row.test, values={**row.test.values, SUCCESS.name: rate})
        return replace(row, test=scores)
