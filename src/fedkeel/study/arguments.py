"""Checking the arguments of the Python interface: each mistake is refused with what to write."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

from pydantic import BaseModel

from fedkeel import config
from fedkeel.base.error_messages import table_of
from fedkeel.base.feature import declared_tables
from fedkeel.base.named_files import expanded
from fedkeel.data.augment import Transform
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.read.user_data import Examples, is_examples, like
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import ArgumentError, ConfigError, DataError, enumeration
from fedkeel.features.attackers.settings import Adversary
from fedkeel.features.budget.settings import Privacy
from fedkeel.features.diagnose.settings import Diagnose
from fedkeel.features.own_training.training import LocalTraining
from fedkeel.features.root.settings import Root
from fedkeel.features.stop.settings import Stop
from fedkeel.features.time.settings import System
from fedkeel.features.track.settings import Track
from fedkeel.runner.callbacks import Callback
from fedkeel.task.task import Task

Test = Examples | None
"""A test set: inputs [N, ...] and labels [N], a `Dataset`, or what else `fedkeel.dataset` takes;
None for the test examples that the clients have, see `fedkeel.from_clients`."""

Diagnosed = Diagnose | str | Sequence[str] | None
"""What is diagnosed: kinds, in a text with commas between them or in a list, or all settings."""

Tracked = Track | str | Sequence[str] | None
"""Which trackers a run reports to: their names as `Diagnosed`, or all settings."""


class _Required(TypedDict):
    task: Task
    clients: Federation
    rounds: int
    local: config.Local


class SharedArguments(_Required, total=False):
    """What `Simulation` takes by name, which says what each means; None where it is left out.

    The tables of features that another package adds are taken, too.
    """

    test: Test
    public: Test
    participation: float | None
    clients_per_round: int | None
    cohort: config.Cohort | None
    weights: config.ChosenWeights | None
    evaluation: config.Evaluation | None
    stop: Stop | None
    adversary: Adversary | None
    root: Root | None
    privacy: Privacy | None
    system: System | None
    engine: config.Engine | None
    augment: Transform | None
    local_training: LocalTraining | None
    diagnose: Diagnosed
    track: Tracked


_F = TypeVar("_F", bound=Callable[..., Any])


def takes_shared_arguments(function: _F) -> _F:
    """Show the arguments that a function passes to `Simulation` in its signature, and check names.

    Args:
        function: its last parameter is ``**shared: Unpack[SharedArguments]``.
    """
    types = {name: kind.__forward_arg__ for name, kind in SharedArguments.__annotations__.items()}
    for table, feature in declared_tables().items():
        types.setdefault(table, f"{feature.settings_class.__name__} | None")
    needed = SharedArguments.__required_keys__
    signature = inspect.signature(function)
    of_call = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    shared = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, kind in types.items()
        for default in [Parameter.empty if name in needed else None]
    ]
    parameters = sorted([*of_call, *shared], key=lambda p: (p.kind, p not in shared))
    known = [p.name for p in parameters if p.name != "self"]
    title = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*positional: object, **named: object) -> object:
        for name in named:
            if name not in known:
                do = config.meant(config.Run, name, known)
                raise ArgumentError(f"{title}() has no argument {name!r}.", do=do)
        if missing := [repr(name) for name in types if name in needed and name not in named]:
            raise ArgumentError(f"{title}() also needs {enumeration(missing)}.")
        return function(*positional, **named)

    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    return cast("_F", call)


_EXAMPLES = {
    "local": "lr=0.1, epochs=1",
    "cohort": "participation=0.1",
    "evaluation": "every=10",
    "engine": "kind='sequential'",
}
"""How settings may be written, of those that no feature declares."""


def shared_settings(shared: Mapping[str, Any]) -> config.Run:
    """Return the settings in what runs share, or refuse it (ConfigError)."""
    who = shared.get("participation"), shared.get("clients_per_round")
    settings = {name: shared.get(name) for name in config.Run.model_fields}
    values = {name: value for name, value in settings.items() if value is not None}
    values["local"] = shared["local"]
    declared = declared_tables()
    for name, value in values.items():
        feature = declared.get(name)
        if feature and feature.shorthand and isinstance(value, str | list | tuple):
            values[name] = {feature.shorthand: value}
        elif (kind := table_of(config.Run, name)) and not isinstance(value, Mapping):
            check_settings(name, value, kind, feature.example if feature else _EXAMPLES[name])
    values["cohort"] = cohort_settings(values.get("cohort"), *who)
    return config.build(config.Run, values, "run")


def check_settings(name: str, value: object, kind: type[BaseModel], example: str) -> None:
    """Refuse what is not of a class of settings (ConfigError)."""
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name!r} is not a fedkeel.{kind.__name__}.",
            got=_described(value),
            do=f"write e.g. {name}=fedkeel.{kind.__name__}({example})",
        )


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
    task: Task,
    clients: Federation,
    test: Test,
    augment: Transform | None = None,
    training: LocalTraining | None = None,
    public: Test = None,
) -> Ingredients:
    """Return data and model, or refuse what is neither (ConfigError, DataError)."""
    if not isinstance(task, Task):
        name = task.__name__ if isinstance(task, type) else "model"
        do = f"write task=fedkeel.Task({name})"
        raise ConfigError("'task' is not a fedkeel.Task.", got=_described(task), do=do)
    if not isinstance(clients, Federation):
        raise DataError(
            "'clients' is not a federation.",
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
            "'augment' is not a function.",
            got=_described(augment),
            expected="(x, y, random) -> (x, y), a batch and a numpy.random.Generator",
        )
    if not isinstance(training, LocalTraining | None):
        raise ConfigError(
            "'local_training' is not a fedkeel.LocalTraining.",
            got=_described(training),
            do="write local_training=fedkeel.LocalTraining(train), of a function (model, data, "
            "round) -> numbers",
        )
    made = partial(_with_seed, clients)
    if public is not None:
        is_scaled = clients.how.get("normalize", "none") != "none"
        public = like(clients.data, public, "public", is_scaled)
    return Ingredients(task, made, data, name, augment or False, own=training, public=public)


def _with_seed(clients: Federation, seed: int) -> Federation:
    """Return the clients, which are the same for every seed."""
    return clients


def _test_set(clients: Federation, test: Test) -> Dataset:
    """Return the test set, made ready as the clients' examples were; or refuse it."""
    if test is None and clients.test is not None:
        return clients.test
    held_out = clients.holdout_rows
    if test is None and held_out is not None and len(held_out):
        return clients.data.take(held_out)
    is_pair = isinstance(test, (tuple, list)) and len(test) == 2
    if not (is_pair or isinstance(test, Dataset) or is_examples(test)):
        raise DataError(
            "'test' is not a test set.",
            got=_described(test),
            expected="a pair (x, y) of inputs and labels, or a fedkeel.Dataset",
            do="give test=(x_test, y_test); or leave it out, and let clients hold out examples, on "
            "which models are then tested: fedkeel.from_clients(..., holdout=0.25)",
        )
    return like(clients.data, test, "test", clients.how.get("normalize", "none") != "none")


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse what is not a callback (ConfigError)."""
    wrong: list[object] = [callbacks]
    if isinstance(callbacks, (list, tuple)):
        wrong = [callback for callback in callbacks if not isinstance(callback, Callback)]
    if wrong:
        raise ConfigError(
            "'callbacks' is not a list of fedkeel.Callback.",
            got=_described(wrong[0]),
            do="write a subclass of fedkeel.Callback, and give callbacks=[MyCallback()]",
        )


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return f"an object of type {type(value).__name__}"


def checked_folder(out: object) -> Path | None:
    """Return the folder, or refuse what is not a path (ConfigError)."""
    return None if out is None else folder_of(out)


def folder_of(out: object) -> Path:
    """Return the folder, or refuse what is not a path, None too (ConfigError)."""
    if isinstance(out, (str, Path)):
        return expanded(out)
    raise ConfigError("'out' is not a folder.", got=_described(out), expected="a path")
