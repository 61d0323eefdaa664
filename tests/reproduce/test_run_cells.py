"""Cells are runs: made once, shared, several at a time, killed and taken up again."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Process, run, wait_for_rows
from fedkeel import config
from fedkeel.engine.process.interrupts import time_limit
from fedkeel.errors import ConfigError
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.records.folder import RunFolder
from fedkeel.report.formatting import format_duration
from fedkeel.reproduce.blocks import line_cells
from fedkeel.reproduce.catalogue import load, read
from fedkeel.reproduce.estimate import what_is_left
from fedkeel.reproduce.outcome import TableLine, table_lines
from fedkeel.reproduce.pages import TablePage
from fedkeel.reproduce.plan import TableProgress, TableRequest, TableRun, digest, table_runs
from fedkeel.reproduce.run_cells import run_cells
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.study import pool
from reproduce.tiny import TINY, tiny
from toys import eventually


def plan(folder: Path, text: str = TINY, **more: object) -> list[TableRun]:
    return table_runs(read(tiny(folder, text)), TableRequest(folder / "out", **more))


def rows(cell: TableRun) -> list[str]:
    """The rounds of a run, without their seconds."""
    return [
        repr(replace(row, seconds={}, processor_seconds=None))
        for row in RunFolder(cell.folder).rows()
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[TableRun]:
    """All runs of the table, made by two jobs."""
    found = plan(tmp_path_factory.mktemp("whole"))
    played = run_cells(found, 2)
    assert (played.failures, played.complete, played.finished) == ({}, True, 10)
    return found


def test_cells_that_are_alike_share_a_run(whole: list[TableRun]) -> None:
    """Two seeds of five: three in the first setting, of which two serve two more columns."""
    assert len(whole) == 18
    assert len({cell.folder for cell in whole}) == 10
    assert (TableProgress.of(whole).finished, TableProgress.of(whole).runs) == (10, 10)


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("gcfed-table5", "fedavg-seed0-cec8859b34e7"),
        ("fedgc-figure5", "fedavg-seed0-b6b9507485bc-0721be3c917f"),
        ("gcfed-figure7", "fedavg-seed0-c06e24ff2935"),
    ],
)
def test_a_run_keeps_the_name_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, name: str
) -> None:
    """Runs of an earlier day are found again: the names are those of 28 November 2026."""
    monkeypatch.setattr("fedkeel.reproduce.plan.__version__", "0.2.0.dev0")
    assert name in {c.folder.name for c in table_runs(load(table), TableRequest(tmp_path))}


BASE: dict[str, Any] = {
    "data": {"source": "mnist"},
    "model": {"name": "mlp"},
    "method": "fedavg",
    "partition": {"kind": "iid", "clients": 5},
    "local": {"lr": 0.1, "epochs": 1},
    "rounds": 3,
}


def test_another_file_is_another_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = [Path("public.csv"), Path("root.npz"), Path("other_net.py")]
    others = {"small": {"name": "other_net:Net", "clients": [0]}}
    experiment = config.Experiment.model_validate(
        BASE
        | {
            "data": {"source": "mnist", "public": "public.csv"},
            "model": {"name": "mlp", "others": others},
            "root": {"file": "root.npz"},
            "method": "fedmd",
        }
    )
    names = []
    for number, file in enumerate([None, *files]):
        for written in files if file is None else [file]:
            written.write_text("a" * (number + 1), encoding="utf-8")
        names.append(digest(experiment))
    assert len(set(names)) == 4


def test_noise_that_was_not_a_setting_is_in_no_name() -> None:
    budget = {"epsilon": 4.0, "delta": 1e-3}
    plain, same, tree = (
        digest(config.Experiment.model_validate(BASE | {"privacy": budget | noise}))
        for noise in ({}, {"noise": "independent"}, {"noise": "tree"})
    )
    assert plain == same != tree


def test_nothing_is_made_twice(whole: list[TableRun]) -> None:
    before = {c.folder: (c.folder / "rounds.jsonl").stat().st_mtime_ns for c in whole}
    again = run_cells(whole, 2)
    assert (again.finished, again.reused, again.complete) == (0, 10, True)
    assert before == {f: (f / "rounds.jsonl").stat().st_mtime_ns for f in before}


def test_a_cell_is_the_run_that_its_settings_make(whole: list[TableRun]) -> None:
    """A job adds nothing: the same bits as a run by itself."""
    cell = next(c for c in whole if c.row.name == "FedGH" and c.column.id == "plain")
    result = start(prepare(cell.experiment, gather(cell.experiment)))
    assert rows(cell) == [
        repr(replace(row, seconds={}, processor_seconds=None)) for row in result.rows
    ]


def test_methods_of_a_column_meet_the_same_conditions(whole: list[TableRun]) -> None:
    """Same initial model, same clients in each round; their first batches too, see below."""
    for seed in (3, 4):
        own = [c for c in whole if c.seed == seed and c.column.id == "skew"]
        runs = [RunFolder(c.folder).rows() for c in own]
        assert len(own) == 3
        assert len({repr(one[0].test) for one in runs}) == 1
        assert len({repr([row.clients for row in one]) for one in runs}) == 1
        assert len({one[1].train_loss for one in runs}) == 1  # same model, clients and batches
        assert len({RunFolder(c.folder).read_run().data.fingerprint for c in own}) == 1
    first, second = (RunFolder(c.folder).rows()[0].test for c in (whole[0], whole[-1]))
    assert first != second


def test_a_finished_run_keeps_no_model(whole: list[TableRun]) -> None:
    assert all(not (cell.folder / "checkpoint").exists() for cell in whole)
    assert all(RunFolder(cell.folder).read_run().engine.workers == 1 for cell in whole)


def test_published_next_to_measured(whole: list[TableRun], tmp_path: Path) -> None:
    table = read(tiny(tmp_path))
    found = {(line.row.name, line.column.id): line for line in table_lines(table, whole)}
    base, own = found["FedAvg", "skew"], found["FedGH", "skew"]
    best = [max(r.test["accuracy"] for r in RunFolder(c.folder).rows()) for c in whole
            if (c.row.name, c.column.id) == ("FedGH", "skew")]  # fmt: skip
    assert list(own.values.values()) == pytest.approx([100 * one for one in best])
    assert own.stat.mean == pytest.approx(50 * sum(best))
    assert own.difference == pytest.approx(own.stat.mean - 55.0)
    assert own.published_gain == 5.0
    steps = [own.values[s] - base.values[s] for s in (3, 4)]
    assert own.gain.stat.mean == pytest.approx(sum(steps) / 2)
    if own.gain.stat.mean:
        assert own.has_same_sign == (own.gain.stat.mean > 0)
    assert (base.baseline, base.gain, own.baseline) == (None, None, "FedAvg")
    share = found["FedAvg", "skew-share"]
    for seed, rounds in share.values.items():
        cell = next(c for c in whole if c.seed == seed and c.row.name == "FedAvg")
        curve = {r.round: r.test["accuracy"] for r in RunFolder(cell.folder).rows()}
        assert rounds == min(r for r, a in curve.items() if a >= 0.9 * max(curve.values()))
    assert set(found["FedAvg", "far"].values.values()) == {None}
    assert found["Momentum", "skew"].published is None
    assert ("FedAvg", "gone") not in found
    plain = table_lines(table, [])
    assert [(line.row.name, line.column.id) for line in plain][-1] == ("FedAvg", "gone")
    assert all(isinstance(line, TableLine) and not line.values for line in plain)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    text = TINY.replace('method = "momentum(beta=0.5)"', 'method = "momentum(beta=0.5)"\n'
                        'settings = { local = { lr = 1e30 } }')  # fmt: skip
    found = plan(tmp_path, text, columns=("skew",), seeds=1)
    played = run_cells(found, 1)
    assert (played.finished, len(played.failures), played.complete) == (2, 1, True)
    told = table_lines(read(tmp_path / "tiny.toml"), found, played.failures)
    assert ["diverged" in " ".join(line.failures) for line in told] == [False, False, True]
    later = table_lines(read(tmp_path / "tiny.toml"), found)  # as it is shown another day
    assert [line.failures for line in later] == [line.failures for line in told]
    page = TablePage(read(tmp_path / "tiny.toml"), later, TableRequest(tmp_path / "out"))
    assert "Momentum failed: Training diverged" in "\n".join(page.to_text())


def test_a_page_says_how_long_its_runs_took(whole: list[TableRun], tmp_path: Path) -> None:
    """A run that several columns share counts once."""
    table = read(tiny(tmp_path, TINY))
    spent = {run.folder: RunFolder(run.folder).rows() for run in whole}
    seconds = sum(sum(row.seconds.values()) for rows in spent.values() for row in rows)
    page = TablePage(table, table_lines(table, whole), TableRequest(tmp_path / "out"))
    each = f"{format_duration(seconds / 10)} each"
    said = f"- Time: {format_duration(seconds)} for the rounds of 10 runs, {each}\n"
    assert said in page.to_markdown()


def test_what_has_no_data_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path))
    text = TINY.replace("settings = { partition", 'settings = { data.source = "svhn", partition')
    found = plan(tmp_path, text, seeds=1)
    assert {cell.column.id for cell in found if cell.absent} == {"plain"}
    assert TableProgress.of(found).possible == 3
    assert (
        TableProgress.of(found).text(read(tmp_path / "tiny.toml"))
        == "not run (needs svhn for the rest)"
    )


SLOW = TINY.replace("rounds = 6", "rounds = 30").replace("clients = 4", "clients = 8")
SLOW = SLOW.replace("checkpoint_seconds = 0.0", "checkpoint_seconds = 0.3")


def quiet(found: list[TableRun]) -> bool:
    """Whether nobody writes into the runs any more."""

    def written() -> list[int]:
        return [len(RunFolder(cell.folder).rows()) for cell in found]

    before = written()
    time.sleep(0.5)
    return written() == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_killed_and_taken_up_again(tmp_path: Path, number: signal.Signals) -> None:
    """The jobs end with the command, and what was saved goes on with the same bits."""
    file = tiny(tmp_path, SLOW)
    words = ("reproduce", file, "--out", "out", "--columns", "plain", "--seeds", "1", "--json")
    found = table_runs(read(file), TableRequest(tmp_path / "out", columns=("plain",), seeds=1))
    process = Process(*words, "--jobs", "2", folder=tmp_path)
    for cell in found:
        wait_for_rows(cell.folder, 3)
    process.send(number)
    stopped = process.wait()
    assert eventually(lambda: quiet(found), 20)
    if number == signal.SIGINT:
        assert stopped.code == 130
        assert "the same command goes on" in stopped.err
        assert all(RunFolder(c.folder).read_run().status == "interrupted" for c in found)
    done = run(*words, "--jobs", "1", folder=tmp_path)
    assert done.code == 0, done.err
    assert all(cell.is_finished for cell in found)
    assert [row["seeds"] for row in done.json] == [1, 1]
    for cell in found:
        whole = start(prepare(cell.experiment, gather(cell.experiment)))
        assert rows(cell) == [
            repr(replace(row, seconds={}, processor_seconds=None)) for row in whole.rows
        ]


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_time_is_up(tmp_path: Path, jobs: int) -> None:
    """Runs end after a whole round, what is left is said, and the next call goes on."""
    text = TINY.replace("rounds = 6", "rounds = 100000")
    found = plan(tmp_path, text, columns=("plain",), rows=("FedAvg",), seeds=1)
    assert len(found) == 1
    assert what_is_left(found, jobs) == "one run left"
    done = 0
    for seconds in (2.0, 8.0, 32.0):  # the longer ones where the machine is busy
        with time_limit(seconds) as is_up:
            ended = run_cells(found, jobs)
        assert (is_up.is_set(), ended.complete, ended.failures) == (True, False, {})
        before, done = done, RunFolder(found[0].folder).rows()[-1].round
        if before:
            break
    assert done > before > 0
    assert "one run left, about" in what_is_left(found, jobs)


def test_enough_time(tmp_path: Path) -> None:
    found = plan(tmp_path, columns=("plain",), rows=("FedAvg",), seeds=1)
    with time_limit(300.0) as is_up:
        ended = run_cells(found, 1)
    assert (is_up.is_set(), ended.complete, ended.finished) == (False, True, 1)


def test_an_unknown_row(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiny has no row 'FedAwg'"):
        plan(tmp_path, rows=("FedAwg",))


def test_all_runs_train_where_they_are_told_to(tmp_path: Path) -> None:
    one = {"columns": ("plain",), "rows": ("FedAvg",), "seeds": 1}
    if not torch.cuda.is_available():
        why = run_cells(plan(tmp_path, device="cuda", **one), 1).failures
        assert "GPU" in " ".join(why.values())
    on_cpu = plan(tmp_path, device="cpu", **one)
    assert [run.folder for run in on_cpu] == [run.folder for run in plan(tmp_path, **one)]
    assert run_cells(on_cpu, 1).finished == 1
    with pytest.raises(ConfigError, match="gpu"):
        plan(tmp_path, device="gpu")


def test_a_search_ends_when_its_time_is_up(tmp_path: Path) -> None:
    """The exit code asks for the same command again, also where no run of the table has begun."""
    text = (
        TINY.replace("rounds = 6", "rounds = 100000")
        + '\n[tune]\nspace = { "local.lr" = [0.1, 0.2] }\n'
    )
    file = tiny(tmp_path, text)
    done = run("reproduce", file, "--tune", "--seconds", "2", "--out", "out", folder=tmp_path)
    assert done.code == 75, done.err
    assert "the time is up; the same command goes on with the search" in done.err


def test_what_belongs_to_one_table(tmp_path: Path) -> None:
    refused = run("reproduce", "--seconds", "2", folder=tmp_path)
    assert refused.code == 2
    assert "are of one table" in refused.err


def test_what_is_diagnosed_is_shown_as_measured(tmp_path: Path) -> None:
    text = TINY.replace("[base.engine]", '[base.diagnose]\nkinds = ["drift"]\n\n[base.engine]')
    metric = 'metric = { kind = "diagnosed", diagnostic = "drift.norm_of_mean" }'
    text = text.replace('name = "alpha 0.1"', f'name = "alpha 0.1"\n{metric}', 1)
    found = plan(tmp_path, text, quick=True, seeds=1)[:1]
    assert run_cells(found, 1).finished == 1
    line = table_lines(read(tiny(tmp_path, text)), found)[0]
    played = [row for row in RunFolder(found[0].folder).rows() if row.round]
    norms = [row.diagnostics["drift.norm_of_mean"] for row in played]
    assert line.stat is not None
    assert line.stat.mean == pytest.approx(sum(norms) / 2)
    assert line_cells(line)[3] == f"{sum(norms) / 2:.3f}"


BESIDE = TINY.replace(
    'kind = "sequential"\ncheckpoint_seconds = 0.0',
    'kind = "vectorized"\nparallel_clients = 4\ncheckpoint_seconds = 0.0',
).replace("rounds = 6", "rounds = 3")
BESIDE += """
[[rows]]
name = "Prox"
method = "fedprox(mu=0.1)"
columns = ["skew", "plain"]
ours = true

