"""A table's numbers are what the papers define, on curves worked out by hand."""

from __future__ import annotations

import pytest

from each import each
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.reproduce.measure import metric_value
from fedkeel.reproduce.table import CellMetric


def curve(*accuracy: float | None, sent: int = 500_000) -> list[RoundRecord]:
    """Rounds with these accuracies, the untrained model first; None is not evaluated."""
    return [
        RoundRecord(
            r,
            test=None if a is None else Scores(100, {"accuracy": a, "top3": min(1.0, a + 0.2)}),
            bytes_up={"model": sent if r else 0},
            bytes_down={"model": sent if r else 0},
        )
        for r, a in enumerate(accuracy)
    ]


CURVE = curve(0.1, 0.5, 0.7, 0.6, 0.65)


@each(
    ("settings", "wanted"),
    [
        ({"kind": "best"}, 70.0),
        ({"kind": "best", "score": "top3"}, 90.0),
        ({"kind": "last"}, 65.0),
        ({"kind": "last_mean"}, 61.25),
        ({"kind": "last_mean", "window": 2}, 62.5),
        ({"kind": "at", "round": 3}, 60.0),
        ({"kind": "at", "round": 3, "score": "top3"}, 80.0),
        ({"kind": "at", "round": 9}, None),
        ({"kind": "rounds_to", "target": 0.6}, 2),
        ({"kind": "rounds_to", "target": 0.7}, 2),
        ({"kind": "rounds_to", "target": 0.71}, None),
        ({"kind": "fluctuation_mean"}, 13.75),
        ({"kind": "fluctuation_min"}, -10.0),
    ],
)
def test_numbers_of_a_curve(settings: dict, wanted: float | None) -> None:
    found = metric_value(CellMetric(**settings), CURVE)
    assert found is None if wanted is None else found == pytest.approx(wanted)


# FedReg, section 4: R_a is the number of rounds until the accuracy is a times the highest of SGD.
SGD = curve(0.10, 0.30, 0.48, 0.60, 0.80, 0.72)
FEDREG = curve(0.10, 0.41, 0.72, 0.69, 0.79, 0.85)


def r(share: float, rows: list[RoundRecord], kind: str = "rounds_to_share") -> float | None:
    return metric_value(CellMetric(kind=kind, share=share, reference="SGD"), rows, SGD)


def test_r_a_is_fedregs() -> None:
    """A = 0.80: thresholds 0.40, 0.72 and 0.80, first reached, and round 0 does not count."""
    assert [r(a, SGD) for a in (0.5, 0.9, 1.0)] == [2, 4, 4]
    assert [r(a, FEDREG) for a in (0.5, 0.9, 1.0)] == [1, 2, 5]


def test_r_a_is_of_the_best_and_not_of_the_last() -> None:
    """Of the last, 0.72, the share 1.0 would be reached in round 2."""
    assert r(1.0, FEDREG) == 5
    assert r(1.0, curve(0.1, 0.2, 0.79)) is None


def test_rounds_are_counted_where_not_every_round_is_evaluated() -> None:
    assert r(0.9, curve(0.1, None, 0.5, None, 0.75)) == 4


def test_bytes_to_a_share_are_both_ways_until_then() -> None:
    assert r(0.9, FEDREG, "bytes_to_share") == pytest.approx(2.0)


def test_communication_cost_is_in_models_each_way_of_a_client() -> None:
    """FedAvg sends as many as it has rounds; three times the model up is two each way."""
    assert r(0.9, FEDREG, "models_to_share") == pytest.approx(2.0)
    for row in (heavy := curve(0.10, 0.41, 0.72)):
        row.bytes_up["controls"] = 2 * row.bytes_up["model"]
    assert r(0.9, heavy, "models_to_share") == pytest.approx(4.0)


def test_what_is_diagnosed_is_a_mean_over_the_rounds_that_have_it() -> None:
    rows = curve(0.1, 0.2, 0.3, 0.4)
    rows[1].diagnostics["forgetting.increase"] = 1.0
    rows[2].diagnostics["forgetting.increase"] = float("inf")
    rows[3].diagnostics["forgetting.increase"] = 4.0
    rows[3].breakdowns["conflict.share.layer"] = {"conv": 0.25, "fc": 0.75}

    def diagnosed(name: str) -> float | None:
        return metric_value(CellMetric(kind="diagnosed", diagnostic=name), rows)

    assert diagnosed("forgetting.increase") == 2.5
    assert diagnosed("conflict.share.layer/fc") == 0.75
    assert diagnosed("conflict.share.layer/none") is None
    assert diagnosed("drift.norm") is None


def test_a_reference_that_never_ran_gives_nothing() -> None:
    assert (
        metric_value(CellMetric(kind="rounds_to_share", share=0.5, reference="SGD"), SGD, None)
        is None
    )
