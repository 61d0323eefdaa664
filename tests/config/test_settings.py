"""Settings as values: ranges, types, what depends on what, schedules and cohorts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import annotated_types
import numpy as np
import pytest
from pydantic import ValidationError

from each import each
from fedkeel import config
from fedkeel.base.settings import RenamedSetting
from fedkeel.config import Cohort, Engine, Experiment, Local, Partition, Schedule, build
from fedkeel.config.settings import Settings
from fedkeel.errors import ConfigError
from fedkeel.features.time.settings import DeviceClass, System

KINDS = [
    kind
    for kind in vars(config).values()
    if isinstance(kind, type) and issubclass(kind, Settings) and kind is not Settings
] + [System, DeviceClass]
FIELDS = [(kind, name) for kind in KINDS for name in kind.model_fields]
REQUIRED: dict[type[Settings], dict[str, Any]] = {
    config.Data: {"source": "digits"},
    DeviceClass: {"share": 1.0},
    config.Model: {"name": "mlp"},
    config.OtherModel: {"name": "mlp", "share": 0.5},
    config.Partition: {"clients": 2, "alpha": 1.0, "kind": "dirichlet"},
    config.Local: {"lr": 0.1, "epochs": 1},
    config.Range: {"low": 1, "high": 2},
    config.Privacy: {"epsilon": 1.0, "delta": 1e-5},
    config.Run: {"rounds": 1, "local": {"lr": 0.1, "epochs": 1}},
}
"""The settings that each table needs."""


def required(kind: type[Settings]) -> dict[str, Any]:
    if kind is Experiment:
        tables = {config.Data: "data", config.Partition: "partition", config.Model: "model"}
        return REQUIRED[config.Run] | {name: REQUIRED[table] for table, name in tables.items()}
    return REQUIRED.get(kind, {})


def bounds() -> list[tuple[type[Settings], str, str, float]]:
    """Every bound of every number."""
    out = []
    for kind, name in FIELDS:
        for mark in kind.model_fields[name].metadata:
            for attribute in ("ge", "gt", "le", "lt"):
                if isinstance(mark, getattr(annotated_types, attribute.capitalize())):
                    out.append((kind, name, attribute, getattr(mark, attribute)))
    return out


def floats() -> list[tuple[type[Settings], str]]:
    return [(k, n) for k, n in FIELDS if "float" in str(k.model_fields[n].annotation)]


# --- ranges and types ------------------------------------------------------------------------


def test_there_are_bounds_to_look_at() -> None:
    assert len(bounds()) > 30
    assert (Local, "momentum", "lt", 1.0) in bounds()


@each(("kind", "name", "sign", "bound"), bounds())
def test_a_number_out_of_range_is_refused_by_name(
    kind: type[Settings], name: str, sign: str, bound: float
) -> None:
    field = kind.model_fields[name]
    whole = "int" in str(field.annotation)
    step = 1 if whole else 1e-6
    for mark in field.metadata:
        if isinstance(mark, annotated_types.MultipleOf):
            step = mark.multiple_of
    outside = {"ge": bound - step, "le": bound + step, "gt": bound, "lt": bound}[sign]
    with pytest.raises(ConfigError) as caught:
        build(kind, required(kind) | {name: int(outside) if whole else float(outside)}, "file")
    assert f"{name!r} cannot be used" in caught.value.what
    words = {"ge": "greater than or equal to", "gt": "greater than"}
    words |= {"le": "less than or equal to", "lt": "less than"}
    assert words[sign] in str(caught.value.expected)


@each("value", [math.inf, -math.inf, math.nan, "0.1", True, [0.1]])
@each(("kind", "name"), floats())
def test_fractions_are_finite_numbers(kind: type[Settings], name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        build(kind, required(kind) | {name: value}, "file")


@each(("kind", "name"), FIELDS)
def test_a_value_of_no_use_is_refused(kind: type[Settings], name: str) -> None:
    """Nothing is converted in silence."""
    with pytest.raises(ConfigError) as caught:
        build(kind, required(kind) | {name: 1j}, "file")
    assert len(str(caught.value).splitlines()) <= 4
    assert f"'{name}' cannot be used" in caught.value.what


@each("kind", KINDS)
def test_settings_are_frozen_and_closed(kind: type[Settings]) -> None:
    made = build(kind, required(kind), "file")
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, next(iter(kind.model_fields)), 1)
    with pytest.raises(ConfigError, match="has no key 'zzz'"):
        build(kind, required(kind) | {"zzz": 1}, "file")


@each(("kind", "name"), FIELDS)
def test_what_may_be_none_is_none_where_it_is_not_given(kind: type[Settings], name: str) -> None:
    """So leaving None out of a file says the same."""
    field = kind.model_fields[name]
    if "None" in str(field.annotation):
        assert field.default is None


@each("kind", KINDS)
def test_every_key_is_explained(kind: type[Settings]) -> None:
    text = "\n".join(inspect.getdoc(base) or "" for base in kind.__mro__ if base in KINDS)
    for name in kind.model_fields:
        assert f"\n    {name}: " in text


def test_a_whole_number_will_do_for_a_fraction() -> None:
    assert Local(lr=1, epochs=1).lr == 1.0


# --- what depends on what --------------------------------------------------------------------


@each(
    ("kind", "given", "says"),
    [
        (Local, {"steps": 3}, "give either 'epochs' or 'steps'"),
        (Local, {"epochs": None}, "give either 'epochs' or 'steps'"),
        (Local, {"batch_size": 0}, "'batch_size' must be >= 1 or \"all\""),
        (Local, {"nesterov": True}, "'nesterov' needs 'momentum' > 0"),
        (Partition, {"kind": "iid", "clients": None}, "needs 'clients'"),
        (Partition, {"kind": "dirichlet", "alpha": None}, "needs 'alpha' > 0"),
        (Partition, {"kind": "dirichlet_prior", "alpha": None}, "needs 'alpha' > 0"),
        (Partition, {"kind": "source"}, "takes the clients from the data; drop 'clients'"),
        (Partition, {"kind": "client"}, "takes the clients from the data; drop 'clients'"),
        (Partition, {"sizes": [1, 2, 3]}, "'sizes' has 3 entries for 2 clients"),
        (Partition, {"kind": "iid", "sigma": 1.0}, "'sigma' is for sizes = \"power\""),
        (Local, {"sampling": "random"}, "is for 'steps', and these are 'epochs'"),
        (Schedule, {"decay": 0.5}, "'kind' is not given, and 'decay' is for 'exponential'"),
        (Schedule, {"milestones": [1]}, "'milestones' and 'factors' must have the same length"),
        (Schedule, {"milestones": [2, 1], "factors": [0.5, 0.1]}, "'milestones' must ascend"),
        (Schedule, {"milestones": [1], "factors": [0.0]}, "'factors' must be > 0"),
        (Cohort, {"participation": 0.5, "clients": 3}, "'participation' or 'clients', not both"),
    ],
)
def test_settings_that_do_not_go_together(
    kind: type[Settings], given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(kind, required(kind) | given, "file")
    assert says in caught.value.what


def test_a_partition_whose_kind_is_forgotten_is_refused() -> None:
    for given, name in (
        ({"alpha": 0.1}, "alpha"),
        ({"classes_per_client": 2}, "classes_per_client"),
    ):
        with pytest.raises(ConfigError, match=f"'kind' is not given, and '{name}' is for"):
            Partition(clients=2, **given)
    assert Partition(clients=2, min_size=1).idle == {}  # as it is anyway
    left_over = Partition(clients=2, kind="iid", alpha=0.1, sizes="power", sigma=1.0)
    assert left_over.idle == {"alpha": ("dirichlet", "dirichlet_gradma", "dirichlet_prior")}
    assert build(Partition, left_over.model_dump(), "file") == left_over


def test_settings_that_do_go_together() -> None:
    assert Partition(kind="source", clients=None).clients is None
    assert Partition(kind="iid", clients=2, sizes=(1, 2)).sizes == (1, 2)
    assert Local(lr=0.1, steps=3, momentum=0.5, nesterov=True, batch_size="all").steps == 3


# --- schedules -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), [1.0] * 5),
        (Schedule(kind="exponential", decay=0.5), [1.0, 0.5, 0.25, 0.125, 0.0625]),
        (Schedule(kind="cosine"), [1.0, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0.0]),
        (Schedule(kind="cosine", final=0.5), [1.0, (6 + 2**0.5) / 8, 0.75, (6 - 2**0.5) / 8, 0.5]),
        (
            Schedule(kind="piecewise", milestones=(1, 3), factors=(0.5, 0.1)),
            [1.0, 0.5, 0.5, 0.1, 0.1],
        ),
    ],
)
def test_schedules_by_hand(schedule: Schedule, expected: list[float]) -> None:
    """Of four rounds, and the end that none reaches."""
    assert [schedule.factor(r, 4) for r in range(5)] == pytest.approx(expected, abs=1e-15)


# --- cohorts ---------------------------------------------------------------------------------


@each(
    ("cohort", "population", "size"),
    [
        (Cohort(), 7, 7),
        (Cohort(participation=1.0), 7, 7),
        (Cohort(participation=0.1), 100, 10),
        (Cohort(participation=0.1), 17, 2),
        (Cohort(participation=0.3), 10, 3),  # 0.3 * 10 is not exactly 3
        (Cohort(participation=0.01), 50, 0),
        (Cohort(clients=3), 7, 3),
        (Cohort(clients=7), 7, 7),
        (Cohort(clients=8), 7, 0),
    ],
)
def test_the_size_of_a_cohort(cohort: Cohort, population: int, size: int) -> None:
    if size:
        assert cohort.size(population) == size
        return
    with pytest.raises(ConfigError) as caught:
        cohort.size(population)
    assert "cohort." in caught.value.what
    assert len(str(caught.value).splitlines()) <= 4


# --- settings that are made in Python --------------------------------------------------------


@each(
    ("make", "says"),
    [
        (lambda: Local(lr=0.1, epoch=1), "Local has no 'epoch'.\n  do   did you mean 'epochs'?"),
        (lambda: Local(lr="a", epochs=1), "Local: 'lr' cannot be used.\n  got 'a'; expected a"),
        (lambda: Local(lr=0.1), "Local: give either 'epochs' or 'steps'."),
        (lambda: Local(epochs=1), "Local: 'lr' is missing."),
        (
            lambda: Local(lr=0.1, epochs=1, schedule="cosine"),
            "expected fedkeel.config.Schedule(...)",
        ),
        (lambda: Local(lr=0.1, epochs=1, schedule={"kid": 1}), "Local.schedule has no 'kid'."),
        (lambda: Schedule(milestones=3), "expected a list or a tuple"),
        (lambda: config.Model(name="x", args=3), "expected a dict"),
    ],
)
def test_a_mistake_in_python_is_said_in_its_words(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)
    assert len(caught.value.lines()) <= 4
    assert "http" not in str(caught.value)


def test_a_mistake_below_another_table_keeps_its_whole_path() -> None:
    with pytest.raises(ConfigError, match=r"try\.toml: \[local\.schedule\] has no key 'kid'"):
        build(config.Run, {"rounds": 1, "local": {"lr": 1, "schedule": {"kid": 1}}}, "try.toml")


@pytest.mark.parametrize("values", [{"kind": "piecewise"}, {"milestones": (1,), "factors": (0.5,)}])
def test_a_schedule_by_pieces_needs_them(values):
    with pytest.raises(ConfigError, match="belong to kind = 'piecewise'"):
        Schedule(**values)


def test_numbers_of_numpy_are_numbers():
    made = Local(lr=np.float32(0.5), epochs=np.int64(2), batch_size=np.int32(4))
    assert (made.lr, made.epochs, made.batch_size) == (0.5, 2, 4)
    assert type(made.epochs) is int
    with pytest.raises(ConfigError, match="lr"):
        Local(lr=np.zeros(2), epochs=1)


def test_old_names_are_accepted_with_a_warning() -> None:
    with pytest.warns(RenamedSetting, match="'chunk' is now called 'parallel_clients'"):
        assert Engine(chunk=8).parallel_clients == 8
    with pytest.warns(RenamedSetting, match="'vectorised' .* 'kind' is now called 'vectorized'"):
        assert Engine(kind="vectorised").kind == "vectorized"
    with pytest.warns(RenamedSetting, match="'screen' is now called 'outlier_factor'"):
        assert config.Flower(screen=50.0).outlier_factor == 50.0
    with pytest.raises(ConfigError, match="'chunk' is the old name of 'parallel_clients'"):
        Engine(chunk=8, parallel_clients=8)
