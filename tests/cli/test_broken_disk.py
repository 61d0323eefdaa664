"""A disk that is full, and files that hold what no run writes: words, and the results all the same.

A limit on the size of files stands for the full disk: the system refuses what is beyond it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import call
from each import each
from fedkeel.records.rows import RoundRecord
from reproduce.tiny import tiny

resource = pytest.importorskip("resource")

DEEP = "[" * 100_000 + "]" * 100_000


@contextmanager
def full_disk() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_finished_run_is_shown_and_the_missing_report_is_said(folder: Path) -> None:
    words = ("run", "toy.toml", "-s", "rounds=1", "--out", "run", "--quiet")
    whole = call(*words)
    assert whole.code == 0, whole.err
    page = Path("run/report.html")
    before = page.read_bytes()
    with full_disk():
        run, report = call(*words), call("report", "run")
        elsewhere = call("report", "run", "--out", "no/where.html")
    assert (run.code, report.code, elsewhere.code) == (0, 2, 2), run.err
    assert run.out == whole.out
    assert "report  not written: " in run.err
    assert "fedavg" in report.out
    assert "RunError: The page run/report.html cannot be written." in report.err
    assert page.read_bytes() == before
    assert call("report", "run").code == 0
    assert not list(Path("run").glob(".report*"))


def test_a_table_is_shown_and_the_missing_page_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny(tmp_path)
    with full_disk():
        done = call("reproduce", "tiny.toml", "--show")
    assert done.code == 0, done.err
    assert "Tiny: a table for tests" in done.out
    assert "not written: " in done.err


@pytest.mark.parametrize("name", ["n" * 300, "runs/" + "n" * 300 + "/x"])
def test_a_folder_whose_name_is_too_long(folder: Path, name: str) -> None:
    words = ("toy.toml", "-s", "rounds=1", "--out", name)
    several = (*words, "--methods", "fedavg")
    commands = ("report", name), ("run", *words), ("compare", *several), ("tune", *several)
    for command in commands:
        done = call(*command)
        assert done.code == 2, done.err
        assert "RunError: " in done.err
        assert "Traceback" not in done.err
    tiny(folder)
    done = call("reproduce", "tiny.toml", "--show", "--out", name)
    assert done.code == 0, done.err
    assert "([Errno 36] File name too long" in done.err


def test_files_that_no_run_writes_are_said_by_the_report(folder: Path) -> None:
    assert call("run", "toy.toml", "-s", "rounds=1", "--out", "all/run", "--quiet").code == 0
    index, run = Path("all/comparison.json"), Path("all/run/run.json")
    index.write_text(json.dumps({"name": "all", "runs": [{"folder": "run"}]}))
    good = json.loads(run.read_text())
    texts = {
        run: [
            DEEP,
            "1" * 5000,
            *(json.dumps({**good, "rounds": rounds}) for rounds in (10**18, 10**30)),
            json.dumps({**good, "partition": 5}),
            json.dumps(good).replace('"alpha": 0.3', f'"alpha": {"[" * 900}{"]" * 900}'),
        ],
        index: [
            DEEP,
            *(json.dumps(value) for value in ([], {"runs": 5}, {"runs": [None]})),
            json.dumps({"runs": [{"folder": 5}]}),
        ],
    }
    for path, damaged in texts.items():
        before = path.read_text()
        for text in damaged:
            path.write_text(text)
            done = call("report", "all")
            assert done.code == 2, text[:100]
            assert f"{path} cannot be read" in done.err
            assert max(map(len, done.err.splitlines())) < 300
        path.write_text(before)
    assert call("report", "all").code == 0


@each(
    "values",
    [
        5,
        {"round": "one"},
        {"round": -1},
        {"round": 10**30},
        {"round": 1, "clients": 5},
        {"round": 1, "test": []},
        {"round": 1, "test": {"examples": 1, "top1": "high", "top3": 1, "loss": 1}},
        {"round": 1, "seconds": {"train": float("inf")}},
        {"round": 1, "bytes_up": {"model": 10**300}},
        {"round": 1, "per_client": {"top1": 5}},
    ],
)
def test_a_row_of_other_types_is_refused(values: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        RoundRecord.from_json(json.loads(json.dumps(values)))
