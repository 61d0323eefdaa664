"""A table of what attacks bring back is run, read and continued as others are."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.reproduce import run_cells as module
from fedkeel.reproduce.catalogue import load, names, read
from fedkeel.reproduce.outcome import table_lines
from fedkeel.reproduce.pages import TablePage
from fedkeel.reproduce.plan import TableRequest, table_runs
from fedkeel.reproduce.run_cells import run_cells

TABLE = """\
id = "leak"
title = "What leaks"
shows = "Nothing."
source = "Nowhere."
data = ["digits"]
seeds = 1
deviations = ["Everything is made up."]

[metric]
kind = "audited"
attack = "linear"

[base]
rounds = 2
data.source = "digits"
partition = { kind = "iid", clients = 200 }
model = { name = "mlp", args = { hidden = [16] } }
local = { lr = 0.1, steps = 1, batch_size = 1, sampling = "random" }
cohort.clients = 3
engine.kind = "sequential"

[[columns]]
id = "first"
name = "round 1"

[[columns]]
id = "second"
name = "round 2"
audit = { round = 2 }

[[rows]]
name = "FedAvg"
method = "fedavg"
"""


def test_a_table_of_attacks_is_made_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "leak.toml"
    file.write_text(TABLE)
    table, request = read(file), TableRequest(tmp_path / "out")
    runs = table_runs(table, request)
    assert len({run.folder for run in runs}) == 2  # the round is the attack's, not the run's
    assert run_cells(runs, 1).finished == 2
    lines = table_lines(table, runs)
    assert all(line.values[0] > 90.0 for line in lines)  # exact: one example in a linear layer
    text = "\n".join(TablePage(table, lines, request).to_text())
    assert "PSNR of what the attack linear brings back, dB" in text
    monkeypatch.setattr(module, "examine", None)
    assert run_cells(runs, 1).reused == 2


def test_an_interrupt_of_an_attack_ends_a_table_as_that_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "leak.toml"
    file.write_text(TABLE)
    runs = table_runs(read(file), TableRequest(tmp_path / "out"))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "examine", interrupted)
    outcomes = run_cells(runs, 1)
    assert (outcomes.finished, outcomes.complete) == (0, False)


def test_the_figures_of_recovered_images_can_be_run() -> None:
    attacked = [t for t in map(load, names()) if t.metric.attack is not None]
    assert [t.id for t in attacked] == ["fedgc-figure5", "fedreg-figure-c3", "fedreg-figure-c4"]
    for table in attacked:
        assert table.is_runnable
        for row, column in table.cells():
            audit = table.audit_of(row, column, 0)
            assert audit.attacks == (table.metric.attack,)
            assert audit.round <= table.experiment(row, column).rounds
