"""A privacy budget in a federation of nodes is that of the simulation, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedkeel as fk
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import prepared, same


@pytest.mark.parametrize("quantile", [None, 0.5])
def test_a_budget_of_clients(tmp_path: Path, quantile: float | None) -> None:
    privacy = fk.Privacy(epsilon=4.0, delta=0.01, quantile=quantile)
    cohort = fk.Cohort(clients=2, sampling="poisson")
    run = prepared(privacy=privacy, cohort=cohort, dtype="float64", rounds=3)
    remote = run_on_nodes(run, InProcessGrid(make_nodes(run, tmp_path)))
    local = start(run)
    for row in (*remote.rows, *local.rows):
        row.bytes_down.clear()  # a node of several clients gets the model once
        row.bytes_up.pop("evaluation", None)
    assert same(remote, local)
    assert 3.9 < (remote.rows[-1].epsilon or 0.0) <= 4.0


def test_a_budget_of_examples(tmp_path: Path) -> None:
    privacy = fk.Privacy(epsilon=4.0, delta=0.01, unit="example")
    run = prepared("scaffold", privacy=privacy, dtype="float64", rounds=2, per_round=6)
    remote = run_on_nodes(run, InProcessGrid(make_nodes(run, tmp_path)))
    local = start(run)
    for row in (*remote.rows, *local.rows):
        row.bytes_down.clear()
        row.bytes_up.pop("evaluation", None)
    assert same(remote, local)
    assert 3.9 < (remote.rows[-1].epsilon or 0.0) <= 4.0
