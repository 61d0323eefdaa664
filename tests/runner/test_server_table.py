"""What the server remembers of each client is kept, saved and taken up again."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedkeel as fk
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.start import start
from fedkeel.tree import nbytes
from toys import prepared, same


class Kill(BaseException):
    """Ends a run as a kill would: nothing catches it."""


class Killer(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round == self.after:
            raise Kill


@pytest.mark.parametrize(
    ("method", "state", "after"),
    [
        ("fedvarp", "memory", 1),
        ("mifa", "disk", 4),
        ("scaffold+fedvarp", "disk", 1),
        pytest.param("fedvarp", "disk", 4, marks=pytest.mark.slow),
        pytest.param("mifa", "memory", 1, marks=pytest.mark.slow),
        pytest.param("scaffold+fedvarp", "memory", 4, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_with_the_same_rows(
    method: str, state: str, after: int, tmp_path: Path
) -> None:
    kind = {"method": method, "rounds": 6, "state": state}
    whole = start(prepared(**kind))
    with pytest.raises(Kill):
        start(prepared(**kind), tmp_path / "run", callbacks=[Killer(after)])
    again = start(prepared(**kind), tmp_path / "run", resume=True)
    assert same(whole, again)


def test_memory_and_disk_have_the_same_bits() -> None:
    runs = [start(prepared(method="mifa", rounds=5, state=s)) for s in ("memory", "disk")]
    assert same(*runs)


def test_the_table_is_reckoned_with() -> None:
    ready = prepared(method="fedvarp")
    model = nbytes(dict(ready.setup.training.network.params))
    needs = estimate_run(ready)
    assert needs.table == model
    assert needs.client_state == 0
    assert needs.rows == model * needs.clients
    assert estimate_run(prepared(method="fedavg")).table == 0


POISSON = {"seed": 76, "rounds": 10, "cohort": fk.Cohort(clients=2, sampling="poisson")}
COHORTS = [0, 2, 4, 2, 1, 0, 3, 2, 1, 6]
"""Two of six clients are expected; all six come after each of them has a row."""


@pytest.mark.parametrize(
    "method",
    ["mifa", "fedvarp", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fedau", "fedawa"))],
)
def test_more_clients_than_expected_come_or_nobody(method: str) -> None:
    """The table had room for the expected number of new rows, and the run ended there."""
    kinds = [("sequential", "memory"), ("sequential", "disk"), ("vectorized", "memory")]
    runs = [start(prepared(method=method, kind=k, state=s, **POISSON)) for k, s in kinds]
    assert [len(row.clients) for row in runs[0].rows[1:]] == COHORTS
    assert same(runs[0], runs[1])
    apart = [(runs[2].params[k] - v).abs().max() for k, v in runs[0].params.items()]
    assert max(apart) < 1e-5


def test_mifa_makes_a_step_when_nobody_comes() -> None:
    """Along the mean of the last updates of those who have ever come."""
    before, after = (start(prepared(method="mifa", **{**POISSON, "rounds": n})) for n in (5, 6))
    last = after.rows[6]
    assert last.clients == []
    assert last.diagnostics == before.rows[5].diagnostics
    assert max((after.params[k] - v).abs().max() for k, v in before.params.items()) > 1e-3
