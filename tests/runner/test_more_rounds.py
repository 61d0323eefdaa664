"""More rounds for a finished run: the bits of a run that had them from the start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeel import config
from fedkeel.errors import RunError
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.runner.start import start


def made(folder: Path, rounds: int, resume: bool = False, **local: object) -> Result:
    values = {
        "method": "scaffold",
        "rounds": rounds,
        "data": {"source": "digits", "limit": 200},
        "partition": {"kind": "iid", "clients": 4},
        "model": {"name": "mlp", "args": {"hidden": [4]}},
        "local": {"lr": 0.1, "steps": 2, **local},
        "cohort": {"clients": 2},
        "engine": {"kind": "sequential"},
    }
    experiment = config.build(config.Experiment, values, "test")
    return start(prepare(experiment, gather(experiment)), folder, resume)


def test_a_finished_run_goes_on_to_more_rounds(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", 4)
    short = made(tmp_path / "run", 2)
    assert len(short.rows) == 3
    with pytest.raises(RunError, match="unfinished"):
        made(tmp_path / "run", 4)
    longer = made(tmp_path / "run", 4, resume=True)
    assert [row.clients for row in longer.rows] == [row.clients for row in whole.rows]
    assert [row.test for row in longer.rows] == [row.test for row in whole.rows]
    assert all(torch.equal(longer.params[k], whole.params[k]) for k in whole.params)
    assert longer.record.key == whole.record.key
    again = made(tmp_path / "run", 4)
    assert all(torch.equal(again.params[k], whole.params[k]) for k in whole.params)
    with pytest.raises(RunError, match="holds another run"):
        made(tmp_path / "run", 3, resume=True)

    made(tmp_path / "cosine", 2, schedule={"kind": "cosine"})
    with pytest.raises(RunError, match="cannot go on to 4") as caught:
        made(tmp_path / "cosine", 4, resume=True, schedule={"kind": "cosine"})
    assert "cosine" in str(caught.value)
