import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fedkeel.records.run_record import PartitionRecord
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.report import palette
from fedkeel.report.chart_style import MAX_POINTS, Chart, empty_figure, evenly_spaced
from fedkeel.report.client_scores import (
    client_score_chart,
    client_scores,
    measured_on,
    run_client_scores,
)
from fedkeel.report.cost_charts import time_chart, traffic_chart
from fedkeel.report.formatting import Fact
from fedkeel.report.learning_curves import curve_charts, learning_curve
from fedkeel.report.partition_chart import partition_summary
from fedkeel.report.runs import load_runs
from fedkeel.report.sparklines import axis_ticks, score_axis, sparkline

LOSS = MetricInfo("loss", False)


@pytest.fixture
def entries(make, tmp_path):
    methods = {"fedavg": {}, "fedgc": {"extra": 500_000, "slow": 2.0}}
    return load_runs(make.comparison(tmp_path, methods, rounds=12, per_client=True))


def lines(chart):
    return [t for t in chart.figure.data if t.name is not None]


def accuracy(row):
    return 100 * row.test["accuracy"]


def points(method):
    return list(learning_curve(method, ACCURACY).points)


def test_the_line_is_the_mean_over_seeds_and_the_band_their_range(entries):
    curve = points(entries[0])
    values = [[accuracy(run.rows[r]) for run in entries[0].runs] for r in range(13)]
    assert [point.round for point in curve] == list(range(13))
    assert [point.stat.mean for point in curve] == pytest.approx([np.mean(v) for v in values])
    assert [point.band[0] for point in curve] == pytest.approx([min(v) for v in values])
    assert [point.band[1] for point in curve] == pytest.approx([max(v) for v in values])
    assert {point.stat.count for point in curve} == {3}
    # 1 client a round, a model of 1 MB each way
    assert [point.megabytes for point in curve] == pytest.approx([2.0 * r for r in range(13)])


def test_from_four_seeds_on_the_band_is_one_deviation(make, tmp_path):
    (entry,) = load_runs(make.comparison(tmp_path, {"m": {}}, seeds=4, rounds=3))
    values = [accuracy(run.rows[2]) for run in entry.runs]
    point = points(entry)[2]
    assert point.band[1] == pytest.approx(np.mean(values) + np.std(values, ddof=1))
    assert point.band[0] == pytest.approx(np.mean(values) - np.std(values, ddof=1))


def test_one_seed_has_no_band(make, tmp_path):
    entries = load_runs([make.save(tmp_path, make.record(), make.rows(rounds=3))])
    assert len(curve_charts(entries, ACCURACY)["rounds"].figure.data) == 1


def test_few_points_of_long_runs_are_drawn_with_the_peak(make, tmp_path):
    rows = make.rows(rounds=3000, noise=0.0)
    rows[1234] = rows[1234].__class__(1234, test=make.scores(0.999))
    (entry,) = load_runs([make.save(tmp_path, make.record(rounds=3000), rows)])
    rounds = [point.round for point in points(entry)]
    assert MAX_POINTS <= len(rounds) <= MAX_POINTS + 1
    assert {0, 1234, 3000} <= set(rounds)


@pytest.mark.parametrize("length", [0, 1, 399, 400, 401, 5000])
def test_evenly_spaced_indices(length):
    indices = evenly_spaced(length)
    assert indices == sorted(set(indices))
    assert len(indices) == min(length, MAX_POINTS)
    if length:
        assert (indices[0], indices[-1]) == (0, length - 1)


def test_a_seed_that_stops_breaks_the_line(make, tmp_path):
    folders = [
        make.save(tmp_path, make.record(seed=0), make.rows(0, rounds=10)),
        make.save(tmp_path, make.record(seed=1, status="failed"), make.rows(1, rounds=4)),
    ]
    (entry,) = load_runs(folders)
    segments = learning_curve(entry, ACCURACY).segments
    assert [[point.round for point in segment] for segment in segments] == [
        list(range(5)),
        list(range(5, 11)),
    ]
    (line,) = lines(curve_charts([entry], ACCURACY)["rounds"])
    assert line.x == (0, 1, 2, 3, 4, None, 5, 6, 7, 8, 9, 10)
    assert line.customdata[6].endswith("1 of 2 seeds")


def test_losses_that_are_not_finite_leave_a_gap(make, tmp_path):
    folders = [make.save(tmp_path, make.record(), make.rows(rounds=10, nan_from=7))]
    (line,) = lines(curve_charts(load_runs(folders), LOSS)["rounds"])
    assert max(line.x) == 6
    gone = [make.save(tmp_path / "b", make.record(), make.rows(rounds=2, nan_from=0)[1:])]
    assert curve_charts(load_runs(gone), LOSS) == {}


