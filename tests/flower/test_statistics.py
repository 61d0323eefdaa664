"""Statistics of sites: the right numbers, no small counts, and none without consent."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from rich.console import Console

from commands import call
from each import each
from fedkeel.config import Experiment, to_toml
from fedkeel.errors import ConfigError, RunError, TrainingError
from fedkeel.features.budget.ledger import Ledger, epsilon_of
from fedkeel.features.budget.policy import PolicyError, read_policy
from fedkeel.flower.local.processes import json_answer
from fedkeel.flower.local.statistics import of_federation
from fedkeel.flower.node import count_noise
from fedkeel.flower.node.configuration import make_node
from fedkeel.flower.node.count_noise import CountNoise, deviation
from fedkeel.flower.node.statistics import _moments as site_moments
from fedkeel.flower.node.trainer_process import NodeAnswers
from fedkeel.flower.protocol import DESCRIBE
from fedkeel.flower.server.statistics import SHARES_OF_VALUES, collect, read_kinds
from fedkeel.flower.server.statistics import _moments as read_moments
from fedkeel.flower.statistics_protocol import (
    STATISTICS,
    TOTALS,
    ColumnForm,
    StatisticsLayout,
    StatisticsRequest,
)
from fedkeel.flower.wire import WireError
from fedkeel.records.node_statistics import FILE, ColumnStatistics, NodeStatistics
from fedkeel.report.statistics_text import statistics_page
from in_process_grid import InProcessGrid, changed, header_of, with_header
from sites import ALL, CONSENT, DATA, FIRST, QUICK, SIZES, experiment, grid_of, write_tables


def pooled(tables: list[dict[str, list[Any]]], name: str) -> np.ndarray:
    values = [value for table in tables for value in table[name] if value is not None]
    return np.array(values)


def check_numbers(column: ColumnStatistics, values: np.ndarray, missing: int) -> None:
    """Compare with numpy on the values themselves; the table is read in float32."""
    assert column.missing == missing
    assert column.known == len(values)
    assert column.mean == pytest.approx(values.mean(), rel=1e-6)
    assert column.deviation == pytest.approx(values.std(), rel=1e-6)
    assert [item.share for item in column.quantiles] == list(SHARES_OF_VALUES)
    for item in column.quantiles:
        exact = float(np.quantile(values, item.share, method="inverted_cdf"))
        assert item.low is not None
        assert item.high is not None
        assert item.value is not None
        slack = 1e-6 * abs(exact)
        assert item.low - slack <= exact <= item.high + slack
        assert item.high - item.low <= max(abs(item.low), abs(item.high)) / 16
        assert item.low <= item.value <= item.high


def check_totals(found: NodeStatistics, tables: list[dict[str, list[Any]]]) -> None:
    total = found.total
    assert total.examples == sum(SIZES)
    assert total.labels is not None
    labels = pooled(tables, "kind")
    assert total.labels.shown == (*(int((labels == n).sum()) for n in ("no", "yes")), 0)
    age, dose, sex, balance = total.columns
    assert [column.name for column in total.columns] == ["age", "dose", "sex", "balance"]
    check_numbers(age, pooled(tables, "age"), 0)
    check_numbers(balance, pooled(tables, "balance"), 0)
    known = pooled(tables, "dose")
    check_numbers(dose, known, sum(SIZES) - len(known))
    assert (sex.missing, sex.mean, sex.quantiles) == (3, None, ())
    assert sex.counts is not None
    of_sex = pooled(tables, "sex")
    assert sex.counts.shown == (int((of_sex == "f").sum()), int((of_sex == "m").sum()), 0)
    assert sex.counts.rest == 0


def test_the_statistics_of_sites_are_those_of_the_pooled_tables(tmp_path: Path) -> None:
    """Though the run standardises the columns and fills their gaps."""
    tables, made = write_tables(tmp_path), experiment()
    found = collect(grid_of(tmp_path, made), made, read_kinds("all"))
    check_totals(found, tables)
    assert [site.name for site in found.sites] == ["site 0", "site 1", "site 2"]
    for site, table in zip(found.sites, tables, strict=True):
        assert site.columns[0].mean == pytest.approx(np.mean(table["age"]), rel=1e-6)
        assert site.labels is not None
        assert site.labels.shown[1] == table["kind"].count("yes")
    found.write(tmp_path)
    assert NodeStatistics.read(tmp_path / FILE) == found
    stream = StringIO()
    Console(width=80, file=stream).print(statistics_page(found))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "site 2" in text
    assert f"{sum(SIZES)}" in text


def test_secure_sums_have_the_same_totals_and_nothing_of_one_site(tmp_path: Path) -> None:
    tables = write_tables(tmp_path)
    made = experiment(flower={**QUICK, "secure_aggregation": True, "secure_minimum": 3})
    sent: list[RecordDict] = []
    grid = grid_of(tmp_path, made)

    def keeps(kind: str, reply: RecordDict) -> RecordDict:
        if kind == TOTALS:
            sent.append(reply)
        return reply

    grid.edits = dict.fromkeys(grid.nodes, keeps)
    found = collect(grid, made, read_kinds("all"))
    check_totals(found, tables)
    assert found.is_secure
    assert [(s.examples, s.labels, s.columns) for s in found.sites] == [
        (size, None, ()) for size in SIZES
    ]
    assert len(sent) == 3
    for reply in sent:  # masked numbers have no zeros, of which an answer is full
        values = np.frombuffer(reply["tensors"]["vector"].data[-80_000:], dtype=np.int64)
        assert (values == 0).sum() == 0
    again = collect(grid, made, ("labels",))  # the same nodes may be asked again
    assert again.total.labels == found.total.labels


def test_a_single_sites_statistics_are_refused_where_sums_are_secure(tmp_path: Path) -> None:
    write_tables(tmp_path)
    made = experiment(flower={**QUICK, "secure_aggregation": True})
    grid = grid_of(tmp_path, made)
    asked: list[RecordDict] = []

    def keeps(node: int, kind: str, content: RecordDict) -> RecordDict:
        if kind == TOTALS:
            asked.append(content)
        return content

    grid.ask = keeps
    collect(grid, made, ("labels",))
    values = header_of(asked[0])
    for name in ("node", "shares", "bound"):
        values.pop(name)
    with pytest.raises(WireError, match="asks for single sites' statistics"):
        grid.nodes[FIRST].reply(STATISTICS, with_header(asked[0], values))


def test_a_second_sum_of_other_nodes_is_refused(tmp_path: Path) -> None:
    """The difference of the two would be what one site has."""
    write_tables(tmp_path)
    made = experiment(flower={**QUICK, "secure_aggregation": True})
    grid = grid_of(tmp_path, made)
    collect(grid, made, ("labels",))
    grid.edits = {FIRST + 2: lambda kind, reply: None if kind == TOTALS else reply}
    with pytest.raises(RunError, match="cannot be unmasked") as caught:
        collect(grid, made, ("missing",))
    assert any("sum of other nodes" in reason for reason in grid.refused), caught.value


def test_a_second_sum_of_other_nodes_is_refused_of_rows_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server sets the seed, which orders the rows that a function returns."""
    (tmp_path / "my_shuffled.py").write_text(
        "import numpy as np\n\n\ndef load():\n    return np.eye(40), np.arange(40) % 2\n"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.toml").write_text(CONSENT)
    fingerprints = set()

    def grid_of_seed(seed: int) -> tuple[Experiment, InProcessGrid]:
        made = experiment(
            seed=seed,
            data={"source": "nodes", "labels": ["0", "1"]},
            flower={**QUICK, "secure_aggregation": True},
        )
        values = {"data": "my_shuffled:load", "policy": str(tmp_path / "policy.toml")}
        nodes = {
            FIRST + i: make_node(
                made, {**values, "partition-id": i, "state": str(tmp_path / str(i))}
            )
            for i in range(3)
        }
        fingerprints.add(nodes[FIRST]._statistics.data.fingerprint())
        return made, InProcessGrid(nodes)

    made, grid = grid_of_seed(0)
    assert collect(grid, made, ("labels",)).total.examples == 120
    made, grid = grid_of_seed(1)
    assert len(fingerprints) == 2
    grid.edits = {FIRST + 2: lambda kind, reply: None if kind == TOTALS else reply}
    with pytest.raises(RunError, match="cannot be unmasked"):
        collect(grid, made, ("labels",))
    assert any("sum of other nodes" in reason for reason in grid.refused)
    made, grid = grid_of_seed(2)
    assert collect(grid, made, ("labels",)).total.examples == 120  # of the same nodes


def test_small_counts_are_not_told(tmp_path: Path) -> None:
    """Nor what is left of a sum: one label that is withheld takes another one with it."""
    tables, made = write_tables(tmp_path), experiment()
    policy = f"[statistics]\n{ALL}\nminimum = 16\n"
    grid = grid_of(tmp_path, made, policy)
    cells: list[np.ndarray] = []

    def keeps(kind: str, reply: RecordDict) -> RecordDict:
        if kind == STATISTICS:
            names = [form.name for form in columns_sent[0]]
            layout = StatisticsLayout(read_kinds("all"), 3, columns_sent[0])
            words = np.frombuffer(reply["tensors"]["vector"].data[-8 * layout.size :], np.uint64)
            parts = layout.parts(words)
            cells.extend(parts["quantiles", names.index(n)] for n in ("age", "dose", "balance"))
        return reply

    columns_sent: list[tuple[ColumnForm, ...]] = []

    def asks(node: int, kind: str, content: RecordDict) -> RecordDict:
        if kind == STATISTICS:
            columns_sent.append(StatisticsRequest.read(content).columns)
        return content

    grid.ask, grid.edits = asks, dict.fromkeys(grid.nodes, keeps)
    found = collect(grid, made, read_kinds("all"))
    for site, table in zip(found.sites, tables, strict=True):
        assert site.minimum == 16
        assert site.labels is not None
        counts = [table["kind"].count(name) for name in ("no", "yes")]
        shown, rest = site.labels.shown, site.labels.rest
        assert sum(shown) + rest == len(table["kind"])
        assert all(count == 0 or count >= 16 for count in (*shown, rest))
        if min(counts) >= 16:
            assert shown[:2] == tuple(counts)
        age, dose, sex, _ = site.columns
        gaps = table["dose"].count(None)
        assert dose.missing == (gaps if gaps >= 16 else 0)
        assert dose.missing_between == ((gaps, gaps) if gaps >= 16 else (0, 15))
        assert dose.known == len(table["dose"]) - dose.missing
        known = [value for value in table["dose"] if value is not None]
        assert dose.mean == pytest.approx(np.mean(known), rel=1e-6)
        assert dose.deviation == pytest.approx(np.std(known), rel=1e-6)
        assert sex.missing == 0
        assert sex.missing_between == (0, 15)
        assert sex.counts is not None
        assert sum(sex.counts.shown) + sex.counts.rest == len(table["sex"])
        assert all(count == 0 or count >= 16 for count in (*sex.counts.shown, sex.counts.rest))
        for item in age.quantiles:
            exact = np.quantile(table["age"], item.share, method="inverted_cdf")
            assert item.low is None or item.low <= exact
            assert item.high is None or exact <= item.high
    sums = experiment(flower={**QUICK, "secure_aggregation": True, "secure_minimum": 3})
    secure = collect(grid_of(tmp_path, sums, policy), sums, ("missing",)).total
    for total in (found.total, secure):
        for column in total.columns:
            low, high = column.missing_between or (1, 0)
            exact = sum(table[column.name].count(None) for table in tables)
            assert 0 <= low <= exact <= high <= total.examples
    assert len(cells) == 9
    for numbers in cells:
        assert numbers.sum() >= 16
        assert not ((numbers > 0) & (numbers < 16)).any()
    too_small = f"[statistics]\n{ALL}\nminimum = 61\n"
    grid = grid_of(tmp_path, made, site0=too_small)
    first = collect(grid, made, read_kinds("all")).sites[0]
    assert first.examples == 60
    assert first.labels is not None
    assert (first.labels.shown, first.labels.rest) == ((0, 0, 0), 0)
    assert first.columns[0].mean is None
    assert first.columns[1].missing_between == (0, 60)


def test_few_known_values_are_told_as_missing_and_bounded(tmp_path: Path) -> None:
    tables, made = write_tables(tmp_path), experiment()
    lines = (tmp_path / "0.csv").read_text().splitlines()
    place = lines[0].split(",").index("dose")
    rows = [line.split(",") for line in lines[1:]]
    for row in rows[5:]:
        row[place] = ""
    (tmp_path / "0.csv").write_text("\n".join([lines[0], *map(",".join, rows)]) + "\n")
    known = sum(value is not None for value in tables[0]["dose"][:5])
    policy = f"[statistics]\n{ALL}\nminimum = 10\n"
    dose = collect(grid_of(tmp_path, made, policy), made, ("missing",)).sites[0].columns[1]
    assert 0 < known < 10
    assert dose.missing == 60
    assert dose.missing_between == (51, 60)


def test_nothing_is_answered_without_consent(tmp_path: Path) -> None:
    write_tables(tmp_path)
    made = experiment()
    some = '[statistics]\nkinds = ["labels"]\nminimum = 1\n'
    grid = grid_of(tmp_path, made, site0="min_clients = 1\n", site1=some)
    found = collect(grid, made, ("labels", "missing"))
    assert [site.name for site in found.sites] == ["site 2"]
    assert found.total.examples == SIZES[2]
    (first, second) = sorted(found.faults.items(), key=lambda item: item[1])
    assert first[1] == (0,)
    assert "has not consented to these statistics. got labels, missing; allowed none" in first[0]
    assert "got missing; allowed labels" in second[0]
    without = {number: replace(node, guard=None) for number, node in grid.nodes.items()}
    with pytest.raises(RunError, match="No site has answered") as caught:
        collect(InProcessGrid(without), made, ("labels",))
    assert "has not consented" in str(caught.value)


def test_rules_of_training_do_not_matter_to_statistics(tmp_path: Path) -> None:
    """Neither how many clients a round has, nor what goes with an update."""
    tables = write_tables(tmp_path)
    rules = f"min_clients = 5\nmethods = []\nmessages = []\n{CONSENT}"
    for flower in ({}, {"secure_aggregation": True, "secure_minimum": 3}):
        made = experiment(
            flower={**QUICK, **flower}, method="scaffold" if not flower else "fedprox"
        )
        found = collect(grid_of(tmp_path, made, rules), made, read_kinds("all"))
        check_totals(found, tables)
        assert found.faults == {}
    sums = f"min_clients = 3\nsecure_sums = true\n{CONSENT}"
    made = experiment(flower={**QUICK, "deadline_seconds": 0.5})
    grid, strict = grid_of(tmp_path, made), tmp_path / "strict.toml"
    strict.write_text(sums)
    for number, node in grid.nodes.items():
        guard = replace(node.guard, policy=read_policy(strict))
        grid.nodes[number] = replace(node, guard=guard)
    with pytest.raises(RunError, match="not there") as caught:
        collect(grid, made, ("labels",))
    text = str(caught.value)
    assert text.count("asks for secure sums") == 3
    assert "then ask again" in text
    assert "resume" not in text
    made = experiment(flower={**QUICK, "secure_aggregation": True, "secure_minimum": 3})
    assert collect(grid_of(tmp_path, made, sums), made, ("labels",)).is_secure


@pytest.mark.parametrize("secure", [False, True])
def test_all_refusals_are_said_with_the_names_of_sites(tmp_path: Path, secure: bool) -> None:
    write_tables(tmp_path)
    made = experiment(flower={**QUICK, "secure_aggregation": secure})
    grid = grid_of(tmp_path, made, '[statistics]\nkinds = ["labels"]\n')
    with pytest.raises((RunError, TrainingError)) as caught:
        collect(grid, made, ("missing",))
    text = str(caught.value)
    assert "site 0, site 1, site 2: " in text
    assert "has not consented" in text
    assert "resume" not in text


@each(
    "change, reason",
    [
        ({"kinds": ["examples"]}, "'kinds.0' is wrong"),
        ({"kinds": []}, "'kinds' is wrong"),
        ({"columns": []}, "other columns or labels"),
        ({"columns": [{"name": "age", "categories": None}]}, "other columns or labels"),
        ({"classes": 2}, "other columns or labels"),
        ({"classes": -1}, "'classes' is wrong"),
        ({"bins": 10}, "'bins' is wrong"),
        ({"data_digest": "0"}, "not those that the run began with"),
        ({"clients": [{"client": 2, "steps_done": 0, "state_round": 0, "state_digest": "",
                       "checkpoint_round": 0}]}, "a client that this node does not play"),
    ],
)  # fmt: skip
def test_requests_that_are_not_as_they_should_be_are_refused(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    write_tables(tmp_path)
    made = experiment()
    grid = grid_of(tmp_path, made)

    def lies(node: int, kind: str, content: RecordDict) -> RecordDict:
        return changed(content, **change) if kind == STATISTICS and node == FIRST else content

    grid.ask = lies
    found = collect(grid, made, ("labels",))
    assert [site.name for site in found.sites] == ["site 1", "site 2"]
    assert any(reason in text for text in grid.refused), grid.refused


def test_a_server_cannot_choose_other_columns_or_rows(tmp_path: Path) -> None:
    """By the difference of two answers it would learn of few examples."""
    write_tables(tmp_path)
    installed = experiment()
    sent = experiment(data={**DATA, "test_fraction": 0.3})
    values = {"partition-id": 0, "data": str(tmp_path / "0.csv"), "state": str(tmp_path)}
    make_node(sent, values, installed)
    for kind in (STATISTICS, TOTALS):
        with pytest.raises(PolicyError, match="statistics of other data"):
            make_node(sent, values, installed, kind)


def test_a_node_that_is_kept_on_a_device_refuses_what_a_new_one_does(tmp_path: Path) -> None:
    """It is made for one kind of message, and then asked for others."""
    write_tables(tmp_path)
    policy = tmp_path / "policy.toml"
    policy.write_text(CONSENT)
    values = {"partition-id": 0, "data": str(tmp_path / "0.csv"), "state": str(tmp_path)}
    config = {**values, "policy": str(policy), "device": "cpu", "engine": "vectorized"}
    installed, sent = experiment(), experiment(data={**DATA, "test_fraction": 0.3})
    kept = NodeAnswers("key")
    node = kept._make(sent, config, installed, DESCRIBE)
    assert kept._make(sent, config, installed, DESCRIBE) is node
    for kind in (STATISTICS, TOTALS):
        with pytest.raises(PolicyError, match="statistics of other data"):
            kept._make(sent, config, installed, kind)


def test_numbers_that_no_site_can_have_are_left_out(tmp_path: Path) -> None:
    write_tables(tmp_path)
    made = experiment()
    grid = grid_of(tmp_path, made)

    def lies(kind: str, reply: RecordDict) -> RecordDict:
        if kind != STATISTICS:
            return reply
        array = np.frombuffer(reply["tensors"]["vector"].data, dtype=np.uint8).copy()
        array[-8:] = np.array([10**6], dtype=np.int64).view(np.uint8)
        wrong = Array("int64", reply["tensors"]["vector"].shape, "numpy.ndarray", array.tobytes())
        return RecordDict({**reply, "tensors": ArrayRecord({"vector": wrong})})

    grid.edits = {FIRST + 1: lies}
    found = collect(grid, made, ("labels",))
    assert [site.name for site in found.sites] == ["site 0", "site 2"]
    assert "A site counts more labels than it has examples, or fewer than 0." in found.faults


def with_known_keys(folder: Path) -> None:
    """Give each site a key, so that its noise is the same in every run of a test."""
    for site in range(len(SIZES)):
        (folder / f"state-{site}").mkdir()
        (folder / f"state-{site}" / count_noise.FILE).write_bytes(bytes([site]) * 32)


def test_a_small_site_with_noise_tells_of_no_cell_that_noise_alone_could_fill(
    tmp_path: Path,
) -> None:
    write_tables(tmp_path)
    with_known_keys(tmp_path)
    made = experiment()
    policy = '[statistics]\nkinds = ["quantiles"]\nminimum = 1\nepsilon = 1.0\n'
    found = collect(grid_of(tmp_path, made, policy), made, ("quantiles",))
    told = [item.value for site in found.sites for c in site.columns for item in c.quantiles]
    assert told.count(None) == len(told)


def test_moments_of_small_numbers_are_right_or_none() -> None:
    """Down to the smallest numbers of float32; of smaller ones there are none."""
    random = np.random.default_rng(0).normal(2.0, 1.0, 100)
    for size in (1.0, 2e-11, 2e-14, 1e-25, 1e-38, 1e-44):
        values = random * size
        count, mean, spread = read_moments(site_moments(values, 0))
        assert count == 100
        assert mean == pytest.approx(values.mean(), rel=1e-12, abs=0.0)
        assert spread == pytest.approx(random.std() * size, rel=1e-9, abs=0.0)
    for size in (1e-60, 1e-170):
        assert read_moments(site_moments(random * size, 0)) == (0, None, None)
    assert read_moments(site_moments(np.full(3, 1e-38), 0)) == (3, pytest.approx(1e-38), 0.0)


def test_statistics_of_arrays_and_of_a_quantity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns without names are numbered; a target that is one quantity is a column, too."""
    (tmp_path / "my_arrays.py").write_text(
        "import numpy as np\n\n\n"
        "def load():\n"
        "    random = np.random.default_rng(0)\n"
        "    x = random.normal(1e6, 3.0, size=(50, 2))\n"
        "    x[:, 1] = 1e30\n"
        "    return x, x[:, 0] - 1e6\n"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.toml").write_text(CONSENT)
    made = experiment(
        data={
            "source": "nodes",
            "label": "weight",
            "target": "quantity",
            "normalize": "standardize",
        },
        task={"loss": "mse"},
    )
    nodes = {
        FIRST + i: make_node(
            made,
            {
                "partition-id": i,
                "data": "my_arrays:load",
                "state": str(tmp_path / str(i)),
                "policy": str(tmp_path / "policy.toml"),
            },
        )
        for i in range(3)
    }
    found = collect(InProcessGrid(nodes), made, read_kinds("all"))
    x = np.random.default_rng(0).normal(1e6, 3.0, size=(50, 2))
    first, huge, target = found.total.columns
    assert (huge.known, huge.mean) == (0, None)
    assert huge.quantiles[2].high is None
    assert [column.name for column in found.total.columns] == ["0", "1", "weight"]
    assert found.total.labels is None
    assert (first.known, target.known) == (150, 150)
    exact = x[:, 0]
    assert first.mean == pytest.approx(exact.mean(), rel=1e-12)
    assert first.deviation == pytest.approx(exact.std(), rel=1e-9)
    assert target.deviation == pytest.approx(exact.std(), rel=1e-6)


# --- noise ---------------------------------------------------------------------------------------

NOISY = '[statistics]\nkinds = ["labels", "missing"]\nminimum = 1\nepsilon = 1.0\n'


def test_noise_has_the_deviation_and_the_distribution_that_are_said() -> None:
    """P(|Z| >= k) of the difference of two geometric variables, over 40,000 draws of one key."""
    noise = CountNoise(bytes(range(32)), epsilon=1.0)
    zeros = np.zeros(40_000, dtype=np.int64)
    drawn = noise.added("labels", "", zeros, sensitivity=2, of=1)
    assert drawn.std() == pytest.approx(deviation(0.5), rel=0.02)
    assert abs(drawn.mean()) < 4 * deviation(0.5) / 200
    for k in (1, 3, 6):
        expected = 2 * math.exp(-0.5 * k) / (1 + math.exp(-0.5))
        assert (np.abs(drawn) >= k).mean() == pytest.approx(expected, rel=0.06)
    assert noise.deviations == {"labels": deviation(0.5)}
    again = CountNoise(bytes(range(32)), epsilon=1.0).added("labels", "", zeros, 2, 1)
    assert np.array_equal(drawn, again)
    for other in (
        CountNoise(bytes(32), 1.0).added("labels", "", zeros, 2, 1),
        CountNoise(bytes(range(32)), 1.0).added("labels", "x", zeros, 2, 1),
        CountNoise(bytes(range(32)), 1.0).added("missing", "", zeros, 2, 1),
        CountNoise(bytes(range(32)), 1.0).added("labels", "", zeros + 1, 2, 1) - 1,
    ):
        assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.03


def test_the_same_question_has_the_same_noise_and_another_site_other_noise(tmp_path: Path) -> None:
    tables, made = write_tables(tmp_path), experiment()
    with_known_keys(tmp_path)
    first = collect(grid_of(tmp_path, made, NOISY), made, ("labels", "missing"))
    second = collect(grid_of(tmp_path, made, NOISY), made, ("labels", "missing"))
    assert first == second
    assert first.sites[0].noise == {"labels": deviation(0.25), "missing": deviation(0.125)}
    assert first.total.noise["labels"] == pytest.approx(math.sqrt(3) * deviation(0.25))
    errors = []
    for site, table in zip(first.sites, tables, strict=True):
        assert site.labels is not None
        errors += [
            site.labels.shown[i] - table["kind"].count(n) for i, n in enumerate(("no", "yes"))
        ]
    assert len(set(errors)) > 3
    assert max(map(abs, errors)) < 12 * deviation(0.25)


def test_a_request_of_more_labels_has_the_same_noise(tmp_path: Path) -> None:
    """Otherwise a server could ask with more and more of them, and take the mean."""
    write_tables(tmp_path)
    with_known_keys(tmp_path)
    made = experiment()
    grid = grid_of(tmp_path, made, NOISY)
    answers = []
    for classes in (3, 4, 5, 9):

        def asks(node: int, kind: str, content: RecordDict, classes: int = classes) -> RecordDict:
            return changed(content, classes=classes) if kind == STATISTICS else content

        def keeps(kind: str, reply: RecordDict, classes: int = classes) -> RecordDict:
            if kind == STATISTICS:
                data = reply["tensors"]["vector"].data
                answers.append(np.frombuffer(data[-8 * (classes + 2) :], dtype=np.int64))
            return reply

        grid.ask, grid.edits = asks, {FIRST: keeps}
        with suppress(RunError):  # the replies do not fit what this server meant to ask
            collect(grid, made, ("labels",))
    assert [len(answer) for answer in answers] == [5, 6, 7, 11]
    for answer in answers:
        assert answer[0] == 60
        assert answer[1:4].tolist() == answers[0][1:4].tolist()
        assert not answer[4:].any()
    zeros = np.zeros(6, dtype=np.int64)
    drawn = [CountNoise(bytes(32), 1.0).added("labels", "", zeros[:n], 2, 1) for n in (3, 6)]
    assert drawn[0].tolist() == drawn[1][:3].tolist()


def test_noisy_counts_are_charged_once_and_not_beyond_the_limit(tmp_path: Path) -> None:
    """Half of the epsilon for each of two kinds; a kind that was sent before costs nothing."""
    write_tables(tmp_path)
    privacy = {"epsilon": 3.0, "delta": 0.01, "unit": "example"}
    made = experiment(method="dpsgd(sigma=4.0)", privacy=privacy)
    policy = f"epsilon = 2.0\ndelta = 0.01\nledger = 'ledger-0.json'\n{NOISY}"
    ledger = Ledger(tmp_path / "ledger-0.json")

    def asked(text: str, kinds: str) -> NodeStatistics:
        return collect(grid_of(tmp_path, made, NOISY, site0=text), made, read_kinds(kinds))

    def spent() -> float:
        return epsilon_of(ledger.read(), read_policy(tmp_path / "policy-0.toml"))

    assert len(asked(policy, "labels").sites) == 3
    assert spent() == pytest.approx(0.5)
    asked(policy, "labels")
    assert spent() == pytest.approx(0.5)
    asked(policy, "labels,missing")
    assert spent() == pytest.approx(1.0)
    (tmp_path / "state-0" / count_noise.FILE).unlink()  # other noise: counted anew
    asked(policy, "labels")
    assert spent() == pytest.approx(1.5)
    (tmp_path / "state-0" / count_noise.FILE).unlink()
    refused = asked(policy, "labels,missing")
    assert [site.name for site in refused.sites] == ["site 1", "site 2"]
    assert any("epsilon of this site is spent" in reason for reason in refused.faults)
    assert spent() == pytest.approx(1.5)


def test_noise_that_is_hardly_there_leaves_the_numbers_and_is_charged_in_all(
    tmp_path: Path,
) -> None:
    """Its epsilon is divided among kinds and columns; together they spend what the policy says."""
    tables = write_tables(tmp_path)
    privacy = {"epsilon": 3.0, "delta": 0.01, "unit": "example"}
    made = experiment(method="dpsgd(sigma=4.0)", privacy=privacy)
    kinds = '["labels", "missing", "categories", "quantiles"]'
    policy = (
        "epsilon = 900.0\ndelta = 0.01\nledger = 'ledger.json'\n"
        f"[statistics]\nkinds = {kinds}\nminimum = 1\nepsilon = 800.0\n"
    )
    grid = grid_of(tmp_path, made, NOISY.replace("1.0", "800.0"), site0=policy)
    found = collect(grid, made, read_kinds("labels,missing,categories,quantiles"))
    (site,) = found.sites
    assert site.labels is not None
    assert site.labels.shown[:2] == tuple(tables[0]["kind"].count(n) for n in ("no", "yes"))
    age, dose, sex, _ = site.columns
    assert dose.missing == tables[0]["dose"].count(None)
    assert sex.counts is not None
    assert sex.counts.shown[:2] == tuple(tables[0]["sex"].count(n) for n in ("f", "m"))
    for item in age.quantiles:
        exact = np.quantile(tables[0]["age"], item.share, method="inverted_cdf")
        assert item.low is not None
        assert item.high is not None
        assert item.low <= exact <= item.high
    ledger = Ledger(tmp_path / "ledger.json").read()
    assert epsilon_of(ledger, read_policy(tmp_path / "policy-0.toml")) == pytest.approx(800.0)
    assert len(ledger) == 1 + 4 + 1 + 3


@each(
    "text, reason",
    [
        (f"[statistics]\n{ALL}\nepsilon = 1.0\n", "'moments' are none"),
        ('[statistics]\nkinds = ["labels", "labels"]\n', "names a kind twice"),
        ('[statistics]\nkinds = ["examples"]\n', "statistics.kinds"),
        ('epsilon = 1.0\ndelta = 0.01\n[statistics]\nkinds = ["labels"]\n', "needs an 'epsilon'"),
        (f"epsilon = 1.0\ndelta = 0.01\nunit = 'client'\n{NOISY}", "leave their 'kinds' out"),
    ],
)
def test_a_policy_that_does_not_hold_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_policy(file)
    assert reason in str(caught.value)


def test_other_kinds_and_data_that_the_server_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such statistics"):
        read_kinds("labels,names")
    made = experiment(data={"source": "digits"}, partition={"kind": "iid", "clients": 3})
    with pytest.raises(ConfigError, match="data that stay on the nodes"):
        collect(InProcessGrid({}), made, ("labels",))


def test_too_few_sites_make_no_secure_sum(tmp_path: Path) -> None:
    write_tables(tmp_path)
    made = experiment(flower={**QUICK, "secure_aggregation": True, "secure_minimum": 3})
    grid = grid_of(tmp_path, made, site0="min_clients = 1\n")
    with pytest.raises(TrainingError, match="too few sites") as caught:
        collect(grid, made, ("labels",))
    assert "has not consented" in str(caught.value)


# --- Flower's commands ----------------------------------------------------------------------------


@each("command", ["flower stats", "doctor"])
def test_a_misspelt_federation_is_named_with_those_that_flower_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Also where Flower's commands are only beside this Python."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / "config.toml").write_text(
        '[superlink]\ndefault = "clinics"\n\n[superlink.clinics]\naddress = "127.0.0.1:9"\n'
    )
    file, out = tmp_path / "sites.toml", tmp_path / "out"
    file.write_text(to_toml(experiment()))
    done = call(*command.split(), file, "--federation", "clincis", "--out", out)
    assert done.code == 2
    assert "Flower's configuration has no such federation" in done.err
    assert "got 'clincis'" in done.err
    assert "did you mean 'clinics'? known: clinics" in done.err
    assert "Traceback" not in done.err
    assert not out.exists()


def test_a_refusal_of_flower_is_said_in_its_words() -> None:
    with pytest.raises(RunError, match="no such run") as caught:
        json_answer('{"success": false, "error-message": "\\nThere is no such run."}')
    assert caught.value.got == "There is no such run."
    assert json_answer('A word before.\n{"success": true, "run-id": "7"}')["run-id"] == "7"
    with pytest.raises(RunError, match="cannot be read"):
        json_answer("nothing")


def test_a_command_of_flower_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(RunError, match="'flwr' is not there") as caught:
        of_federation(experiment(), Path("out"), "here", "labels")
    assert "fedkeel[flower]" in str(caught.value)
