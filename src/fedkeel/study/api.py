"""The Python interface: a model, arrays and a method, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedkeel import config
from fedkeel.data.augment import Transform
from fedkeel.data.federation import Federation
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.features.budget.settings import Privacy
from fedkeel.features.stop.settings import Stop
from fedkeel.features.time.settings import System
from fedkeel.method.grammar import split_expressions
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.features import callbacks_of
from fedkeel.runner.prepare import prepare
from fedkeel.runner.progress import run_name
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study.arguments import (
    Diagnosed,
    Test,
    Tracked,
    check_callbacks,
    checked_folder,
    checked_ingredients,
    cohort_settings,
    run_settings,
)
from fedkeel.study.compare import compare as _compare
from fedkeel.study.comparison import Comparison
from fedkeel.study.watching import display_of, interruptible
from fedkeel.task.task import Task


def run(
    method: str,
    *,
    task: Task,
    clients: Federation,
    test: Test = None,
    rounds: int,
    local: config.Local,
    participation: float | None = None,
    clients_per_round: int | None = None,
    seed: int = 0,
    weights: config.ChosenWeights | None = None,
    evaluation: config.Evaluation | None = None,
    stop: Stop | None = None,
    adversary: config.Adversary | None = None,
    engine: config.Engine | None = None,
    cohort: config.Cohort | None = None,
    privacy: Privacy | None = None,
    system: System | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    augment: Transform | None = None,
    diagnose: Diagnosed = None,
    track: Tracked = None,
) -> Result:
    """Train one method on clients' data.

    Args:
        method: expression, e.g. ``"fedprox(mu=0.1)+gcfed"``; or a baseline, see `compare`.
        task: model, loss and head.
        clients: the training data, divided among clients.
        test: test inputs [N, ...] and labels [N], or what else `fedkeel.dataset` takes; None for
            the test examples of the clients, see `from_clients`.
        rounds: T, the number of rounds.
        local: local training.
        participation: share of the clients in each round; all where nothing is given.
        clients_per_round: number of clients in each round, in place of `participation`.
        seed: seed of the initial model, the cohorts and the batches.
        weights: how clients count in the mean; None and ``"method"`` take what the method states.
        evaluation: when the model is evaluated.
        stop: when the run ends before its last round; None never.
        adversary: attackers among the clients; None for none.
        engine: what runs the clients.
        cohort: participation in full, in place of the two above.
        privacy: the budget of differential privacy, which noise is calibrated for.
        system: how long clients take, in virtual time; None counts no time.
        out: run folder; None keeps the run in memory.
        resume: whether an unfinished run in `out` is continued.
        progress: whether to show progress; None does so on a terminal, and in a notebook.
        callbacks: follow the run, see `Callback`.
        augment: a random change of each batch in training, (x [B, ...], y [B, ...], random) -> (x,
            y) of the same form. It draws from `random`, a `numpy.random.Generator`, or from torch,
            and the same numbers come again in every engine and after a restart.
        diagnose: what is measured beside the scores, see `Diagnose`: e.g. ``"forgetting, cka"``.
        track: which trackers the run reports to, see `Track`: e.g. ``"tensorboard, mlflow"``.

    Threads that call this or `compare` take turns: torch's random generator is one for a process.

    Returns:
        Rows, parameters, and what ran. A run that was finished before is read, not made again.

    Raises:
        FedkeelError: with what was given, what was expected, why, and what to do.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, when the round at hand has ended and, with
            `out`, everything is saved: the same call goes on there. A second one ends it at once.
        Exception: whatever a callback raises; see `Callback`.
    """
    settings = run_settings(
        method=method,
        rounds=rounds,
        seed=seed,
        weights=weights,
        local=local,
        cohort=cohort_settings(cohort, participation, clients_per_round),
        evaluation=evaluation,
        stop=stop,
        diagnose=diagnose,
        track=track,
        adversary=adversary,
        engine=engine,
        privacy=privacy,
        system=system,
    )
    check_callbacks(callbacks)
    ingredients, folder = checked_ingredients(task, clients, test, augment), checked_folder(out)
    with display_of(progress) as display, one_at_a_time(display.waiting):
        display.prepare()
        prepared = prepare(settings, ingredients)
        shown = display.follow(run_name(settings))
        following = [*callbacks_of(settings, folder), *callbacks, shown]
        with interruptible(display):
            return start(prepared, folder, resume, following)


def compare(
    methods: str | Sequence[str],
    *,
    task: Task,
    clients: Federation,
    test: Test = None,
    rounds: int,
    local: config.Local,
    seeds: int = 3,
    participation: float | None = None,
    clients_per_round: int | None = None,
    seed: int = 0,
    weights: config.ChosenWeights | None = None,
    evaluation: config.Evaluation | None = None,
    stop: Stop | None = None,
    adversary: config.Adversary | None = None,
    engine: config.Engine | None = None,
    cohort: config.Cohort | None = None,
    privacy: Privacy | None = None,
    system: System | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    augment: Transform | None = None,
    diagnose: Diagnosed = None,
    track: Tracked = None,
) -> Comparison:
    """Train several methods with several seeds, everything else the same.

    Args:
        methods: expressions; or one text, in which commas stand between them. ``"local"`` and
            ``"centralised"`` are the baselines: each client alone, all examples in one place.
        task: as in `run`. A function or class in place of a module starts every seed from
            another initial model.
        clients: as in `run`.
        test: as in `run`.
        rounds: as in `run`.
        local: as in `run`.
        seeds: number of seeds, >= 1, counted from `seed`.
        participation: as in `run`.
        clients_per_round: as in `run`.
        seed: the first seed.
        weights: as in `run`, but None is ``"examples"`` for every method: none leads by its own.
        evaluation: as in `run`.
        stop: as in `run`; each run ends by itself.
        adversary: as in `run`.
        engine: as in `run`.
        cohort: as in `run`.
        system: as in `run`.
        privacy: as in `run`; of unit ``client``, all clients have equal weights.
        out: folder of the comparison, for which `report` writes a page; None keeps it in memory.
        progress: as in `run`.
        callbacks: as in `run`. All runs call the same ones, one run after the other;
            `on_run_begin` says which begins. What a callback raises ends the comparison.
        augment: as in `run`.
        diagnose: as in `run`; a baseline has none.
        track: as in `run`; the runs are grouped as one comparison.

    Raises:
        FedkeelError: as in `run`, before anything has run.
        KeyboardInterrupt: as in `run`; the same call takes the runs that are there in `out`.
    """
    expressions = split_expressions(methods) if isinstance(methods, str) else methods
    wanted = config.build(config.Compare, {"methods": expressions, "seeds": seeds}, "compare")
    settings = run_settings(
        method="fedavg",
        rounds=rounds,
        seed=seed,
        weights=weights,
        local=local,
        cohort=cohort_settings(cohort, participation, clients_per_round),
        evaluation=evaluation,
        stop=stop,
        diagnose=diagnose,
        track=track,
        adversary=adversary,
        engine=engine,
        privacy=privacy,
        system=system,
    )
    check_callbacks(callbacks)
    ingredients, folder = checked_ingredients(task, clients, test, augment), checked_folder(out)
    with display_of(progress) as display, interruptible(display), one_at_a_time(display.waiting):
        methods, seeds = wanted.methods, wanted.seeds
        return _compare(settings, ingredients, methods, seeds, folder, display, callbacks)
