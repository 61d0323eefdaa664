"""Every number that a table takes from diagnostics is measured in the runs of that table."""

from __future__ import annotations

from functools import cache

import pytest

from each import each
from fedkeel import config
from fedkeel.config import build
from fedkeel.reproduce.catalogue import names
from fedkeel.reproduce.measure import metric_value
from fedkeel.reproduce.table import CellMetric
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from reproduce.test_tables import stand_in, table_of

SLOW = ("fisher", "global_forgetting")
"""Kinds that take gradients of each example, or are shown only of a deep network."""


@cache
def diagnosed() -> dict[str, tuple[config.Experiment, list[CellMetric]]]:
    """A cell and its metrics for each kind of diagnostics, of the first table that has it."""
    found: dict[str, tuple[config.Experiment, list[CellMetric]]] = {}
    for table in map(table_of, names()):
        for row, column in table.cells() if table.base else ():
            metric = table.metric_of(column)
            if metric.diagnostic is None:
                continue
            cell = table.experiment(row, column)
            metrics = found.setdefault(", ".join(cell.diagnose.kinds), (cell, []))[1]
            metrics += [metric] if metric not in metrics else []
    return found


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
@each("key", diagnosed)
def test_what_a_table_shows_is_measured(key: str, slow: bool) -> None:
    if slow != (key in SLOW):
        return
    cell, metrics = diagnosed()[key]
    values = cell.model_dump(include=set(config.Run.model_fields), exclude_none=True)
    values |= {"rounds": 2, "cohort": {"clients": 2}, "engine": {"kind": "sequential"}}
    values["local"] = {**values["local"], "epochs": 1}
    values["diagnose"] = {**values["diagnose"], "every": 1, "examples": 8}
    prepared = prepare(build(config.Run, values, "a cell"), stand_in(cell))
    rows = start(prepared).rows
    assert metrics
    for metric in metrics:
        assert metric_value(metric, rows) is not None, metric.diagnostic


def test_all_five_kinds_that_figures_need_are_in_tables() -> None:
    kinds = {kind for cell, _ in diagnosed().values() for kind in cell.diagnose.kinds}
    assert kinds == {"forgetting", "global_forgetting", "fisher", "participation", "cka"}
