"""What is searched for a method, and which settings a point stands for."""

from __future__ import annotations

import pytest

import fedkeel as fk
from each import each
from fedkeel import config
from fedkeel.config import Range, Space
from fedkeel.errors import CompositionError, ConfigError, FedkeelError
from fedkeel.study.search_space import Axis, check_space, search_axes, settings_at

RATES = {"local.lr": (0.1, 1.0)}


def settings(**more: object) -> config.Run:
    return config.Run(rounds=2, local=fk.Local(lr=0.05, epochs=1), **more)


def space(**method: dict[str, object]) -> Space:
    return Space(space=RATES, method=method)


def names(method: str, searched: Space) -> list[str]:
    return [axis.name for axis in search_axes(method, searched)]


# --- which axes -----------------------------------------------------------------------------------


def test_settings_are_for_all_and_hyperparameters_for_their_method() -> None:
    searched = space(fedprox={"mu": (0.1, 1.0)})
    assert names("fedavg", searched) == ["local.lr"]
    assert names("fedprox", searched) == ["local.lr", "fedprox.mu"]
    assert names("gcfed+fedprox", searched) == ["local.lr", "fedprox.mu"]


def test_what_an_expression_gives_stays() -> None:
    assert names("fedprox(mu=0.5)", space(fedprox={"mu": (0.1, 1.0)})) == ["local.lr"]


def test_another_name_of_a_method_is_that_method() -> None:
    searched = space(momentum={"beta": (0.5, 0.9)})
    assert names("fedavgm", searched) == ["local.lr", "fedavgm.beta"]
    assert names("momentum", space(fedavgm={"beta": (0.5, 0.9)}))[1:] == ["momentum.beta"]


def test_a_part_has_the_choices_of_its_method_and_its_own() -> None:
    searched = space(fedgc={"margin": (0.0, 1.0)}, **{"fedgc.sgc": {"margin": (2.0, 3.0)}})
    assert search_axes("fedgc.sgc", searched)[1].choices == (2.0, 3.0)
    assert search_axes("fedgc", searched)[1].choices == (0.0, 1.0)
    assert names("fedgc.cgc", searched) == ["local.lr", "fedgc.cgc.margin"]


# --- a point --------------------------------------------------------------------------------------


def test_a_point_sets_settings_and_hyperparameters() -> None:
    method, searched = "fedavg + fedprox+gcfed", space(fedprox={"mu": (0.1, 1.0)})
    axes = search_axes(method, searched)
    one = settings_at({"local.lr": 1.0, "fedprox.mu": 0.1}, axes, method, settings())
    assert (one.local.lr, one.local.epochs) == (1.0, 1)
    assert one.method == "fedavg+fedprox(mu=0.1)+gcfed"
    assert fk.parse(one.method).parts[0].mu == 0.1


def test_an_expression_without_hyperparameters_stays_as_it_was_written() -> None:
    axes = search_axes("fedavg + gcfed", space())
    assert (
        settings_at({"local.lr": 0.1}, axes, "fedavg + gcfed", settings()).method
        == "fedavg + gcfed"
    )


def test_deeper_settings_and_text() -> None:
    searched = Space(
        space={"local.schedule.final": (0.5,), "weights": ("uniform",), "cohort.clients": (3,)}
    )
    axes = search_axes("fedavg", searched)
    point = {axis.name: axis.examples[0] for axis in axes}
    one = settings_at(point, axes, "fedavg", settings())
    assert (one.local.schedule.final, one.weights, one.cohort.clients) == (0.5, "uniform", 3)


def test_an_experiment_stays_one() -> None:
    tables = {"data": {"source": "digits"}, "model": {"name": "mlp", "args": {"hidden": [8]}}}
    experiment = config.build(
        config.Experiment,
        {
            "rounds": 1,
            "local": {"lr": 0.1, "epochs": 1},
            "partition": {"kind": "iid", "clients": 2},
            "tune": {"method": {"fedprox": {"mu": [0.1]}}},
            **tables,
        },
        "values",
    )
    assert settings_at({}, (), "fedavg", experiment) == experiment


