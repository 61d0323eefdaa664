"""The Python interface: a model, arrays and a method, in one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from numpy.typing import ArrayLike
from rich.console import Console
from torch import Tensor

from fedkeel import config
from fedkeel.data.dataset import Dataset, Federation, dataset
from fedkeel.engine.prepared import Ingredients
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.errors import ConfigError, DataError
from fedkeel.method.grammar import split_expressions
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.prepare import prepare
from fedkeel.runner.progress import ProgressDisplay, progress_display, run_name
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study.compare import Comparison
from fedkeel.study.compare import compare as _compare
from fedkeel.task.task import Task

Test = Dataset | tuple[ArrayLike | Tensor, ArrayLike | Tensor]


def run(
    method: str,
    *,
    task: Task,
    clients: Federation,
    test: Test,
    rounds: int,
    local: config.Local,
    participation: float | None = None,
    clients_per_round: int | None = None,
    seed: int = 0,
    weights: config.Weights | None = None,
    evaluation: config.Evaluation | None = None,
    stop: config.Stop | None = None,
    engine: config.Engine | None = None,
    cohort: config.Cohort | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train one method on clients' data.

    Args:
        method: expression, e.g. ``"fedprox(mu=0.1)+gcfed"``.
        task: model, loss and head.
        clients: the training data, divided among clients.
        test: test inputs [N, ...] and labels [N].
        rounds: T, the number of rounds.
        local: local training.
        participation: share of the clients in each round; all where nothing is given.
        clients_per_round: number of clients in each round, in place of `participation`.
        seed: seed of the initial model, the cohorts and the batches.
        weights: how clients count in the mean; None takes what the method states.
        evaluation: when the model is evaluated.
        stop: when the run ends before its last round; None never.
        engine: what runs the clients.
        cohort: participation in full, in place of the two above.
        out: run folder; None keeps the run in memory.
        resume: whether an unfinished run in `out` is continued.
        progress: whether to show progress on standard error; None does so on a terminal.
        callbacks: follow the run, see `Callback`.

    Returns:
        Rows, parameters, and what ran. A run that was finished before is read, not made again.

    Raises:
        FedkeelError: with what was given, what was expected, why, and what to do.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, when the round at hand has ended and, with
            `out`, everything is saved: the same call goes on there. A second one ends it at once.
        Exception: whatever a callback raises; see `Callback`.
    """
    settings = _settings(
        method=method,
        rounds=rounds,
        seed=seed,
        weights=weights,
        local=local,
        cohort=_cohort(cohort, participation, clients_per_round),
        evaluation=evaluation,
        stop=stop,
        engine=engine,
    )
    _check_callbacks(callbacks)
    prepared = prepare(settings, _ingredients(task, clients, test))
    with _shown(progress) as display:
        following = [*callbacks, display.follow(run_name(settings))]
        return start(prepared, _folder(out), resume, following)


def compare(
    methods: str | Sequence[str],
    *,
    task: Task,
    clients: Federation,
    test: Test,
    rounds: int,
    local: config.Local,
    seeds: int = 3,
    participation: float | None = None,
    clients_per_round: int | None = None,
    seed: int = 0,
    weights: config.Weights | None = None,
    evaluation: config.Evaluation | None = None,
    stop: config.Stop | None = None,
    engine: config.Engine | None = None,
    cohort: config.Cohort | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
) -> Comparison:
    """Train several methods with several seeds, everything else the same.

    Args:
        methods: expressions; or one text, in which commas stand between them.
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
        weights: as in `run`. None compares each method with its paper's weights.
        evaluation: as in `run`.
        stop: as in `run`; each run ends by itself.
        engine: as in `run`.
        cohort: as in `run`.
        out: folder of the comparison, for which `report` writes a page; None keeps it in memory.
        progress: as in `run`.
        callbacks: as in `run`. All runs call the same ones, one run after the other in this
            process; `on_run_begin` says which run begins. What a callback raises ends the
            comparison.

    Raises:
        FedkeelError: as in `run`, before anything has run.
        KeyboardInterrupt: as in `run`; the same call takes the runs that are there in `out`.
    """
    expressions = split_expressions(methods) if isinstance(methods, str) else methods
    wanted = config.build(config.Compare, {"methods": expressions, "seeds": seeds}, "compare")
    settings = _settings(
        method="fedavg",
        rounds=rounds,
        seed=seed,
        weights=weights,
        local=local,
        cohort=_cohort(cohort, participation, clients_per_round),
        evaluation=evaluation,
        stop=stop,
        engine=engine,
    )
    _check_callbacks(callbacks)
    ingredients, folder = _ingredients(task, clients, test), _folder(out)
    with _shown(progress) as display:
        return _compare(
            settings, ingredients, wanted.methods, wanted.seeds, folder, display, callbacks
        )