[[rows]]
name = "Prox, strong"
method = "fedprox(mu=1.0)"
columns = ["skew", "plain"]
ours = true
"""


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The folders of the runs of each group that is made in this process, by seed."""
    found: list[list[str]] = []
    genuine = pool._make_group

    def watched(group: Sequence[pool.RunRequest], display: ProgressDisplay) -> list[Any]:
        found.append([request.name for request in group])
        return genuine(group, display)

    monkeypatch.setattr(pool, "_make_group", watched)
    return found


def test_seeds_and_numbers_train_side_by_side(tmp_path: Path, groups: list[list[str]]) -> None:
    """Their folders, names and rows are those of runs that are made one by one."""
    one, two, apart = (tmp_path / name for name in ("one", "two", "apart"))
    for folder in (one, two, apart):
        folder.mkdir()
    text = BESIDE.replace("parallel_clients = 4", "parallel_clients = 4\nparallel_runs = 1")
    wanted = {"columns": ("skew",)}
    together, by_two, singly = (
        plan(one, BESIDE, **wanted),
        plan(two, BESIDE, **wanted),
        plan(apart, text, **wanted),
    )
    assert run_cells(together, 1).finished == 10
    assert groups == [
        [f"FedAvg, alpha 0.1, seed {seed}" for seed in (3, 4)],
        [f"FedGH, alpha 0.1, seed {seed}" for seed in (3, 4)],
        [f"Momentum, alpha 0.1, seed {seed}" for seed in (3, 4)],
        [f"{name}, alpha 0.1, seed {s}" for s in (3, 4) for name in ("Prox", "Prox, strong")],
    ]
    assert run_cells(by_two, 2).finished == 10
    assert run_cells(singly, 1).finished == 10
    assert [c.folder.name for c in together] == [c.folder.name for c in singly]
    for cell, other, alone in zip(together, by_two, singly, strict=True):
        engine = RunFolder(cell.folder).read_run().engine
        assert (engine.parallel_runs or 0) >= 4
        assert RunFolder(alone.folder).read_run().engine.parallel_runs is None
        assert rows(cell) == rows(other)
        pairs = zip(RunFolder(cell.folder).rows(), RunFolder(alone.folder).rows(), strict=True)
        for row, by_itself in pairs:
            assert row.clients == by_itself.clients
            assert (row.train_loss or 0) == pytest.approx(by_itself.train_loss or 0, rel=1e-3)
        assert not (cell.folder / "checkpoint").exists()


