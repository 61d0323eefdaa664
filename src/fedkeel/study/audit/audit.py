"""The audit in Python: what an attacker learns from what a method sends."""

from __future__ import annotations

from pathlib import Path

from fedkeel import config
from fedkeel.data.augment import Transform
from fedkeel.data.federation import Federation
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.errors import ConfigError
from fedkeel.features.budget.settings import Privacy
from fedkeel.records.audit import AuditRecord
from fedkeel.study.arguments import (
    Test,
    checked_folder,
    checked_ingredients,
    cohort_settings,
    run_settings,
)
from fedkeel.study.audit.examine import examine
from fedkeel.study.watching import display_of, interruptible
from fedkeel.task.task import Task


def audit(
    method: str,
    *,
    task: Task,
    clients: Federation,
    test: Test = None,
    rounds: int,
    local: config.Local,
    attack: config.Audit | None = None,
    participation: float | None = None,
    clients_per_round: int | None = None,
    seed: int = 0,
    weights: config.ChosenWeights | None = None,
    engine: config.Engine | None = None,
    cohort: config.Cohort | None = None,
    privacy: Privacy | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    augment: Transform | None = None,
) -> AuditRecord:
    """Attack what a method sends in a round, and say what the attacker learns.

    The run is made on the reference engine up to the round that is attacked.

    Args:
        method: as in `run`.
        task: as in `run`.
        clients: as in `run`.
        test: as in `run`. Its examples stand for what an attacker has of its own, and for those
            that nobody trained on.
        rounds: as in `run`: of the whole run, for which noise and learning rates are meant.
        local: as in `run`.
        attack: what the attacker sees and tries, ``fedkeel.Audit(view="sum")``; None takes the
            defaults.
        participation: as in `run`.
        clients_per_round: as in `run`.
        seed: as in `run`.
        weights: as in `run`.
        engine: as in `run`; runs of the attacker's own use it, the run that is attacked does not.
        cohort: as in `run`.
        privacy: as in `run`.
        out: folder in which results are kept; attacks that are there are not made again.
        progress: as in `run`.
        augment: as in `run`.

    Raises:
        FedkeelError: as in `run`; or the method sends nothing.
        KeyboardInterrupt: after the attack at hand; the same call goes on there.
    """
    attack = config.Audit() if attack is None else attack
    if not isinstance(attack, config.Audit):
        raise ConfigError(
            "'attack' is no fedkeel.Audit.",
            got=type(attack).__name__,
            do='write e.g. attack=fedkeel.Audit(view="sum", round=5)',
        )
    settings = run_settings(
        method=method,
        rounds=rounds,
        seed=seed,
        weights=weights,
        local=local,
        cohort=cohort_settings(cohort, participation, clients_per_round),
        privacy=privacy,
        engine=engine,
    )
    ingredients, folder = checked_ingredients(task, clients, test, augment), checked_folder(out)
    with (
        display_of(progress) as display,
        interruptible(display),
        one_at_a_time(display.waiting),
    ):
        return examine(settings, ingredients, attack, folder, display)
