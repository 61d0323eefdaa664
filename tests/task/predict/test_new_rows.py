"""What is said of the rows of a table that do not fit the model, or may not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, tensor

import fedkeel as fk
from fedkeel.data.read.new_rows import read_new_rows
from fedkeel.data.read.scaling import Scale
from fedkeel.data.table_schema import Column, TableSchema
from fedkeel.records.files import SEAL
from fedkeel.task.predict.far_values import UsualValues, odd_values

pa = pytest.importorskip("pyarrow")

COLUMNS = (
    Column("age", fill=(54.0,)),
    Column("sex", ("female", "male"), fill=(0.5, 0.5)),
    Column("pain", fill=(1.0,)),
    Column("dose", fill=(2.0,)),
)
FILLED = TableSchema(COLUMNS, "mean")
WHOLE = TableSchema(tuple(Column(c.name, c.categories) for c in COLUMNS))
ROW: dict[str, Any] = {"age": [61.5, 48], "sex": ["male", "female"], "pain": [1, 2], "dose": [1, 2]}


def of(**columns: Any) -> Any:
    """A table of two rows with some columns changed; None leaves one out."""
    return pa.table({key: value for key, value in (ROW | columns).items() if value is not None})


def refused(table: Any, schema: TableSchema) -> str:
    with pytest.raises(fk.FedkeelError) as caught:
        read_new_rows(table, "new.csv", schema)
    return str(caught.value)


@pytest.mark.parametrize("schema", [FILLED, WHOLE])
def test_a_table_of_other_data_is_refused(schema: TableSchema) -> None:
    """Also where values may be missing: it would be answered from the values that fill gaps."""
    told = refused(pa.table({"radius": [1.0], "area": [2.0], "age": [50]}), schema)
    assert "no columns 'sex', 'pain', 'dose'." in told
    assert "lacks 3 of the 4 columns of the training; its columns: 'radius', 'area'" in told
    assert "expected the columns 'age', 'sex', 'pain', 'dose'" in told
    assert "give a table that this model is for" in told
    refused(pa.table({"radius": [1.0]}), schema)


def test_half_of_the_columns_is_enough_where_values_may_be_missing() -> None:
    rows = read_new_rows(of(pain=None, dose=None), "new.csv", FILLED)
    assert rows.warnings == (
        "new.csv has no columns 'pain', 'dose': their values are taken for missing ones",
    )
    told = refused(of(pain=None, dose=None), WHOLE)
    assert "lacks 2 of the 4 columns" in told
    assert "without missing values" in told


def test_a_column_with_almost_the_name_is_told() -> None:
    table = of(age=None, pain=None, **{"Age": [60, 50], " pain": [1, 2], "id": ["a", "b"]})
    hint = "(did you mean 'Age' for 'age', ' pain' for 'pain'?)"
    assert hint in read_new_rows(table, "new.csv", FILLED).warnings[0]
    assert hint in refused(table, WHOLE)
    assert "'age' (did you mean 'Age'?)" in refused(of(age=None, Age=[60, 50]), WHOLE)


def test_a_category_with_almost_the_name_is_told() -> None:
    assert read_new_rows(of(sex=["Male", "Female"]), "new.csv", FILLED).warnings == (
        "new.csv: column 'sex' holds a category that is not known ('Male', 'Female', in 2 of 2 "
        "rows): it is taken for a missing value; did you mean 'male', 'female'?",
    )
    (told,) = read_new_rows(of(sex=["male", "unknown"]), "new.csv", FILLED).warnings
    assert told.endswith("('unknown', in 1 of 2 rows): it is taken for a missing value")
    told = refused(of(sex=["Male", "x"]), WHOLE)
    assert "did you mean 'male'? write the categories as in the training" in told


@pytest.mark.parametrize("schema", [FILLED, WHOLE])
def test_what_to_do_about_a_value_is_not_about_training(schema: TableSchema) -> None:
    """The model is trained: no setting of [data] helps."""
    odd: list[dict[str, list[Any]]] = [
        {"age": ["old", "48"]},
        {"age": [float("inf"), 48]},
        {"age": [[1], [2]]},
    ]
    if schema is WHOLE:
        odd += [{"age": [None, 48]}, {"sex": [None, "male"]}, {"sex": ["x", "male"]}]
    for columns in odd:
        told = refused(of(**columns), schema)
        advice = told.split("  do   ")[1]
        assert "[data]" not in told
        assert "drop" not in advice or "to train without it" in advice
    assert "write a number, or leave out the row" in refused(of(age=["old", "48"]), schema)
    assert "with a point: 1.5" in refused(of(age=["1,5", "48"]), schema)


@pytest.fixture(scope="module")
def clinics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on ages and a rare flag, standardised over all clients, by each, and not at all."""
    folder = tmp_path_factory.mktemp("clinics")
    random = np.random.default_rng(0)
    clients = {}
    for name, middle in (("north", 50.0), ("south", 500.0)):
        age = random.normal(middle, 5.0, 300)
        x = np.stack([age, np.arange(300) == 7], axis=1).astype(np.float64)
        table = {"age": x[:, 0].copy(), "rare": x[:, 1], "same": np.full(300, 3.0)}
        table["age"][5] = np.nan
        clients[name] = pa.table({**table, "ill": (age > middle).astype(np.int64)})
    for how in ("standardize", "client", "none"):
        fk.run(
            "fedavg",
            task=fk.Task(Three),
            clients=fk.from_clients(
                clients, test=clients, target="ill", normalize=how, missing="mean"
            ),
            rounds=1,
            local=fk.Local(lr=0.1, epochs=1, batch_size=50),
            engine=fk.Engine(kind="sequential"),
            out=folder / how,
            progress=False,
        )
    return folder


