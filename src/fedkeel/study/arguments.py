"""Checking the arguments of the Python interface: each mistake is refused with what to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedkeel import config
from fedkeel.base.feature import declared_tables
from fedkeel.data.augment import Transform
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.read.user_data import Examples, is_examples, like
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import ConfigError, DataError
from fedkeel.features.track.settings import Track
from fedkeel.named_files import expanded
from fedkeel.runner.callbacks import Callback
from fedkeel.task.task import Task

Test = Examples | None
"""A test set: inputs [N, ...] and labels [N], a `Dataset`, or what else `fedkeel.dataset` takes;
None for the test examples that the clients have, see `fedkeel.from_clients`."""

Diagnosed = config.Diagnose | str | Sequence[str] | None
"""What is diagnosed: kinds, in a text with commas between them or in a list, or all settings."""

Tracked = Track | str | Sequence[str] | None
"""Which trackers a run reports to: their names as `Diagnosed`, or all settings."""

_TABLES: dict[str, tuple[type[config.Settings], str]] = {
    "local": (config.Local, "lr=0.1, epochs=1"),
    "cohort": (config.Cohort, "participation=0.1"),
    "evaluation": (config.Evaluation, "every=10"),
    "diagnose": (config.Diagnose, "kinds=['drift'], every=5"),
    "adversary": (config.Adversary, "kind='sign_flip', share=0.2"),
    "engine": (config.Engine, "kind='sequential'"),
}
"""Arguments that are settings themselves, with their class and how it may be called."""


def run_settings(**values: object) -> config.Run:
    """Return the settings of a run, or refuse an argument that is no settings (ConfigError)."""
    if isinstance(values.get("diagnose"), str | list | tuple):
        values["diagnose"] = {"kinds": values["diagnose"]}
    for table, item in declared_tables().items():
        if item.shorthand and isinstance(values.get(table), str | list | tuple):
            values[table] = {item.shorthand: values[table]}
    for name in ("evaluation", "diagnose", "adversary", "engine"):
        values[name] = {} if values.get(name) is None else values[name]
    features = declared_tables()
    given = {name: (item.settings_class, item.example) for name, item in features.items()}
    for name, (kind, example) in {**_TABLES, **given}.items():
        if values.get(name) is None and name in features:
            values.pop(name, None)
            continue
        if not isinstance(values[name], (kind, Mapping)):
            raise ConfigError(
                f"{name!r} is no fedkeel.{kind.__name__}.",
                got=_described(values[name]),
                do=f"write e.g. {name}=fedkeel.{kind.__name__}({example})",
            )
    return config.build(config.Run, values, "run")


def cohort_settings(
    cohort: config.Cohort | None, participation: float | None, clients: int | None
) -> config.Cohort:
    """Return who takes part, or refuse what is given twice (ConfigError)."""
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


def checked_ingredients(
    task: Task, clients: Federation, test: Test, augment: Transform | None = None
) -> Ingredients:
    """Return data and model, or refuse what is neither (ConfigError, DataError)."""
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
    data = _test_set(clients, test)
    model = task.model
    name = getattr(model, "__name__", None) or type(model).__name__
    if augment is not None and not callable(augment):
        raise ConfigError(
            "'augment' is no function.",
            got=_described(augment),
            expected="(x, y, random) -> (x, y), a batch and a numpy.random.Generator",
        )
    return Ingredients(task, lambda seed: clients, data, name, augment or False)


def _test_set(clients: Federation, test: Test) -> Dataset:
    """Return the test set, made ready as the clients' examples were; or refuse what is none."""
    if test is None and clients.test is not None:
        return clients.test
    is_pair = isinstance(test, (tuple, list)) and len(test) == 2
    if not (is_pair or isinstance(test, Dataset) or is_examples(test)):
        raise DataError(
            "'test' is no test set.",
            got=_described(test),
            expected="a pair (x, y) of inputs and labels, or a fedkeel.Dataset",
            do="keep some examples from the clients, and give test=(x_test, y_test)",
        )
    return like(clients.data, test, "test", clients.how.get("normalize", "none") != "none")


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse what is no callback (ConfigError)."""
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


def checked_folder(out: str | Path | None) -> Path | None:
    """Return the folder, or refuse what is no path (ConfigError)."""
    if out is None or isinstance(out, (str, Path)):
        return None if out is None else expanded(out)
    raise ConfigError("'out' is no folder.", got=_described(out), expected="a path, or None")