def test_an_accuracy_that_is_not_finite_leaves_a_gap(make, tmp_path):
    rows = make.rows(rounds=4)
    rows[2] = replace(rows[2], test=make.scores(math.nan))
    (entry,) = load_runs([make.save(tmp_path, make.record(), rows)])
    assert [point.round for point in points(entry)] == [0, 1, 3, 4]


def test_the_mean_is_not_drawn_where_one_seed_is_not_finite(make, tmp_path):
    folders = [
        make.save(tmp_path, make.record(seed=s), make.rows(s, rounds=6, nan_from=4 + s))
        for s in (0, 1)
    ]
    (line,) = lines(curve_charts(load_runs(folders), LOSS)["rounds"])
    assert max(line.x) == 3


def test_both_axes_and_the_same_colour_in_all_figures(entries):
    charts = curve_charts(entries, ACCURACY, 0.85)
    assert set(charts) == {"rounds", "megabytes"}
    assert max(lines(charts["megabytes"])[1].x) == pytest.approx(12 * 3.0)
    colours = {line.line.color for line in (lines(d)[1] for d in charts.values())}
    assert colours == {palette.method_colour(1)}
    assert palette.method_colour(1) in client_score_chart(client_scores(entries)).to_json()
    assert "fedgc ends at" in charts["rounds"].description
    assert any("target 85 %" in a.text for a in charts["rounds"].figure.layout.annotations)


def test_a_tick_is_a_whole_round(make, tmp_path):
    charts = curve_charts(
        load_runs([make.save(tmp_path, make.record(), make.rows(rounds=1))]), ACCURACY
    )
    assert charts["rounds"].figure.layout.xaxis.dtick == 1
    assert charts["megabytes"].figure.layout.xaxis.dtick is None


def test_a_collapse_is_never_cut_off(make, tmp_path):
    folders = [make.save(tmp_path, make.record(), make.rows(rounds=60, nan_from=40, noise=0.0))]
    low, high = curve_charts(load_runs(folders), ACCURACY)["rounds"].figure.layout.yaxis.range
    assert low < 10.0 < 85.0 < high


def test_the_axis_leaves_out_the_first_fifth(make, tmp_path):
    folders = [make.save(tmp_path, make.record(), make.rows(rounds=60, noise=0.0))]
    low, _ = curve_charts(load_runs(folders), ACCURACY)["rounds"].figure.layout.yaxis.range
    at13 = 100 * (0.1 + 0.8 * (1 - math.exp(-13 / 8)))
    assert at13 - 5 < low < at13 + 2


def test_traffic_by_part_adds_up_to_the_factor(entries):
    chart = traffic_chart(entries)
    assert [item.label for item in chart.legend] == ["model", "fedgc.cgc"]
    model, part = chart.figure.data
    assert list(model.x) == pytest.approx([1, 1, 1, 1])
    assert list(part.x) == pytest.approx([0, 0, 0.5, 0.5])
    assert "fedgc: 1.50 times" in chart.description


def test_the_legend_has_the_pattern_of_the_bars(make, tmp_path):
    names = [f"phase {i}" for i in range(4 * len(palette.RAMP))]
    rows = [replace(row, seconds=dict.fromkeys(names, 0.1)) for row in make.rows(rounds=3)]
    chart = time_chart(load_runs([make.save(tmp_path, make.record(rounds=3), rows)]))
    shapes = {"": "", "stripes": "/", "crosses": "x", "dots": "."}
    shown = [shapes[item.pattern] for item in chart.legend]
    assert shown == [bar.marker.pattern.shape for bar in chart.figure.data]
    assert len({(item.light, item.pattern) for item in chart.legend}) == len(names)


def test_seconds_by_phase(entries):
    chart = time_chart(entries)
    assert next(item.label for item in chart.legend) == "train"
    slow = [sum(trace.x[i] for trace in chart.figure.data) for i in (0, 1)]
    total = [np.mean([run.summary.seconds for run in e.runs]) / 12 for e in entries]
    assert slow == pytest.approx([1000 * t for t in total], rel=1e-4)


def test_nothing_to_draw(make, tmp_path):
    record = make.record(partition=PartitionRecord(), status="running")
    entries = load_runs([make.save(tmp_path, record, [])])
    assert curve_charts(entries, ACCURACY) == {}
    assert traffic_chart(entries) is None
    assert time_chart(entries) is None
    assert client_score_chart(client_scores(entries)) is None
    assert partition_summary(record) is None


def test_clients_without_examples_are_left_out(entries):
    charts = run_client_scores(entries[0].runs[0], ACCURACY)
    assert charts is not None
    assert (charts.round, len(charts.values)) == (12, 9)
    box = client_score_chart(client_scores(entries)).figure.data[0]
    values = [100 * v for run in entries[0].runs for v in run_client_scores(run, ACCURACY).values]
    assert box.median[0] == pytest.approx(np.median(values), rel=1e-5)
    assert box.lowerfence[0] == pytest.approx(np.percentile(values, 5), rel=1e-5)