_TABLES: dict[str, tuple[type[config.Settings], str]] = {
    "local": (config.Local, "lr=0.1, epochs=1"),
    "cohort": (config.Cohort, "participation=0.1"),
    "evaluation": (config.Evaluation, "every=10"),
    "stop": (config.Stop, "patience=10"),
    "engine": (config.Engine, "kind='sequential'"),
}
"""Arguments that are settings themselves, with their class and how it may be called."""


def _settings(**values: object) -> config.Run:
    for name in ("evaluation", "stop", "engine"):
        values[name] = {} if values[name] is None else values[name]
    for name, (kind, example) in _TABLES.items():
        if not isinstance(values[name], (kind, Mapping)):
            raise ConfigError(
                f"{name!r} is no fedkeel.{kind.__name__}.",
                got=_described(values[name]),
                do=f"write e.g. {name}=fedkeel.{kind.__name__}({example})",
            )
    return config.build(config.Run, values, "run")


def _cohort(
    cohort: config.Cohort | None, participation: float | None, clients: int | None
) -> config.Cohort:
    values = {"participation": participation, "clients": clients}
    if cohort is None:
        return config.build(config.Cohort, values, "run")
    for key, name in (("participation", "participation"), ("clients", "clients_per_round")):
        if values[key] is not None:
            raise ConfigError(
                f"'cohort' and {name!r} both say who takes part.",
                got=values[key],
                do=f"leave out {name!r}, or write cohort=fedkeel.Cohort({key}=...)",
            )
    return cohort


def _ingredients(task: Task, clients: Federation, test: Test) -> Ingredients:
    if not isinstance(task, Task):
        name = task.__name__ if isinstance(task, type) else "model"
        do = f"write task=fedkeel.Task({name})"
        raise ConfigError("'task' is no fedkeel.Task.", got=_described(task), do=do)
    if not isinstance(clients, Federation):
        raise DataError(
            "'clients' is no federation.",
            got=_described(clients),
            expected="a fedkeel.Federation",
            do="divide the arrays: clients=fedkeel.iid(x, y, clients=10), or by fedkeel.dirichlet, "
            "by_classes or by_client; of clients' own arrays fedkeel.from_clients({'a': (x, y)})",
        )
    if not isinstance(test, Dataset):
        if not isinstance(test, (tuple, list)) or len(test) != 2:
            raise DataError(
                "'test' is no test set.",
                got=_described(test),
                expected="a pair (x, y) of inputs and labels, or a fedkeel.Dataset",
                do="keep some examples from the clients, and give test=(x_test, y_test)",
            )
        tokens = not clients.data.x.is_floating_point()
        test = dataset(test[0], test[1], name="test", tokens=tokens)
    model = task.model
    name = getattr(model, "__name__", None) or type(model).__name__
    return Ingredients(task, lambda seed: clients, test, name)


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    wrong: list[object] = [callbacks]
    if isinstance(callbacks, (list, tuple)):
        wrong = [callback for callback in callbacks if not isinstance(callback, Callback)]
    if wrong:
        raise ConfigError(
            "'callbacks' is no list of fedkeel.Callback.",
            got=_described(wrong[0]),
            do="write a subclass of fedkeel.Callback, and give callbacks=[MyCallback()]",
        )


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return f"an object of type {type(value).__name__}"


def _folder(out: str | Path | None) -> Path | None:
    if out is None or isinstance(out, (str, Path)):
        return None if out is None else Path(out)
    raise ConfigError("'out' is no folder.", got=_described(out), expected="a path, or None")


@contextmanager
def _shown(progress: bool | None) -> Iterator[ProgressDisplay]:
    """Show the progress of a call, and raise KeyboardInterrupt where one has ended it."""
    console = Console(stderr=True)
    quiet = not (console.is_terminal if progress is None else progress)
    with progress_display(console, quiet) as display, interrupts(display.stopping) as stop:
        yield display
    if stop.is_set():
        raise KeyboardInterrupt
