"""What is tried next: whole grids, draws, what Optuna suggests; the same each time."""

from __future__ import annotations

import sys

import pytest

from fedkeel.config import Range, Space
from fedkeel.errors import ConfigError
from fedkeel.study.samplers import WAVE, GridSampler, OptunaSampler, Sampler, make_sampler
from fedkeel.study.search_space import Point, search_axes

RANGE = Range(low=0.001, high=1.0, log=True)


def made(expression: str = "fedavg", seed: int = 0, **space: object) -> Sampler:
    searched = Space(**space)
    return make_sampler(search_axes(expression, searched), searched, seed)


def asked(suggests: Sampler, value: object = lambda point: 0.5) -> list[list[Point]]:
    """Every wave, told what `value` makes of each point."""
    waves = []
    while wave := suggests.ask():
        waves.append(wave)
        for point in wave:
            suggests.tell(point, value(point))
    return waves


def points(waves: list[list[Point]]) -> list[Point]:
    return [point for wave in waves for point in wave]


def test_a_grid_is_every_combination_once() -> None:
    grid = made("fedprox", space={"local.lr": (0.1, 1.0)}, method={"fedprox": {"mu": (1, 2, 3)}})
    assert isinstance(grid, GridSampler)
    assert (grid.size, grid.trials) == (6, 6)
    assert [tuple(p.values()) for p in points(asked(grid))] == [
        (0.1, 1),
        (0.1, 2),
        (0.1, 3),
        (1.0, 1),
        (1.0, 2),
        (1.0, 3),
    ]


def test_a_method_with_nothing_to_search_has_one_trial() -> None:
    assert asked(made(space={})) == [[{}]]


def test_of_a_grid_that_is_too_large_points_are_drawn() -> None:
    many = {f"local.{name}": tuple(i / 1e4 for i in range(999)) for name in ("lr", "momentum")}
    first, again = (points(asked(made(space=many, trials=7))) for _ in range(2))
    assert first == again
    assert len({tuple(p.values()) for p in first}) == 7
    assert points(asked(made(space=many, trials=7, seed=1))) != first


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_no_more_points_than_trials_are_a_grid(sampler: str) -> None:
    assert isinstance(made(sampler=sampler, trials=5), GridSampler)


def test_random_choices_of_lists_are_never_the_same_twice() -> None:
    drawn = points(asked(made(sampler="random", trials=4)))
    assert len({p["local.lr"] for p in drawn}) == 4


@pytest.mark.parametrize("sampler", ["random", "tpe", None])
def test_ranges_are_suggested_within_their_bounds(sampler: str | None) -> None:
    space = {"local.lr": RANGE, "local.epochs": Range(low=1, high=3)}
    waves = asked(made(space=space, sampler=sampler, trials=10))
    assert [len(wave) for wave in waves] == [WAVE, WAVE, 2]
    for point in points(waves):
        assert 0.001 <= point["local.lr"] <= 1.0
        assert point["local.epochs"] in (1, 2, 3)
        assert isinstance(point["local.epochs"], int)
        assert len(f"{point['local.lr']:.12g}".strip("0.").replace(".", "")) <= 5
    assert len({tuple(p.values()) for p in points(waves)}) == 10


def test_whole_numbers_are_a_grid_where_they_are_few() -> None:
    drawn = asked(made(space={"local.epochs": Range(low=1, high=3)}))
    assert drawn == [[{"local.epochs": 1}, {"local.epochs": 2}, {"local.epochs": 3}]]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_suggestions_repeat_with_what_they_were_told(sampler: str) -> None:
    def search(seed: int = 0, best: float = 0.1) -> list[list[Point]]:
        own = made(space={"local.lr": RANGE}, sampler=sampler, trials=12, seed=seed)
        return asked(own, lambda p: 1 - abs(p["local.lr"] - best))

    assert search() == search()
    assert search(seed=1) != search()
    assert (search(best=1.0) == search()) == (sampler == "random")


def test_tpe_looks_where_it_was_good() -> None:
    def value(point: Point) -> float | None:
        return None if point["local.lr"] > 0.5 else 1.0 - abs(point["local.lr"] - 0.2)

    own = made(space={"local.lr": Range(low=0.0, high=10.0)}, trials=40)
    found = [point["local.lr"] for point in points(asked(own, value))]
    early, late = found[:WAVE], found[-10:]
    assert sum(late) / len(late) < 0.5 * sum(early) / len(early)


@pytest.mark.parametrize("repeats", [1, 50])
def test_tpe_tries_no_combination_twice_and_finds_the_last_one(
    repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedkeel.study.samplers.MAX_REPEATS", repeats)
    space = {"local.lr": (0.1, 0.2, 0.3, 0.4), "weights": ("examples", "uniform", "processed")}
    own = made(space=space, sampler="tpe", trials=11)
    assert isinstance(own, OptunaSampler)
    assert (own.size, own.trials) == (12, 11)
    found = points(asked(own, lambda p: float(p["local.lr"] == 0.1)))
    assert len({tuple(p.values()) for p in found}) == 11


def test_a_range_with_few_numbers_ends_early() -> None:
    own = made(space={"local.lr": Range(low=0.1, high=0.1001)}, trials=8)
    assert sorted(p["local.lr"] for p in points(asked(own))) == [0.1, 0.1001]


def test_a_grid_of_a_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'local\.lr' is a range"):
        made(space={"local.lr": RANGE}, sampler="grid")


def test_without_optuna_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="needs Optuna") as caught:
        made(space={"local.lr": RANGE})
    assert "pip install 'fedkeel[tune]'" in str(caught.value)
    assert len(points(asked(made()))) == 5
