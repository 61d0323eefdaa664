"""Attackers in a run: what they do to the updates of a round, and whether a backdoor works."""

from __future__ import annotations

from dataclasses import replace

from fedkeel.engine.base import TrainedCohort
from fedkeel.engine.evaluation import evaluate, scores_by_group
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.method.round_values import Server
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import ACCURACY, MetricInfo, TaskRecord
from fedkeel.robust.poison import triggered

SUCCESS = MetricInfo("attack_success", False, "%")
"""Share of the test examples of other labels that get the label of a backdoor with its trigger."""


def under_attack(trained: TrainedCohort, prepared: Prepared, round: int) -> TrainedCohort:
    """Return a cohort as the server receives it, with the updates that attackers send.

    They are written over their own ones, where clients are trained on this machine: nodes lie
    themselves.
    """
    attack = prepared.attack
    if attack is None or prepared.is_baseline:
        return trained
    if trained.remote is None:
        attack.apply(trained.replies, round)
    clients = trained.replies.clients
    return replace(trained, attackers=tuple(sorted(map(int, clients[attack.among(clients)]))))


def has_success_rate(prepared: Prepared) -> bool:
    """Whether the success of an attack is measured: of a backdoor, in a model that is whole."""
    attack, training = prepared.attack, prepared.setup.training
    return attack is not None and attack.settings.kind == "backdoor" and not training.personal


def task_record(prepared: Prepared, task: TaskRecord) -> TaskRecord:
    """Return the task of a run with the attack success rate, where it is measured."""
    if not has_success_rate(prepared):
        return task
    return replace(task, metrics=[*task.metrics[:-1], SUCCESS, *task.metrics[-1:]])


def with_success_rate(row: RoundRecord, prepared: Prepared, server: Server) -> RoundRecord:
    """Return the row with the attack success rate among its test scores."""
    attack, setup = prepared.attack, prepared.setup
    if attack is None or row.test is None or not has_success_rate(prepared):
        return row
    network, train = setup.training.network, setup.federation.data
    task = replace(prepared.ingredients.task, metrics=(ACCURACY.name,), score=None)
    setup = replace(
        setup,
        test=triggered(setup.test, train, attack.settings),
        metrics=task.metric_set(network, train),
    )
    with use_numerics(setup.precision):
        measured = evaluate(setup, server.params, server.buffers or network.buffers, "test")
    rate = scores_by_group(setup, "test", measured, of_all=True)[0][ACCURACY.name]
    scores = replace(row.test, values={**row.test.values, SUCCESS.name: rate})
    return replace(row, test=scores)
