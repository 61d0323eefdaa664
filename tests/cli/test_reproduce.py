"""``fedkeel reproduce``: the list, a table as text, JSON and pages, and what a smaller one says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import call
from fedkeel.reproduce import estimate
from fedkeel.reproduce.catalogue import load, names
from reproduce.tiny import TINY, tiny

WORDS = ("reproduce", "tiny.toml", "--jobs", "2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny(tmp_path)
    return tmp_path


def test_a_table_as_json_and_pages(folder: Path) -> None:
    done = call(*WORDS, "--json", "--seeds", "2", "--write", "docs", "--columns", "skew, far")
    assert done.code == 0, done.err
    rows = {(row["row"], row["column"]): row for row in done.json}
    assert set(rows) == {
        *((row, "skew") for row in ("FedAvg", "FedGH", "Momentum")),
        *((row, "far") for row in ("FedAvg", "FedGH")),
    }
    own = rows["FedGH", "skew"]
    assert (own["published"], own["published_gain"], own["baseline"]) == (55.0, 5.0, "FedAvg")
    assert own["difference"] == pytest.approx(own["measured"] - 55.0)
    assert own["gain_low"] <= own["gain"] <= own["gain_high"]
    assert (own["quick"], own["seeds"], own["state"]) == (None, 2, "done")
    assert (rows["FedAvg", "far"]["measured"], rows["FedGH", "far"]["published"]) == (None, "never")
    page = (folder / "runs" / "reproduce" / "tiny" / "report.html").read_text()
    assert "Tiny: a table for tests" in page
    assert "Everything is made up." in page
    assert 'href="skew.html"' in page
    assert (folder / "runs" / "reproduce" / "tiny" / "skew.html").stat().st_size > 100_000
    text = (folder / "docs" / "tiny.md").read_text()
    for said in ("| FedGH | 55.00 |", "torch ", "Machine: ", "Date: 2", "Seeds: 3, 4", "best %"):
        assert said in text
    assert "a set that is gone: The set is gone." in text
    assert str(folder) not in text + page


def test_a_reading_by_hand_stays(folder: Path) -> None:
    words = (*WORDS, "--columns", "skew", "--seeds", "1", "--quiet", "--write", "docs")
    assert call(*words).code == 0
    file = folder / "docs" / "tiny.md"
    first = file.read_text()
    file.write_text(first + "\n## Reading\n\nIt holds.\n")
    assert call(*words, "--show").code == 0
    assert file.read_text() == first + "\n## Reading\n\nIt holds.\n"


def test_a_smaller_version_says_so_on_every_line(folder: Path) -> None:
    done = call(*WORDS, "--quick", "--write", "docs")
    assert done.code == 0, done.err
    lines = [line for line in (done.out + done.err).splitlines() if line]
    assert len(lines) > 8
    assert all(line.startswith("quick:") for line in lines)
    assert "2 rounds of 6, the first setting" in done.out
    page = (folder / "runs" / "reproduce" / "tiny-quick" / "report.html").read_text()
    assert "quick: Tiny" in page
    text = (folder / "docs" / "tiny-quick.md").read_text()
    assert "| quick: FedGH |" in text
    rows = call(*WORDS, "--quick", "--json").json
    assert {row["quick"] for row in rows} == {"2 rounds of 6, the first setting"}
    assert {row["column"] for row in rows} == {"skew"}
    whole = call(*WORDS, "--show", "--json").json
    assert {row["state"] for row in whole} == {
        "not run"
    }  # a smaller run does not belong to the table


@pytest.mark.slow
def test_the_same_command_takes_what_is_there(folder: Path) -> None:
    words = (*WORDS, "--columns", "skew", "--seeds", "1")
    first = call(*words)
    again = call(*words)
    assert first.out == again.out
    assert "3 runs of 18 rounds in all" in first.err
    assert "runs of" not in again.err
    more = call(*WORDS, "--columns", "skew", "--seeds", "2")
    assert "3 runs of 18 rounds in all" in more.err
    assert "±" in more.out


@pytest.mark.slow
def test_of_a_table_that_cannot_be_run_the_published_numbers_are_shown(folder: Path) -> None:
    done = call("reproduce", "fedgh-faces", "--json", "--quiet")
    assert done.code == 0, done.err
    cells = done.json
    assert {cell["state"] for cell in cells} == {"cannot be run"}
    assert [cell["published"] for cell in cells] == [61.5, 91.6, 83.0, 89.7, 84.2, 89.7]


@pytest.mark.slow
def test_tuned(folder: Path) -> None:
    tune = '[tune]\nsampler = "grid"\nsplit = "test"\n[tune.space]\n"local.lr" = [0.0001, 0.3]\n\n'
    tiny(folder, TINY.replace("[metric]", f"{tune}[metric]", 1))
    words = (*WORDS, "--tune", "--columns", "skew", "--seeds", "1")
    done = call(*words, "--json")
    assert done.code == 0, done.err
    assert {row["lr"] for row in done.json} == {0.3}
    shown = call(*words, "--show")
    assert "local.lr in {0.0001, 0.3}" in shown.out
    assert "chosen by the test set" in shown.out


def test_mistakes_are_told_in_four_lines(folder: Path) -> None:
    for words, told in (
        (("reproduce", "fedgh-tabel1"), "did you mean 'fedgh-table1'?"),
        (("reproduce", "tiny.toml", "--columns", "skwe"), "did you mean 'skew'?"),
        (("reproduce", "tiny.toml", "--tune"), "has no [tune]"),
        (("reproduce", "tiny.toml", "--show", "--write", "docs"), "run it first"),
    ):
        done = call(*words)
        assert (done.code, done.out if "--show" not in words else "") == (2, "")
        assert told in done.err
        assert len(done.err.splitlines()) <= 5


@pytest.mark.slow
def test_the_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_DATA", str(folder))
    monkeypatch.setenv("FEDKEEL_CACHE", str(folder))
    speed = estimate.Speed(0.001, 0.0001, 0.001)
    monkeypatch.setattr(estimate, "measure_speed", lambda experiment: speed)
    done = call("reproduce", "--json", "--jobs", "2", "--quiet")
    assert done.code == 0, done.err
    rows = {row["table"]: row for row in done.json}
    assert list(rows) == names()
    own = rows["fedgh-table1"]
    assert (own["state"], own["data"], own["finished"]) == ("needs mnist", ["mnist"], 0)
    assert own["seconds"] > 0
    assert {row["state"] for row in rows.values() if row["reason"]} == {"cannot be run"}
    assert {row["tuned_runs"] for row in rows.values()} == {0}
    table = load("beyond-digits")
    row, column = table.cells()[0]
    found = [{"row": row.name, "column": column.id, "chosen": {"local": {"lr": 0.1}}}]
    tuned = folder / "runs" / "reproduce" / "beyond-digits-tuned"
    tuned.mkdir(parents=True)
    (tuned / "tuned.json").write_text(json.dumps(found))
    text = call("reproduce", "--jobs", "2", "--quiet").out
    assert "fedgh-table1" in text
    assert "~" in text
    assert text.count("; tuned:") == 1
    assert f"not run; tuned: 0 of {table.seeds}\n" in text


def test_the_time_of_a_run_is_measured_without_its_data(folder: Path) -> None:
    """And from its own rounds, where there are some."""
    from fedkeel.reproduce.catalogue import read
    from fedkeel.reproduce.plan import TableRequest, table_runs

    runs = table_runs(
        read(folder / "tiny.toml"), TableRequest(Path("out"), columns=("skew",), seeds=1)
    )
    speeds = estimate.SpeedStore(Path("out"))
    assert estimate.estimate(runs, speeds).unknown == 3
    speeds.measure(runs[0].experiment)
    before = estimate.estimate(runs, estimate.SpeedStore(Path("out")))
    assert (before.unknown, before.guessed) == (0, 2)
    assert before.total == before.left > 0
    assert call(*WORDS, "--columns", "skew", "--seeds", "1", "--out", "out").code == 0
    after = estimate.estimate(runs, speeds)
    assert (after.guessed, after.left) == (0, 0.0)
    assert after.total > 0
