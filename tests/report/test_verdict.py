"""The verdict claims what the results support, and no more."""

import pytest

from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.report.summary import MethodSummary, summarise
from fedkeel.report.verdict import lead_over, verdict


def group(
    method,
    *bests,
    unfinished=0,
    end=None,
    target=None,
    sent=1,
    ms=10.0,
    wall=10.0,
    examples=100_000,
):
    runs = []
    for seed, best in enumerate(bests):
        accuracy = (best, best if end is None else end)
        rows = [
            RoundRecord(
                i + 1,
                clients=[0],
                train_loss=2.0 - best + seed / 8,
                bytes_down={"model": 100 * sent},
                bytes_up={"model": 100 * sent},
                seconds={"train": wall / 1e3},
                processor_seconds=None if ms is None else ms / 1e3,
                test=Scores(examples, {"accuracy": a, "loss": 1.0}),
            )
            for i, a in enumerate(accuracy)
        ]
        runs.append(summarise(rows, target, model_bytes=100))
    return MethodSummary(method, tuple(runs), tuple(range(len(bests))), unfinished)


FEDAVG = group("fedavg", 0.80, 0.81, 0.82)


def plain(text):
    return text.replace("`", "")


def conclusion(*groups):
    result = verdict(groups)
    return result.status, plain(result.headline)


def details_of(*groups):
    return plain(" ".join(verdict(groups).details))


def test_a_clear_lead_names_the_gap():
    status, headline = conclusion(FEDAVG, group("fedgc", 0.90, 0.91, 0.92))
    assert status == "clear"
    assert headline == "fedgc reached 91.0 ± 1.0 % (best round, 3 seeds), 10.0 points above fedavg."


def test_the_next_best_is_named_beside_fedavg():
    status, headline = conclusion(
        FEDAVG, group("b", 0.85, 0.85, 0.85), group("a", 0.90, 0.91, 0.92)
    )
    assert status == "clear"
    assert headline.endswith("10.0 points above fedavg and 6.0 points above b, the next best.")


def test_leads_within_the_spread_are_named():
    rival = group("gcfed", 0.93, 0.90, 0.89)
    status, headline = conclusion(FEDAVG, group("fedgc", 0.90, 0.91, 0.92), rival)
    assert status == "close"
    assert headline.endswith(
        "10.0 points above fedavg. Its lead over gcfed is within the chance of seeds."
    )


def test_no_clear_winner_where_fedavg_is_within_the_spread():
    status, headline = conclusion(
        FEDAVG, group("fedgc", 0.79, 0.83, 0.84), group("bad", 0.5, 0.5, 0.5)
    )
    assert status == "none"
    assert headline == (
        "No clear winner: fedgc has the highest mean, 82.0 ± 2.6 % (best round, 3 seeds). Its lead "
        "over fedavg is within the chance of seeds. It is 32.0 points above bad."
    )


def test_a_lead_is_judged_seed_by_seed():
    # ranges overlap, and the lead is 0.5 points on each of the three seeds
    status, headline = conclusion(FEDAVG, group("fedgc", 0.805, 0.815, 0.825))
    assert status == "clear"
    assert headline.endswith("0.5 points above fedavg.")
    shuffled = MethodSummary("fedgc", group("x", 0.805, 0.815, 0.825).runs, (2, 1, 0))
    assert conclusion(FEDAVG, shuffled)[0] == "none"


def test_ahead_on_every_seed_is_no_clear_lead():
    """Three of three happen by chance in one of four comparisons; ranges apart in one of ten."""
    apart = group("fedgc", 0.821, 0.85, 0.90)  # 2.1, 4 and 8 points: p = 0.11
    assert lead_over(apart, FEDAVG) == "within spread"
    assert conclusion(FEDAVG, apart)[0] == "none"


def test_a_lead_over_many_methods_has_to_be_larger():
    """The p-value is multiplied with the number of methods, as the leader was chosen among them."""
    leader = group("a", 0.85, 0.862, 0.871)  # 5, 5.2 and 5.1 points: p = 0.0001
    weak = group("a", 0.85, 0.865, 0.862)  # 5, 5.5 and 4.2 points: p = 0.006
    assert lead_over(leader, FEDAVG, comparisons=10) == "clear"
    assert lead_over(weak, FEDAVG) == "clear"
    assert lead_over(weak, FEDAVG, comparisons=10) == "within spread"


