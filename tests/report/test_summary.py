"""Every figure of a run and of a group, against values worked out by hand."""

import math

import pytest

from fedkeel.records.paired import paired_difference
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.statistics import Stat, is_tied, pooled_error
from fedkeel.report.summary import (
    MethodSummary,
    fluctuation,
    rounds_to,
    summarise,
)


def scored(*accuracy, every=1, start=0):
    return [
        RoundRecord(start + i * every, test=Scores(100, {"accuracy": a, "loss": 1.0}))
        for i, a in enumerate(accuracy)
    ]


def two_rounds():
    """Two rounds of a model of 100 bytes; 3 selected, then 2 of which one drops out."""
    return [
        RoundRecord(0, seconds={"evaluate": 1.0}, test=Scores(10, {"accuracy": 0.1, "loss": 2.3})),
        RoundRecord(
            1,
            clients=[0, 4, 7],
            train_loss=1.0,
            bytes_down={"model": 300, "scaffold": 300},
            bytes_up={"model": 300, "scaffold": 300},
            seconds={"train": 0.9, "aggregate": 0.1, "evaluate": 1.0},
            test=Scores(10, {"accuracy": 0.6, "loss": 1.0}),
        ),
        RoundRecord(
            2,
            clients=[1],
            dropped=[2],
            train_loss=0.5,
            bytes_down={"model": 200, "scaffold": 200},
            bytes_up={"model": 100, "scaffold": 100},
            seconds={"train": 0.3, "aggregate": 0.1},
        ),
    ]


def test_traffic_is_counted_by_part_and_in_multiples_of_the_model():
    summary = summarise(two_rounds(), model_bytes=100)
    assert summary.bytes_down == {"model": 500, "scaffold": 500}
    assert summary.bytes_up == {"model": 400, "scaffold": 400}
    assert (summary.down, summary.up, summary.sent) == (1000, 800, 1800)
    assert (summary.selections, summary.trainings) == (5, 4)
    # (1000 + 800) / 2 over 5 selections of 100 bytes
    assert summary.traffic == pytest.approx(1.8)


def test_traffic_without_the_model_size_uses_the_bytes_sent_as_model():
    assert summarise(two_rounds()).traffic == pytest.approx(900 / 500)
    assert summarise(scored(0.1)).traffic is None


@pytest.mark.parametrize(
    ("down", "up", "factor"),
    [(1, 1, 1.0), (3, 2, 2.5), (2, 2, 2.0)],
    ids=["fedavg", "fedcurv", "scaffold"],
)
def test_the_papers_factors(down, up, factor):
    sent = {"bytes_down": {"model": 40, "x": 40 * (down - 1)}, "bytes_up": {"model": 40 * up}}
    rows = [RoundRecord(1, clients=[0, 1, 2, 3], **sent)]
    assert summarise(rows, model_bytes=10).traffic == pytest.approx(factor)


def test_seconds_by_phase_round_and_client():
    summary = summarise(two_rounds())
    assert summary.seconds_by_phase == pytest.approx(
        {"evaluate": 2.0, "train": 1.2, "aggregate": 0.2}
    )
    assert summary.seconds == pytest.approx(3.4)
    assert summary.seconds_per_round == pytest.approx(2.4 / 2)  # round 0 has no training
    assert summary.seconds_per_client == pytest.approx(1.2 / 4)


def test_an_excluded_client_trained():
    rows = [RoundRecord(1, clients=[1], excluded=[2], train_loss=1.0, seconds={"train": 3.0})]
    summary = summarise(rows)
    assert (summary.trainings, summary.seconds_per_client) == (2, 1.5)


def test_best_is_the_first_round_with_the_highest_accuracy():
    summary = summarise(scored(0.1, 0.7, 0.5, 0.7, 0.6))
    assert (summary.best, summary.best_round, summary.last) == (0.7, 1, 0.6)
    assert (summary.rounds, summary.evaluations) == (4, 5)


def test_last_ten_leaves_out_the_untrained_model():
    assert summarise(scored(0.1, 0.5, 0.7)).last_mean == pytest.approx(0.6)
    eleven = [0.0] + [0.2] + [0.5] * 9 + [1.0]
    assert summarise(scored(*eleven)).last_mean == pytest.approx((0.5 * 9 + 1.0) / 10)
    assert summarise(scored(0.1)).last_mean == 0.1


def test_rounds_to_target_counts_completed_rounds():
    rows = scored(0.1, 0.5, 0.4, 0.8, every=5)
    assert [rounds_to(rows, a) for a in (0.1, 0.5, 0.51, 0.8, 0.9)] == [0, 5, 15, 15, None]
    assert rounds_to(rows, None) is None


