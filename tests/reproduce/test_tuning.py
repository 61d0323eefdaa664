"""Searches of a table: kept column by column, and never shown where there was none."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkeel.errors import RunError, TrainingError
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.records.rows import RoundRecord
from fedkeel.reproduce import tuning
from fedkeel.reproduce.blocks import table_blocks
from fedkeel.reproduce.catalogue import read
from fedkeel.reproduce.outcome import table_lines
from fedkeel.reproduce.plan import CellKey, TableRequest, table_runs
from reproduce.tiny import TINY, tiny

SEARCH = '\n[tune]\nspace = { "local.lr" = [0.01, 0.3] }\n'


def test_a_search_keeps_what_was_found_for_other_columns(tmp_path: Path) -> None:
    table = read(tiny(tmp_path, TINY.replace("rounds = 6", "rounds = 1") + SEARCH))
    for column in ("skew", "plain"):
        request = TableRequest(tmp_path / "out", columns=(column,), seeds=1, tuned=True)
        found = tuning.search(table, request, 1, ProgressDisplay())
        assert found.complete
    assert request.folder(table) == tmp_path / "out" / "tiny-tuned"
    assert tuning.read_tuned_settings(request.folder(table)) == found.settings
    assert {cell.column for cell in found.settings} == {"skew", "plain"}


def test_a_search_takes_the_weights_of_the_papers(tmp_path: Path) -> None:
    assert "weights" not in TINY
    table = read(tiny(tmp_path, TINY.replace("rounds = 6", "rounds = 1") + SEARCH))
    request = TableRequest(tmp_path / "out", columns=("plain",), seeds=1, tuned=True)
    tuning.search(table, request, 1, ProgressDisplay())
    records = [json.loads(p.read_text()) for p in tmp_path.glob("out/tune/*/*/run.json")]
    found = {record["method"]: record["weights"] for record in records}
    assert found == {"fedavg": "examples", "fedgh": "uniform"}


def test_two_searches_at_once_keep_what_the_other_finds(tmp_path: Path) -> None:
    """The other one ends, with another column, while this one's runs go on."""
    table = read(tiny(tmp_path, TINY.replace("rounds = 6", "rounds = 1") + SEARCH))
    folder = tmp_path / "out" / "tiny-tuned"

    def search(column: str, display: ProgressDisplay) -> tuning.CellSettings:
        request = TableRequest(tmp_path / "out", columns=(column,), seeds=1, tuned=True)
        return tuning.search(table, request, 1, display).settings

    class Waits(ProgressDisplay):
        other: tuning.CellSettings | None = None

        def end(self, run: str, how: str) -> None:
            self.other = self.other or search("plain", ProgressDisplay())

    display = Waits()
    ours = search("skew", display)
    assert display.other
    assert {column for _, column in display.other} == {"plain"}
    assert ours == tuning.read_tuned_settings(folder)
    assert {column for _, column in ours} == {"skew", "plain"}


@pytest.mark.parametrize("run", [pytest.param(6, marks=pytest.mark.slow), 10])
def test_an_interrupt_in_the_last_round_of_a_search_counts(tmp_path: Path, run: int) -> None:
    """The searches have six, two and two runs; a table is not begun after the last."""

    class Presses(ProgressDisplay):
        begun = 0

        def begin(self, run: str, rounds: int, done: int, score: object = None) -> None:
            self.begun += 1

        def row(self, name: str, row: RoundRecord) -> None:
            if (self.begun, row.round) == (run, 1):
                signal.raise_signal(signal.SIGINT)

    table = read(tiny(tmp_path, TINY.replace("rounds = 6", "rounds = 1") + SEARCH))
    request = TableRequest(tmp_path / "out", columns=("skew", "plain"), seeds=1, tuned=True)
    display = Presses()
    found = tuning.search(table, request, 1, display)
    assert (found.complete, display.begun) == (False, run)
    assert len(found.settings) == {6: 3, 10: 5}[run]


def test_a_cell_for_which_nothing_was_found_is_not_in_a_tuned_table(tmp_path: Path) -> None:
    table = read(tiny(tmp_path, TINY + SEARCH))
    request = TableRequest(tmp_path / "out", seeds=1, tuned=True)
    chosen = {CellKey("FedAvg", "skew"): {"local": {"lr": 0.01}}}
    (one,) = table_runs(table, replace(request, tuned_settings=chosen))
    assert (one.row.name, one.column.id, one.experiment.local.lr) == ("FedAvg", "skew", 0.01)
    assert table_runs(table, replace(request, tuned_settings={})) == []


