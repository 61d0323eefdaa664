"""What a search is told: lists and ranges, by dotted or nested keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.examples import values
from each import each
from fedkeel.config import Experiment, Range, Space, build, load, to_toml
from fedkeel.errors import ConfigError


def space(**given: object) -> Space:
    return build(Space, given, "file")


def test_without_a_word_the_learning_rate_is_searched() -> None:
    assert space().space == {"local.lr": (0.01, 0.03, 0.1, 0.3, 1.0)}
    assert (space().split, space().metric, space().seeds) == ("validation", "best", 1)


def test_keys_may_be_dotted_or_nested() -> None:
    dotted = space(space={"local.lr": [0.1, 1.0], "weights": ["uniform"]})
    nested = space(space={"local": {"lr": [0.1, 1.0]}, "weights": ["uniform"]})
    assert dotted == nested
    assert dotted.space == {"local.lr": (0.1, 1.0), "weights": ("uniform",)}


def test_methods_and_their_parts_have_tables() -> None:
    dotted = space(method={"fedgc.sgc": {"margin": [0.0, 1.0]}})
    nested = space(method={"fedgc": {"sgc": {"margin": [0.0, 1.0]}}})
    assert dotted == nested
    assert dotted.method == {"fedgc.sgc": {"margin": (0.0, 1.0)}}


def test_a_range_is_of_whole_numbers_where_both_ends_are_written_so() -> None:
    assert Range(low=1, high=5).is_whole
    assert not Range(low=1, high=5.0).is_whole
    assert not Range(low=0.5, high=5).is_whole


def test_a_choice_given_twice_is_one() -> None:
    assert space(space={"local.lr": [0.1, 0.1, 1.0]}).space["local.lr"] == (0.1, 1.0)


@each(
    ("given", "says"),
    [
        ({"space": {"local.lr": 0.1}}, "'space.local.lr' is 0.1: give a list"),
        ({"space": {"local": {"lr": 0.1}}}, "'space.local.lr' is 0.1: give a list"),
        ({"space": {"local.lr": []}}, "'space.local.lr' is an empty list"),
        ({"space": {"local.lr": [[0.1]]}}, "has a choice [0.1]"),
        ({"space": {"local.lr": {"low": 1.0, "high": 1.0}}}, "needs low < high"),
        ({"space": {"local.lr": {"low": 0, "high": 1, "log": True}}}, "needs low > 0"),
        ({"space": {"local.lr": {"low": 0.1, "hihg": 1}}}, "did you mean 'high'"),
        ({"space": {"local.lr": {"low": 0.1}}}, "needs a number for 'high', and has None"),
        ({"space": {"local.lr": {"low": 0.1, "high": "1"}}}, "needs a number for 'high'"),
        ({"space": {"local.lr": {"low": 0.1, "high": 1.0, "log": 3}}}, "valid boolean"),
        ({"method": {"mu": [0.1]}}, "'method.mu' has no table"),
        ({"sampler": "gird"}, "'sampler' cannot be used"),
        ({"trails": 3}, "has no key 'trails'"),
    ],
)
def test_what_cannot_be_read_is_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        space(**given)
    assert says in str(caught.value)
    assert len(caught.value.lines()) <= 4


def test_an_experiment_holds_one_and_writes_it(tmp_path: Path) -> None:
    given = values(tune__space={"local.lr": {"low": 0.01, "high": 1.0, "log": True}})
    file = tmp_path / "x.toml"
    file.write_text(to_toml(build(Experiment, given, "values")))
    assert load(file).tune.space == {"local.lr": Range(low=0.01, high=1.0, log=True)}
    laid = load(file, ["tune.space.local.momentum=[0.0, 0.9]", "tune.split=test"])
    assert laid.tune.space["local.momentum"] == (0.0, 0.9)
    assert laid.tune.split == "test"
    with pytest.raises(ConfigError, match=r"\[tune\] has no key 'seed_s'"):
        load(file, ["tune.seed_s=1"])
