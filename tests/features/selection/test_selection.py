"""Cohorts by losses: who is chosen, what it costs, and that a run can be continued."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.base.rng import generator
from fedkeel.errors import ConfigError
from fedkeel.features.selection.rules import draw_by_utility, oort_utility
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.result import Result

MINIMA = np.array([0.0, 5.0, -3.0, 4.0, 1.0, -6.0])
"""Client k has the loss (theta - MINIMA[k])^2 / 2, on k + 1 examples."""


class Point(nn.Module):
    """One number, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.theta + 0.0 * x


def half_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.5 * (output - target).square().flatten(1).sum(1)


def run(cohort: fk.Cohort, method: str = "fedavg", **given: object) -> Result:
    ones = [np.ones((k + 1, 1)) for k in range(6)]
    settings = {
        "rounds": 8,
        "local": fk.Local(lr=0.25, steps=2, batch_size=3),
        "engine": fk.Engine(kind="sequential", dtype="float64"),
        "evaluation": fk.Evaluation(every=100),
        "weights": "uniform",
        **given,
    }
    return fk.run(
        method,
        task=fk.Task(Point, loss=half_square),
        clients=fk.from_clients([(x, m * x) for x, m in zip(ones, MINIMA, strict=True)]),
        test=(ones[0], ones[0]),
        cohort=cohort,
        progress=False,
        **settings,
    )


# --- power of choice -------------------------------------------------------------------------


def test_the_candidates_with_the_largest_losses_train() -> None:
    """With all clients as candidates it is known in closed form who is chosen."""
    result = run(fk.Cohort(clients=2, sampling="power_of_choice", candidates=6))
    theta, q = 0.0, 0.75**2
    for row in result.rows[1:]:
        chosen = np.sort(np.argsort(-np.abs(theta - MINIMA), kind="stable")[:2])
        assert row.clients == chosen.tolist()
        theta = float(np.mean(MINIMA[chosen] + q * (theta - MINIMA[chosen])))
    assert float(result.params["theta"]) == pytest.approx(theta, abs=1e-12)


def test_with_no_more_candidates_than_places_it_is_sampling_by_examples() -> None:
    by_loss = run(fk.Cohort(clients=3, sampling="power_of_choice", candidates=3))
    by_examples = run(fk.Cohort(clients=3, sampling="examples"))
    assert [row.clients for row in by_loss.rows] == [row.clients for row in by_examples.rows]
    assert torch.equal(by_loss.params["theta"], by_examples.params["theta"])


def test_asking_takes_time_and_traffic(tmp_path: Path) -> None:
    """The model has 8 bytes; a client takes 1 s for them, 1 s for a step, 1/3 s for its loss."""
    file = tmp_path / "devices.csv"
    file.write_text("client,speed\n0,0.1\n")
    system = fk.System(step_seconds=1.0, devices=str(file), mbit_down=64e-6, mbit_up=32e-6)
    cohort = fk.Cohort(clients=2, sampling="power_of_choice", candidates=6)
    result = run(cohort, rounds=1, system=system)
    row = result.rows[1]
    assert row.clients == [1, 5]  # with 2 and 6 examples: a pass is one and two batches
    assert row.bytes_down == {"model": 2 * 8, "selection": 4 * 8}
    assert row.bytes_up == {"model": 2 * 8, "selection": 6 * 8}
    asked = 1 + 1 / 3 / 0.1  # client 0 is the slowest to answer
    assert row.virtual_seconds == pytest.approx(asked + 2 + 2)


# --- Oort ------------------------------------------------------------------------------------


def test_utility() -> None:
    seconds, last = np.array([1.0, 4.0, 2.0]), np.array([1, 3, 2])
    found = oort_utility(np.array([6.0, 2.0, 4.0]), last, 3, seconds, 2.0, 2.0)
    clipped = np.array([5.8, 2.0, 4.0])  # 95th percentile of three, by lines between them
    expected = (clipped + np.sqrt(0.1 * np.log(3) / last)) * [1.0, 0.25, 1.0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_draws_are_in_proportion_to_the_utility_of_those_above_the_cut() -> None:
    random, clients = generator(0, "test"), np.array([3, 5, 7, 9])
    utility = np.array([10.0, 9.6, 9.4, 1.0])
    drawn = [int(draw_by_utility(clients, utility, 1, random)[0]) for _ in range(4000)]
    assert set(drawn) == {3, 5}
    assert abs(drawn.count(3) / 4000 - 10.0 / 19.6) < 0.03


def test_all_are_explored_and_large_losses_come_again() -> None:
    result = run(fk.Cohort(clients=2, sampling="oort", exploration=1.0), rounds=30, local=FLAT)
    seen = [set(row.clients) for row in result.rows[1:]]
    assert set().union(*seen[:3]) == set(range(6))  # two new ones in each of the first rounds
    # At theta = 0 utility is examples times m^2 / 2: 108, 32 and less
    last = [client for row in seen[5:] for client in row]
    assert last.count(5) > 20
    assert last.count(0) <= 2


FLAT = fk.Local(lr=1e-9, steps=1, batch_size="all")
"""Local training that hardly moves, so that losses stay as they are."""


def test_slow_clients_are_chosen_less(tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    file.write_text("client,speed\n5,0.01\n")
    system = fk.System(step_seconds=1.0, devices=str(file))
    cohort = fk.Cohort(clients=1, sampling="oort", exploration=1.0)
    count = [
        sum(row.clients == [5] for row in run(cohort, rounds=30, local=FLAT, **more).rows)
        for more in ({}, {"system": system})
    ]
    assert count[0] > 20
    assert count[1] <= 2


# --- going on, engines, refusals -------------------------------------------------------------


class StoppedError(Exception):
    pass


class Ends(Callback):
    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round == 4:
            raise StoppedError


@pytest.mark.parametrize("sampling", ["power_of_choice", "oort"])
def test_a_run_that_goes_on_chooses_the_same(sampling: str, tmp_path: Path) -> None:
    cohort = fk.Cohort(clients=2, sampling=sampling, dropout=0.2)
    engine = fk.Engine(kind="sequential", dtype="float64", checkpoint_seconds=0.0)
    whole = run(cohort, engine=engine)
    with pytest.raises(StoppedError):
        run(cohort, engine=engine, out=tmp_path / "run", callbacks=[Ends()])
    again = run(cohort, engine=engine, out=tmp_path / "run")
    assert [row.clients for row in again.rows] == [row.clients for row in whole.rows]
    assert torch.equal(again.params["theta"], whole.params["theta"])
    other = run(cohort, engine=fk.Engine(kind="workers", workers=2, dtype="float64"))
    assert torch.equal(other.params["theta"], whole.params["theta"])


@pytest.mark.parametrize(
    ("cohort", "given", "says"),
    [
        ({"sampling": "oort"}, {"method": "fedasync"}, "the server waits for none"),
        ({"sampling": "oort"}, {"method": "fedper(keep='theta')"}, "personal parameters"),
        ({"sampling": "power_of_choice", "candidates": 1}, {}, "does not fit"),
        (
            {"sampling": "power_of_choice"},
            {"privacy": fk.Privacy(epsilon=8.0, delta=1e-3)},
            "no account of privacy",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(cohort: dict, given: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(fk.Cohort(clients=2, **cohort), **given)


def test_a_setting_of_another_sampling_is_refused() -> None:
    with pytest.raises(ConfigError, match="'candidates' is only for sampling = 'power_of_choice'"):
        fk.Cohort(clients=2, candidates=3)