def test_rounds_to_share_is_not_moved_by_rounding():
    assert 3 * 0.1 > 0.3  # in the last bit
    assert rounds_to(scored(0.1, 0.3), 0.1 * 3.0) == 1
    assert rounds_to(scored(0.1, 0.63), 0.7 * 0.9) == 1
    assert rounds_to(scored(0.1, 0.6299), 0.7 * 0.9) is None


def test_bytes_to_target_are_those_sent_until_then():
    summary = summarise(two_rounds(), 0.6)
    assert (summary.target, summary.rounds_to_target, summary.bytes_to_target) == (0.6, 1, 1200)
    assert summarise(two_rounds(), 0.7).bytes_to_target is None


def test_fluctuation_in_percentage_points():
    # steps: +40, -20, +10; mean 10, deviations 30, -30, 0
    summary = fluctuation(scored(0.1, 0.5, 0.3, 0.4, every=2))
    assert summary is not None
    assert summary.mean == pytest.approx(10.0)
    assert summary.std == pytest.approx(30.0)  # sqrt((900 + 900) / 2)
    assert summary.min == pytest.approx(-20.0)
    assert fluctuation(scored(0.1)) is None
    assert fluctuation(scored(0.25, 0.5)) == Stat(25.0, None, 1, 25.0, 25.0)


def test_rows_without_a_score_or_with_one_that_is_not_finite():
    rows = [
        RoundRecord(1, clients=[0], train_loss=1.0),
        RoundRecord(
            2, clients=[0], train_loss=None, test=Scores(10, {"accuracy": 0.5, "loss": None})
        ),
        RoundRecord(
            3, clients=[0], train_loss=math.nan, test=Scores(0, {"accuracy": math.nan, "loss": 1.0})
        ),
        RoundRecord(4),
    ]
    summary = summarise(rows)
    assert (summary.evaluations, summary.best, summary.best_round, summary.last) == (1, 0.5, 2, 0.5)
    assert summary.losses_not_finite == 2  # round 4 trained nobody
    assert summary.fluctuation is None


def test_no_rows():
    summary = summarise([], 0.5)
    assert (summary.rounds, summary.best, summary.last_mean, summary.traffic, summary.seconds) == (
        0,
        None,
        None,
        None,
        0,
    )
    assert summary.seconds_per_round is None
    assert MethodSummary("x", (summary,)).stat("best") is None


def test_a_method_over_seeds():
    runs = tuple(summarise(scored(0.1, a), 0.6) for a in (0.5, 0.6, 0.7))
    group = MethodSummary("m", runs, (0, 1, 2))
    best = group.stat("best")
    assert best is not None
    assert best.mean == pytest.approx(0.6)
    assert best.std == pytest.approx(0.1)
    assert (best.count, best.min, best.max) == (3, 0.5, 0.7)
    assert len(group.values("rounds_to_target")) == 2
    assert group.stat("rounds_to_target") == Stat(1.0, 0.0, 2, 1.0, 1.0)
    assert MethodSummary("m", runs[:1]).stat("best") == Stat(0.5, None, 1, 0.5, 0.5)
    falls = group.fluctuation("min")
    assert falls is not None
    assert falls.mean == pytest.approx(50.0)


def test_parts_that_a_seed_lacks_count_as_nothing():
    one = summarise([RoundRecord(1, bytes_up={"model": 10, "x": 4})])
    two = summarise([RoundRecord(1, bytes_up={"model": 20})])
    assert MethodSummary("m", (one, two)).by_name("bytes_up") == {"model": 15, "x": 2}


def test_paired_differences_go_seed_by_seed():
    def group(name, **best):
        seeds = tuple(int(s[1:]) for s in best)
        return MethodSummary(
            name, tuple(summarise(scored(b, start=1)) for b in best.values()), seeds
        )

    def difference(first, second):
        return paired_difference(first.by_seed("best"), second.by_seed("best"))

    one, two = group("a", s0=0.8, s1=0.6, s2=0.9), group("b", s2=0.7, s1=0.7, s5=0.1)
    summary = difference(one, two)
    assert summary is not None
    assert summary.stat.count == 2
    assert summary.stat.mean == pytest.approx((-0.1 + 0.2) / 2)
    assert summary.stat.std == pytest.approx(0.3 / math.sqrt(2))
    assert summary.ahead == 1
    assert difference(one, group("c", s7=0.5)) is None
    assert difference(one, MethodSummary("d", two.runs)) is None
    failed = MethodSummary("e", (summarise(scored(0.1)), summarise(scored(0.7, start=1))), (0, 1))
    summary = difference(one, failed)  # the run of seed 0 holds only the untrained model
    assert summary is not None
    assert (summary.stat.count, summary.stat.mean) == (1, pytest.approx(-0.1))


def test_one_seed_each_has_no_pooled_error():
    alone = Stat(1.0, None, 1, 1.0, 1.0)
    assert pooled_error(alone, alone) is None
    assert is_tied(alone, alone)
    assert not is_tied(alone, Stat(1.001, None, 1, 1.001, 1.001))
