"""What the server remembers of each client is kept, saved and taken up again."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.cost.memory import estimate_run
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