def test_a_table_that_gets_more_seeds_keeps_their_bits(tmp_path: Path) -> None:
    """The last run of its group has nobody beside it, and the bits of one that has."""
    late, whole = tmp_path / "late", tmp_path / "whole"
    late.mkdir()
    whole.mkdir()
    one = {"columns": ("skew",), "rows": ("FedGH",)}
    two = plan(late, BESIDE, seeds=2, **one)
    assert run_cells(two, 1).finished == 2
    three = plan(late, BESIDE, seeds=3, **one)
    ended = run_cells(three, 1)
    assert (ended.finished, ended.reused) == (1, 2)
    at_once = plan(whole, BESIDE, seeds=3, **one)
    assert run_cells(at_once, 1).finished == 3
    assert [rows(cell) for cell in three] == [rows(cell) for cell in at_once]


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_side_by_side_end_when_the_time_is_up(tmp_path: Path, jobs: int) -> None:
    text = BESIDE.replace("rounds = 3", "rounds = 100000")
    found = plan(tmp_path, text, columns=("skew",), rows=("FedAvg",), seeds=2)
    done: list[int] = []
    for seconds in (4.0, 16.0, 64.0):  # the longer ones where the machine is busy
        with time_limit(seconds) as is_up:
            ended = run_cells(found, jobs)
        assert (is_up.is_set(), ended.complete, ended.failures) == (True, False, {})
        before, done = done, [len(RunFolder(cell.folder).rows()) for cell in found]
        if before and min(before) > 1:
            break
    assert all(now > then > 1 for now, then in zip(done, before, strict=True))
    assert all(RunFolder(c.folder).read_run().status == "interrupted" for c in found)


def test_a_run_that_fails_beside_others_leaves_them(tmp_path: Path) -> None:
    text = BESIDE.replace(
        'method = "fedprox(mu=1.0)"',
        'method = "fedprox(mu=1.0)"\nsettings = { local = { lr = 1e30 } }',
    )
    found = plan(tmp_path, text, columns=("skew",), rows=("Prox", "Prox, strong"))
    ended = run_cells(found, 1)
    assert (ended.finished, len(ended.failures), ended.complete) == (2, 2, True)
    assert all(cell.is_finished == (cell.row.name == "Prox") for cell in found)
