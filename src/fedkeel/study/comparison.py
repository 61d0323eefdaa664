"""The result of a comparison: its runs, its table, its curves, its page."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import plotly.graph_objects as go

from fedkeel.errors import FedkeelError, counted, enumeration
from fedkeel.records.comparison import runs_of
from fedkeel.records.score import LOSS
from fedkeel.report.beside_table import client_tables, notes
from fedkeel.report.claims import Claims, claims_of
from fedkeel.report.client_gains import ClientRow, personal_rows
from fedkeel.report.client_scores import client_scores
from fedkeel.report.columns import ResultRow
from fedkeel.report.each_client import EachClient, each_client
from fedkeel.report.notebook import Page, by_method, curves
from fedkeel.report.runs import MethodResults, all_metrics, load_runs
from fedkeel.report.tables import result_rows, result_table
from fedkeel.report.text_table import TextTable
from fedkeel.runner.frames import data_frame
from fedkeel.runner.result import Result


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of a comparison.

    Args:
        results: the finished runs, by method in the order given, then by seed.
        failures: one line for each run that could not go on.
        failed: the results of these runs until then.
        others: number of runs in the folder that no table of this comparison holds, because they
            have other settings, another model, other data or another version.
        complete: whether every run was made; false after an interrupt.
        folder: where it is on disk; None for a comparison in memory.
    """

    results: list[Result]
    failures: list[str] = field(default_factory=list)
    failed: list[Result] = field(default_factory=list)
    others: int = 0
    complete: bool = True
    folder: Path | None = None

    @cached_property
    def entries(self) -> list[MethodResults]:
        """The runs, grouped by method, as the report takes them; those on disk are read once.

        Failed runs are among them; on disk also those of earlier calls that differ only in method
        and seed.
        """
        if self.folder is not None:
            return load_runs(runs_of(self.folder))
        return by_method(result.results() for result in [*self.results, *self.failed])

    @property
    def table(self) -> list[ResultRow]:
        """One row for each method, with its figures over seeds."""
        return result_rows([method.summary for method in self.entries], self.claims())

    def claims(self, reference: str | None = None, margin: float | None = None) -> Claims | None:
        """Return what may be claimed of each method against a reference: see `claims_of`.

        Its ``sentence`` says it in words. None for one method.
        """
        return claims_of([method.summary for method in self.entries], reference, margin)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `table` as plain values, ready for JSON."""
        clients: dict[str, list[dict[str, Any]]] = {}
        for row in self.clients:
            clients.setdefault(row.scores.method.label, []).append(row.to_json())
        by_name = self.each_client
        return [
            {
                **row.to_json(),
                **_clients_of(row, clients),
                **({"each_client": by_name.to_json(row.summary.method)} if by_name else {}),
            }
            for row in self.table
        ]

    @property
    def clients(self) -> list[ClientRow]:
        """How scores are distributed over clients; empty where no method has personal models."""
        return personal_rows(self.entries)

    @property
    def each_client(self) -> EachClient | None:
        """What each client gains, by name; None where they are many, or others with each seed."""
        return each_client(client_scores(self.entries))

    @property
    def notes(self) -> list[str]:
        """What to know beside the table: claims, who gains by federation, differences, problems."""
        return notes(self.entries, self.claims())

    @property
    def client_tables(self) -> list[TextTable]:
        """The table of clients: each by its name, or how scores are distributed over them.

        None where neither is worth one: no client has a name and none a model of its own.
        """
        return client_tables(self.entries)

    def to_frame(self, of: Literal["methods", "clients", "rounds"] = "methods") -> Any:  # noqa: ANN401 - a pandas.DataFrame
        """Return the results as a `pandas.DataFrame`.

        Args:
            of: a row for each of the ``methods``, as in `rows`; for each of the ``clients`` with
                each method, as in `each_client`; or for each of the evaluated ``rounds`` of each
                run, with its metrics on the test set.

        Raises:
            ConfigError: pandas is not installed.
        """
        if of == "methods":
            nested = ("clients", "each_client")
            return data_frame({k: v for k, v in r.items() if k not in nested} for r in self.rows)
        if of == "clients":
            by_name = self.each_client
            return data_frame(
                {"method": method.label} | client
                for method in self.entries
                for client in (by_name.to_json(method.label) if by_name else ())
            )
        return data_frame(
            {"method": method.label, "seed": run.record.seed, "round": row.round}
            | dict(row.test.values)
            for method in self.entries
            for run in method.runs
            for row in run.rows
            if row.test is not None
        )

    def plot(self, metric: str | None = None) -> go.Figure:
        """Return the learning curves as a plotly figure: a line for each method, a band over seeds.

        Args:
            metric: name of a metric of the task; None takes the score.

        Raises:
            RunError: there is no such metric.
        """
        return curves(self.entries, metric)

    def report(self) -> Page:
        """Return the report page; a notebook shows it, and its `save` writes it to a file."""
        return Page.of(self.entries)

    def _told(self) -> list[str]:
        """Return what stands below the table: notes, failures, and which metrics it has not."""
        failures = [f"failed: {failure}" for failure in self.failures]
        others = [metric.name for metric in all_metrics(self.entries)[1:]] if self.entries else []
        if not set(others) - {LOSS}:
            return [*self.notes, *failures]
        more = f'Also measured: {enumeration(others)}; see to_frame("rounds"), or report().'
        return [*self.notes, *failures, more]

    def _repr_html_(self) -> str:
        return result_table(self.table, self._told()).html()

    def __str__(self) -> str:
        notes = self._told()
        tables = [result_table(self.table), *self.client_tables]
        return "\n".join(table.markdown() for table in tables) + "".join(
            f"\n{note}\n" for note in notes
        )

    def __repr__(self) -> str:
        """Return what a notebook shows: the table, where its folder still exists."""
        try:
            return str(self)
        except (OSError, FedkeelError):
            return f"Comparison of {counted(len(self.results), 'run')} in {self.folder}"


def _clients_of(row: ResultRow, clients: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    label = row.summary.method
    return {"clients": clients[label]} if label in clients else {}
