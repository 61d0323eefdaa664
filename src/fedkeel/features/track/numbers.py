"""The numbers of a round, by the names that every tracker shows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fedkeel.base.feature import figures
from fedkeel.records.fairness import client_values, spread
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.run_record import RunRecord


def numbers(
    row: RoundRecord,
    record: RunRecord,
    bytes_so_far: int,
    breakdowns: bool = False,
    test: bool = True,
) -> dict[str, float]:
    """Return the finite numbers of a round by name; a slash groups them in a tracker's pages.

    Args:
        row: the round.
        record: what runs.
        bytes_so_far: traffic of all rounds until this one, both ways.
        breakdowns: whether to take diagnostics by layer, class, client or position.
        test: whether to take scores on the test set.
    """
    every = _every(row, record, bytes_so_far, breakdowns, test)
    return {name: float(value) for name, value in every if math.isfinite(value)}


def _every(
    row: RoundRecord, record: RunRecord, bytes_so_far: int, breakdowns: bool, test: bool
) -> Iterator[tuple[str, float]]:
    yield "lr", row.lr
    if row.train_loss is not None:
        yield "train/loss", row.train_loss
    if test:
        yield from _scores("test", row.test)
        for source, scores in row.sources.items():
            yield from _scores(f"test/{source}", scores)
    for name, columns in (("clients", row.per_client), ("personal", row.personal)):
        over = spread(list(client_values(columns, record.score).values()), record.score)
        if over is not None:
            yield f"{name}/{record.score.name}_mean", over.mean
            yield f"{name}/{record.score.name}_worst_tenth", over.worst_tenth
    for figure in figures():
        if figure.tracked and (value := figure.value(row.features)) is not None:
            yield figure.tracked, value
    if row.round > 0:
        yield "cohort/clients", len(row.clients)
        yield "cohort/dropped", len(row.dropped)
        yield "cohort/excluded", len(row.excluded)
        yield "traffic/bytes_up", sum(row.bytes_up.values())
        yield "traffic/bytes_down", sum(row.bytes_down.values())
        yield "traffic/bytes_so_far", bytes_so_far
    yield "seconds/round", math.fsum(row.seconds.values())
    for phase, seconds in row.seconds.items():
        yield f"seconds/{phase}", seconds
    for name, axis, label, value in row.measured():
        if axis is None:
            yield f"diagnostics/{name}", value
        elif breakdowns:
            yield f"diagnostics/{name}/{axis}/{label}", value


def _scores(name: str, scores: Scores | None) -> Iterator[tuple[str, float]]:
    for metric, value in () if scores is None else scores.values.items():
        yield f"{name}/{metric}", value
