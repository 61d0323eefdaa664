"""The page: one HTML file that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedkeel.records.baselines import LOCAL
from fedkeel.records.folder import RunFolder
from fedkeel.records.score import LOSS
from fedkeel.report import claim_table, page_content
from fedkeel.report.alerts import alerts
from fedkeel.report.chart_style import Chart
from fedkeel.report.claims import Claims, claims_of
from fedkeel.report.client_gains import client_rows, gain_chart
from fedkeel.report.client_scores import (
    ClientScores,
    client_score_chart,
    client_scores,
    measured_on,
)
from fedkeel.report.cost_charts import time_chart, traffic_chart
from fedkeel.report.diagnostic_charts import diagnostic_charts, feature_charts
from fedkeel.report.each_client import EachClient, each_client
from fedkeel.report.feature_report import feature_notes
from fedkeel.report.formatting import extreme_of, score_unit
from fedkeel.report.html import render_page, write_page
from fedkeel.report.learning_curves import curve_charts
from fedkeel.report.partition_chart import PartitionSummary, partition_summary
from fedkeel.report.prediction_charts import (
    has_numbers,
    prediction_charts,
    tested_on,
    whose_predictions,
)
from fedkeel.report.runs import MethodResults, all_metrics, load_runs
from fedkeel.report.sparklines import score_axis
from fedkeel.report.summary import shared_score
from fedkeel.report.tables import footnotes, result_rows, visible_columns
from fedkeel.report.verdict import Status, verdict

_BADGES: dict[Status, str] = {
    "clear": "Clear lead",
    "close": "A lead, but not over all",
    "none": "No clear winner",
    "few": "Too few seeds for a claim",
    "single": "",
    "apart": "Not ranked",
    "empty": "Not evaluated yet",
}


def write_report(
    folders: Sequence[Path | RunFolder], out: Path, *, title: str | None = None
) -> Path:
    """Write the page of a run or of a comparison.

    Args:
        folders: run folders; seeds of a method are grouped, methods stay in the order given.
        out: the file, or a folder that gets a ``report.html``.
        title: title of the page; None makes one.

    Returns:
        The file.

    Raises:
        RunError: there is nothing to report, a folder holds no run, or the file cannot be written.
    """
    return save_report(load_runs(folders), out, title=title)


def save_report(
    methods: Sequence[MethodResults],
    out: Path,
    *,
    title: str | None = None,
    claims: Claims | None = None,
) -> Path:
    """Write the page of runs that have been read, as `write_report`.

    Args:
        methods: the runs.
        out: the file, or a folder.
        title: title of the page; None makes one.
        claims: what may be claimed; None for those against FedAvg, or the first method.

    Returns:
        The file.

    Raises:
        RunError: the file cannot be written.
    """
    page = render_report(methods, title=title, claims=claims)
    return write_page(page, out / "report.html" if out.is_dir() else out)


def render_report(
    methods: Sequence[MethodResults], *, title: str | None = None, claims: Claims | None = None
) -> str:
    """Return the page as HTML; the arguments are those of `save_report`."""
    summaries = [method.summary for method in methods]
    claims = claims or claims_of(summaries)
    rows = result_rows(summaries, claims)
    conclusion = verdict(summaries, claims)
    claimed = [claims.sentence] if claims else []
    details = (*claimed, *conclusion.details, *feature_notes(methods))
    conclusion = replace(conclusion, details=details)
    clients = client_scores(methods)
    by_name = each_client(clients)
    by_client = by_name.sentences if by_name else []
    partitions = (partition_summary(m.record, m.runs[0].histogram) for m in methods)
    partition = next((summary for summary in partitions if summary is not None), None)
    diagnosed, added = diagnostic_charts(methods), feature_charts(methods)
    charts = _charts(methods, clients, by_name, partition)
    charts |= {item.name: chart for item, chart in {**diagnosed, **added}.items()}
    score = methods[0].record.score
    curve = charts.get("score_rounds")
    return render_page(
        "page.html.j2",
        title=title or page_content.page_title(methods),
        description=" ".join(by_client or [conclusion.headline]).replace("`", ""),
        content=page_content,
        methods=methods,
        is_single=len(methods) == 1,
        most_seeds=max(len(method.runs) for method in methods),
        run_count=sum(len(method.runs) for method in methods),
        verdict=conclusion,
        badge=_BADGES[conclusion.status],
        alerts=alerts(methods),
        score_axis=score_axis(summaries),
        score=score,
        score_unit=score_unit(score),
        extreme=extreme_of(score),
        is_ranked=shared_score(summaries) is not None,
        rows=rows,
        claims=claims,
        claim_table=claim_table,
        columns=visible_columns(rows, is_page=True),
        footnotes=footnotes(rows),
        charts=charts,
        further=[
            (f"metric{place}", metric)
            for place, metric in enumerate(all_metrics(methods)[1:])
            if f"metric{place}_rounds" in charts
        ],
        diagnosed=list(diagnosed),
        added=list(added),
        predictions_of=whose_predictions(methods),
        tested_on=tested_on(methods),
        predicted_methods=[m.index for m in methods if f"predictions{m.index}" in charts],
        has_classes=any(has_numbers(method) for method in methods),
        is_zoomed=curve is not None and curve.figure.layout.yaxis.range is not None,
        clients=client_rows(clients),
        by_name=by_name,
        by_client=by_client,
        has_spread=any(item.has_spread for item in clients),
        has_local=any(method.record.method == LOCAL for method in methods),
        measured_on=measured_on(methods),
        partition=partition,
    )


def _charts(
    methods: Sequence[MethodResults],
    clients: Sequence[ClientScores],
    by_name: EachClient | None,
    partition: PartitionSummary | None,
) -> dict[str, Chart]:
    """Return the charts by name, without those for which the records hold nothing to draw."""
    targets = (method.summary.target for method in methods)
    target = next((target for target in targets if target is not None), None)
    score, *others = all_metrics(methods)
    curves = {"score": curve_charts(methods, score, target)}
    for place, metric in enumerate(others):
        name = LOSS if metric.name == LOSS else f"metric{place}"
        curves[name] = curve_charts(methods, metric)
    charts = {
        **{f"{name}_{axis}": c for name, both in curves.items() for axis, c in both.items()},
        **prediction_charts(methods),
        "traffic": traffic_chart(methods),
        "seconds": time_chart(methods),
        "clients": client_score_chart([item for item in clients if item.has_spread]),
        "gains": gain_chart(clients) if by_name is None else None,
        "partition": partition.chart if partition else None,
    }
    return {name: chart for name, chart in charts.items() if chart is not None}