FAILS = TINY.replace("rounds = 6", "rounds = 1").replace('"fedgh"\n', '"fedprox(mu=1e38)"\n')


def test_nor_is_one_of_which_every_trial_fails(tmp_path: Path) -> None:
    """Searched apart, as its settings are others; what was found before counts no more."""

    class Hears(ProgressDisplay):
        told = ""

        def warn(self, run: str, message: str) -> None:
            self.told += message

    table = read(tiny(tmp_path, FAILS + SEARCH))
    request, display = (
        TableRequest(tmp_path / "out", columns=("plain",), seeds=1, tuned=True),
        Hears(),
    )
    folder = request.folder(table)
    folder.mkdir(parents=True)
    earlier = '[{"row": "FedGH", "column": "plain", "chosen": {}}]'
    (folder / tuning.TUNED).write_text(earlier)
    found = tuning.search(table, request, 1, display)
    assert (list(found.settings), found.complete) == ([("FedAvg", "plain")], True)
    assert tuning.read_tuned_settings(folder) == found.settings
    assert "FedGH, iid: no trial could be finished" in display.told


def test_a_search_of_which_nothing_came_is_a_failure(tmp_path: Path) -> None:
    text = FAILS.replace('"fedavg"\n', '"fedprox(mu=1e37)"\n')
    table = read(tiny(tmp_path, text + SEARCH))
    request = TableRequest(tmp_path / "out", columns=("plain",), seeds=1, tuned=True)
    with pytest.raises(TrainingError, match="No trial"):
        tuning.search(table, request, 1, ProgressDisplay())


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"row": "FedAvg"}]', "null"])
def test_what_was_found_before_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / tuning.TUNED).write_text(text)
    with pytest.raises(RunError, match="cannot be read"):
        tuning.read_tuned_settings(tmp_path)


def test_learning_rates_are_shown_where_they_differ(tmp_path: Path) -> None:
    table = read(tiny(tmp_path, TINY + SEARCH))
    request = TableRequest(tmp_path / "out", columns=("skew",), seeds=1, tuned=True)
    (block,) = table_blocks(table, table_lines(table, table_runs(table, request)))
    assert "lr" not in block.heads
    rates = dict(zip([row.name for row in table.rows], (0.01, 0.3, 1.0), strict=True))
    chosen = {CellKey(name, "skew"): {"local": {"lr": lr}} for name, lr in rates.items()}
    (block,) = table_blocks(
        table, table_lines(table, table_runs(table, replace(request, tuned_settings=chosen)))
    )
    assert {row[0]: row[block.heads.index("lr")] for row in block.cells} == {
        "FedAvg": "0.01",
        "FedGH": "0.3",
        "Momentum (ours)": "1",
    }


def test_precision_and_own_files_make_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def folders(text: str) -> set[Path]:
        return {
            cell.folder
            for cell in table_runs(read(tiny(tmp_path, text)), TableRequest(tmp_path / "out"))
        }

    rounded = TINY.replace('kind = "sequential"', 'kind = "sequential"\nprecision = "bf16"')
    assert not folders(TINY) & folders(rounded)
    diagnosed = TINY.replace("[base.engine]", '[base.diagnose]\nkinds = ["drift"]\n\n[base.engine]')
    assert not folders(TINY) & folders(diagnosed)  # else the rows of a plain run would be taken
    own = TINY.replace('"digits"', '"own.npz"').replace('"mlp"', '"own_net:Net"')
    Path("own_net.py").write_text("first")
    np.savez("own.npz", x=np.zeros((4, 2)), y=np.arange(4))
    found = [folders(own)]
    np.savez("own.npz", x=np.zeros((4, 2)), y=np.arange(4)[::-1])
    found.append(folders(own))
    Path("own_net.py").write_text("second")
    found.append(folders(own))
    own = own.replace('source = "own.npz"', 'source = "own.npz"\ntest = "digits"')
    for labels in (np.arange(4), np.arange(4)[::-1]):  # a path, though a known set is so called
        with Path("digits").open("wb") as file:
            np.savez(file, x=np.ones((4, 2)), y=labels)
        found.append(folders(own))
    assert len(set.union(*found)) == sum(map(len, found))
