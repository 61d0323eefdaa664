"""What is printed beside the table of methods: tables of clients, and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fedkeel.report.alerts import differences, problems
from fedkeel.report.claims import Claims
from fedkeel.report.client_gains import client_table, personal_rows
from fedkeel.report.client_scores import client_scores
from fedkeel.report.each_client import each_client
from fedkeel.report.feature_report import feature_notes
from fedkeel.report.runs import MethodResults
from fedkeel.report.text_table import TextTable


def client_tables(methods: Sequence[MethodResults]) -> list[TextTable]:
    """Return the table of clients: each by its name, or how scores are distributed over them.

    None where neither is worth one: no client has a name and none a model of its own.
    """
    by_name = each_client(client_scores(methods))
    if by_name is not None and by_name.has_names and by_name.has_local:
        return [by_name.table()]
    rows = personal_rows(methods)
    return [client_table(rows)] if rows else []


def notes(methods: Sequence[MethodResults], claims: Claims | None) -> list[str]:
    """Return what to know beside the tables: claims, who gains, differences, problems."""
    by_name = each_client(client_scores(methods))
    sentences = [claims.sentence] if claims else []
    sentences += [*feature_notes(methods), *(by_name.sentences if by_name else [])]
    return [*sentences, *differences(methods), *problems(methods)]