@pytest.mark.parametrize(
    ("seeds", "word"), [(1, "One seed shows nothing"), (2, "2 seeds show little")]
)
def test_few_seeds_make_no_claim(seeds, word):
    low, high = (0.80, 0.81)[:seeds], (0.90, 0.91)[:seeds]
    groups = group("fedavg", *low), group("fedgc", *high)
    status, headline = conclusion(*groups)
    assert status == "few"
    assert "10.0 points above fedavg." in headline
    assert word in details_of(*groups)
    assert "hint" in details_of(*groups)


def test_a_method_with_few_seeds_does_not_silence_the_others():
    groups = FEDAVG, group("fedgc", 0.90, 0.91, 0.92), group("new", 0.85)
    assert conclusion(*groups)[0] == "clear"
    assert "new is left out of this verdict: fewer than 3 seeds." in details_of(*groups)
    top = FEDAVG, group("fedgc", 0.90, 0.91, 0.92), group("new", 0.99)
    assert conclusion(*top)[0] == "few"
    assert conclusion(*top)[1].startswith("new reached 99.0 %")


def test_unfinished_methods_are_left_out():
    groups = FEDAVG, group("fedgc", 0.90, 0.91, 0.92), group("x", 0.5, 0.5, 0.5, unfinished=1)
    assert "x" not in conclusion(*groups)[1].replace("fedgc", "")
    assert "x is left out of this verdict: some of the runs are not finished." in details_of(
        *groups
    )


def test_where_nothing_is_finished_it_says_so_far():
    one = group("fedavg", 0.8, 0.8, 0.8, unfinished=3)
    two = group("fedgc", 0.9, 0.9, 0.9, unfinished=1)
    assert conclusion(one, two)[1].startswith("So far, fedgc reached 90.0")
    assert conclusion(one)[1].startswith("So far, fedavg reached")


def test_one_method_alone():
    assert conclusion(group("fedreg", 0.85)) == (
        "single",
        "fedreg reached 85.0 % (best round, one seed).",
    )
    assert "One seed shows nothing about the spread" in details_of(group("fedreg", 0.85))
    assert "spread" not in details_of(FEDAVG)


def test_equal_methods_are_level():
    assert ", level with b." in conclusion(group("fedavg", 0.8), group("b", 0.8))[1]


def test_nothing_evaluated():
    empty = MethodSummary("m", (summarise([]),), (0,), 1)
    assert conclusion(empty) == ("empty", "Nothing has been evaluated yet.")


def test_another_leader_at_the_end_is_reported():
    one = group("peak", 0.90, 0.91, 0.92, end=0.60)
    two = group("steady", 0.85, 0.85, 0.85)
    assert "At the end (mean of the last ten evaluations) steady is ahead: 85.0 %" in details_of(
        one, two
    )
    assert "At the end" not in details_of(FEDAVG, two)
    # at the end 88.2 ± 1.0 against 88.0 ± 1.0: nothing to tell
    noisy = MethodSummary(
        "peak", tuple(group("x", b, end=b - 0.06).runs[0] for b in (0.9, 0.91, 0.92))
    )
    level = group("steady", 0.872, 0.882, 0.892)
    assert "At the end" not in details_of(noisy, level)


def test_target_and_cost_in_words():
    one = group("fedgc", 0.90, 0.91, 0.92, target=0.85, sent=1.5, ms=20.0)
    two = group("fedavg", 0.80, 0.81, 0.82, target=0.85)
    details = details_of(two, one)
    assert "fedgc reached 85 % after 1 ± 0 rounds, fedavg never did." in details
    never = group("fedgc", 0.70, 0.71, 0.72, target=0.85), group("fedavg", 0.6, 0.6, 0.6)
    assert "Neither fedgc nor fedavg reached 85 %." in details_of(*never)
    costs = "sent 1.50 times as much as fedavg and took 2.00 times as much processor time to train"
    assert f"fedgc {costs}." in details


def test_costs_that_differ_by_noise_are_alike():
    one = group("fedgc", 0.90, 0.91, 0.92, ms=10.2)
    assert (
        "fedgc sent as much as fedavg and took about as much processor time to train."
        in details_of(FEDAVG, one)
    )


def test_a_busy_machine_is_no_property_of_a_method():
    """Three times as long beside other load, for the same processor time."""
    slow = group("fedgc", 0.90, 0.91, 0.92, wall=30.0)
    assert "took about as much processor time to train." in details_of(FEDAVG, slow)
    unknown = group("fedgc", 0.90, 0.91, 0.92, wall=30.0, ms=None)
    details = details_of(FEDAVG, unknown)
    assert "fedgc sent as much as fedavg." in details
    assert "took" not in details