# --- what is refused ------------------------------------------------------------------------------


@each(
    ("searched", "methods", "kind", "says"),
    [
        (Space(space={"local.lrr": (1,)}), ["fedavg"], ConfigError, "did you mean 'local.lr'"),
        (Space(space={"lr": (1,)}), ["fedavg"], ConfigError, "local.lr"),
        (Space(space={"learning_rate": (1,)}), ["fedavg"], ConfigError, "local.lr"),
        (Space(space={"rounds": (1, 2)}), ["fedavg"], ConfigError, "cannot be searched"),
        (Space(space={"local": (1, 2)}), ["fedavg"], ConfigError, "cannot be searched"),
        (Space(space={"partition.alpha": (1,)}), ["fedavg"], ConfigError, "cannot be searched"),
        (Space(space={"local.lr": (0.1, -1.0)}), ["fedavg"], ConfigError, "greater than 0"),
        (Space(space={"local.lr": ("fast",)}), ["fedavg"], ConfigError, "'local.lr'"),
        (Space(space={"local.epochs": (1.5,)}), ["fedavg"], ConfigError, "'local.epochs'"),
        (
            Space(space={"local.lr": Range(low=-1.0, high=1.0)}),
            ["fedavg"],
            ConfigError,
            "greater than 0",
        ),
        (Space(space={"local.nesterov": (True,)}), ["fedavg"], ConfigError, "needs 'momentum'"),
        (space(fedpox={"mu": (1,)}), ["fedavg"], CompositionError, "did you mean 'fedprox'"),
        (space(fedprox={"my": (1,)}), ["fedavg"], ConfigError, "did you mean 'mu'"),
        (space(fedavg={"mu": (1,)}), ["fedavg"], ConfigError, "takes none"),
        (space(**{"fedprox+gcfed": {"mu": (1,)}}), ["fedavg"], ConfigError, "not the name"),
        (space(fedprox={"mu": (-1.0,)}), ["fedprox"], CompositionError, "mu"),
        (space(fedprox={"mu": ("much",)}), ["fedprox"], CompositionError, "mu"),
        (space(), ["fedavg", "fedpox"], CompositionError, "did you mean 'fedprox'"),
        (space(), ["momentum+gradma.s"], CompositionError, "which takes one"),
    ],
)
def test_choices_that_no_run_can_be_made_with(
    searched: Space, methods: list[str], kind: type[FedkeelError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        check_space(settings(), methods, searched)
    assert says in str(caught.value)
    assert len(caught.value.lines()) <= 4


def test_a_point_of_a_grid_is_looked_at_whole() -> None:
    """Each value by itself would do."""
    searched = Space(space={"local.momentum": (0.9, 0.0), "local.nesterov": (True, False)})
    with pytest.raises(ConfigError, match="needs 'momentum'"):
        check_space(settings(), ["fedavg"], searched)


# --- the edge -------------------------------------------------------------------------------------


@each(
    ("choices", "value", "end"),
    [
        ((0.01, 0.1, 1.0), 0.01, "low"),
        ((0.01, 0.1, 1.0), 0.1, None),
        ((1.0, 0.1, 0.01), 1.0, "high"),
        ((0.0, 0.1, 1.0), 0.0, None),
        ((0.1,), 0.1, None),
        (("uniform", "examples"), "uniform", None),
        ((True, False), True, None),
        ((1, "all"), 1, None),
        (Range(low=0.001, high=1.0, log=True), 0.001, "low"),
        (Range(low=0.001, high=1.0, log=True), 0.0013, "low"),
        (Range(low=0.001, high=1.0, log=True), 0.03, None),
        (Range(low=0.001, high=1.0), 0.03, "low"),
        (Range(low=0.0, high=1.0), 0.0, None),
        (Range(low=0.0, high=1.0), 0.97, "high"),
        (Range(low=1, high=5), 5, "high"),
    ],
)
def test_the_end_at_which_a_value_lies(choices: object, value: object, end: str | None) -> None:
    assert Axis("x", choices, None, "x").end_at(value) == end
