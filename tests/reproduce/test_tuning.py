"""Searches of a table: kept column by column, and never shown where there was none."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkeel.errors import RunError, TrainingError
from fedkeel.records.rows import RoundRecord
from fedkeel.reproduce import tuning
from fedkeel.reproduce.catalogue import read
from fedkeel.reproduce.formatting import blocks
from fedkeel.reproduce.outcome import lines
from fedkeel.reproduce.plan import Ask, cells
from fedkeel.runner.progress import Silent
from reproduce.tiny import TINY, tiny

SEARCH = '\n[tune]\nspace = { "local.lr" = [0.01, 0.3] }\n'


def test_a_search_keeps_what_was_found_for_other_columns(tmp_path: Path) -> None:
    table = read(tiny(tmp_path, TINY.replace("rounds = 6", "rounds = 1") + SEARCH))
    folder = tmp_path / "out" / "tiny-tuned"
    for column in ("skew", "plain"):
        ask = Ask(tmp_path / "out", columns=(column,), seeds=1)
        found, complete = tuning.search(table, ask, folder, 1, Silent())
        assert complete
    assert ask.folder(table, tuned=True) == folder
    assert tuning.read(folder) == found
    assert {column for _, column in found} == {"skew", "plain"}


def test_two_searches_at_once_keep_what_the_other_finds(tmp_path: Path) -> None:
    """The other one ends, with another column, while this one's runs go on."""
    table = read(tiny(tmp_path, TINY.replace("rounds = 6", "rounds = 1") + SEARCH))
    folder = tmp_path / "out" / "tiny-tuned"

    def search(column: str, watcher: Silent) -> tuning.Found:
        ask = Ask(tmp_path / "out", columns=(column,), seeds=1)
        return tuning.search(table, ask, folder, 1, watcher)[0]

    class Waits(Silent):
        other: tuning.Found | None = None

        def end(self, run: str, how: str) -> None:
            self.other = self.other or search("plain", Silent())

    watcher = Waits()
    ours = search("skew", watcher)
    assert watcher.other
    assert {column for _, column in watcher.other} == {"plain"}
    assert ours == tuning.read(folder)
    assert {column for _, column in ours} == {"skew", "plain"}


@pytest.mark.parametrize("run", [6, 10])
def test_an_interrupt_in_the_last_round_of_a_search_counts(tmp_path: Path, run: int) -> None:
    """The searches have six, two and two runs; a table is not begun after the last."""

    class Presses(Silent):
        begun = 0

        def begin(self, run: str, rounds: int, done: int) -> None:
            self.begun += 1

        def row(self, name: str, row: RoundRecord) -> None:
            if (self.begun, row.round) == (run, 1):
                signal.raise_signal(signal.SIGINT)

    table = read(tiny(tmp_path, TINY.replace("rounds = 6", "rounds = 1") + SEARCH))
    ask = Ask(tmp_path / "out", columns=("skew", "plain"), seeds=1)
    watcher = Presses()
    found, complete = tuning.search(table, ask, tmp_path / "out" / "tiny-tuned", 1, watcher)
    assert (complete, watcher.begun) == (False, run)
    assert len(found) == {6: 3, 10: 5}[run]


def test_a_cell_for_which_nothing_was_found_is_not_in_a_tuned_table(tmp_path: Path) -> None:
    table = read(tiny(tmp_path, TINY + SEARCH))
    ask = Ask(tmp_path / "out", seeds=1)
    chosen = {("FedAvg", "skew"): {"local": {"lr": 0.01}}}
    (one,) = cells(table, replace(ask, chosen=chosen))
    assert (one.row.name, one.column.id, one.experiment.local.lr) == ("FedAvg", "skew", 0.01)
    assert cells(table, replace(ask, chosen={})) == []


FAILS = TINY.replace("rounds = 6", "rounds = 1").replace('"fedgh"\n', '"fedprox(mu=1e38)"\n')


def test_nor_is_one_of_which_every_trial_fails(tmp_path: Path) -> None:
    """Searched apart, as its settings are others; what was found before counts no more."""

    class Hears(Silent):
        told = ""

        def hint(self, run: str, text: str) -> None:
            self.told += text

    table = read(tiny(tmp_path, FAILS + SEARCH))
    ask, watcher = Ask(tmp_path / "out", columns=("plain",), seeds=1), Hears()
    folder = ask.folder(table, tuned=True)
    folder.mkdir(parents=True)
    earlier = '[{"row": "FedGH", "column": "plain", "chosen": {}}]'
    (folder / tuning.TUNED).write_text(earlier)
    found, complete = tuning.search(table, ask, folder, 1, watcher)
    assert (list(found), complete) == ([("FedAvg", "plain")], True)
    assert tuning.read(folder) == found
    assert "FedGH, iid: no trial could be finished" in watcher.told


def test_a_search_of_which_nothing_came_is_a_failure(tmp_path: Path) -> None:
    text = FAILS.replace('"fedavg"\n', '"fedprox(mu=1e37)"\n')
    table = read(tiny(tmp_path, text + SEARCH))
    ask = Ask(tmp_path / "out", columns=("plain",), seeds=1)
    with pytest.raises(TrainingError, match="No trial"):
        tuning.search(table, ask, ask.folder(table, tuned=True), 1, Silent())


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"row": "FedAvg"}]', "null"])
def test_what_was_found_before_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / tuning.TUNED).write_text(text)
    with pytest.raises(RunError, match="cannot be read"):
        tuning.read(tmp_path)


def test_learning_rates_are_shown_where_they_differ(tmp_path: Path) -> None:
    table = read(tiny(tmp_path, TINY + SEARCH))
    ask = Ask(tmp_path / "out", columns=("skew",), seeds=1)
    (block,) = blocks(table, lines(table, cells(table, ask)))
    assert "lr" not in block.heads
    rates = dict(zip([row.name for row in table.rows], (0.01, 0.3, 1.0), strict=True))
    chosen = {(name, "skew"): {"local": {"lr": lr}} for name, lr in rates.items()}
    (block,) = blocks(table, lines(table, cells(table, replace(ask, chosen=chosen))))
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
        return {cell.folder for cell in cells(read(tiny(tmp_path, text)), Ask(tmp_path / "out"))}

    rounded = TINY.replace('kind = "sequential"', 'kind = "sequential"\nprecision = "bf16"')
    assert not folders(TINY) & folders(rounded)
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