class Three(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)


def earlier(folder: Path) -> Path:
    """A copy of a run as earlier versions made it, and as runs with a privacy budget are."""
    copy = folder.with_name(f"{folder.name}-earlier")
    if not copy.exists():
        shutil.copytree(folder, copy)
        values = json.loads((copy / "run.json").read_text("utf-8"))
        del values["data"]["ranges"], values[SEAL]
        (copy / "run.json").write_text(json.dumps(values), encoding="utf-8")
    return copy


def test_a_value_far_outside_the_training_is_told(clinics: Path) -> None:
    rows = pa.table({"age": [60.0, 6300.0, None, -1e5], "rare": [1.0, 0, 0, 0], "same": [4.0] * 4})
    model = fk.load(clinics / "standardize", model=Three)
    gap, far = model.predict(rows, name="new.csv").warnings
    assert gap.startswith("new.csv: column 'age' has no value in 1 of 4 rows, first in row 2 ")
    assert far == (
        "new.csv: column 'age' holds values unlike those of the training in 2 of 4 rows: -100000 "
        "to 6300, first in row 1 (counted from 0); the training had 34.47 to 510.6, 274.9 on "
        "average: see whether the values and their unit are right"
    )
    assert "'rare'" in model.predict(rows.set_column(1, "rare", [[2.0] * 4])).warnings[2]
    old = fk.load(earlier(clinics / "standardize"), model=Three).predict(rows).warnings
    assert "-100000 to 6300, first in row 1" in old[1]
    assert "on average, a deviation of" in old[1]
    unscaled = fk.load(clinics / "none", model=Three).predict(rows).warnings
    assert ["'age' holds" in text for text in unscaled] == [False, True, False]
    assert "'same' holds" in unscaled[2]  # it is no constant for this model
    assert len(fk.load(earlier(clinics / "none"), model=Three).predict(rows).warnings) == 1


def test_another_unit_is_told(clinics: Path) -> None:
    """Also one that is within ten deviations, or inside a range that one odd value has made."""

    def told(run: Path, age: list[float], **more: str) -> list[str]:
        rows = pa.table({"age": age, "rare": [0.0] * len(age), "same": [3.0] * len(age)})
        return list(fk.load(run, model=Three).predict(rows, **more).warnings)

    years = [44.0, 49.0, 52.0, 55.0, 495.0, 503.0]
    for run in (clinics / "standardize", earlier(clinics / "standardize")):
        assert told(run, years) == []
    for run, client in ((clinics / "client", "north"), (earlier(clinics / "client"), "south")):
        of_client = [age for age in years if (age < 100) == (client == "north")]
        assert told(run, of_client, client=client) == []
        (text,) = told(run, [age / 12 for age in of_client] * 2, client=client)
        assert f"in {2 * len(of_client)} of" in text
    (text,) = told(clinics / "none", [4.0, 4.5, 5.0])
    assert "in 3 of 3 rows: 4 to 5, first in row 0" in text
    assert told(clinics / "none", [30.0]) == []  # a little below the lowest


def test_most_values_far_from_the_mean_are_told_inside_a_wide_range() -> None:
    """One value of 0 in training is no reason to take all for right."""
    usual = UsualValues.of_range(tensor([-7.0]), tensor([3.5]), is_table=True, is_scaled=True)
    schema, scale = TableSchema((Column("pressure"),)), Scale(tensor([130.0]), tensor([18.0]))

    def told(*values: float) -> list[str]:
        raw = tensor([[value] for value in values])
        scales = [(torch.arange(len(raw)), scale)]
        return list(odd_values(raw, scale.applied(raw), usual, scales, schema, "new.csv"))

    assert told(110.0, 140.0, 43.0) == []
    (one,) = told(19.3)
    assert "in 1 of 1 rows: 19.3" in one
    assert told(19.3, 120.0) == []
    (text,) = told(11.0, 14.0, 12.5, 120.0)
    assert "in 3 of 4 rows: 11 to 14, first in row 0 (counted from 0); the training had " in text


def test_gaps_that_training_had_not_are_told() -> None:
    columns = (Column("age", fill=(54.0,)), Column("dose", fill=(2.0,), indicator=True))
    schema = TableSchema((*columns, Column("sex", ("f", "m"), fill=(0.5, 0.5))), "indicator")

    def told(**more: Any) -> tuple[str, ...]:
        table = {"age": [60.0, 50.0], "dose": [1.0, 2.0], "sex": ["f", "m"], **more}
        return read_new_rows(pa.table(table), "new.csv", schema).warnings

    assert told(dose=[None, 1.0]) == ()
    assert told(age=[60.0, None]) == (
        "new.csv: column 'age' has no value in 1 of 2 rows, first in row 1 (counted from 0): it "
        "had no gaps in training, and the mean of the training takes its place",
    )
    empty = "has no value in any row: "
    assert told(dose=[None, None]) == (
        f"new.csv: column 'dose' {empty}the mean of the training takes its place",
    )
    assert empty in told(sex=[None, None])[0]
    (one,) = read_new_rows(of(dose=[None, 1]), "new.csv", FILLED).warnings
    assert "'dose' has no value in 1 of 2 rows" in one  # with "mean", no input says so


def test_far_is_meant_by_the_scale_of_each_client(clinics: Path) -> None:
    """What fills a gap is the mean of all clients, far from that of each, and is not told."""
    rows = pa.table({"age": [51.0, 490.0, None], "rare": [0.0] * 3, "same": [3.0] * 3})
    model = fk.load(clinics / "client", model=Three)
    for client, value in (("north", "490, first in row 1"), ("south", "51, first in row 0")):
        told = model.predict(rows, client=client).warnings[1]
        assert "in 1 of 3 rows" in told
        assert value in told