def test_the_run_that_warms_the_machine_up_is_no_dearer():
    """The first run of a comparison loads libraries and fills caches in its first round."""

    def timed(method, accuracy, first):
        rows = [
            RoundRecord(
                i + 1,
                clients=[0],
                train_loss=1.0,
                bytes_down={"model": 100},
                bytes_up={"model": 100},
                seconds={"train": seconds},
                processor_seconds=seconds,
                test=Scores(100_000, {"accuracy": accuracy, "loss": 1.0}),
            )
            for i, seconds in enumerate([first, 0.0077, 0.0077, 0.0077])
        ]
        return MethodSummary(method, (summarise(rows, model_bytes=100),) * 3, (0, 1, 2))

    base, later = timed("fedavg", 0.80, first=0.5), timed("fedgc", 0.90, first=0.0078)
    assert "took about as much processor time to train" in details_of(base, later)
    shown = [one.stat("seconds_per_client").mean for one in (base, later)]
    assert shown == pytest.approx([0.0077, 0.0077])


def test_times_within_their_error_are_alike():
    def runs(method, bests, times):
        runs = [group(method, b, ms=ms).runs[0] for b, ms in zip(bests, times, strict=True)]
        return MethodSummary(method, tuple(runs), (0, 1, 2))

    base = runs("fedavg", (0.80, 0.81, 0.82), (10.0, 20.0, 30.0))
    slow = runs("fedgc", (0.90, 0.91, 0.92), (15.0, 23.0, 34.0))  # 1.2 times, error 0.4
    assert "took about as much processor time to train" in details_of(base, slow)


def test_the_cheapest_of_the_methods_without_a_clear_difference():
    one = group("fedgc", 0.79, 0.83, 0.84, sent=1.5)
    assert "Among the methods without a clear difference, fedavg sends least." in details_of(
        FEDAVG, one
    )
    assert "sends least" not in details_of(
        group("dear", 0.1, 0.1, 0.1), group("x", 0.9, 0.9, 0.9, sent=2)
    )


def test_labels_are_quoted_and_many_are_counted():
    others = [group(f"m{i}", 0.79, 0.82, 0.83) for i in range(6)]
    result = verdict([FEDAVG, *others])
    assert "`m0`" in result.headline
    assert result.headline.count("`") % 2 == 0
    assert "and 3 others is within the chance of seeds." in result.headline


def test_a_lead_needs_three_seeds_each():
    assert lead_over(group("a", 0.9, 0.9, 0.9), group("b", 0.1, 0.1)) == "too few seeds"
    assert lead_over(group("a", 0.9, 0.9, 0.9), group("b", 0.1, 0.1, 0.1)) == "clear"
    assert lead_over(group("a", 0.9, 0.8, 0.9), group("b", 0.85, 0.85, 0.85)) == "within spread"


def test_a_lead_too_small_for_the_test_examples():
    """One example of twenty was a clear lead."""
    few = [group(m, *[a] * 3, examples=20) for m, a in (("fedavg", 0.80), ("fedgc", 0.85))]
    assert lead_over(few[1], few[0]) == "too few examples"
    status, headline = conclusion(*few)
    assert status == "none"
    assert headline.endswith("Its lead over fedavg is too small for 20 test examples.")
    wide = [group("fedavg", *[0.3] * 3, examples=20), few[1], group("x", *[0.8] * 3, examples=20)]
    status, headline = conclusion(*wide)
    assert status == "close"
    assert headline.endswith(
        "55.0 points above fedavg. Its lead over x is too small for 20 test examples."
    )
    # on every seed, and yet by less than two standard errors: 0.9 points of 2,000 examples
    small = group("fedgc", 0.805, 0.815, 0.825, examples=2000)
    assert lead_over(small, group("fedavg", 0.80, 0.81, 0.82, examples=2000)) == "too few examples"
    spread = group("y", 0.70, 0.95, 0.85, examples=20)
    headline = conclusion(few[0], few[1], spread)[1]
    assert headline.endswith(
        " Its lead over y is within the chance of seeds. "
        "Its lead over fedavg is too small for 20 test examples."
    )


def test_identical_runs_are_no_seeds():
    """Where nothing is random, three seeds were a clear lead."""
    same = MethodSummary("fedgc", group("fedgc", 0.9).runs * 3, (0, 1, 2))
    assert lead_over(same, FEDAVG) == "too few seeds"
    assert conclusion(FEDAVG, same)[0] == "few"
    assert "fedgc repeats one run with every seed, because nothing in it is random" in details_of(
        FEDAVG, same
    )
