"""One schema for the tables of all clients: categories, missing values, scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeel.config import Data, Experiment, build
from fedkeel.data.read.load import load
from fedkeel.errors import ConfigError, DataError

NORTH = "age,site,thal,label\n" + "40,a,3.0,yes\n50,b,?,no\n?,a,7.0,yes\n60,a,3.0,no\n"
SOUTH = "age,label,thal,site\n" + "20,no,6,a\n30,yes,3,a\n,yes,NA,c\n40,no, 3 ,a\n"


def tables(folder: Path, **texts: str) -> tuple[str, ...]:
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text)
    return tuple(str(folder / f"{name}.csv") for name in texts)


def column(data, name):
    return data.x[:, data.columns.index(name)].tolist()


def loaded(folder, train, test, **settings):
    source, other = tables(folder, train=train, test=test)
    return load(Data(source=source, test=other, **settings))


def test_two_hospitals_share_one_schema(tmp_path: Path) -> None:
    rows = 5  # so that some are set aside for testing
    north, south = (text + "".join(text.splitlines(True)[1:]) * rows for text in (NORTH, SOUTH))
    sources = tables(tmp_path, north=north, south=south)
    settings = Data(source=sources, categories=("site", "thal"), missing="indicator")
    train, test = load(settings)
    assert train.columns == (
        *("age", "age is missing", "site=a", "site=b", "site=c"),
        *("thal=3", "thal=6", "thal=7", "thal is missing"),
    )
    assert train.schema == test.schema
    assert train.schema is not None
    record = {column["name"]: column for column in train.schema.record()}
    assert record["site"]["kind"] == "category"
    assert record["site"]["indicator"] is False  # nobody lacks it
    ages = np.array(column(train, "age"))
    gaps = np.array(column(train, "age is missing")) == 1
    mean = ages[~gaps].mean()
    np.testing.assert_allclose(record["age"]["fill"], mean)
    np.testing.assert_allclose(ages[gaps], mean, rtol=1e-6)
    thal = train.x[:, 5:8]
    gaps = train.x[:, 8] == 1
    shares = thal[~gaps].mean(dim=0)
    torch.testing.assert_close(thal[gaps], shares.expand(int(gaps.sum()), 3))
    assert set(thal[~gaps].flatten().tolist()) == {0.0, 1.0}


def test_means_fill_gaps_of_training_and_test_data(tmp_path: Path) -> None:
    train = "a,s,label\n1,x,0\n,x,1\n3,y,0\n8,,1\n"
    test = "a,s,label\n,y,0\n2,,1\n"
    for missing, columns in (
        ("mean", ("a", "s=x", "s=y")),
        ("indicator", ("a", "a is missing", "s=x", "s=y", "s is missing")),
    ):
        both = loaded(tmp_path, train, test, categories="s", missing=missing)
        assert [data.columns for data in both] == [columns, columns]
        assert column(both[0], "a") == [1, 4, 3, 8]
        assert column(both[0], "s=y") == pytest.approx([0, 0, 1, 1 / 3])
        assert column(both[1], "a") == [4, 2]
        assert column(both[1], "s=x") == pytest.approx([0, 2 / 3])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("?,x,0", ("column 'a' has a gap", "'?' in row 4", "2 of 6 values", 'drop = ["a"]')),
        ("NA,x,0", ("column 'a' has a gap", "no value in row 4", 'missing = "mean"')),
        ("1,?,0", ("column 's' has a gap", "'?' in row 4")),
        ("1,,0", ("column 's' has a gap", "'' in row 4")),
        ("old,x,0", ("column 'a' holds text", "'old' in row 4", 'categories = ["a"]')),
    ],
)
def test_a_gap_is_refused_where_nothing_is_said(tmp_path: Path, row: str, says: str) -> None:
    (source,) = tables(tmp_path, own=f"a,s,label\n1,x,0\n2,y,1\n1,x,0\n2,y,1\n{row}\n{row}\n")
    with pytest.raises(DataError) as caught:
        load(Data(source=source, categories=("s",)))
    assert len(caught.value.lines()) <= 4
    for words in says:
        assert words in str(caught.value)


def test_a_category_that_is_not_known(tmp_path: Path) -> None:
    train, test = "a,s,label\n1,x,0\n1,y,1\n", "a,s,label\n1,z,0\n1,x,1\n"
    with pytest.raises(DataError) as caught:
        loaded(tmp_path, train, test, categories="s")
    for words in (
        "train (test): column 's'",
        "'z', in 1 of 2 rows",
        "one of 'x', 'y'",
        "missing =",
    ):
        assert words in str(caught.value)
    _, held = loaded(tmp_path, train, test, categories="s", missing="mean")
    assert held.x[0].tolist() == [1, 0.5, 0.5]
    data, _ = loaded(tmp_path, train, test, categories="s", missing="mean")
    assert "not known" in data.warnings[0]
    named, held = loaded(tmp_path, train, test, categories={"s": ["z", "y", "x"]})
    assert named.columns == ("a", "s=z", "s=y", "s=x")
    assert held.x[0].tolist() == [1, 1, 0, 0]
    with pytest.raises(DataError, match="column 's' holds a category that is not known"):
        loaded(tmp_path, train, train, categories={"s": ["x"]})


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    train, test = "a,s,label\n1,x,0\n3,y,1\n", "s,label\nx,0\ny,1\n"
    with pytest.raises(DataError, match="no column 'a'"):
        loaded(tmp_path, train, test, categories="s")
    data, held = loaded(tmp_path, train, test, categories="s", missing="mean")
    assert column(held, "a") == [2, 2]
    assert "the test data of train has no column 'a'" in data.warnings[0]
    sources = tables(tmp_path, one=train * 1 + "2,x,0\n2,y,1\n" * 4, two=test + "x,0\ny,1\n" * 4)
    with pytest.raises(DataError, match="their columns differ"):
        load(Data(source=sources, categories=("s",)))
    data, _ = load(Data(source=sources, categories=("s",), missing="mean"))
    assert "two has no column 'a'" in data.warnings[0]
    assert column(data, "a")[-4:] == pytest.approx([data.schema.columns[0].fill[0]] * 4)
    empty = "a,s,label\n,x,0\n,y,1\n"
    with pytest.raises(DataError, match="No training example has a value in the column 'a'"):
        loaded(tmp_path, empty, empty, categories="s", missing="mean")
    (made_up,) = tables(tmp_path, made_up=empty)
    with pytest.raises(DataError, match="fill in at least one cell where the table is made up"):
        load(Data(source=made_up, categories=("s",), missing="mean"), is_one_of_many=True)


def test_categories_are_no_free_text(tmp_path: Path) -> None:
    (source,) = tables(tmp_path, own="a,s,label\n1,0.5,0\n2,y,1\n" * 1)
    with pytest.raises(DataError, match="has no column 'sx'"):
        load(Data(source=source, categories=("sx",)))
    np.savez(tmp_path / "own.npz", x=np.ones((4, 2)), label=[0, 1, 0, 1])
    with pytest.raises(DataError, match=r"data\.categories is for columns of tables"):
        load(Data(source=str(tmp_path / "own.npz"), categories=("s",)))


def test_categories_are_not_standardised(tmp_path: Path) -> None:
    train = "a,s,label\n1,x,0\n,x,1\n3,y,0\n8,,1\n"
    data, _ = loaded(
        tmp_path, train, train, categories="s", missing="indicator", normalize="standardize"
    )
    assert set(column(data, "s is missing")) == {0.0, 1.0}
    assert column(data, "s=x")[:3] == [1, 1, 0]
    np.testing.assert_allclose(np.mean(column(data, "a")), 0, atol=1e-6)
    np.testing.assert_allclose(np.std(column(data, "a")), 1, rtol=1e-6)
    assert data.scale is not None
    assert data.scale[0][1:] == (0.0,) * 4
    assert data.scale[1][1:] == (1.0,) * 4


def test_each_client_is_standardised_by_its_own_examples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sites = {"north": rng.normal(100, 5, 40), "south": rng.normal(-3, 0.1, 30)}
    rows = [f"{a},{site},{i % 2}" for site, ages in sites.items() for i, a in enumerate(ages)]
    train = "a,site,label\n" + "\n".join(rows) + "\n"
    test = "a,site,label\n100,north,0\n-3,south,1\n0,west,1\n"
    data, held = loaded(tmp_path, train, test, client="site", normalize="client")
    for k, site in enumerate(data.clients):
        own = data.x[torch.from_numpy(data.client == k), 0].double().numpy()
        np.testing.assert_allclose([own.mean(), own.std()], [0, 1], atol=1e-5)
        (mean,), (deviation,) = data.client_scales[site]
        np.testing.assert_allclose(mean, sites[site].mean(), rtol=1e-9)
        np.testing.assert_allclose(deviation, sites[site].std(), rtol=1e-9)
    pooled = np.concatenate(list(sites.values()))
    expected = [
        (100 - sites["north"].mean()) / sites["north"].std(),
        (-3 - sites["south"].mean()) / sites["south"].std(),
        (0 - pooled.mean()) / pooled.std(),  # nobody trains on the west's
    ]
    np.testing.assert_allclose(held.x[:, 0].numpy(), expected, rtol=1e-5)
    assert data.scale is None


def test_who_is_standardised_apart_trains_apart() -> None:
    values = {
        "method": "fedavg",
        "rounds": 1,
        "data": {"source": "own.csv", "client": "site", "normalize": "client"},
        "partition": {"kind": "client"},
        "model": {"name": "mlp"},
        "local": {"lr": 0.1, "epochs": 1},
    }
    iid = {"kind": "iid", "clients": 2}
    assert build(Experiment, values, "experiment").data.normalize == "client"
    with pytest.raises(
        ConfigError, match=r"needs partition\.kind = 'client' here, and it is 'iid'"
    ):
        build(Experiment, {**values, "partition": iid}, "experiment")