def test_the_worst_tenth(entries):
    values = sorted(v for run in entries[1].runs for v in run_client_scores(run, ACCURACY).values)
    clients = client_scores(entries)[1]
    assert clients.spread.worst_tenth == pytest.approx(np.mean(values[:2]))  # a tenth of 27
    assert clients.spread.best_tenth == pytest.approx(np.mean(values[-2:]))
    assert (clients.client_counts, len(clients.runs), clients.rounds) == ("9", 3, "12")


@pytest.mark.parametrize(
    ("divisions", "says"),
    [
        ([{"held_out": 0}], "on the examples that it is trained on"),
        ([{}], "on the examples that it is trained on"),
        ([{"held_out": 12}, {"held_out": 9}], "on the examples that it holds out"),
        ([{"held_out": 12}, {}], "Some runs"),
        ([{"kind": "nodes"}], "by its node"),
    ],
)
def test_on_what_clients_are_measured(make, tmp_path, divisions, says):
    folders = [
        make.save(tmp_path, make.record(seed=i, partition=PartitionRecord(**one)), [])
        for i, one in enumerate(divisions)
    ]
    assert says in measured_on(load_runs(folders))


def test_few_clients_keep_their_order(make):
    record = make.record(clients=4, classes=3)
    partition = partition_summary(record)
    bars, heat = partition.chart.figure.data
    assert list(bars.x) == ["0", "1", "2", "3"]
    assert list(bars.y) == record.partition.sizes
    assert np.sum(heat.z, axis=0) == pytest.approx([1, 1, 1, 1], abs=2e-3)
    assert heat.customdata[2][1] == record.partition.histogram[1][2]
    assert "sorted" not in partition.caption


def test_many_clients_are_sorted_by_class_and_thinned(make):
    record = make.record(clients=2000, classes=5)
    partition = partition_summary(record)
    _, heat = partition.chart.figure.data
    assert len(heat.x) == 600
    first = np.argmax(np.array(heat.z), axis=0)
    assert list(first) == sorted(first)
    assert "600 of 2,000 clients" in partition.caption
    assert partition.facts[0] == Fact("clients", "2,000")
    assert len(partition.chart.to_json()) < 100_000


def test_names_that_are_alike_stay_apart(make):
    record = make.record(clients=2)
    names = ["a hospital with a long name", "a hospital with a longer name"]
    record = replace(record, partition=replace(record.partition, names=names))
    assert list(partition_summary(record).chart.figure.data[0].x) == [
        "a hospital with a… (0)",
        "a hospital with a… (1)",
    ]


def test_labels_are_text_in_figures(make, tmp_path):
    odd = "<b onclick=x>%{y}</b>"
    record = make.record(odd, name="odd")
    entries = load_runs([make.save(tmp_path, record, make.rows(rounds=3, per_client=True))])
    for chart in (
        *curve_charts(entries, ACCURACY).values(),
        client_score_chart(client_scores(entries)),
        traffic_chart(entries),
    ):
        assert "<b" not in json.dumps(chart.figure.to_plotly_json())
        assert "&lt;b onclick" in json.dumps(chart.figure.to_plotly_json())
        assert "<" not in chart.to_json()


def test_json_cannot_end_a_script():
    figure = empty_figure(100, title={"text": "</script><!--\u2028"})
    text = Chart(figure, "").to_json()
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text)["layout"]["title"]["text"] == "</script><!--\u2028"


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.1, 0.9), (0.8999, 0.9001), (0, 1)])
def test_ticks_enclose_the_values(low, high):
    charts = axis_ticks(low, high)
    assert charts[0] <= low + 1e-9
    assert charts[-1] >= high - 1e-9
    assert 2 <= len(charts) <= 7


def test_accuracies_lie_on_one_axis(entries):
    axis = score_axis([entry.summary for entry in entries])
    for entry in entries:
        best = entry.summary.stat("best")
        assert 2 <= axis.position(best.min) <= axis.position(best.mean) <= 98
    assert (axis.position(axis.ticks[0]), axis.position(axis.ticks[-1])) == (2, 98)
    assert float(axis.label(axis.ticks[0])) == pytest.approx(100 * axis.ticks[0])
    assert score_axis([]) is None


def test_sparklines():
    assert sparkline([]) == ()
    assert sparkline([None, None]) == ()
    assert sparkline([3.0, 3.0]) == ("0.0,13.0 120.0,13.0",)
    assert len(sparkline([float(i) for i in range(1000)])[0].split()) == 120
