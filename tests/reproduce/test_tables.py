"""Every table that comes with the package is whole: it loads, composes and can start."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from each import each
from fedkeel import config
from fedkeel.config import build
from fedkeel.data.dataset import Dataset, dataset
from fedkeel.data.federation import federation
from fedkeel.data.partition.recipes import divide
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import ConfigError
from fedkeel.method.docs.bibliography import entries
from fedkeel.method.grammar import parse
from fedkeel.reproduce.catalogue import load, names, read
from fedkeel.reproduce.estimate import data_size, has_known_size
from fedkeel.reproduce.table import PaperTable, merge_settings
from fedkeel.runner.ingredients import task
from fedkeel.runner.prepare import prepare
from fedkeel.task.models import make
from reproduce.tiny import TINY, tiny

table_of = cache(load)

PAPERS = {"fedgc", "fedreg", "gcfed", "fedgh", "gradma"}

OWN = "beyond"
"""What tables that belong to no paper begin with."""

SMALL = 3_000_000
"""Parameters of a model that all its methods are prepared on."""


def tables() -> list[PaperTable]:
    return [table_of(name) for name in names()]


def experiments(table: PaperTable) -> Iterator[config.Experiment]:
    """The experiments of a table, each once."""
    seen = set()
    if not table.base:
        return
    for quick in (False, True) if table.quick else (False,):
        for row, column in table.cells(quick):
            one = table.experiment(row, column, seed=0, quick=quick)
            if (text := one.model_dump_json()) not in seen:
                seen.add(text)
                yield one


# --- what is in them ------------------------------------------------------------------------------


def test_all_five_papers_are_there() -> None:
    assert {name.partition("-")[0] for name in names()} == {*PAPERS, OWN}
    assert names().index("gradma-table1") < names().index("gradma-table2")


@each("table", tables)
def test_it_says_what_it_is(table: PaperTable) -> None:
    kind = table.id.partition("-")[0]
    assert table.paper in entries() if kind in PAPERS else (kind, table.paper) == (OWN, "")
    for text in (table.title, table.shows, table.source):
        assert text
        assert "\n" not in text
    is_ours = table.shows.startswith("Not in ")
    assert is_ours or table.conclusion.startswith("The paper shows: ")
    assert table.paper or is_ours
    for text in table.deviations:  # a page says on which seeds it was measured
        assert not re.search(r"\bwe use (\d+|one|two|three|five) seeds?\b", text)
    assert table.deviations or not table.is_runnable
    assert not table.is_runnable or table.quick is not None


@each("table", tables)
def test_published_numbers_are_plausible(table: PaperTable) -> None:
    for row in table.rows:
        for column in table.columns:
            given = row.published.get(column.id)
            if given is None or isinstance(given.value, str):
                continue
            unit = table.metric_of(column).unit
            if unit == "%":
                assert 0 <= given.value <= 100, (row.name, column.id)
            elif unit != "points":
                assert given.value >= 0, (row.name, column.id)
            assert given.spread is None or given.spread <= max(20.0, abs(given.value))


@each("table", tables)
def test_a_share_written_as_percent_would_be_found(table: PaperTable) -> None:
    """Accuracies are in percent: a column of shares would lie between 0 and 1 altogether."""
    for column in table.columns:
        if table.metric_of(column).unit != "%" or not table.base:
            continue
        given = [row.published[column.id].value for row in table.rows if column.id in row.published]
        numbers = [one for one in given if not isinstance(one, str)]
        assert not numbers or max(numbers) > 1.0, column.id


@each("table", tables)
def test_every_method_composes_and_every_set_is_known(table: PaperTable) -> None:
    for one in experiments(table):
        assert parse(one.method, weights=one.weights).expression
        assert has_known_size(one), one.data.sources
        assert set(one.data.sources) <= set(table.data)


@each("table", tables)
def test_the_smaller_version_is_smaller(table: PaperTable) -> None:
    if not table.is_runnable:
        assert table.quick is None or table.base
        return

    def work(quick: bool) -> int:
        return sum(
            table.experiment(row, column, 0, quick).rounds for row, column in table.cells(quick)
        )

    assert 0 < work(True) < work(False)


# --- whether they can start -----------------------------------------------------------------------


@cache
def labels(sources: tuple[str, ...], limit: int | None) -> Dataset:
    """Examples without content, with labels and sources as many as there are."""
    y, source = [], []
    for i, name in enumerate(sources):
        count = min(SOURCES[name].train, limit or SOURCES[name].train)
        y.append(np.arange(count) % SOURCES[name].classes)
        source.append(np.full(count, i))
    whole = np.concatenate(y)
    return dataset(
        torch.zeros(len(whole), 1),
        whole,
        classes=max(SOURCES[name].classes for name in sources),
        sources=sources,
        source=np.concatenate(source) if len(sources) > 1 else None,
    )


SLOW_TABLES = ("beyond-digits", "gcfed-table5", "gcfed-table6")
"""Tables with large federations."""


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
@each("name", names())
def test_the_data_can_be_divided(name: str, large: bool) -> None:
    """With as many examples, and labels as evenly spread, as the real set nearly has."""
    seen = set()
    for one in experiments(table_of(name)) if large == (name in SLOW_TABLES) else ():
        key = (one.data.sources, one.data.limit, one.partition.model_dump_json())
        if key not in seen:
            seen.add(key)
            made = divide(labels(one.data.sources, one.data.limit), one.partition, 0)
            assert one.cohort.size(len(made)) <= len(made)
            assert len(made) == data_size(one).clients


def stand_in(experiment: config.Experiment) -> Ingredients:
    """Four clients of a few generated examples of the right shape."""
    there = data_size(experiment)
    random = np.random.default_rng(0)
    n = 24
    x = torch.from_numpy(random.normal(size=(n, *there.shape)).astype(np.float32))
    train = dataset(x, np.arange(n) % there.classes, classes=there.classes)
    made = federation(train, np.array_split(np.arange(n), 4))
    return Ingredients(task(experiment, train), lambda seed: made, train, experiment.model.name)


@cache
def models() -> dict[str, list[config.Experiment]]:
    """The experiments of all tables by model, shape and classes.

    One for each method, which is tried on only one shape of a model; one at least for each shape.
    """
    found: dict[str, list[config.Experiment]] = {}
    seen: set[tuple[str, str]] = set()
    ordered = [one for name in names() for one in experiments(table_of(name))]
    for one in sorted(ordered, key=lambda one: math.prod(data_size(one).shape)):
        model = f"{one.model.name}, {one.model.args}"
        method = re.sub(r"\([^)]*\)", "", one.method)
        shaped = f"{model}, {data_size(one).shape}, {data_size(one).classes}"
        if shaped not in found or (model, f"{method} {one.weights}") not in seen:
            found.setdefault(shaped, []).append(one)
            seen.add((model, f"{method} {one.weights}"))
    return found


SLOW_MODELS = ("resnet20", "fixup_resnet9", "resnet18_gn", "cnn_", "lenet5", "mlp_gcfed", "mlp, {}")
"""Models whose methods take seconds to prepare; the fast selection has the others."""


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
@each("model", models)
def test_every_method_can_start_on_its_model(model: str, slow: bool) -> None:
    """Large models are made without memory, and looked through once."""
    if slow != model.startswith(SLOW_MODELS):
        return
    own = models()[model]
    there = data_size(own[0])
    with torch.device("meta"):
        net = make(own[0].model.name, there.shape, there.classes, own[0].model.args)
        scores = net(torch.zeros(4, *there.shape))
    assert scores.shape == (4, there.classes)
    if sum(p.numel() for p in net.parameters()) > SMALL:
        return
    ingredients = stand_in(own[0])
    for one in own:
        values = one.model_dump(include=set(config.Run.model_fields), exclude_none=True)
        run = build(config.Run, {**values, "cohort": {"clients": 2}}, "a cell")
        assert prepare(run, ingredients).plan.expression


# --- what a table may hold ------------------------------------------------------------------------


def test_settings_are_laid_over_each_other(tmp_path: Path) -> None:
    table = read(tiny(tmp_path))
    row, plain = table.rows[1], table.columns[3]
    one = table.experiment(row, plain, seed=9)
    assert (one.partition.kind, one.partition.alpha, one.local.lr) == ("iid", None, 0.2)
    assert (one.method, one.seed, one.name) == ("fedgh", 9, "tiny")
    assert table.experiment(row, table.columns[0], quick=True).rounds == 2
    assert merge_settings({"a": {"b": 1}}, {"a": "unset"}) == {}


def test_what_is_missing_is_not_run(tmp_path: Path) -> None:
    table = read(tiny(tmp_path))
    asked = {(row.name, column.id) for row, column in table.cells()}
    assert ("Momentum", "skew") in asked
    assert ("Momentum", "plain") not in asked
    assert all(column != "gone" for _, column in asked)
    assert {column.id for _, column in table.cells(quick=True)} == {"skew"}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('shows = "Nothing."', 'shows = "Nothing."\nshown = 1', "no key 'shown'"),
        ("rounds = 6", "round = 6", "no key 'round'"),
        ("alpha = 0.1\n", "", "needs 'alpha'"),
        ('id = "plain"', 'id = "skew"', "two columns 'skew'"),
        ("skew = 55.0", "skewed = 55.0", "there is no 'skewed'"),
        ('baseline = "FedAvg"', 'baseline = "FedSGD"', "there is no 'FedSGD'"),
        ('reference = "FedAvg"', 'reference = "SGD"', "there is no 'SGD'"),
        ("target = 1.0", "round = 3", "needs target"),
        ('columns = ["skew"]\n', 'columns = ["new"]\n', "there is no 'new'"),
        ("skew = 55.0", "plain = 55.0", "'ours' has no published number"),
        ("skew = 55.0", 'skew = "often"', "often"),
        ('kind = "best"', 'kind = "diagnosed"', "needs diagnostic"),
        (
            'kind = "best"',
            'kind = "diagnosed"\ndiagnostic = "drift.norm"',
            "diagnose.kinds lacks that of 'drift.norm'",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in TINY
    with pytest.raises(ConfigError, match=told) as refused:
        read(tiny(tmp_path, TINY.replace(old, new, 1)))
    assert len(refused.value.lines()) <= 4


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no table 'fedgh-table9'") as refused:
        load("fedgh-table9")
    assert "fedgh-table" in str(refused.value)
    with pytest.raises(ConfigError, match="no such table file"):
        load(str(tmp_path / "no.toml"))
    with pytest.raises(ConfigError, match="not valid TOML"):
        read(tiny(tmp_path, "id = "))


def test_the_files_are_in_plain_toml() -> None:
    """A parser of another make, without our models, reads the same ids."""
    folder = Path(__file__).parents[2] / "src" / "fedkeel" / "reproduce" / "tables"
    ids = {tomllib.loads(file.read_text("utf-8"))["id"] for file in folder.glob("*.toml")}
    assert ids == set(names())
