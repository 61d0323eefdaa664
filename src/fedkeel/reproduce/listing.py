"""The list of all tables: the data they need, their time on this machine, and their progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fedkeel.report.formatting import MISSING, format_duration
from fedkeel.report.text_table import TextTable
from fedkeel.reproduce.catalogue import load, names
from fedkeel.reproduce.estimate import (
    SpeedStore,
    estimate,
    experiments_to_measure,
    measure_speeds,
)
from fedkeel.reproduce.plan import TableProgress, TableRequest, TableRun, table_runs
from fedkeel.reproduce.table import PaperTable
from fedkeel.reproduce.tuning import read_tuned_settings


@dataclass(frozen=True)
class ListedTable:
    """One table in the list; the fields are the keys of ``fedkeel reproduce --json``.

    Args:
        table: its id.
        title: its title.
        paper: citation key.
        quick: what is smaller; None where the whole table is listed.
        data: the data sets that it needs.
        absent: those that are not on this machine.
        state: its progress as text.
        reason: why it cannot be run.
        runs: number of runs.
        finished: number of finished runs.
        tuned_runs: the same for the version with searched hyper-parameters; 0 without a search.
        tuned_finished: the same for the finished ones.
        seconds: estimated seconds of all runs.
        seconds_left: estimated seconds of unfinished runs.
        guessed: number of runs whose time is that of another method.
        unmeasured: number of runs without an estimate.
        jobs: runs at a time that the seconds are for.
    """

    table: str
    title: str
    paper: str
    quick: str | None
    data: list[str]
    absent: list[str]
    state: str
    reason: str
    runs: int
    finished: int
    tuned_runs: int
    tuned_finished: int
    seconds: float
    seconds_left: float
    guessed: int
    unmeasured: int
    jobs: int

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return id, data, runs, time and state as text."""
        time = MISSING
        if self.seconds:
            time = f"~{format_duration(self.seconds)}" + "+" * bool(self.guessed or self.unmeasured)
            if 0 < self.seconds_left < self.seconds:
                time += f", ~{format_duration(self.seconds_left)} left"
        elif self.runs:
            time = "not measured"
        tuned = f"; tuned: {self.tuned_finished} of {self.tuned_runs}" if self.tuned_runs else ""
        runs = str(self.runs) if self.runs else MISSING
        return self.table, ", ".join(self.data), runs, time, self.state + tuned


def list_tables(
    request: TableRequest,
    jobs: int,
    measuring_seconds: float | None,
    show: Callable[[str], None],
) -> list[ListedTable]:
    """Return all tables.

    Args:
        request: where the runs are, and which version is wanted.
        jobs: runs at a time that times are for.
        measuring_seconds: seconds to measure missing speeds in; None measures all.
        show: shows a line about what is going on.
    """
    request = replace(request, columns=(), rows=())
    tables: list[tuple[PaperTable, list[TableRun]]] = []
    for table in map(load, names()):
        lacks_version = request.quick and table.quick is None
        tables.append((table, [] if lacks_version else table_runs(table, request)))
    speeds = SpeedStore(request.out)
    if missing := experiments_to_measure(tables, speeds):
        show(f"{len(missing)} speeds of methods on models are not measured yet; Ctrl-C stops that")
    with suppress(KeyboardInterrupt):
        measure_speeds(missing, speeds, measuring_seconds)
    return [_listed(table, runs, request, jobs, speeds) for table, runs in tables]


def _listed(
    table: PaperTable,
    runs: Sequence[TableRun],
    request: TableRequest,
    jobs: int,
    speeds: SpeedStore,
) -> ListedTable:
    progress, time = TableProgress.of(runs), estimate(runs, speeds)
    tuned = TableProgress.of(_tuned_runs(table, request))
    return ListedTable(
        table=table.id,
        title=table.title,
        paper=table.paper,
        quick=table.quick.name if request.quick and table.quick else None,
        data=list(table.data),
        absent=list(progress.absent),
        state=progress.text(table),
        reason=table.missing,
        runs=progress.runs,
        finished=progress.finished,
        tuned_runs=tuned.runs,
        tuned_finished=tuned.finished,
        seconds=time.total / jobs,
        seconds_left=time.left / jobs,
        guessed=time.guessed,
        unmeasured=time.unknown,
        jobs=jobs,
    )


def _tuned_runs(table: PaperTable, request: TableRequest) -> list[TableRun]:
    """Return the runs with searched hyper-parameters; none before a search."""
    request = replace(request, tuned=True)
    settings = read_tuned_settings(request.folder(table)) if table.tune else {}
    return table_runs(table, replace(request, tuned_settings=settings)) if settings else []


def list_lines(tables: Sequence[ListedTable]) -> Iterator[str]:
    """Yield the list as lines of text."""
    head = ("table", "data", "runs", "time", "state")
    cells = [table.cells() for table in tables]
    lines = TextTable(head, cells, texts=frozenset(range(len(head)))).lines()
    for line, table in zip(lines, [None, *tables], strict=True):
        prefix = "quick: " if table and table.quick else ""
        yield prefix + line
        for text in (table.title, table.quick, table.reason) if table else ():
            if text:
                yield f"{prefix}  {text}"
    if tables:
        yield ""
        yield (
            f"time: with {tables[0].jobs} jobs on this machine, from a short measured round or "
            "from finished runs; +: some methods or settings are not measured yet, and count as "
            "the fastest one beside them, or not at all (--measure)"
        )
