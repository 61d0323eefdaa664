"""The table of a search for good settings."""

from __future__ import annotations

from collections.abc import Sequence

from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.records.statistics import Stat
from fedkeel.report.formatting import MISSING, format_score, score_unit
from fedkeel.report.tables import Footnote
from fedkeel.report.text_table import TextTable
from fedkeel.study.tuning_result import TunedMethod

_METRICS = {
    "best": "the best {score} over rounds",
    "last": "the {score} after the last round",
    "last_mean": "the mean {score} of the last ten evaluations",
}


def tuning_table(rows: Sequence[TunedMethod], validation_examples: int | None = None) -> TextTable:
    """Return the table as texts.

    Args:
        rows: one for each method.
        validation_examples: held-out examples that settings were chosen on; None for the test set.
    """
    metrics = "/".join(dict.fromkeys(row.metric.replace("_", " ") for row in rows))
    score = rows[0].score if rows else ACCURACY
    value = f"{metrics}\n{score_unit(score)}"
    return TextTable(
        ["method", value, "measured\non", "chosen", "trials", "failed", "at the edge"],
        [cells(row) for row in rows],
        notes=[str(note) for note in footnotes(rows, validation_examples)],
        texts=frozenset({0, 2, 3, 6}),
    )


def cells(row: TunedMethod) -> list[str]:
    """Return the text of a row, column by column."""
    stat = None
    if row.value is not None:
        stat = Stat(row.value, row.spread, row.seeds, row.value, row.value)
    value = format_score(stat, row.score, decimals=1)
    settings = [f"{key}={_short(v)}" for key, v in row.chosen.items() if key != "method"]
    method = row.chosen.get("method", row.method)
    if method != row.method:
        settings.append(str(method))
    is_complete = row.offered in (None, row.trials)
    return [
        row.method,
        value,
        "test set" if row.on == "test" else "validation",
        ", ".join(settings) or MISSING,
        str(row.trials) if is_complete else f"{row.trials} of {row.offered}",
        str(row.failed) if row.failed else "",
        ", ".join(f"{name} {end}" for name, end in row.edge.items()),
    ]


def footnotes(rows: Sequence[TunedMethod], validation_examples: int | None) -> list[Footnote]:
    """Return what a reader of the table has to know."""
    notes = []
    if any(row.on == "test" for row in rows):
        text = f"as in many papers, so these {_too_good(rows[0].score)}."
        notes.append(Footnote("Chosen on the test set", text))
    elif validation_examples is not None:
        text = f"{validation_examples:,} examples held out from the clients' training data."
        notes.append(Footnote("Validation", text))
    metrics = " and ".join(
        dict.fromkeys(_METRICS[row.metric].format(score=row.score.label) for row in rows)
    )
    seeds = max((row.seeds for row in rows), default=1)
    spread = f"; mean ± sample standard deviation of {seeds} seeds" if seeds > 1 else ""
    notes.append(Footnote("Settings were chosen by", f"{metrics}{spread}."))
    if len({row.trials for row in rows}) > 1:
        text = "the methods share their settings, and some have hyper-parameters besides."
        notes.append(Footnote("Trials differ", text))
    if any(row.failed for row in rows):
        text = "training could not continue, most often because it diverged."
        notes.append(Footnote("Failed", text))
    if any(row.edge for row in rows):
        text = "better values may lie outside the range that was tried; widen it."
        notes.append(Footnote("At the edge", text))
    return notes


def _too_good(score: MetricInfo) -> str:
    name = "accuracies" if score == ACCURACY else "scores"
    return f"{name} are too {'high' if score.higher_is_better else 'low'}"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
